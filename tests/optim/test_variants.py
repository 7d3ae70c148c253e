"""The variants of Step-Tuned SGD: their twins, every call form, checkpoints, GradScaler."""

import copy
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import reference
import steptuned
from compare import same
from problems import Network, Regression
from steptuned import StepTunedSGD
from steptuned.optim import kernel
from test_diagnostics import run
from test_forms import batches, dropout_network
from test_state import WAYS, assert_same_run, loss, make
from test_twins import close, joined

ITERATIONS = 250
pytestmark = pytest.mark.filterwarnings(
    "ignore:gamma has been at", "ignore:torch.distributed is disabled:UserWarning"
)

VARIANTS = {
    "every third": {"tune_every": 3},
    "relative": {"relative": True},
    "relative, every third": {"relative": True, "tune_every": 3},
    "per group": {"per_group": True},
    "per group, relative, every third": {"per_group": True, "relative": True, "tune_every": 3},
}
"""The options of all tests except those of the twins."""


def follow(opt, params, problem_loss, twin, iterations=ITERATIONS):
    """Run the optimizer beside its twin, by hand. Returns the gammas."""
    gammas = []
    for k, (half, whole, gamma, raw) in enumerate(islice(twin, iterations)):
        opt.zero_grad()
        problem_loss(k).backward()
        assert opt.needs_second_pass == (half is not None)
        if half is not None:
            opt.half_step()
            close(joined(params), half)
            problem_loss(k).backward()
        opt.step()
        close(joined(params), whole)
        close(opt.gamma.reshape(-1), gamma)
        found = opt.raw_gamma.reshape(-1).numpy()
        assert np.array_equal(np.isnan(found), np.isnan(raw)), "nan if the step was zero"
        found, raw = found[~np.isnan(found)], raw[~np.isnan(raw)]
        # Where the curvature is nearly zero, rounding of its terms dominates it and its inverse.
        assert np.all(np.abs(1 / found - 1 / raw) <= 1e-8 / np.abs(raw).min(initial=np.inf) + 1e-10)
        gammas.append(gamma)
    return np.array(gammas)


def twin_options(
    lr, bounds=(0.5, 2.0), tune_every=1, weight_decay=0.0, max_grad_norm=np.inf, **rest
):
    m, M = bounds
    return {
        "alpha": lr,
        "m": m,
        "M": M,
        "T": tune_every,
        "decay": weight_decay,
        "clip": max_grad_norm,
        **rest,
    }


TWINS = {
    "every other": {"lr": 0.1, "bounds": (0.1, 8.0), "tune_every": 2},
    "every fifth, decay": {"lr": 0.1, "bounds": (0.05, 10.0), "tune_every": 5, "decay_every": 10},
    "every third, weight decay": {
        "lr": 0.03,
        "weight_decay": 0.1,
        "bounds": (0.05, 20.0),
        "tune_every": 3,
    },
    "every fourth, clipped": {
        "lr": 0.3,
        "max_grad_norm": 0.03,
        "bounds": (0.05, 15.0),
        "tune_every": 4,
    },
    "relative": {"lr": 0.1, "relative": True},
    "relative, wide bounds": {"lr": 0.05, "relative": True, "bounds": (0.3, 3.0)},
    "relative, every third": {
        "lr": 0.2,
        "relative": True,
        "tune_every": 3,
        "weight_decay": 0.01,
        "decay_every": 20,
    },
    "every seventh, no memory": {"lr": 0.2, "beta": 0.0, "bounds": (0.2, 5.0), "tune_every": 7},
}


@pytest.fixture(params=["kernel", "small", "torch", "in chunks", "accelerator"])
def implementation(request, monkeypatch):
    """Each implementation of a step, the kernel's as for large and for small models.

    An accelerator is a CPU whose values are not free to read.
    """
    if request.param == "kernel":
        monkeypatch.setattr(kernel, "SMALL", 0)  # gradients are held, not copied
    if request.param in ("kernel", "small"):
        active, reason = steptuned.kernel_status()
        if not active:
            pytest.skip(f"no kernel: {reason}")
    else:
        request.getfixturevalue("torch_path")
    if request.param == "in chunks":
        monkeypatch.setattr("steptuned.optim.bucket.LARGE", 2)
        monkeypatch.setattr("steptuned.optim.flat.CHUNK", 7)
        monkeypatch.setattr("steptuned.optim.flat.first_pass", None)
    if request.param == "accelerator":
        monkeypatch.setattr("steptuned.optim.flat.is_on_host", lambda tensors: False)


def network():
    problem = Network()
    return problem, [
        torch.tensor(part, requires_grad=True) for part in problem.split(problem.start)
    ]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", TWINS)
def test_a_variant_matches_its_twin_on_the_regression(name):
    problem, options = Regression(), TWINS[name]
    theta = torch.tensor(problem.start, requires_grad=True)
    twin = reference.variant(problem.start, problem.gradient, **twin_options(**options))
    gammas = follow(
        StepTunedSGD([theta], **options), [theta], lambda k: problem.torch_loss(k, theta), twin
    )
    assert len(np.unique(gammas)) > 10, "gamma moves"


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", TWINS)
def test_a_variant_matches_its_twin_on_a_network(name):
    problem, params = network()
    options = TWINS[name]
    twin = reference.variant(problem.start, problem.gradient, **twin_options(**options))
    follow(StepTunedSGD(params, **options), params, lambda k: problem.torch_loss(k, *params), twin)


def test_groups_with_their_own_lr_and_weight_decay_at_every_third_mini_batch():
    problem, params = network()
    alphas, decays = (0.1, 0.03, 0.2, 0.01), (0.0, 0.02, 0.0, 0.1)
    groups = [
        {"params": [p], "lr": a, "weight_decay": w}
        for p, a, w in zip(params, alphas, decays, strict=True)
    ]
    opt = StepTunedSGD(groups, bounds=(0.05, 5.0), tune_every=3)
    sizes = [p.numel() for p in params]
    alpha, decay = np.repeat(alphas, sizes), np.repeat(decays, sizes)
    twin = reference.variant(
        problem.start, problem.gradient, alpha=alpha, decay=decay, m=0.05, M=5.0, T=3
    )
    follow(opt, params, lambda k: problem.torch_loss(k, *params), twin)


# --------------------------------------------------------------------------------------- tune_every


def least_squares(n=1600):
    rng = np.random.default_rng(0)
    A = rng.standard_normal((n, 32, 10))
    return A, A @ rng.standard_normal(10) + rng.standard_normal((n, 32))


def test_gamma_does_not_collapse_under_a_cosine_schedule_as_with_undivided_differences():
    """Curvature is always about 1. Undivided, G remembers the differences of longer steps."""
    A, b = least_squares()
    n, lr = len(A), 1e-3

    def gradient(k, theta):
        return A[k].T @ (A[k] @ theta - b[k]) / 32

    def alpha(k):
        return lr * (1 + np.cos(np.pi * k / n)) / 2

    options = {"alpha": alpha, "T": 16, "m": 0.05, "M": 20.0}
    undivided = [
        gamma[0]
        for *_, gamma, _ in islice(
            reference.variant(np.zeros(10), gradient, divide=False, **options), n
        )
    ]

    theta = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=lr, bounds=(0.05, 20.0), tune_every=16)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: alpha(k) / lr)
    gammas = []
    for k, (_, whole, gamma, _) in enumerate(
        islice(reference.variant(np.zeros(10), gradient, **options), n)
    ):
        for _ in opt.passes():
            theta.grad = torch.from_numpy(gradient(k, theta.detach().numpy()))
        scheduler.step()
        close(theta.detach(), whole)
        if alpha(k) > lr / 100:  # differences over shorter steps are dominated by rounding
            close(opt.gamma.item(), gamma)
        else:
            assert opt.gamma.item() == pytest.approx(gamma, rel=1e-7)
        gammas.append(opt.gamma.item())
    assert 0.5 < min(gammas[n // 2 :]) < max(gammas[n // 2 :]) < 2
    assert set(undivided[-160:]) == {0.05}


def back_propagate(model, opt, x, y):
    opt.zero_grad()
    value = nn.functional.mse_loss(model(x), y)
    value.backward()
    return value


def with_closure(model, opt, x, y):
    opt.step(lambda: back_propagate(model, opt, x, y))


def with_passes(model, opt, x, y):
    for _ in opt.passes():
        back_propagate(model, opt, x, y)


def by_hand(model, opt, x, y):
    noise = steptuned.replay(opt)
    back_propagate(model, opt, x, y)
    if opt.needs_second_pass:
        opt.half_step()
        noise.rewind()
        back_propagate(model, opt, x, y)
    opt.step()


FORMS = [with_closure, with_passes, by_hand]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_three_forms_give_the_same_bits_with_dropout(variant):
    runs = []
    for form in FORMS:
        model = dropout_network()
        groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.03}]
        opt = StepTunedSGD(
            groups, lr=0.1, bounds=(0.05, 20.0), max_grad_norm=1.0, **VARIANTS[variant]
        )
        torch.manual_seed(2)
        for x, y in batches(30):
            form(model, opt, x, y)
        runs.append((dict(model.state_dict()), opt.gamma, opt.curvature, opt.stats()))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@pytest.mark.parametrize("form", FORMS)
def test_every_third_mini_batch_is_used_twice_beginning_with_the_first(form, monkeypatch):
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1, tune_every=3)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    counts, steps = [], []
    model.register_forward_hook(lambda *_: counts.append(1))
    opt.register_step_post_hook(lambda *_: steps.append(1))
    seen, gammas = [], []
    for x, y in batches(7):
        before = len(counts)
        needed = opt.needs_second_pass
        form(model, opt, x, y)
        scheduler.step()
        seen.append((needed, len(counts) - before))
        gammas.append(opt.gamma.item())
    assert seen == [(True, 2), (False, 1), (False, 1)] * 2 + [(True, 2)]
    assert len(steps) == 7, "one step() is one mini-batch"
    assert opt.param_groups[0]["lr"] == 0.1 * 0.5**7
    assert (opt.stats().iterations, opt.stats().measurements) == (7, 3)
    assert gammas[0] == gammas[1] == gammas[2]


def test_unneeded_half_steps_and_missing_half_steps_are_refused_and_move_nothing():
    model = dropout_network().eval()
    opt = StepTunedSGD(model.parameters(), lr=0.1, tune_every=2)
    (x, y), *_ = batches(1)
    back_propagate(model, opt, x, y)
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))
    with pytest.raises(RuntimeError, match="without a pending half step"):
        opt.step()
    assert same((model.state_dict(), opt.state_dict()), before)
    opt.half_step()
    assert opt.needs_second_pass, "this iteration still does"
    back_propagate(model, opt, x, y)
    opt.step()
    assert not opt.needs_second_pass
    back_propagate(model, opt, x, y)
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))
    with pytest.raises(
        RuntimeError, match=r"half_step\(\) on a mini-batch that is used once: with tune_every=2"
    ):
        opt.half_step()
    assert same((model.state_dict(), opt.state_dict()), before)
    opt.step()
    assert opt.needs_second_pass


def test_an_iteration_that_is_dropped_or_has_no_gradients_does_not_count():
    model = dropout_network().eval()
    opt = StepTunedSGD(model.parameters(), lr=0.1, tune_every=2)
    (x, y), *_ = batches(1)
    back_propagate(model, opt, x, y)
    opt.half_step()
    opt.cancel()
    assert opt.needs_second_pass
    with_passes(model, opt, x, y)
    opt.step(opt.zero_grad)
    assert not opt.needs_second_pass
    assert (opt.stats().iterations, opt.stats().skipped) == (1, 1)
    for _ in opt.passes():
        back_propagate(model, opt, x, y)
        break
    assert not opt.needs_second_pass
    with_passes(model, opt, x, y)
    assert (opt.stats().iterations, opt.stats().measurements) == (2, 1)
    opt.reset()
    assert opt.needs_second_pass
    assert opt.stats().iterations == 0


@pytest.mark.parametrize("copied", [False, True])
def test_a_state_that_was_removed_is_measured_again(copied):
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1, tune_every=5)
    for x, y in batches(2):
        with_passes(model, opt, x, y)
    if copied:
        model, opt = copy.deepcopy((model, opt))
    opt.state.clear()
    assert opt.needs_second_pass
    with_passes(model, opt, x, y)
    assert (opt.stats().iterations, opt.stats().measurements) == (1, 1)


def test_tune_every_may_be_changed_but_not_between_one_and_more():
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1, tune_every=9)
    opt.param_groups[0]["tune_every"] = 1  # nothing is measured yet
    for x, y in batches(2):
        with_passes(model, opt, x, y)
    opt.param_groups[0]["tune_every"] = 4
    with pytest.raises(
        RuntimeError,
        match=r"tune_every is 4 now, but the average G was made with tune_every=1: .*reset",
    ):
        with_passes(model, opt, x, y)
    opt.reset()
    with_passes(model, opt, x, y)
    assert opt.param_groups[0]["countdown"] == 3
    opt.param_groups[0]["tune_every"] = 2
    with_passes(model, opt, x, y)
    assert opt.needs_second_pass


def rates(k):
    """The learning rates of two groups: a warm-up from zero, and a rest in the second."""
    return 0.1 * min(k, 6) / 6, 0.0 if k < 5 or 15 < k < 25 else 0.05


def with_rates(opt, loss):
    """The loss of mini-batch k, whose computation sets the learning rates."""

    def loss_at(k):
        for group, lr in zip(opt.param_groups, rates(k), strict=True):
            group["lr"] = lr
        return loss(k)

    return loss_at


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("per_group", [False, True])
def test_a_measurement_at_lr_zero_is_ignored(per_group, relative):
    """G, its bias correction and gamma stay as they are: there is no difference to divide by."""
    problem = Network()
    params = [torch.tensor(part, requires_grad=True) for part in problem.split(problem.start)]
    sizes = [sum(p.numel() for p in part) for part in (params[:2], params[2:])]
    twin = reference.variant(
        problem.start,
        problem.gradient,
        alpha=lambda k: np.repeat(rates(k), sizes),
        T=2,
        m=0.05,
        M=20.0,
        relative=relative,
        groups=np.split(np.arange(sum(sizes)), sizes[:1]) if per_group else None,
    )
    opt = StepTunedSGD(
        [{"params": params[:2]}, {"params": params[2:]}],
        bounds=(0.05, 20.0),
        tune_every=2,
        relative=relative,
        per_group=per_group,
    )
    follow(opt, params, with_rates(opt, lambda k: problem.torch_loss(k, *params)), twin, 60)
    ignored = (1, 8) if per_group else (1, 1)
    assert tuple(opt.stats(i).ignored for i in range(2)) == ignored
    assert tuple(opt.stats(i).measurements for i in range(2)) == tuple(30 - n for n in ignored)
    assert opt.stats(1).iterations == 60


@pytest.mark.usefixtures("implementation")
def test_the_first_measurement_after_a_warm_up_from_zero_is_unbiased():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.0, bounds=(0.05, 20.0), tune_every=2)
    for k in range(8):
        opt.param_groups[0]["lr"] = 0.001 * (k > 4)
        run(opt, theta, 1, 4.0)
    assert opt.raw_gamma.item() == pytest.approx(0.25, rel=1e-2)
    assert opt.stats().ignored == 3
    assert all(torch.isfinite(state["G"]).all() for state in opt.state.values())


def test_a_layer_without_a_second_gradient_does_not_fade_at_lr_zero():
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    opt = StepTunedSGD([a, b], lr=0.1, tune_every=2)
    for k in range(3):
        opt.param_groups[0]["lr"] = 0.1 * (k < 2)
        before = copy.deepcopy([state["G"] for state in opt.state.values()])
        for i in opt.passes():
            a.grad, b.grad = a.detach().clone(), b.detach().clone() if k + i < 3 else None
    assert same([state["G"] for state in opt.state.values()], before)


@pytest.mark.parametrize("missing", [True, False])
def test_a_layer_without_a_second_gradient_fades_in_the_unit_of_the_step(missing):
    """The same as with an unchanged second gradient, except for the move of that gradient."""
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    opt = StepTunedSGD([a, b], lr=0.1, beta=0.5, bounds=(0.01, 100.0), tune_every=2)
    for k in range(3):
        for i in opt.passes():
            a.grad = 0.7 * a.detach()
            if i == 0 or k != 2:
                b.grad = first = 0.3 * b.detach()
            else:
                b.grad = None if missing else first
    # The steps were 0.1 and 0.1 gamma; dg / step is -0.49 a and -0.09 b, or 0 b.
    a0h, b0h = (1 - 0.07) ** 2, (1 - 0.03) ** 2
    gamma = (0.49 + 0.09) / (0.343 + 0.027)
    a1, b1 = a0h * (1 - 0.07 * gamma), b0h * (1 - 0.03 * gamma)
    Ga, Gb = (0.5 * 0.49 + 0.49 * a1) / 1.5, 0.5 * 0.09 / 1.5
    raw = (0.49 * a1**2 + 0.09 * b1**2) / (0.7 * Ga * a1 + 0.3 * Gb * b1)
    assert opt.gamma.item() == pytest.approx(raw, rel=1e-12)


# ----------------------------------------------------------------------------------------- relative


def test_a_relative_gamma_does_not_depend_on_the_size_of_the_curvature():
    """A loss that is steeper by c, with an lr that is smaller by c, has the same trajectory.

    With absolute bounds it has not.
    """
    problem = Network()
    ways = {}
    for c in (1.0, 1024.0):
        for relative in (True, False):
            params = [
                torch.tensor(part, requires_grad=True) for part in problem.split(problem.start)
            ]
            opt = StepTunedSGD(params, lr=0.2 / c, relative=relative, nu=1.0)
            for k in range(100):
                for _ in opt.passes():
                    opt.zero_grad()
                    (c * problem.torch_loss(k, *params)).backward()
            ways[c, relative] = joined(params), opt.gamma.item(), opt.reference.item()
    close(ways[1024.0, True][0], ways[1.0, True][0])
    close(1024.0 * ways[1024.0, True][2], ways[1.0, True][2])
    assert np.abs(ways[1024.0, False][0] - ways[1.0, False][0]).max() > 0.01
    assert ways[1.0, False][2] == 1.0, "no reference is kept"


def test_the_reference_is_a_geometric_mean_without_negative_curvature():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-9, beta=0.0, relative=True, bounds=(0.1, 10.0), nu=3.0)
    assert opt.reference == 1.0
    found = []
    for curvature in (1.0, 4.0, -1.0, 2.0):
        run(opt, theta, 1, curvature)
        found.append((opt.gamma.item(), opt.reference.item()))
    geometric = 4 ** -(0.01 / (1 - 0.99**2))
    assert found[0] == pytest.approx((1.0, 1.0), rel=1e-6)
    assert found[1] == pytest.approx((0.25 / geometric, geometric), rel=1e-6)
    assert found[2] == pytest.approx((3.0, geometric), rel=1e-6)
    assert found[3][1] == pytest.approx(4 ** -((0.0099 + 0.005) / (1 - 0.99**3)), rel=1e-6)
    assert opt.stats().negative == 0.25


def test_non_finite_values_do_not_enter_the_reference():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-9, beta=0.0, relative=True)
    run(opt, theta, 3, 0.5)
    for i in opt.passes():
        theta.grad = torch.full_like(theta, 1e200 * i)
    assert opt.stats().ignored == 1
    assert opt.reference.item() == pytest.approx(2.0, rel=1e-6)
    theta.data.fill_(1.0)
    for i in opt.passes():
        theta.grad = torch.full_like(
            theta, 1e150 - i * 1e-170
        )  # a curvature so small that its inverse is infinite
    assert torch.isfinite(opt.reference)


def test_a_stuck_relative_gamma_explains_what_that_means():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-9, beta=0.0, relative=True)
    run(opt, theta, 100, 1.0)
    with pytest.warns(
        UserWarning,
        match=r"lower bound .* keeps falling away from its running reference: widen .* lower lr",
    ):
        run(opt, theta, 100, 1e4)


# ---------------------------------------------------------------------------------------- per_group

PER_GROUP = {
    "plain": {"bounds": (0.05, 5.0)},
    "decay": {"bounds": (0.05, 5.0), "decay_every": 10, "beta": 0.5},
    "every third": {"bounds": (0.05, 5.0), "tune_every": 3},
    "relative": {"relative": True},
    "relative, every fourth, clipped": {"relative": True, "tune_every": 4, "max_grad_norm": 0.3},
}


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", PER_GROUP)
def test_each_group_has_its_own_gamma(name):
    problem, params = network()
    options = PER_GROUP[name]
    alphas, decays = (0.1, 0.03, 0.05), (0.0, 0.02, 0.0)
    parts = [params[:1], params[1:3], params[3:]]
    groups = [
        {"params": part, "lr": a, "weight_decay": w}
        for part, a, w in zip(parts, alphas, decays, strict=True)
    ]
    sizes = [sum(p.numel() for p in part) for part in parts]
    alpha, decay = np.repeat(alphas, sizes), np.repeat(decays, sizes)
    indices = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    twin = reference.variant(
        problem.start,
        problem.gradient,
        groups=indices,
        **twin_options(lr=alpha, **options) | {"decay": decay},
    )
    opt = StepTunedSGD(groups, per_group=True, **options)
    gammas = follow(opt, params, lambda k: problem.torch_loss(k, *params), twin)
    assert all(len(np.unique(column)) > 10 for column in gammas.T)
    assert np.abs(gammas[:, 0] - gammas[:, 1]).max() > 0.1
    each = [group["effective_lr"].item() for group in opt.param_groups]
    decayed = 1.0 if "decay_every" not in options else 25**-(0.501)
    np.testing.assert_allclose(each, np.array(alphas) * gammas[-2] * decayed, rtol=1e-9)
    assert (
        opt.stats(1).at_upper
        == (
            gammas[:: options.get("tune_every", 1), 1] == options.get("bounds", (0.5, 2.0))[1]
        ).mean()
    )


def two_groups(**options):
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return (
        a,
        b,
        StepTunedSGD(
            [{"params": [a]}, {"params": [b]}],
            **{"lr": 1e-6, "beta": 0.0, "bounds": (0.01, 100.0), **options},
        ),
    )


def curve(opt, *params, n=1):
    """So many iterations on quadratics with curvatures 1, 2, ..."""
    for _ in range(n):
        for _ in opt.passes():
            for c, p in enumerate(params, start=1):
                p.grad = c * p.detach()


def test_properties_have_one_entry_per_group_even_for_one_group():
    a, b, opt = two_groups(per_group=True)
    curve(opt, a, b)
    assert opt.gamma.tolist() == pytest.approx([1.0, 0.5])
    assert opt.raw_gamma.tolist() == pytest.approx([1.0, 0.5])
    assert opt.curvature.tolist() == pytest.approx([1.0, 2.0])
    assert opt.reference.tolist() == [1.0, 1.0]
    assert opt.stats(0).raw_gamma[1] == pytest.approx(1.0)
    assert opt.stats(1).raw_gamma[1] == pytest.approx(0.5)
    single = StepTunedSGD([a], per_group=True)
    assert single.gamma.shape == (1,)


def test_an_added_group_begins_at_one_with_its_own_bias_correction():
    a, b, opt = two_groups(per_group=True, beta=0.9)
    curve(opt, a, b, n=5)
    c = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt.add_param_group({"params": [c], "bounds": (0.1, 1.0), "nu": 0.7})
    assert opt.gamma[2] == 1.0
    curve(opt, a, b, c)
    assert opt.gamma[2].item() == pytest.approx(1 / 3, rel=1e-4)
    assert [opt.stats(i).iterations for i in range(3)] == [6, 6, 1]


def test_groups_may_differ_only_in_the_options_of_gamma():
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    opt = StepTunedSGD(
        [{"params": [a]}, {"params": [b], "bounds": (0.1, 0.2), "beta": 0.5, "nu": 0.15}],
        per_group=True,
    )
    curve(opt, a, b)
    assert opt.gamma.tolist() == [pytest.approx(1.0), 0.2]
    for name, value in (("tune_every", 2), ("per_group", False), ("max_grad_norm", 1.0)):
        with pytest.raises(
            ValueError, match=f"{name} must be the same for all parameter groups: got"
        ):
            StepTunedSGD([{"params": [a]}, {"params": [b], name: value}], per_group=True)
    with pytest.raises(
        ValueError, match="bounds must be the same for all parameter groups, as gamma is one number"
    ):
        StepTunedSGD([{"params": [a]}, {"params": [b], "bounds": (0.1, 0.2)}])


def test_per_group_can_be_switched_during_a_run_and_gamma_continues():
    a, b, opt = two_groups()
    curve(opt, a, b)
    gamma = opt.gamma.item()
    for group in opt.param_groups:
        group["per_group"] = True
    curve(opt, a, b)
    assert opt.gamma.tolist() == pytest.approx([1.0, 0.5], rel=1e-4)
    assert opt.param_groups[1]["effective_lr"].item() == 1e-6 * gamma
    for group in opt.param_groups:
        group["per_group"] = False
    curve(opt, a, b)
    assert opt.param_groups[0]["gamma"] is opt.param_groups[1]["gamma"]
    assert opt.gamma.item() == pytest.approx(gamma, rel=1e-4)


def test_reset_and_the_warning_apply_to_each_group():
    a, b, opt = two_groups(per_group=True, bounds=(0.8, 2.0))
    with pytest.warns(
        UserWarning,
        match=r"gamma of parameter group 1 has been at its lower bound 0.8 for 100 iterations",
    ):
        curve(opt, a, b, n=100)
    opt.reset()
    assert opt.gamma.tolist() == [1.0, 1.0]
    assert opt.param_groups[0]["gamma"] is not opt.param_groups[1]["gamma"]


# --------------------------------------------------------------------------------------- GradScaler


def scaled_run(model, opt, data, overflow=(), through=True):
    """``overflow``: the indices of the passes that overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6, enabled=through)
    passes = 0
    for x, y in data:
        views = (opt.first_pass, opt) if opt.needs_second_pass else (opt,)
        for view in views:
            opt.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            if passes in overflow:
                model[0].weight.grad[0, 0] = torch.inf
            scaler.step(view)
            passes += 1
        scaler.update()


def in_two_groups(**options):
    """A network whose layers are two groups, and its optimizer."""
    model = dropout_network().eval()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.03}]
    return model, StepTunedSGD(groups, lr=0.1, bounds=(0.05, 20.0), **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_the_same_through_a_scaler(variant):
    runs = []
    for through in (True, False):
        model, opt = in_two_groups(max_grad_norm=0.5, **VARIANTS[variant])
        scaled_run(model, opt, batches(20), through=through)
        runs.append(
            (
                torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
                opt.gamma,
                opt.stats(),
            )
        )
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=1e-3, atol=0)
    assert runs[0][1].shape == ((2,) if "per group" in variant else ())
    assert runs[0][2].iterations == runs[1][2].iterations == 20


@pytest.mark.parametrize("passes", [(4,), (5,), (4, 5)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_overflow_measures_nothing_for_any_gamma(variant, passes):
    """Passes 4 and 5 are the two of a mini-batch, for every third as for each."""
    model, opt = in_two_groups(**VARIANTS[variant])
    data = batches(8)
    first = 2 if opt.param_groups[0]["tune_every"] == 1 else 3
    scaled_run(model, opt, data[:first])
    before = measured_state(model, opt)
    counts = [(opt.stats(i).iterations, opt.stats(i).measurements) for i in range(2)]
    scaled_run(model, opt, data[first : first + 1], overflow=[i - 4 for i in passes])
    after = measured_state(model, opt)
    assert same(after[1:], before[1:]), "G, gamma and the reference"
    assert same(after[0], before[0]) == (len(passes) == 2), "a sound pass moves"
    assert counts == [(opt.stats(i).iterations, opt.stats(i).measurements) for i in range(2)]
    assert [opt.stats(i).ignored for i in range(2)] == [1, 1]
    scaled_run(model, opt, data[first + 1 :])
    after = measured_state(model, opt)
    assert not same(after[2], before[2])
    assert [opt.stats(i).ignored for i in range(2)] == [1, 1]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "third" not in name])
def test_an_overflow_in_both_passes_is_as_if_the_mini_batch_were_left_out(variant):
    data, runs = batches(8), []
    for used, overflow in ((data, (6, 7)), (data[:3] + data[4:], ())):
        model, opt = in_two_groups(**VARIANTS[variant])
        scaled_run(model, opt, used, overflow)
        assert opt.stats(1).iterations == 7
        runs.append(measured_state(model, opt))
    assert same(*runs)


def measured_state(model, opt):
    G = [state["G"] for state in opt.state.values()]
    return copy.deepcopy((dict(model.state_dict()), G, opt.gamma, opt.reference))


def test_an_overflow_on_a_mini_batch_that_is_used_once_moves_nothing_and_is_not_counted():
    model = dropout_network().eval()
    opt = StepTunedSGD(model.parameters(), lr=0.1, tune_every=3)
    data = batches(4)
    scaled_run(model, opt, data[:1])
    before = copy.deepcopy(
        (model.state_dict(), [state["G"] for state in opt.state.values()], opt.gamma)
    )
    scaled_run(model, opt, data[1:2], overflow=(0,))
    assert same(
        (model.state_dict(), [state["G"] for state in opt.state.values()], opt.gamma), before
    )
    assert (opt.stats().iterations, opt.stats().measurements) == (1, 1)
    scaled_run(model, opt, data[2:3])
    assert (opt.stats().iterations, opt.stats().measurements) == (2, 1)
    assert opt.needs_second_pass


# -------------------------------------------------------------------------------------- checkpoints


def go_on(model, opt, k, passes):
    """Make passes by hand from mini-batch k, whose first pass may be done. Returns the next k."""
    for _ in range(passes):
        opt.zero_grad()
        loss(model, k).backward()
        if opt.needs_second_pass and not opt.pending:
            opt.half_step()
        else:
            opt.step()
            k += 1
    return k


@pytest.mark.filterwarnings("ignore:parameters are:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_after_any_pass_resumes_bit_for_bit(variant, way, dtype, tmp_path):
    options = VARIANTS[variant]
    straight = make(dtype, **options)
    go_on(*straight, 0, 16)
    for moment in range(4, 9):
        run = make(dtype, **options)
        k = go_on(*run, 0, moment)
        arguments = {"tmp_path": tmp_path / str(moment)} if "distributed" in way else {}
        resumed = WAYS[way](*run, **arguments, **options)
        assert_same_run(run, resumed)
        assert resumed[1].needs_second_pass == run[1].needs_second_pass
        go_on(*resumed, k, 16 - moment)
        assert_same_run(straight, resumed)


NEW = (
    "tune_every",
    "single",
    "countdown",
    "divided",
    "still",
    "relative",
    "log_mean",
    "positives",
    "per_group",
)


def test_a_checkpoint_from_before_the_variants_resumes_with_the_same_numbers():
    straight, run, other = make(), make(), make()
    go_on(*straight, 0, 12)
    k = go_on(*run, 0, 7)
    saved = copy.deepcopy(run[1].state_dict())
    for group in saved["param_groups"]:
        for name in NEW:
            del group[name]
    other[0].load_state_dict(run[0].state_dict())
    other[1].load_state_dict(saved)
    go_on(*other, k, 5)
    assert_same_run(straight, other)


@pytest.mark.parametrize("flatten", [False, True])
def test_an_older_distributed_checkpoint_resumes_with_the_same_numbers(flatten, tmp_path):
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    straight, run, other = make(), make(), make()
    go_on(*straight, 0, 12)
    k = go_on(*run, 0, 7)
    saved = {"model": run[0].state_dict(), "opt": get_optimizer_state_dict(*run, options=how)}
    for group in [saved["opt"]] if flatten else saved["opt"]["param_groups"]:
        for key in [key for key in group if key.split(".")[-1] in NEW]:
            del group[key]
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    loaded = {"model": other[0].state_dict(), "opt": get_optimizer_state_dict(*other, options=how)}
    dcp.load(
        loaded,
        checkpoint_id=tmp_path,
        planner=DefaultLoadPlanner(allow_partial_load=True),
        no_dist=True,
    )
    other[0].load_state_dict(loaded["model"])
    set_optimizer_state_dict(*other, loaded["opt"], options=how)
    go_on(*other, k, 5)
    assert_same_run(straight, other)


def test_gamma_stuck_at_a_bound_counts_measurements():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-6, tune_every=3)
    with pytest.warns(UserWarning, match=r"lower bound 0\.5 for 100 measurements"):
        run(opt, theta, 300, 100.0)
    assert opt.stats().at_lower == 1.0
    assert opt.stats().raw_gamma == pytest.approx((0.01, 0.01, 0.01), rel=2e-3)
