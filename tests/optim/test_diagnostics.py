"""Diagnostics of a run, and error messages for invalid arguments."""

import math
import sys
import warnings

import numpy as np
import pytest
import torch

from steptuned import (
    ArmijoGD,
    BarzilaiBorweinGD,
    ExactGV,
    ExpectedGV,
    StepTunedGD,
    StepTunedSGD,
    StochasticGV,
)


def test_gamma_and_curvature_are_snapshots():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, bounds=(0.01, 100.0))
    history = [opt.gamma]
    assert math.isnan(opt.curvature)
    for _ in opt.passes():
        theta.grad = 0.25 * theta.detach()
    history.append(opt.gamma)
    assert [h.item() for h in history] == [1.0, pytest.approx(4.0)]
    assert opt.curvature.item() == pytest.approx(0.25), "that of J, whatever the step"
    assert opt.raw_gamma.item() == pytest.approx(4.0)


def run(opt, theta, iterations, curvature=1.0):
    for _ in range(iterations):
        for _ in opt.passes():
            theta.grad = curvature * theta.detach()


def test_stats_have_quartiles_of_the_raw_gamma_over_the_last_100_iterations():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-6, beta=0.0)
    opt._warned.add("stuck")
    assert all(map(math.isnan, opt.stats().raw_gamma))
    run(opt, theta, 60, 0.1)
    assert opt.stats().raw_gamma == pytest.approx((10.0, 10.0, 10.0), rel=1e-6)
    run(opt, theta, 60, 0.2)
    assert opt.stats().raw_gamma == pytest.approx((5.0, 5.0, 10.0), rel=1e-6), "40 of 10, 60 of 5"
    run(opt, theta, 40, 0.2)
    assert opt.stats().raw_gamma == pytest.approx((5.0, 5.0, 5.0), rel=1e-6)
    assert opt.gamma == 2.0, "clipped"


def test_an_ignored_measurement_is_not_among_the_raw_gammas():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-6, beta=0.0)
    run(opt, theta, 3, 0.1)
    for i in opt.passes():
        theta.grad = torch.full_like(theta, 1e200 * i)
    assert opt.stats().ignored == 1
    assert opt.stats().raw_gamma == pytest.approx((10.0, 10.0, 10.0), rel=1e-6)
    assert math.isnan(opt.raw_gamma)
    assert math.isnan(opt.curvature)


def test_effective_lr_is_the_step_of_each_group_in_the_last_iteration():
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    opt = StepTunedSGD(
        [{"params": [a]}, {"params": [b], "lr": 0.01}], lr=0.1, delta=0.0, decay_every=1
    )
    assert [group["effective_lr"].item() for group in opt.param_groups] == [0.0, 0.0]
    gamma, seen = 1.0, []
    for k in range(3):
        before = a.detach().clone()
        for i in opt.passes():
            a.grad, b.grad = 0.7 * a.detach(), 0.7 * b.detach()
            first = a.detach() - before if i else None
        used = 0.1 * gamma / (1 + k) ** 0.5
        assert torch.allclose(first, -used * 0.7 * before, rtol=1e-12)
        seen.append(opt.param_groups[0]["effective_lr"])
        assert opt.param_groups[1]["effective_lr"].item() == pytest.approx(used / 10)
        gamma = opt.gamma.item()
    assert len({step.item() for step in seen}) == 3, "each iteration leaves a tensor of its own"


@pytest.mark.parametrize(
    ("curvature", "message"),
    [
        (
            100.0,
            r"lower bound 0\.5 for \d+ iterations.*step 0\.5 x lr.*"
            r"bounds=\(0\.0\d+, 0\.0\d+\), and multiply lr by \d+, so that",
        ),
        (1e-3, r"upper bound 2\.0 for \d+ iterations.*step 2 x lr.*bounds=\(5e\+02, 2e\+03\)"),
        (-1.0, r"upper bound 2\.0 for \d+ iterations.*mostly not positive.*lower nu"),
    ],
)
def test_gamma_stuck_at_a_bound_warns_once_and_says_what_to_change(curvature, message):
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-6)
    run(opt, theta, 99, curvature)
    with pytest.warns(UserWarning, match=message) as caught:
        run(opt, theta, 1, curvature)
    if sys.version_info >= (3, 12):
        assert caught[0].filename == __file__, "the warning points at the user's code"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(opt, theta, 100, curvature)
        assert opt.gamma in (0.5, 2.0)
        opt.stats()


def test_on_devices_the_warning_comes_when_stats_are_read(monkeypatch):
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-6)
    with monkeypatch.context() as patched:
        patched.setattr("steptuned.optim.flat.is_on_host", lambda tensors: False)
        run(opt, theta, 120, 100.0)
    with pytest.warns(UserWarning, match="multiply lr by"):
        opt.stats()


@pytest.mark.parametrize("at", [0, 57, 99])
def test_gamma_that_sometimes_leaves_a_bound_is_not_stuck(at):
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-3, beta=0.0)
    for k in range(300):
        run(opt, theta, 1, 1.0 if k % 100 == at else 1e-3)
    assert opt.stats().at_upper == 0.99


def test_a_change_from_one_bound_to_the_other_is_not_stuck():
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-6, beta=0.0)
    for k in range(4):
        run(opt, theta, 50, (100.0, 1e-3)[k % 2])
    assert (opt.stats().at_lower, opt.stats().at_upper) == (0.5, 0.5)
    with pytest.warns(UserWarning, match="upper bound"):
        run(opt, theta, 100, 1e-3)


GOOD = {
    "lr": [0.0, 1, 0.5, torch.tensor(0.1), torch.tensor([0.1]), np.float32(0.1)],
    "nu": [0.1, 2],
    "beta": [0.0, 0.999],
    "bounds": [(0.5, 2.0), (1, 1), [0.1, 3]],
    "delta": [0.0, 0.49],
    "decay_every": [None, 1, 195.5],
    "weight_decay": [0.0, 1e-4],
    "maximize": [True],
    "max_grad_norm": [None, 1.0, math.inf],
    "foreach": [None, True, False],
    "replay_rng": [False],
}
BAD = {
    "lr": [-0.1, math.nan, math.inf, "0.1", torch.ones(2), None, torch.tensor(-1.0)],
    "nu": [0.0, -1.0, math.inf, math.nan],
    "beta": [-0.1, 1.0, math.nan],
    "bounds": [(0.0, 2.0), (2.0, 0.5), (0.5, math.inf), (0.5,), (math.nan, 1.0), 5],
    "delta": [-0.01, 0.5, math.nan],
    "decay_every": [0, -1, math.inf, "epoch"],
    "weight_decay": [-1e-4, math.nan],
    "maximize": [1],
    "max_grad_norm": [0.0, -1.0, math.nan],
    "foreach": ["yes"],
    "replay_rng": [None],
}


@pytest.mark.filterwarnings("ignore:nu=")
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD.items() for value in values]
)
def test_valid_arguments_are_accepted(name, value):
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([theta], **{name: value})
    assert name in opt.param_groups[0]
    run(opt, theta, 1)
    assert opt.stats().iterations == 1


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_invalid_arguments_are_reported_with_value_and_range(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*, got ") as error:
        StepTunedSGD([torch.ones(2, requires_grad=True)], **{name: value})
    assert str(error.value).endswith(repr(value))
    assert "\n" not in str(error.value)


def test_the_options_of_a_group_are_validated_too():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="weight_decay must be"):
        StepTunedSGD([{"params": [a]}, {"params": [b], "weight_decay": -1}])
    with pytest.raises(
        ValueError,
        match=r"beta must be the same for all .*got 0\.5, but the first group has 0\.9",
    ):
        StepTunedSGD([{"params": [a]}, {"params": [b], "beta": 0.5}])


def test_the_bounds_of_a_group_may_be_a_list():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([{"params": [a]}, {"params": [b], "bounds": [0.5, 2.0]}])
    assert opt.param_groups[1]["bounds"] == (0.5, 2.0)


def test_nu_outside_the_bounds_is_clipped_with_a_warning():
    theta = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match=r"nu=5.* outside bounds=\(0\.5, 2\.0\)"):
        opt = StepTunedSGD([theta], lr=0.1, nu=5)
    run(opt, theta, 1, curvature=-1.0)
    assert opt.gamma == 2.0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: StepTunedGD(p, nu=0), "nu"),
        (lambda p: BarzilaiBorweinGD(p, lr=-1), "lr"),
        (lambda p: ArmijoGD(p, slope=1.0), "slope"),
        (lambda p: ArmijoGD(p, shrink=0.0), "shrink"),
        (lambda p: ArmijoGD(p, max_backtracks=-1), "max_backtracks"),
        (lambda p: StochasticGV(p, bounds=(2, 1)), "bounds"),
        (lambda p: ExactGV(p, list, delta=0.7), "delta"),
    ],
)
def test_the_companions_validate_their_arguments(make, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        make([torch.ones(2, requires_grad=True)])


def test_a_companion_refuses_a_group_whose_shared_options_differ():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="bounds must be the same for all parameter groups"):
        StochasticGV([{"params": [a]}, {"params": [b], "bounds": (7.0, 8.0)}])
    with pytest.raises(ValueError, match="nu must be positive"):
        StochasticGV([{"params": [a]}, {"params": [b], "nu": -3}])


@pytest.mark.parametrize("cls", [StepTunedGD, StochasticGV, ExactGV, ExpectedGV])
def test_a_companion_accepts_a_group_added_later(cls):
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    params = [a]
    ask = (lambda: [p.detach() for p in params],) if cls in (ExactGV, ExpectedGV) else ()
    opt = cls([a], *ask, lr=0.1)
    for k in range(4):
        if k == 2:
            params.append(b)
            opt.add_param_group({"params": [b], "lr": 0.2})
        for p in params:
            p.grad = p.detach().clone()
        opt.step()
    assert b[0] < 1
    assert torch.isfinite(opt.gamma)


def test_one_gradient_that_is_not_finite_does_not_poison_a_companion():
    theta = torch.ones(2, requires_grad=True)
    opt = StochasticGV([theta], lr=0.1)
    for k in range(6):
        theta.grad = theta.detach() * (torch.inf if k == 2 else 1.0)
        opt.step()
        if k == 2:
            theta.data.fill_(0.5)
    assert torch.isfinite(theta).all()
    assert torch.isfinite(opt.gamma)


def test_armijo_restores_the_parameters_if_a_trial_fails():
    theta = torch.tensor([1.0, 2.0], requires_grad=True)
    opt = ArmijoGD([theta], lr=10.0)

    def closure():
        opt.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    def value():
        raise KeyError("no memory")

    with pytest.raises(KeyError):
        opt.step(closure, value)
    assert theta.tolist() == [1.0, 2.0]


def test_a_vector_of_the_wrong_shape_is_reported():
    theta = torch.ones(2, requires_grad=True)
    opt = ExactGV([theta], lambda: [torch.ones(3)])
    theta.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"tensors with the shapes \[\(2,\)\], got \[\(3,\)\]"):
        opt.step()


def test_armijo_does_not_move_if_no_trial_is_good_enough():
    theta = torch.tensor([0.0, 1.0], requires_grad=True)
    opt = ArmijoGD([theta], lr=1.0, max_backtracks=3)

    def closure():
        theta.grad = torch.ones(2)  # not the gradient of the value
        return -theta.detach().sum()

    opt.step(closure)
    assert torch.equal(theta, torch.tensor([0.0, 1.0]))
    assert opt.scale == 0.0
    assert opt.evaluations == 5


def test_armijo_shrinks_away_from_a_value_that_is_not_finite():
    theta = torch.tensor([1.0], requires_grad=True)
    opt = ArmijoGD([theta], lr=16.0)

    def closure():
        opt.zero_grad()
        loss = theta.sum() - 0.5 * torch.log(theta).sum()  # nan for negative theta
        loss.backward()
        return loss

    opt.step(closure)
    assert 0 < theta.item() < 1
    assert 0 < opt.scale < 1
