"""What goes wrong in real training.

Clipping, gradients that are not finite or change in place, and zero displacement.
"""

import copy
import gc
import math
import tempfile
import warnings
import weakref
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compare import same
from steptuned import StepTunedSGD
from steptuned.optim import flat
from steptuned.optim.kernel import Workspace

pytestmark = pytest.mark.usefixtures("path")


def quadratic(n=20, seed=0):
    """J = theta' H theta / 2, whose curvature along any d is d' H d."""
    torch.manual_seed(seed)
    A = torch.randn(n, n, dtype=torch.float64) / n**0.5
    return A.T @ A, torch.randn(n, dtype=torch.float64).requires_grad_()


# ----------------------------------------------------------------------------------------- clipping


def test_max_grad_norm_clips_the_update_and_not_the_measurement():
    H, theta = quadratic()
    opt = StepTunedSGD([theta], lr=0.1, max_grad_norm=0.3, bounds=(1e-6, 1e6), decay_every=None)
    for _ in range(20):
        gamma = opt.gamma
        points = []
        for _ in opt.passes():
            points.append(theta.detach().clone())
            theta.grad = H @ theta.detach()
        points.append(theta.detach().clone())
        for a, b in pairwise(points):
            assert (b - a).norm() <= 0.1 * gamma * 0.3 * (1 + 1e-12)
    assert (H @ points[0]).norm() > 0.3, "clipping was at work to the end"
    # Along one direction of a quadratic, gamma is the inverse of the curvature, however short the
    # steps were.
    d = points[1] - points[0]
    H1, theta1 = quadratic()
    single = StepTunedSGD([theta1], lr=0.1, beta=0.0, max_grad_norm=0.3, bounds=(1e-6, 1e6))
    start = theta1.detach().clone()
    for _ in single.passes():
        theta1.grad = H1 @ theta1.detach()
    d = H1 @ start
    torch.testing.assert_close(single.gamma, (d @ d) / (d @ H1 @ d), rtol=1e-10, atol=0)


def test_clipping_outside_each_pass_breaks_the_measurement():
    """Two gradients clipped to the same length differ in direction only: hence max_grad_norm."""
    H, theta = quadratic()
    start = theta.detach().clone()
    opt = StepTunedSGD([theta], lr=0.1, beta=0.0, bounds=(1e-6, 1e6))
    for _ in opt.passes():
        theta.grad = H @ theta.detach()
        nn.utils.clip_grad_norm_([theta], 0.3)
    d = H @ start
    assert opt.gamma > 2 * (d @ d) / (d @ H @ d)


def test_the_first_pass_of_max_grad_norm_is_clip_grad_norm_and_sgd():
    torch.manual_seed(0)
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(7, 5)
    opt, sgd = (
        StepTunedSGD(models[0].parameters(), lr=0.2, max_grad_norm=0.5),
        torch.optim.SGD(models[1].parameters(), lr=0.2),
    )
    for model in models:
        model(x).square().sum().backward()
    nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
    opt.half_step()
    sgd.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


# --------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["first", "second", "both"])
@pytest.mark.parametrize("how", ["lists", "in chunks"])
def test_one_gradient_that_is_not_finite_does_not_poison_what_follows(bad, where, how, monkeypatch):
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", 1 if how == "in chunks" else 1 << 30)
    monkeypatch.setattr("steptuned.optim.flat.CHUNK", 6)
    H, theta = quadratic()
    start = theta.detach().clone()
    opt = StepTunedSGD([theta], lr=0.1, bounds=(0.01, 100.0))
    undisturbed = StepTunedSGD([theta], lr=0.1, bounds=(0.01, 100.0))

    def iterate(opt, spoil=()):
        for i in opt.passes():
            theta.grad = H @ theta.detach()
            if i in spoil:
                theta.grad[3] = bad

    for _ in range(5):
        iterate(opt)
    sound, gamma, G = theta.detach().clone(), opt.gamma, opt.state[theta]["G"].clone()
    iterate(opt, {"first": (0,), "second": (1,), "both": (0, 1)}[where])
    assert not torch.isfinite(theta[3]), "the update is the one of SGD"
    if (
        where == "second"
    ):  # after the first pass the spoiled parameter spoils the second gradient altogether
        assert torch.isfinite(theta).sum() == 19
    assert same(opt.gamma, gamma)
    assert math.isnan(opt.curvature)
    assert opt.stats().ignored == 1
    assert opt.stats().iterations == 6
    assert torch.isfinite(opt.state[theta]["G"]).all()
    assert opt.state[theta]["G"].norm() > 0.5 * G.norm(), "G is still of use"

    with torch.no_grad():
        theta.copy_(sound)  # as a user would who restores the last good weights
    for _ in range(5):
        iterate(opt)
    assert opt.stats().ignored == 1
    with torch.no_grad():
        theta.copy_(start)
    for _ in range(11):
        iterate(undisturbed)
    assert 0.7 < opt.gamma / undisturbed.gamma < 1.4, "gamma is as good as if nothing had happened"


@pytest.mark.parametrize("how", ["lists", "in chunks"])
@pytest.mark.parametrize(
    "spike",
    [[1e15, torch.inf], [1e22, 1e22]],
    ids=["beside an infinite one", "whose square overflows"],
)
def test_a_measurement_that_is_ignored_leaves_nothing_in_G(how, spike, monkeypatch):
    """Nor does its huge but finite part, which would dominate G for hundreds of iterations."""
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", 1 if how == "in chunks" else 1 << 30)
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, beta=0.9)
    for k in range(10):
        for i in opt.passes():
            theta.grad = torch.tensor(spike) if k == 5 and i == 1 else theta.detach().clone()
        with torch.no_grad():
            theta.fill_(1.0)
    assert opt.stats().ignored == 1
    assert opt.state[theta]["G"].abs().max() < 1


def test_a_displacement_too_long_to_be_squared_is_ignored():
    theta = torch.zeros(2, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1.0, beta=0.0)
    for _ in opt.passes():
        theta.grad = torch.full((2,), 1e25)  # dg is zero; |dtheta|^2 is infinite in float32
    assert opt.stats().ignored == 1
    assert opt.gamma == 1.0


@pytest.mark.parametrize("how", ["lists", "in chunks"])
@pytest.mark.parametrize("cause", ["lr 0", "zero gradient"])
def test_a_zero_displacement_does_not_divide_by_zero(how, cause, monkeypatch):
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", 1 if how == "in chunks" else 1 << 30)
    H, theta = quadratic()
    before = theta.detach().clone()
    opt = StepTunedSGD([theta], lr=0.0 if cause == "lr 0" else 0.1, nu=1.5)
    for _ in opt.passes():
        theta.grad = H @ theta.detach() if cause == "lr 0" else torch.zeros_like(theta)
    assert torch.equal(theta, before)
    assert opt.curvature == 0
    assert opt.gamma == 1.5, "a curvature of zero is not positive: nu, as Algorithm 2 has it"
    assert opt.stats().ignored == 0


# ---------------------------------------------------------------------------- gradients that change


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)
    )


def reference_run(weight_decay=0.0, iterations=4):
    model = network()
    opt = StepTunedSGD(model.parameters(), lr=0.05, weight_decay=weight_decay)
    for k in range(iterations):
        for _ in opt.passes():
            opt.zero_grad()
            loss(model, k).backward()
    return model, opt


def loss(model, k):
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(k))
    return (model(x) - x[:, :2]).square().mean()


def equal(a, b):
    (model_a, opt_a), (model_b, opt_b) = a, b
    return same(list(model_a.parameters()), list(model_b.parameters())) and same(
        opt_a.gamma, opt_b.gamma
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_zero_grad_that_keeps_the_tensors_is_safe(weight_decay):
    model = network()
    opt = StepTunedSGD(model.parameters(), lr=0.05, weight_decay=weight_decay)
    for k in range(4):
        for _ in opt.passes():
            model.zero_grad(set_to_none=False)
            opt.zero_grad(set_to_none=False)
            loss(model, k).backward()
    assert equal((model, opt), reference_run(weight_decay))


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_a_missing_zero_grad_between_the_passes_is_harmless(weight_decay):
    model = network()
    opt = StepTunedSGD(model.parameters(), lr=0.05, weight_decay=weight_decay)
    for k in range(4):
        opt.zero_grad()
        loss(model, k).backward()
        opt.half_step()
        loss(model, k).backward()
        opt.step()
    assert equal((model, opt), reference_run(weight_decay))


@pytest.fixture
def process_group():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_views_of_ddp_buckets_are_safe(process_group, weight_decay, set_to_none):
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    opt = StepTunedSGD(model.parameters(), lr=0.05, weight_decay=weight_decay)
    for k in range(4):
        for _ in opt.passes():
            opt.zero_grad(set_to_none=set_to_none)
            loss(model, k).backward()
            assert all(p.grad._is_view() for p in model.parameters())
    assert equal((model, opt), reference_run(weight_decay))


@pytest.mark.parametrize("size", [10, 1 << 16])
def test_a_first_gradient_overwritten_in_place_is_detected(size, path):
    if path == "small":
        pytest.skip("the gradients of a small model are copied")
    theta = torch.ones(size, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    theta.grad = mine = torch.ones(size)
    opt.half_step()
    mine.mul_(2)
    theta.grad = torch.ones(size)
    with pytest.raises(RuntimeError, match=r"overwritten in place .*opt.cancel\(\)"):
        opt.step()
    opt.cancel()
    for _ in opt.passes():
        theta.grad = torch.ones(size)


def test_a_gradient_that_is_a_part_of_something_larger_is_copied():
    flat = torch.ones(12)
    theta = torch.ones(4, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, beta=0.0)
    for i in opt.passes():
        theta.grad = torch.empty(0).set_(
            flat.untyped_storage(), 4, (4,)
        )  # no view for autograd, but not alone in its memory
        flat.fill_(1.0 + i)
    theta.grad = torch.empty(0).set_(flat.untyped_storage(), 4, (4,))
    opt.half_step()
    held = opt.state[theta]["g0"]
    flat.fill_(50.0)
    assert held.tolist() == [2.0] * 4


def test_a_graph_that_create_graph_leaves_on_a_gradient_is_not_kept():
    theta = torch.ones(3, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of reference cycles
        (theta**3).sum().backward(create_graph=True)
    opt.half_step()
    assert not opt.state[theta]["g0"].requires_grad
    copy.deepcopy(opt.state_dict())


@pytest.mark.parametrize("half", [True, False])
def test_an_error_in_the_middle_of_a_pass_leaves_nothing_pending_and_pairs_nothing(
    half, path, monkeypatch
):
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([{"params": [a]}, {"params": [b]}], lr=0.1, beta=0.0)
    if not half:
        a.grad, b.grad = torch.ones(2), torch.ones(2)
        opt.half_step()
    a.grad, b.grad = torch.ones(2), torch.ones(2)
    name = "first_pass" if half else "second_pass"
    owner = flat if path == "torch" else Workspace
    original, calls = getattr(owner, name), []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(MemoryError):
            opt.half_step() if half else opt.step()
    assert not opt.param_groups[0]["pending"]
    assert all(state["g0"] is None and not state["held"] for state in opt.state.values())
    assert opt.stats().iterations == 0
    for i in opt.passes():
        a.grad, b.grad = (None, torch.ones(2)) if i == 0 else (torch.full((2,), 9.0), torch.ones(2))
    assert opt.state[a]["G"].tolist() == [0.0, 0.0] if a in opt.state else True


def test_a_deleted_optimizer_is_freed_at_once():
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    there = weakref.ref(opt)
    gc.disable()
    try:
        del opt
        assert there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"max_grad_norm": 0.1}, {"maximize": True}, {"foreach": True}],
)
@pytest.mark.parametrize("size", [10, 1 << 16])
def test_the_values_of_a_gradient_are_never_changed(options, size):
    torch.manual_seed(0)
    theta = torch.randn(size, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, **options)
    for _ in range(3):
        for _ in opt.passes():
            theta.grad = torch.randn(size)
            kept = theta.grad, theta.grad.clone()
        assert torch.equal(*kept)
        assert theta.grad is kept[0], (
            "after an iteration the gradient of the second pass is still there"
        )


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("size", [10, 1 << 16])
def test_memory_holds_G_and_while_a_half_step_is_pending_g0(options, size):
    theta = torch.ones(size, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, **options)
    assert not opt.state, "the state is lazy"
    for i in opt.passes():
        tensors = [v for v in opt.state[theta].values() if isinstance(v, torch.Tensor)] if i else []
        assert [t.numel() for t in tensors] == [size, size][: 2 * i]
        theta.grad = torch.ones(size)
        if i == 1:
            assert theta.grad is not opt.state[theta]["g0"]
    assert [name for name, v in opt.state[theta].items() if isinstance(v, torch.Tensor)] == ["G"]


def test_g0_is_held_by_reference_if_that_is_safe(path):
    if path == "small":
        pytest.skip("the gradients of a small model are copied")
    theta = torch.ones(1 << 16, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    theta.grad = g = torch.ones(1 << 16)
    opt.half_step()
    assert opt.state[theta]["g0"].data_ptr() == g.data_ptr()
    assert theta.grad is None


def test_a_single_element_whose_square_overflows_stays_out_of_G():
    theta = torch.ones(1, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-30)
    theta.grad = torch.ones(1)
    opt.half_step()
    theta.grad = torch.full((1,), 1e25)
    opt.step()
    assert opt.state[theta]["G"].item() == 0
    assert opt.stats().ignored == 1


@pytest.mark.parametrize("lr", [1e-30, 1e-42], ids=str)
def test_a_difference_that_overflows_when_divided_by_the_step_stays_out_of_G(lr):
    theta = torch.ones(3, requires_grad=True)
    opt = StepTunedSGD([theta], lr=lr, tune_every=2)
    for _ in range(6):
        for i, _ in enumerate(opt.passes()):
            theta.grad = torch.full((3,), 1 + i / 1000)
    assert torch.equal(opt.state[theta]["G"], torch.zeros(3))
    assert opt.stats().ignored == 3
