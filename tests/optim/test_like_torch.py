"""What torch tests for all its optimizers, with torch's own inputs and errors if available."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from compare import same
from steptuned import ArmijoGD, BarzilaiBorweinGD, StepTunedGD, StepTunedSGD, StochasticGV

pytestmark = pytest.mark.usefixtures("path")

common = pytest.importorskip(
    "torch.testing._internal.common_optimizers",
    reason="this torch keeps its lists of optimizer inputs elsewhere",
)

ALL = [StepTunedSGD, StepTunedGD, BarzilaiBorweinGD, StochasticGV, ArmijoGD]
ACCEPTED = {"lr", "weight_decay", "maximize", "foreach"}
INPUTS = [given for given in common.optim_inputs_func_sgd("cpu") if given.kwargs.keys() <= ACCEPTED]
ERRORS = common.get_error_inputs_for_all_optims("cpu", torch.float32)


def by_name(given):
    return (
        getattr(given, "desc", None) or given.optimizer_error_input.desc
        if not isinstance(given, type)
        else given.__name__
    )


def make(kwargs, seed=0, shape=(3, 2)):
    torch.manual_seed(seed)
    weight, bias = nn.Parameter(torch.randn(*shape)), nn.Parameter(torch.randn(shape[0]))
    return weight, bias, StepTunedSGD([weight, bias], **kwargs)


def closure_of(weight, bias, opt, scale=1.0):
    x = torch.linspace(-1, 1, weight.shape[1])

    def closure():
        opt.zero_grad()
        loss = scale * (weight @ x + bias).square().sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("error", ERRORS, ids=by_name)
@pytest.mark.parametrize("cls", ALL, ids=by_name)
def test_torchs_errors_for_all_optimizers_are_raised(cls, error):
    given = error.optimizer_error_input
    params = given.params if given.params is not None else [nn.Parameter(torch.randn(1, 1))]
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            cls(params, **given.kwargs)
        return
    expected = (
        None if "lr" in given.kwargs else error.error_regex
    )  # our error message for lr differs from torch's
    with pytest.raises(error.error_type, match=expected):
        cls(params, **given.kwargs)


@pytest.mark.parametrize("given", INPUTS, ids=by_name)
def test_the_loss_decreases_or_increases_with_maximize(given):
    weight, bias, opt = make({**given.kwargs, "lr": given.kwargs.get("lr", 0.01)})
    closure = closure_of(weight, bias, opt)
    losses = [opt.step(closure).item() for _ in range(20)]
    assert (losses[-1] > losses[0]) == given.kwargs.get("maximize", False)


@pytest.mark.parametrize("given", INPUTS, ids=by_name)
def test_foreach_and_one_by_one_are_the_same(given):
    ends = []
    for foreach in (True, False):
        weight, bias, opt = make({**given.kwargs, "foreach": foreach})
        for _ in range(7):
            opt.step(closure_of(weight, bias, opt))
        ends.append(torch.cat([weight.detach().reshape(-1), bias.detach()]))
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("given", INPUTS, ids=by_name)
def test_non_contiguous_parameters_are_the_same(given):
    ends = []
    for contiguous in (True, False):
        weight, bias, _ = make(given.kwargs)
        if not contiguous:
            weight = nn.Parameter(weight.detach().t().contiguous().t())
            assert not weight.is_contiguous()
        opt = StepTunedSGD([weight, bias], **given.kwargs)
        for _ in range(7):
            opt.step(closure_of(weight, bias, opt))
        ends.append(torch.cat([weight.detach().reshape(-1), bias.detach()]))
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("given", INPUTS, ids=by_name)
def test_a_state_dict_saved_with_weights_only_is_equal(given):
    weight, bias, opt = make(given.kwargs)
    opt.step(closure_of(weight, bias, opt))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same(loaded, opt.state_dict())
    other_weight, other_bias, other = make(given.kwargs)
    with torch.no_grad():
        other_weight.copy_(weight)
        other_bias.copy_(bias)
    other.load_state_dict(loaded)
    for w, b, o in ((weight, bias, opt), (other_weight, other_bias, other)):
        for _ in range(3):
            o.step(closure_of(w, b, o))
    assert torch.equal(weight, other_weight)
    assert torch.equal(bias, other_bias)


@pytest.mark.parametrize("given", INPUTS, ids=by_name)
def test_a_deep_copy_continues_identically(given):
    weight, bias, opt = make(given.kwargs)
    opt.step(closure_of(weight, bias, opt))
    other = copy.deepcopy(opt)
    other_weight, other_bias = other.param_groups[0]["params"]
    opt.step(closure_of(weight, bias, opt))
    other.step(closure_of(other_weight, other_bias, other))
    assert torch.equal(weight, other_weight)


@pytest.mark.parametrize("cls", ALL, ids=by_name)
def test_a_step_is_a_no_op_for_zero_gradients(cls):
    theta = nn.Parameter(torch.randn(5))
    before = theta.detach().clone()
    opt = cls([theta])

    def closure():
        theta.grad = torch.zeros_like(theta)
        return torch.ones(())

    opt.step(closure)
    assert torch.equal(theta, before)


@pytest.mark.parametrize("cls", ALL, ids=by_name)
def test_a_step_is_a_no_op_without_gradients(cls):
    theta = nn.Parameter(torch.randn(5))
    before = theta.detach().clone()
    opt = cls([theta])
    opt.step(lambda: torch.ones(()))
    assert torch.equal(theta, before)


def test_step_hooks_run_once_per_iteration_and_see_the_arguments():
    weight, bias, opt = make({})
    seen = []
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    opt.step(closure_of(weight, bias, opt))
    for _ in opt.passes():
        closure_of(weight, bias, opt)()
    assert seen == ["before", "after"] * 2


def test_state_dict_hooks_run_in_order():
    _, _, opt = make({})
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    opt.register_state_dict_post_hook(lambda o, state: seen.append("post"))
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append("load pre"))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "post", "load pre", "load post"]


def test_named_parameters_keep_their_names_through_a_checkpoint():
    model = nn.Linear(3, 2)
    opt = StepTunedSGD(model.named_parameters())
    state = opt.state_dict()
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    StepTunedSGD(nn.Linear(3, 2).named_parameters()).load_state_dict(state)


def test_the_repr_has_the_options():
    text = repr(make({"lr": 0.25})[2])
    assert "lr: 0.25" in text
    assert "decay_every: None" in text


SCHEDULERS = {
    "StepLR": lambda o: StepLR(o, 3, 0.5),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "LinearLR": lambda o: LinearLR(o, 0.1, total_iters=5),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.05, total_steps=12, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, swa_lr=0.005, anneal_epochs=3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_with_a_scheduler_the_loss_goes_down_and_effective_lr_follows(name):
    weight, bias, opt = make({"lr": 0.02})
    scheduler = SCHEDULERS[name](opt)
    closure = closure_of(weight, bias, opt)
    first = closure().item()
    opt.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            gamma, lr = opt.gamma.item(), opt.param_groups[0]["lr"]
            loss = opt.step(closure)
            assert opt.param_groups[0]["effective_lr"].item() == pytest.approx(gamma * lr)
            scheduler.step(*([loss.detach()] if name == "ReduceLROnPlateau" else []))
    assert loss.item() < first


def test_averaged_weights_work_with_batchnorm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    opt = StepTunedSGD(model.parameters(), lr=0.05)
    averaged = AveragedModel(model)
    batches = [torch.randn(8, 4) for _ in range(4)]
    for x in batches:
        for _ in opt.passes():
            opt.zero_grad()
            model(x).square().mean().backward()
        averaged.update_parameters(model)
    update_bn(batches, averaged)
    assert averaged.n_averaged == 4
    assert averaged.module[1].num_batches_tracked == 4
