"""Subclasses of StepTunedSGD with options and rules of their own."""

import pytest
import torch

from steptuned import StepTunedSGD
from steptuned.optim.arguments import WHOLE


class Held(StepTunedSGD):
    """gamma is 1 until it has been measured ``hold`` times."""

    OPTIONS = {**StepTunedSGD.OPTIONS, "hold": WHOLE.per("gamma")}  # noqa: RUF012 - not changed

    def __init__(self, params, lr=0.1, *, hold=0, **options):
        super().__init__(params, lr, **options)
        self.add_options(hold=hold)

    def unclipped_gamma(self, group, measured):
        gamma = super().unclipped_gamma(group, measured)
        n = group["k"] - group["single"] + 1
        return torch.ones_like(gamma) if n < group["hold"] else gamma


def train(opt, theta, iterations):
    """gamma after every iteration on a bent valley."""
    gammas = []
    for _ in range(iterations):
        for _ in opt.passes():
            opt.zero_grad()
            (theta**4 + 0.5 * theta**2).sum().backward()
        gammas.append(opt.gamma.tolist())
    return gammas


def point():
    return torch.tensor([1.5, -0.7], dtype=torch.float64, requires_grad=True)


def test_a_rule_that_changes_nothing_is_bit_identical():
    theirs, ours = point(), point()
    assert train(StepTunedSGD([theirs], 0.05), theirs, 20) == train(Held([ours], 0.05), ours, 20)
    assert torch.equal(theirs, ours)


def test_a_rule_of_ones_own_sets_gamma():
    theta = point()
    gammas = train(Held([theta], 0.05, hold=4), theta, 6)
    assert gammas[:3] == [1.0, 1.0, 1.0]
    assert gammas[3] != 1.0


def test_its_option_is_checked_everywhere():
    with pytest.raises(ValueError, match="hold must be a whole number at least 0, got -1"):
        Held([point()], hold=-1)
    with pytest.raises(ValueError, match=r"hold must be a whole number at least 0, got 0\.5"):
        Held([{"params": [point()], "hold": 0.5}], hold=1)
    with pytest.raises(ValueError, match="hold must be the same for all parameter groups"):
        Held([{"params": [point()], "hold": 1}, {"params": [point()]}], hold=2)
    opt = Held([point()], hold=1)
    with pytest.raises(ValueError, match="got 3, but the first group has 1"):
        opt.add_param_group({"params": [point()], "hold": 3})


def test_groups_with_their_own_gamma_have_their_own_value():
    thetas = point(), point()
    groups = [{"params": [thetas[0]]}, {"params": [thetas[1]], "hold": 3}]
    opt = Held(groups, 0.05, per_group=True)
    for _ in range(2):
        for _ in opt.passes():
            opt.zero_grad()
            sum((theta**4).sum() for theta in thetas).backward()
    assert opt.gamma[0] != 1.0
    assert opt.gamma[1] == 1.0


def test_the_option_is_saved_and_older_states_get_the_default():
    theta = point()
    opt = Held([theta], 0.05, hold=3)
    train(opt, theta, 1)
    saved = opt.state_dict()
    assert saved["param_groups"][0]["hold"] == 3
    fresh = Held([point()], 0.05, hold=7)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["hold"] == 3
    del saved["param_groups"][0]["hold"]
    fresh = Held([point()], 0.05, hold=7)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["hold"] == 7
