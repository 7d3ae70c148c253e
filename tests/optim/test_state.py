"""Checkpoints at any moment, even between the passes: the run resumes bit for bit."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from compare import same
from steptuned import (
    ArmijoGD,
    BarzilaiBorweinGD,
    ExactGV,
    ExpectedGV,
    RobbinsMonroLR,
    StepTunedGD,
    StepTunedSGD,
    StochasticGV,
)
from steptuned.optim.record import read

pytestmark = pytest.mark.usefixtures("path")


def make(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)
    ).to(dtype)
    groups = [
        {"params": model[0].parameters(), "lr": 0.05},
        {"params": model[2:].parameters(), "weight_decay": 0.01},
    ]
    return model, StepTunedSGD(groups, **{"lr": 0.1, "bounds": (0.05, 20.0), **options})


def loss(model, k):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(k)).to(
        next(model.parameters()).dtype
    )
    return (model(x) - x[:, :2]).square().mean()


def passes(model, opt, start, stop):
    """Single passes: 2 k and 2 k + 1 are those of iteration k."""
    for i in range(start, stop):
        opt.zero_grad()
        loss(model, i // 2).backward()
        opt.step() if i % 2 else opt.half_step()


def scalars(opt):
    return {
        name: value
        for group in opt.state_dict()["param_groups"]
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def assert_same_run(a, b):
    (model_a, opt_a), (model_b, opt_b) = a, b
    assert same(dict(model_a.state_dict()), dict(model_b.state_dict()))
    assert same(scalars(opt_a), scalars(opt_b))
    assert same(opt_a.state_dict()["state"], opt_b.state_dict()["state"])


def through_torch_save(model, opt, **options):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other_model, other = make(next(model.parameters()).dtype, **options)
    other_model.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    return other_model, other


def through_deepcopy(model, opt, **_):
    return copy.deepcopy((model, opt))


def through_pickle(model, opt, **_):
    return pickle.loads(pickle.dumps((model, opt)))


def through_dcp(flatten):
    def way(model, opt, tmp_path, **options):
        how = StateDictOptions(flatten_optimizer_state_dict=flatten)
        saved = {
            "model": model.state_dict(),
            "opt": get_optimizer_state_dict(model, opt, options=how),
        }
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        other_model, other = make(next(model.parameters()).dtype, **options)
        loaded = {
            "model": other_model.state_dict(),
            "opt": get_optimizer_state_dict(other_model, other, options=how),
        }
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        other_model.load_state_dict(loaded["model"])
        set_optimizer_state_dict(other_model, other, loaded["opt"], options=how)
        return other_model, other

    return way


WAYS = {
    "torch.save": through_torch_save,
    "deepcopy": through_deepcopy,
    "pickle": through_pickle,
    "distributed checkpoint": through_dcp(False),
    "distributed checkpoint, flattened": through_dcp(True),
}


@pytest.mark.filterwarnings(
    "ignore:parameters are:UserWarning", "ignore:torch.distributed is disabled:UserWarning"
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", [6, 7], ids=["at a boundary", "between the passes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}])
def test_a_checkpoint_resumes_bit_for_bit(way, moment, dtype, options, tmp_path):
    straight = make(dtype, **options)
    passes(*straight, 0, 16)

    run = make(dtype, **options)
    passes(*run, 0, moment)
    arguments = {"tmp_path": tmp_path} if "distributed" in way else {}
    resumed = WAYS[way](*run, **arguments, **options)
    assert_same_run(run, resumed)
    passes(*resumed, moment, 16)
    assert_same_run(straight, resumed)
    passes(*run, moment, 16)
    assert_same_run(straight, run)


def keys(state_dict):
    state = {key: sorted(value) for key, value in state_dict["state"].items()}
    return state, [sorted(group) for group in state_dict["param_groups"]]


@pytest.mark.filterwarnings("ignore:parameters are:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_has_the_same_keys_and_shapes_at_every_moment(dtype):
    model, opt = make(dtype)
    seen = []
    for i in range(4):
        seen.append(opt.state_dict())
        passes(model, opt, i, i + 1)
    assert all(keys(s) == keys(seen[0]) for s in seen)
    for s in seen:
        for state, p in zip(s["state"].values(), model.parameters(), strict=True):
            assert all(
                v.shape == p.shape and v.dtype == torch.float32
                for v in state.values()
                if isinstance(v, torch.Tensor)
            )


def test_between_the_passes_a_parameter_without_a_first_gradient_stays_without_after_loading():
    def run(checkpoint):
        a, b = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
        opt = StepTunedSGD([a, b], lr=0.1, beta=0.0)
        a.grad, b.grad = torch.tensor([1.0, 2.0, 3.0]), None
        opt.half_step()
        if checkpoint:
            saved = copy.deepcopy(opt.state_dict())
            opt = StepTunedSGD([a, b], lr=0.1, beta=0.0)
            opt.load_state_dict(saved)
        a.grad, b.grad = torch.tensor([2.0, 2.0, 3.0]), torch.tensor([50.0, 60.0])
        opt.step()
        return opt.curvature, opt.gamma, a, b

    assert same(run(True), run(False))


def test_loading_copies_so_that_two_optimizers_do_not_share_memory():
    run, other = make(), make()
    passes(*run, 0, 7)
    other[1].load_state_dict(run[1].state_dict())
    before = copy.deepcopy(other[1].state_dict())
    passes(*run, 7, 12)
    assert same(other[1].state_dict(), before)


def test_a_state_of_another_optimizer_is_refused_and_nothing_is_lost():
    model, opt = make()
    passes(model, opt, 0, 7)
    sgd = torch.optim.SGD([{"params": g["params"]} for g in opt.param_groups], lr=0.1)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match="not one of StepTunedSGD"):
        opt.load_state_dict(sgd.state_dict())
    assert same(opt.state_dict(), before)


def test_the_step_of_the_distributed_checkpoint_initialiser_is_inert_and_creates_the_state():
    model, opt = make()
    before = copy.deepcopy((model.state_dict(), scalars(opt)))
    get_optimizer_state_dict(model, opt)
    assert same((model.state_dict(), scalars(opt)), before)
    assert opt.stats().iterations == 0
    for p in model.parameters():
        assert set(opt.state[p]) == {"G", "g0", "held"}
        assert p.grad is None
    fresh = make()
    passes(model, opt, 0, 6)
    passes(*fresh, 0, 6)
    assert_same_run((model, opt), fresh)


def test_a_step_with_lr_zero_is_not_mistaken_for_the_initialiser_once_there_is_a_state():
    model, opt = make(lr=0.0)
    passes(model, opt, 0, 2)
    for group in opt.param_groups:
        group["lr"] = 0.0
    loss(model, 0).backward()
    with pytest.raises(RuntimeError, match="without a pending half step"):
        opt.step()


@pytest.mark.parametrize("way", ["torch.save", "deepcopy", "pickle"])
def test_a_group_can_be_added_after_a_restart(way):
    run = make()
    passes(*run, 0, 4)
    model, opt = WAYS[way](*run)
    extra = torch.ones(3, requires_grad=True)
    opt.add_param_group({"params": [extra]})
    for i in range(2):
        opt.zero_grad()
        (loss(model, 9) + extra.square().sum()).backward()
        opt.step() if i else opt.half_step()
    assert extra[0] < 1
    assert opt.stats().iterations == 3
    assert all(g["gamma"] is opt.param_groups[0]["gamma"] for g in opt.param_groups)


def test_after_loading_the_groups_share_one_gamma_again():
    run = make()
    passes(*run, 0, 4)
    saved = run[1].state_dict()
    # as a distributed checkpoint brings them: every group with tensors of its own
    saved["param_groups"] = [copy.deepcopy(group) for group in saved["param_groups"]]
    _, other = make()
    other.load_state_dict(saved)
    assert all(
        other.param_groups[1][name] is other.param_groups[0][name]
        for name in ("gamma", "measured", "tally")
    )


def test_a_state_loaded_between_the_passes_replaces_the_pending_one():
    run, other = make(), make()
    passes(*run, 0, 7)
    passes(*other, 0, 3)
    other[1].load_state_dict(copy.deepcopy(run[1].state_dict()))
    other[0].load_state_dict(run[0].state_dict())
    for state in other[1].state.values():
        state["g0"].add_(0)  # moves the version of every tensor that could still be watched
    passes(*other, 7, 12)
    passes(*run, 7, 12)
    assert_same_run(run, other)


def test_an_older_state_without_an_option_takes_the_default():
    run = make()
    passes(*run, 0, 4)
    saved = copy.deepcopy(run[1].state_dict())
    for group in saved["param_groups"]:
        del group["replay_rng"]
    _, other = make()
    other.load_state_dict(saved)
    assert other.param_groups[0]["replay_rng"] is True


def as_of_the_first_version(group):
    """Only gamma itself is kept, and the step has another name."""
    for name in ("measured", "counted", "single", "overflows"):
        del group[name]
    group["curvature"] = torch.tensor(0.3)
    group["streak"] = torch.tensor(0)
    group["step"] = group.pop("effective_lr")


def as_of_the_second_version(group):
    """The ring buffer has the raw gammas only."""
    rows = read(group, group.pop("measured"))
    n = group["k"] - group["single"] - 1
    group["recent"] = rows.raw_gamma
    group["raw_gamma"], group["curvature"] = rows.raw_gamma[n % 100], rows.curvature[n % 100]
    group["streak"] = torch.tensor(0)
    del group["counted"], group["overflows"]


def valley(start):
    theta = start.clone().requires_grad_()
    return theta, StepTunedSGD([theta], lr=0.3, bounds=(0.001, 20.0))


def walk(theta, opt, iterations):
    for _ in range(iterations):
        for _ in opt.passes():
            theta.grad = torch.sin(3 * theta.detach()) + 0.1 * theta.detach()


@pytest.mark.parametrize("version", [as_of_the_first_version, as_of_the_second_version])
@pytest.mark.parametrize("done", [5, 120])
def test_a_checkpoint_of_an_older_version_resumes_with_the_same_numbers(version, done):
    torch.manual_seed(0)
    start = torch.randn(4, dtype=torch.float64)
    theta, opt = valley(start)
    walk(theta, opt, done)
    stats, gamma = opt.stats(), opt.raw_gamma
    old = copy.deepcopy(opt.state_dict())
    for group in old["param_groups"]:
        version(group)
    other, loaded = valley(start)
    other.data.copy_(theta.data)
    loaded.load_state_dict(old)
    if version is as_of_the_first_version:
        assert math.isnan(loaded.raw_gamma)
        assert math.isnan(loaded.curvature), "it was in another unit"
        assert loaded.stats()[:5] == stats[:5]
    else:
        assert torch.equal(loaded.raw_gamma, gamma)
        torch.testing.assert_close(loaded.curvature, opt.curvature, rtol=1e-15, atol=0)
        assert loaded.stats() == stats
    assert loaded.param_groups[0]["effective_lr"] == opt.param_groups[0]["effective_lr"]
    walk(theta, opt, 105)
    walk(other, loaded, 105)
    assert torch.equal(theta, other)
    assert torch.equal(loaded.raw_gamma, opt.raw_gamma)
    assert loaded.stats() == opt.stats()
    assert (
        loaded.state_dict()["param_groups"][0].keys() == opt.state_dict()["param_groups"][0].keys()
    )


def test_a_model_converted_to_double_during_a_run_continues():
    model, opt = make()
    passes(model, opt, 0, 4)
    model.double()
    passes(model, opt, 4, 8)
    assert opt.stats().iterations == 4
    assert all(state["G"].dtype == torch.float64 for state in opt.state.values())


def test_a_state_dict_can_be_taken_before_a_lazy_layer_knows_its_shape():
    opt = StepTunedSGD(nn.LazyLinear(3).parameters(), lr=0.1)
    assert opt.state_dict()["state"] == {}


def test_frozen_parameters_have_no_state():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2)
    opt = StepTunedSGD([a, b], lr=0.1)
    assert list(opt.state_dict()["state"]) == [0]


def test_hooks_of_state_dict_and_load_see_the_whole_state():
    model, opt = make()
    passes(model, opt, 0, 3)
    seen = []
    opt.register_state_dict_post_hook(lambda _, state: seen.append(keys(state)))
    state = opt.state_dict()
    assert seen == [keys(state)]


def full_gradient(theta, target):
    return lambda: [2 * (theta.detach() - target)]


@pytest.mark.parametrize(
    "name",
    ["StepTunedGD", "BarzilaiBorweinGD", "ArmijoGD", "StochasticGV", "ExactGV", "ExpectedGV"],
)
@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_companion_resumes_bit_for_bit(name, way):
    def make_one():
        theta = torch.linspace(-1, 2, 6, dtype=torch.float64).requires_grad_()
        classes = {c.__name__: c for c in (StepTunedGD, BarzilaiBorweinGD, ArmijoGD, StochasticGV)}
        if name in classes:
            return theta, classes[name]([theta], lr=0.05)
        cls = {"ExactGV": ExactGV, "ExpectedGV": ExpectedGV}[name]
        return theta, cls([theta], full_gradient(theta, 1.0), lr=0.05)

    def run(theta, opt, start, stop):
        for k in range(start, stop):

            def closure(k=k):
                opt.zero_grad()
                value = ((theta - 1.0) ** 2 + 0.3 * torch.cos((2 + k % 3) * theta)).sum()
                value.backward()
                return value

            opt.step(closure)

    straight = make_one()
    run(*straight, 0, 12)
    theta, opt = make_one()
    run(theta, opt, 0, 5)
    if way == "state_dict":
        buffer = io.BytesIO()
        torch.save(opt.state_dict(), buffer)
        buffer.seek(0)
        _, other = make_one()
        other.param_groups[0]["params"][0].data.copy_(theta.data)
        other.load_state_dict(torch.load(buffer, weights_only=True))
        theta = other.param_groups[0]["params"][0]
    else:
        other = copy.deepcopy(opt)
        theta = other.param_groups[0]["params"][0]
    if name in ("ExactGV", "ExpectedGV"):
        other._ask = full_gradient(theta, 1.0)
    run(theta, other, 5, 12)
    assert same(theta, straight[0])
    assert same(other.state_dict(), straight[1].state_dict())


def test_a_scheduler_and_its_optimizer_resume_together():
    def make_one():
        model, opt = make(decay_every=None)
        return model, opt, RobbinsMonroLR(opt, every=3)

    def run(model, opt, scheduler, start, stop):
        for k in range(start, stop):
            passes(model, opt, 2 * k, 2 * k + 2)
            scheduler.step()

    straight = make_one()
    run(*straight, 0, 10)
    first = make_one()
    run(*first, 0, 4)
    resumed = make_one()
    for new, old in zip(resumed, first, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    run(*resumed, 4, 10)
    assert_same_run(straight[:2], resumed[:2])
