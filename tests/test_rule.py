"""The rule, the decay and the scheduler."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steptuned import RobbinsMonroLR, StepTunedSGD, rule


@given(square=st.floats(0, 1e6), curvature=st.floats(-1e6, 1e6), nu=st.floats(0.1, 10))
def test_gamma_is_the_quotient_where_curvature_is_positive_and_nu_elsewhere(square, curvature, nu):
    value = rule.gamma(
        torch.tensor(square, dtype=torch.float64), torch.tensor(curvature, dtype=torch.float64), nu
    ).item()
    if curvature > 0:
        with np.errstate(over="ignore"):
            assert value == np.float64(square) / np.float64(curvature)
    else:
        assert value == nu


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
def test_debias_makes_the_weights_sum_to_one(beta):
    for k in (0, 1, 5, 50):
        weights = sum((1 - beta) * beta ** (k - j) for j in range(k + 1))
        assert rule.debias(
            beta, torch.tensor(float(k), dtype=torch.float64)
        ).item() * weights == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("every", [1, 3, 195.5])
@pytest.mark.parametrize("delta", [0.0, 0.001, 0.4])
def test_the_decay_counts_blocks_of_iterations_from_one(every, delta):
    for k in (0, 1, 2, 3, 194, 195, 196, 390, 391, 392):
        expected = 1 / (1 + k // every) ** (0.5 + delta)
        assert rule.robbins_monro(float(k), delta, every) == pytest.approx(expected, rel=1e-14)
        assert rule.robbins_monro(
            torch.tensor(float(k), dtype=torch.float64), delta, every
        ).item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("every", [1, 4, 2.5])
def test_the_scheduler_is_the_decay_of_the_optimizer(every):
    trajectories = []
    for scheduled in (False, True):
        theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
        opt = StepTunedSGD([theta], lr=0.2, decay_every=None if scheduled else every)
        scheduler = RobbinsMonroLR(opt, every=every) if scheduled else None
        for _ in range(12):
            for _ in opt.passes():
                theta.grad = theta.detach()
            if scheduler:
                scheduler.step()
        trajectories.append(theta.detach())
    torch.testing.assert_close(*trajectories, rtol=1e-12, atol=0)


def test_the_scheduler_drives_any_optimizer_and_any_kind_of_lr():
    for lr in (0.4, torch.tensor(0.4)):
        a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        adam = torch.optim.Adam([{"params": [a]}, {"params": [b], "lr": 0.1}], lr=lr, foreach=False)
        scheduler = RobbinsMonroLR(adam, delta=0.1)
        for _ in range(4):
            adam.step()
            scheduler.step()
        assert [float(g["lr"]) for g in adam.param_groups] == pytest.approx(
            [0.4 / 5**0.6, 0.1 / 5**0.6]
        )


@pytest.mark.parametrize(
    ("name", "value"), [("delta", 0.5), ("delta", -0.1), ("every", 0), ("every", float("inf"))]
)
def test_the_scheduler_validates_its_arguments(name, value):
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match=f"^{name} must be"):
        RobbinsMonroLR(opt, **{name: value})
