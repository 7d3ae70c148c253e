"""Tensors, groups and contexts that programs change around the optimizer, on every path."""

import functools
import os
import warnings
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing
from torch import nn

import steptuned
from steptuned import StepTuned, StepTunedSGD
from steptuned.optim import kernel

pytestmark = pytest.mark.usefixtures("path")


def iterate(opt, params, n=1, loss=None):
    for _ in range(n):
        for _ in opt.passes():
            opt.zero_grad()
            (loss or (lambda: sum((p**2).sum() for p in params)))().backward()


def parameter(n, value=1.0):
    return nn.Parameter(torch.full((n,), value))


def trained(shape, **options):
    p = nn.Parameter(torch.ones(shape))
    opt = StepTunedSGD([p], lr=0.01, **options)
    iterate(opt, [p], 3)
    return opt


@pytest.mark.parametrize("other", [(1000,), (3,), (4, 5)], ids=str)
def test_a_state_of_a_different_network_is_refused(other):
    p = nn.Parameter(torch.ones(5))
    opt = StepTunedSGD([p], lr=0.01)
    with pytest.raises(ValueError, match=r"its G has the shape .*, and the parameter has \(5,\)"):
        opt.load_state_dict(trained(other).state_dict())
    iterate(opt, [p])
    assert opt.stats().iterations == 1, "nothing was loaded"


def test_a_parameter_that_becomes_smaller_in_place_is_an_error_and_writes_nothing():
    p = parameter(70_000)
    opt = StepTunedSGD([p], lr=0.01)
    iterate(opt, [p], 2)
    whole = p.data
    rest = whole[10:].clone()
    p.data, p.grad = whole[:10], None
    with pytest.raises(RuntimeError, match="size"):
        iterate(opt, [p])
    assert torch.equal(whole[10:], rest)


def test_a_gradient_that_becomes_smaller_is_an_error():
    p = parameter(70_000)
    opt = StepTunedSGD([p], lr=0.01)
    iterate(opt, [p], 2)
    p.grad = torch.ones(70_000)
    p.grad.data = torch.ones(10)
    with pytest.raises(RuntimeError, match="size"):
        opt.half_step()


def move_G(opt, p):
    opt.state[p]["G"].data = opt.state[p]["G"].clone()


def share(opt, p):
    ForkingPickler.dumps(opt.state_dict())  # as by a queue of torch.multiprocessing


@pytest.mark.parametrize("move", [move_G, share])
@pytest.mark.parametrize("elements", [1_000, 600_000])
def test_state_whose_memory_moves_is_found_where_it_is(elements, move):
    scale = torch.linspace(0.1, 1, elements)

    def run(move):
        p = parameter(elements)
        opt = StepTunedSGD([p], lr=0.1, bounds=(0.05, 20.0))
        for _ in range(3):
            iterate(opt, [p], 2, lambda: (scale * p**2).sum())
            move(opt, p)
        return p.detach(), opt.state[p]["G"], opt.gamma

    for moved, still in zip(run(move), run(lambda opt, p: None), strict=True):
        assert torch.equal(moved, still)


@pytest.mark.parametrize("like", ["smaller", "bfloat16", "float64"])
def test_nothing_is_written_beyond_a_G_whose_memory_was_replaced(like):
    p = parameter(2_000)
    opt = StepTunedSGD([p], lr=0.1)
    iterate(opt, [p], 2)
    G = opt.state[p]["G"]
    whole = torch.full((4_000,), 7.0, dtype=getattr(torch, like, torch.float32))
    G.data = whole[:10] if like == "smaller" else whole[:2_000]
    if like == "smaller":
        with pytest.raises(RuntimeError, match="size"):
            iterate(opt, [p])
    else:
        iterate(opt, [p])
    assert (whole[2_000:] == 7).all()


def by_hand(opt, params, between):
    """One iteration, in which something happens between the passes."""
    iterate(opt, params, 2)
    sum((p**2).sum() for p in params).backward()
    opt.half_step()
    between()
    sum((p**2).sum() for p in params).backward()
    opt.step()


def test_a_g0_that_is_replaced_between_the_passes_is_used():
    def curvature(place):
        params = [parameter(3), parameter(3)]
        opt = StepTunedSGD(params, lr=0.1)

        def replace():
            if place is not None:
                opt.state[params[place]]["g0"] = torch.full((3,), 5.0)

        by_hand(opt, params, replace)
        return opt.curvature

    assert curvature(0) == curvature(1) != curvature(None)


@pytest.mark.parametrize("elements", [3, 600_000])
def test_a_g0_that_is_cast_between_the_passes_is_an_error(elements):
    p = parameter(elements)
    opt = StepTunedSGD([p], lr=0.1)

    def cast():
        opt.state[p]["g0"] = opt.state[p]["g0"].bfloat16()

    with pytest.raises(RuntimeError, match="was cast to"):
        by_hand(opt, [p], cast)


def test_memory_shared_between_the_passes_is_found_beside_an_empty_parameter():
    def run(between):
        params = [parameter(0), parameter(1_000)]
        opt = StepTunedSGD(params, lr=0.1)
        by_hand(opt, params, lambda: between(opt))
        iterate(opt, params)
        return params[1].detach(), opt.curvature

    shared = run(lambda opt: ForkingPickler.dumps(opt.state_dict()))
    for found, expected in zip(shared, run(lambda opt: None), strict=True):
        assert torch.equal(found, expected)


def test_a_state_that_is_cleared_starts_again():
    p = parameter(3)
    opt = StepTunedSGD([p], lr=0.1)
    iterate(opt, [p], 2)
    opt.state[p].clear()
    iterate(opt, [p])
    assert "G" in opt.state[p]


def test_parameters_that_change_their_group_get_its_options():
    a, b, c = (parameter(3) for _ in range(3))
    opt = StepTunedSGD([{"params": [a, b], "lr": 0.0}, {"params": [c], "lr": 0.1}])
    iterate(opt, [a, b, c], 2)
    opt.param_groups[0]["params"], opt.param_groups[1]["params"] = [a], [b, c]
    iterate(opt, [a, b, c])
    assert torch.equal(a, torch.ones(3))
    assert not torch.equal(b, torch.ones(3))


def test_a_group_that_is_replaced_is_used():
    p = parameter(3)
    opt = StepTunedSGD([p], lr=0.1)
    iterate(opt, [p], 2)
    before = p.detach().clone()
    opt.param_groups[0] = {**opt.param_groups[0], "lr": 0.0}
    iterate(opt, [p])
    assert torch.equal(p, before)


@pytest.mark.filterwarnings("ignore:parameters are torch.bfloat16")
@pytest.mark.parametrize("options", [{}, {"tune_every": 2}], ids=str)
def test_a_model_may_be_cast_to_higher_precision_and_back(options):
    model = nn.Linear(3, 3).bfloat16()
    opt = StepTunedSGD(model.parameters(), lr=0.01, **options)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32):
        x = torch.ones(2, 3, dtype=dtype)
        model.to(dtype)
        iterate(opt, [*model.parameters()], 4, lambda x=x: model(x).sum() ** 2)
    assert opt.stats().iterations == 16
    assert "displacement" not in opt.state[model.weight]


@pytest.mark.filterwarnings("ignore:parameters are torch.bfloat16")
def test_a_state_of_low_precision_can_be_loaded_into_float32():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = StepTunedSGD([p], lr=0.01)
    iterate(opt, [p], 2)
    q = parameter(3)
    other = StepTunedSGD([q], lr=0.01)
    other.load_state_dict(opt.state_dict())
    iterate(other, [q], 2)
    assert other.stats().iterations == 4


def tuned(p):
    return StepTuned(torch.optim.SGD([p], lr=0.01, momentum=0.9))


def test_the_states_of_the_two_classes_are_told_apart():
    p = parameter(3)
    plain, wrapped = StepTunedSGD([p], lr=0.01), tuned(p)
    for into, state, name in (
        (plain, wrapped, "one of StepTuned, not of StepTunedSGD"),
        (wrapped, plain, "one of StepTunedSGD, not of StepTuned"),
    ):
        with pytest.raises(ValueError, match=name):
            into.load_state_dict(state.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: StepTunedSGD(p, lr=0.01),
        lambda p: StepTunedSGD(p, lr=0.01, tune_every=2),
        lambda p: StepTuned(torch.optim.SGD(p, lr=0.01), tune_every=1, relative=False),
    ],
    ids=["StepTunedSGD", "every other", "StepTuned"],
)
@pytest.mark.parametrize("form", ["passes", "closure", "hand"])
def test_an_autocast_region_around_several_passes_measures_the_same(make, form):
    x = torch.linspace(-1, 1, 24).reshape(8, 3)

    def curvature(around):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        opt = make(model.parameters())

        def backward():
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float() ** 2).sum()
            loss.backward()
            return loss

        def step():
            if form == "closure":
                opt.step(backward)
            elif form == "passes":
                for _ in opt.passes():
                    backward()
            else:
                backward()
                if opt.needs_second_pass:
                    opt.half_step()
                    backward()
                opt.step()

        region = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        with region() if around == "all iterations" else nullcontext():
            for _ in range(4):
                with region() if around == "both passes" else nullcontext():
                    step()
        return opt.curvature

    expected = curvature("one pass")
    assert expected > 1
    assert curvature("both passes") == expected
    assert curvature("all iterations") == expected


def test_the_default_device_does_not_matter():
    """Parameters on the CPU, in a program whose default device is another one."""

    def run(default):
        p, q = parameter(1_000), parameter(70_000)
        opt = StepTunedSGD([p, q], lr=0.1, max_grad_norm=1.0, decay_every=2)
        torch.set_default_device(default)
        try:
            for _ in range(3):
                for _ in opt.passes():
                    p.grad, q.grad = p.detach().clone(), q.detach().clone()
            opt.stats()
            opt.state_dict()
        finally:
            torch.set_default_device(None)
        return p.detach(), q.detach(), opt.curvature

    for with_meta, with_cpu in zip(run("meta"), run(None), strict=True):
        assert torch.equal(with_meta, with_cpu)


def test_entries_of_other_programs_in_the_state_are_left_alone():
    p, q = parameter(3), parameter(3)
    opt = StepTunedSGD([p, q], lr=0.1)
    own = opt.state[p]
    own["ema"] = torch.ones(3)
    assert opt.state_dict()["state"][0].keys() == {"ema", "G", "g0", "held"}
    opt.param_groups[0]["tune_every"] = 2
    iterate(opt, [p, q], 2)
    assert opt.state[p] is own
    assert torch.equal(own["ema"], torch.ones(3))
    assert "G" in own


@pytest.mark.parametrize("before", [0, 2], ids=["at first", "after other gradients"])
def test_a_zero_tensor_without_memory_may_be_a_gradient(before):
    p = parameter(5)
    opt = StepTunedSGD([p], lr=0.1)
    iterate(opt, [p], before)
    start = p.detach().clone()
    for _ in range(3):
        p.grad = torch._efficientzerotensor(5)
        opt.half_step()
        p.grad = torch._efficientzerotensor(5)
        opt.step()
    assert torch.equal(p, start)


def test_a_gradient_that_autograd_makes_a_zero_tensor_is_used():
    p = parameter(5)
    opt = StepTunedSGD([p], lr=0.1)
    iterate(opt, [p], 2)
    start = p.detach().clone()
    iterate(opt, [p], 2, lambda: torch.sgn(p).sum())
    assert torch.equal(p, start)


def test_without_any_temporary_folder_the_torch_path_is_used(path, monkeypatch):
    if path == "torch":
        pytest.skip("there is no kernel to compile")

    def nowhere():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.setattr(kernel.tempfile, "gettempdir", nowhere)
    kernel._load.cache_clear()
    status = steptuned.kernel_status()
    monkeypatch.undo()
    kernel._load.cache_clear()
    assert not status.active
    assert "no folder" in status.reason


def test_a_parameter_that_becomes_a_nested_tensor_does_not_end_the_process():
    p = parameter(12)
    opt = StepTunedSGD([p], lr=0.01)
    iterate(opt, [p], 2)
    p.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(4, 3)])
    torch.utils.swap_tensors(p, nn.Parameter(nested))
    for _ in opt.passes():  # without gradients
        p.grad = None
    assert opt.stats().iterations == 2
