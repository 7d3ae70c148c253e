"""Details that no other test covers.

Each of these tests was seen to fail when one line of the code was changed.
"""

import copy
import math
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import reference
import steptuned
import test_layout
from compare import same
from problems import Regression
from steptuned import (
    ArmijoGD,
    BarzilaiBorweinGD,
    ExactGV,
    StepTunedGD,
    StepTunedSGD,
    StochasticGV,
    rule,
)
from steptuned.optim import bucket, flat, gradient_variation
from test_amp import backward, data, make_scaler, scaled_iteration, setup, values
from test_safety import quadratic
from test_twins import close, follow, twin_options

pytestmark = pytest.mark.usefixtures("path")


def test_memory_layouts_may_change_between_the_passes(monkeypatch):
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", 1)
    for options in ({}, {"weight_decay": 0.01}):
        runs = []
        for layouts in (
            (torch.contiguous_format,) * 2,
            (torch.contiguous_format, torch.channels_last),
            (torch.channels_last, torch.contiguous_format),
        ):
            torch.manual_seed(0)
            p = (
                torch.randn(2, 3, 2, 2, dtype=torch.float64)
                .to(memory_format=torch.channels_last)
                .requires_grad_()
            )
            opt = StepTunedSGD([p], lr=0.1, bounds=(0.01, 100.0), **options)
            for _ in range(4):
                for i in opt.passes():
                    p.grad = (torch.sin(3 * p.detach()) * p.detach()).contiguous(
                        memory_format=layouts[i]
                    )
            runs.append((p.detach().contiguous(), opt.gamma))
        for theta, gamma in runs[1:]:
            torch.testing.assert_close(theta, runs[0][0], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(gamma, runs[0][1], rtol=1e-10, atol=0)


@pytest.mark.filterwarnings("ignore:parameters are:UserWarning")
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_dtypes_may_be_mixed_in_one_group(dtypes):
    def run(split):
        torch.manual_seed(0)
        params = [torch.randn(30).to(d).requires_grad_() for d in dtypes]
        opt = StepTunedSGD(
            [{"params": [p]} for p in params] if split else params, lr=0.03, bounds=(1e-3, 1e3)
        )
        for _ in range(6):
            for _ in opt.passes():
                for p in params:
                    p.grad = (p.detach().double().sin() * 1.7).to(p.dtype)
        return [p.detach() for p in params], opt.gamma, [opt.state[p]["G"] for p in params]

    assert same(run(False), run(True))


def test_a_bucket_has_one_device():
    params = [torch.ones(3, requires_grad=True), torch.ones(3, device="meta", requires_grad=True)]
    for p in params:
        p.grad = torch.ones_like(p)
    buckets = bucket.gather(StepTunedSGD(params), None)
    assert [{p.device.type for p in b.params} for b in buckets] == [{"cpu"}, {"meta"}]


@pytest.mark.usefixtures("torch_path")
def test_foreach_false_works_tensor_by_tensor_and_full_limits_lists(monkeypatch):
    sizes = []
    first_pass = flat.first_pass
    monkeypatch.setattr(
        flat,
        "first_pass",
        lambda p, *rest: (sizes.append([t.numel() for t in p]), first_pass(p, *rest))[1],
    )
    params = [torch.ones(4, requires_grad=True) for _ in range(5)]
    for foreach, full, expected in (
        (False, 1 << 24, [[4]] * 5),
        (None, 1 << 24, [[4] * 5]),
        (None, 8, [[4, 4], [4, 4], [4]]),
    ):
        monkeypatch.setattr("steptuned.optim.bucket.FULL", full)
        sizes.clear()
        for p in params:
            p.grad = torch.ones(4)
        StepTunedSGD(params, foreach=foreach).half_step()
        assert sizes == expected


@pytest.mark.parametrize("full", [1, 7, 10])
def test_lists_processed_in_parts_give_the_same(full, monkeypatch):
    monkeypatch.setattr("steptuned.optim.bucket.FULL", full)
    params = [test_layout.tensor(part) for part in np.split(test_layout.START, [3, 8, 15, 20])]
    test_layout.assert_follows_the_twin(params, StepTunedSGD(params, **test_layout.OPTIONS))


class Sub(torch.Tensor):
    pass


def test_tensor_subclasses_are_not_processed_in_flat_memory():
    p = torch.ones(1 << 16).as_subclass(Sub)
    assert not bucket.fits_chunks(p, torch.ones(1 << 16), {})
    assert bucket.fits_chunks(torch.ones(1 << 16), torch.ones(1 << 16), {})


@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.bfloat16])
def test_gradients_may_have_another_dtype(grad_dtype, monkeypatch):
    runs = []
    for large in (1, 1 << 30):
        monkeypatch.setattr("steptuned.optim.bucket.LARGE", large)
        p = torch.linspace(-1, 2, 20).requires_grad_()
        p.grad_dtype = None
        opt = StepTunedSGD([p], lr=0.1)
        for _ in range(3):
            for _ in opt.passes():
                p.grad = p.detach().sin().to(grad_dtype)
        runs.append((p.detach(), opt.gamma))
    torch.testing.assert_close(*runs)


class FakeModule:
    def __init__(self):
        self.states = {}

    def get_rng_state(self, device):
        return self.states[str(device)].clone()

    def set_rng_state(self, state, device):
        self.states[str(device)] = state


def test_devices_are_recorded_and_replayed(monkeypatch):
    fake = FakeModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    fake.states = {"cuda:0": torch.tensor([1]), "cuda:1": torch.tensor([2])}
    on = [SimpleNamespace(device=torch.device(d)) for d in ("cpu", "cuda:0", "cuda:1")]
    noise = steptuned.replay(SimpleNamespace(param_groups=[{"params": on[:2]}, {"params": on[2:]}]))
    fake.states = {"cuda:0": torch.tensor([8]), "cuda:1": torch.tensor([9])}
    noise.rewind()
    assert same(fake.states, {"cuda:0": torch.tensor([1]), "cuda:1": torch.tensor([2])})
    assert set(noise.state_dict()) == {"cpu", "cuda:0", "cuda:1"}


def test_replay_without_an_optimizer_uses_the_current_accelerator(monkeypatch):
    fake = FakeModule()
    fake.states = {"cuda:3": torch.tensor([1])}
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert set(steptuned.replay().state_dict()) == {"cpu", "cuda:3"}


def pending():
    theta = torch.ones(3, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    theta.grad = torch.ones(3)
    opt.half_step()
    return theta, opt


def test_a_refused_closure_is_not_called_and_a_refused_body_does_not_run():
    _, opt = pending()
    calls = []
    with pytest.raises(RuntimeError, match=r"step\(closure\) in the middle of an iteration"):
        opt.step(lambda: calls.append(1))
    assert not calls


def test_refused_passes_do_not_run_their_body():
    _, opt = pending()
    with pytest.raises(RuntimeError, match=r"passes\(\) in the middle of an iteration"):
        opt.passes()


def test_one_group_with_lr_zero_is_not_the_initialiser():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([{"params": [a], "lr": 0.0}, {"params": [b], "lr": 0.1}])
    a.grad = b.grad = None
    with pytest.raises(RuntimeError, match="without a pending half step"):
        opt.step()
    assert not opt.state


def test_the_initialiser_leaves_frozen_parameters_out():
    a, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    opt = StepTunedSGD([a, frozen], lr=0.0)
    a.grad = torch.zeros_like(a)
    opt.step()
    assert a in opt.state
    assert frozen not in opt.state


@pytest.mark.parametrize("overflow", [(0,), (1,), (0, 1)])
def test_an_overflow_leaves_the_G_of_a_parameter_without_gradient(overflow):
    model, opt = setup()
    unused = torch.ones(3, requires_grad=True)
    opt.add_param_group({"params": [unused]})
    scaler = make_scaler()
    (x, y), *_ = data(1)
    for k in range(2):
        for i, turn in enumerate((opt.first_pass, opt)):
            backward(model, x, y, scaler, k == 1 and i in overflow)
            unused.grad = torch.full((3,), 1.0 + i) * scaler.get_scale() if k == 0 else None
            scaler.step(turn)
        scaler.update()
        if k == 0:
            G = opt.state[unused]["G"].clone()
            assert G.any()
    assert same(opt.state[unused]["G"], G)


def test_large_tensors_work_under_a_scaler(monkeypatch):
    runs = []
    for large in (1 << 30, 1):
        monkeypatch.setattr("steptuned.optim.bucket.LARGE", large)
        model, opt = setup()
        scaler = make_scaler()
        for k, (x, y) in enumerate(data(5)):
            scaled_iteration(model, opt, scaler, x, y, (0,) if k == 3 else ())
        runs.append(values(model, opt))
    assert same(*runs)


def test_a_gradient_of_one_pass_only_is_unscaled():
    theta, late = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    opt = StepTunedSGD([theta, late], lr=0.1)
    scaler = make_scaler()
    scaler.scale(theta.sum()).backward()
    scaler.step(opt.first_pass)
    scaler.scale(theta.sum() + late.sum()).backward()
    scaler.step(opt)
    torch.testing.assert_close(late.detach(), torch.full((2,), -0.1))


def test_unscaling_changes_no_gradient():
    model, opt = setup()
    scaler = make_scaler()
    (x, y), *_ = data(1)
    for turn in (opt.first_pass, opt):
        backward(model, x, y, scaler)
        kept = [(p.grad, p.grad.clone()) for p in model.parameters()]
        scaler.step(turn)
        assert all(torch.equal(*pair) for pair in kept)


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1.0, "max_grad_norm": 0.03, "bounds": (0.05, 10.0), "decay_every": 1},
        {
            "lr": 1.0,
            "max_grad_norm": 0.03,
            "weight_decay": 0.02,
            "bounds": (0.05, 10.0),
            "decay_every": 1,
        },
    ],
)
def test_clipping_works_in_chunks(options, monkeypatch):
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", 1)
    monkeypatch.setattr("steptuned.optim.flat.CHUNK", 7)
    monkeypatch.setattr("steptuned.optim.flat.first_pass", None)
    problem = Regression()
    theta = torch.tensor(problem.start, requires_grad=True)
    opt = StepTunedSGD([theta], **options)
    follow(
        opt,
        [theta],
        lambda k: problem.torch_loss(k, theta),
        reference.step_tuned_sgd(problem.start, problem.gradient, **twin_options(**options)),
    )


@pytest.mark.parametrize("large", [1, 1 << 30])
def test_a_displacement_whose_square_overflows_is_ignored(large, monkeypatch):
    monkeypatch.setattr("steptuned.optim.bucket.LARGE", large)
    theta = torch.zeros(4, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-25, bounds=(0.5, 3.0), nu=1.5)
    for i in opt.passes():
        theta.grad = torch.full((4,), 1e20) - 1e14 * i * 100
    assert opt.stats().ignored == 1
    assert opt.gamma == 1.0


def test_an_ignored_measurement_is_in_no_share():
    theta = torch.ones(4, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-6)

    def iterate(bad=False):
        for _ in opt.passes():
            theta.grad = 100.0 * theta.detach()
            if bad:
                theta.grad[0] = torch.nan

    for _ in range(3):
        iterate()
    iterate(bad=True)
    stats = opt.stats()
    assert (stats.iterations, stats.negative, stats.at_lower, stats.at_upper, stats.ignored) == (
        4,
        0.0,
        0.75,
        0.0,
        1,
    )


@pytest.mark.filterwarnings("ignore:parameters are:UserWarning")
def test_a_low_precision_parameter_without_second_gradient():
    theta, other = (
        torch.full((3,), v, dtype=torch.bfloat16, requires_grad=True) for v in (1.0, 1.0)
    )
    opt = StepTunedSGD([theta, other], lr=0.1, beta=0.5, bounds=(1e-6, 1e6), decay_every=None)
    for i in opt.passes():
        theta.grad = torch.full((3,), 1.0 - 0.5 * i, dtype=torch.bfloat16)
        other.grad = torch.full((3,), 1.0 - 0.25 * i, dtype=torch.bfloat16)
    G = opt.state[other]["G"].double() * 0.5
    Gt = opt.state[theta]["G"].double()
    start = other.detach().double(), theta.detach().double()
    theta.grad, other.grad = (torch.full((3,), 0.13, dtype=torch.bfloat16) for _ in range(2))
    opt.half_step()
    moved = other.detach().double() - start[0], theta.detach().double() - start[1]
    theta.grad = torch.full((3,), 0.13, dtype=torch.bfloat16)
    opt.step()
    square = (moved[0] @ moved[0] + moved[1] @ moved[1]).item()
    expected = (G @ moved[0] + 0.5 * Gt @ moved[1]).item() / (1 - 0.5**2) / square
    assert math.isclose(opt.curvature.item(), expected, rel_tol=1e-5)


@pytest.mark.filterwarnings("ignore:parameters are:UserWarning")
def test_the_displacement_itself_is_not_rounded():
    theta = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.9, beta=0.0)
    theta.grad = torch.ones(3, dtype=torch.bfloat16)
    opt.half_step()
    moved = theta.detach().double() - 1
    theta.grad = torch.full((3,), 0.5, dtype=torch.bfloat16)
    opt.step()
    assert math.isclose(
        opt.curvature.item(), ((-0.5 * moved).sum() / (moved @ moved)).item(), rel_tol=1e-6
    )


@pytest.mark.parametrize("size", [10, 1 << 16])
@pytest.mark.parametrize("kind", ["view of all", "slice without a base"])
def test_a_gradient_in_shared_memory_is_copied(size, kind):
    theta = torch.ones(size, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, beta=0.0)
    buffer = torch.ones(size if kind == "view of all" else size + 5)
    theta.grad = buffer.view(size) if kind == "view of all" else buffer[2 : size + 2].data
    opt.half_step()
    buffer.fill_(7.0)
    theta.grad = torch.full((size,), 0.5)
    opt.step()
    assert opt.curvature.item() == pytest.approx(5.0, rel=1e-5), "dg = -0.5, dtheta = -0.1"


def test_loading_forgets_what_was_held_by_reference():
    theta = torch.ones(10, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    theta.grad = g = torch.ones(10)
    opt.half_step()
    opt.load_state_dict(opt.state_dict())
    g.mul_(2)
    theta.grad = torch.ones(10)
    opt.step()
    assert opt.stats().iterations == 1


def test_after_loading_all_groups_share_the_scalars():
    def make():
        a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        return (a, b), StepTunedSGD([{"params": [a]}, {"params": [b]}], lr=0.1)

    _, opt = make()
    saved = opt.state_dict()
    saved["param_groups"] = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in g.items()}
        for g in saved["param_groups"]
    ]
    params, other = make()
    other.load_state_dict(saved)
    for _ in other.passes():
        for p in params:
            p.grad = p.detach().clone()
    assert [int(g["k"]) for g in other.param_groups] == [1, 1]


def test_scalars_are_the_same_in_every_group():
    params = [torch.ones(2, requires_grad=True) for _ in range(2)]
    opt = StepTunedSGD([{"params": [p]} for p in params], lr=0.1)
    for _ in opt.passes():
        for p in params:
            p.grad = p.detach().clone()
    assert [int(g["k"]) for g in opt.state_dict()["param_groups"]] == [1, 1]


def test_neither_saving_nor_loading_fills_memory():
    theta = torch.ones(10, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    opt.state_dict()
    assert not opt.state
    for _ in opt.passes():
        theta.grad = theta.detach().clone()
    saved = opt.state_dict()
    assert opt.state[theta]["g0"] is None
    opt.load_state_dict(saved)
    assert opt.state[theta]["g0"] is None


def test_load_pre_hooks_run_and_none_is_left_behind():
    theta = torch.ones(10, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    for i in opt.passes():
        theta.grad = theta.detach() * (1 + i)
    G = opt.state[theta]["G"].clone()
    saved = opt.state_dict()

    def double(_, state_dict):
        state = {key: value | {"G": 2 * value["G"]} for key, value in state_dict["state"].items()}
        return state_dict | {"state": state}

    hook = opt.register_load_state_dict_pre_hook(double)
    opt.load_state_dict(saved)
    assert torch.equal(opt.state[theta]["G"], 2 * G)
    hook.remove()
    assert not opt._optimizer_load_state_dict_pre_hooks


def test_a_tensor_lr_is_not_read():
    theta = torch.empty(3, device="meta", requires_grad=True)
    opt = StepTunedSGD([theta], lr=torch.empty((), device="meta"))
    for half in (True, False):
        theta.grad = torch.empty_like(theta)
        opt.half_step() if half else opt.step()
    assert not opt.param_groups[0]["pending"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_on_an_accelerator_a_bad_gradient_is_cleaned_too(bad, monkeypatch):
    monkeypatch.setattr(flat, "is_on_host", lambda tensors: False)
    H, theta = quadratic()
    opt = StepTunedSGD([theta], lr=0.1)
    for k in range(3):
        for i in opt.passes():
            theta.grad = H @ theta.detach()
            if (k, i) == (2, 1):
                theta.grad[3] = bad
    assert opt.stats().ignored == 1
    assert torch.isfinite(opt.state[theta]["G"]).all()


def test_equal_bounds_give_no_warning():
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1, nu=1.0, bounds=(1.0, 1.0))
    for _ in range(8):
        for _ in opt.passes():
            theta.grad = theta.detach().clone()
    assert opt.stats().iterations == 8  # and no warning, which would be an error


def test_curvature_is_a_snapshot():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    seen = opt.curvature
    for _ in opt.passes():
        theta.grad = theta.detach().clone()
    assert math.isnan(seen)
    assert not math.isnan(opt.curvature)


def test_stats_exist_before_the_first_iteration():
    assert StepTunedSGD([torch.ones(2, requires_grad=True)]).stats()[:5] == (0, 0.0, 0.0, 0.0, 0)


def test_the_warning_comes_after_a_hundred_iterations_at_a_bound():
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1e-6)
    for _ in range(99):
        for _ in opt.passes():
            theta.grad = 100.0 * theta.detach()
    theta.grad = 100.0 * theta.detach()
    opt.half_step()
    theta.grad = 100.0 * theta.detach()
    with pytest.warns(UserWarning, match="multiply lr by"):
        opt.step()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nu", 1.0),
        ("beta", 0.5),
        ("bounds", (0.1, 9.0)),
        ("delta", 0.1),
        ("decay_every", 1),
        ("max_grad_norm", 1.0),
        ("replay_rng", False),
    ],
)
def test_options_of_gamma_must_agree(name, value):
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=f"^{name} must be the same for all parameter groups"):
        StepTunedSGD([{"params": [a]}, {"params": [b], name: value}])


@pytest.mark.parametrize("name", ["lr", "nu", "weight_decay", "decay_every", "max_grad_norm"])
def test_a_bool_is_not_accepted_as_a_number(name):
    with pytest.raises(ValueError, match=f"^{name} must be .*got True"):
        StepTunedSGD([torch.ones(2, requires_grad=True)], **{name: True})


def test_barzilai_borwein_handles_negative_curvature():
    problem = Regression(n=100, p=5, seed=8)
    theta = torch.tensor(problem.start, requires_grad=True)
    opt = BarzilaiBorweinGD([theta], lr=0.02)
    curvatures = []
    for expected, gamma in islice(
        reference.barzilai_borwein(
            problem.start, lambda k, t: problem.full_gradient(t), alpha=0.02
        ),
        30,
    ):
        opt.zero_grad()
        problem.torch_loss(None, theta).backward()
        opt.step()
        close(theta.detach(), expected)
        close(opt.gamma.item(), gamma)
        curvatures.append(opt.curvature.item())
    assert any(c < 0 for c in curvatures)
    assert any(c > 0 for c in curvatures)


def test_zero_curvature_repeats_the_last_step():
    theta = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    opt = BarzilaiBorweinGD([theta], lr=0.1)
    for g in ([1.0, 1.0], [0.5, 0.5], [0.5, 0.5]):
        theta.grad = torch.tensor(g, dtype=torch.float64)
        opt.step()
    assert opt.curvature == 0
    assert opt.gamma.item() == pytest.approx(0.2)


def test_armijo_leaves_the_gradient_of_the_start():
    theta = torch.tensor([1.0, -2.0], requires_grad=True)
    opt = ArmijoGD([theta], lr=0.3)

    def closure():
        opt.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert torch.equal(theta.grad, torch.tensor([2.0, -4.0]))


def test_armijo_with_value_back_propagates_once():
    theta = torch.tensor([1.0, -2.0], requires_grad=True)
    opt = ArmijoGD([theta], lr=8.0)
    calls = []

    def closure():
        calls.append(1)
        opt.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    opt.step(closure, lambda: theta.square().sum())
    assert len(calls) == 1
    assert opt.evaluations > 2


def test_armijo_groups_have_their_own_lr():
    a, b = torch.tensor([1.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    opt = ArmijoGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}])

    def closure():
        opt.zero_grad()
        loss = (a**2 + b**2).sum() / 2
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.scale == 1.0
    torch.testing.assert_close((a.detach(), b.detach()), (torch.tensor([0.9]), torch.tensor([0.8])))


def test_gammas_of_gradient_variation_have_the_bits_of_the_rule():
    """The optimizers compute in floats what `rule` computes with tensors."""
    theta = torch.zeros(1, requires_grad=True)
    tuned, clipped = StepTunedGD([theta], nu=1.7), StochasticGV([theta], nu=1.7, bounds=(0.3, 5.0))
    absolute = BarzilaiBorweinGD([theta])
    generator = torch.Generator().manual_seed(1)
    sums = torch.randn(300, 2, generator=generator, dtype=torch.float64)
    kinds = torch.tensor([[c, s] for c in (0.0, -0.0, 5e-324) for s in (0.0, 2.0, 1e300)])
    for curvature, square in torch.cat((sums, kinds.double())):
        numbers = square.abs().item(), curvature.item()
        expected = rule.gamma(square.abs(), curvature, 1.7)
        assert tuned._raw_gamma(*numbers) == clipped._raw_gamma(*numbers) == expected
        assert clipped._clip(expected.item()) == rule.clip(expected, (0.3, 5.0))
        assert absolute._raw_gamma(*numbers) == rule.gamma(square.abs(), curvature.abs(), 1.0)
        assert gradient_variation._per_unit(numbers[1], numbers[0]) == rule.per_unit(
            curvature, square.abs()
        )


@pytest.mark.parametrize("cls", [StepTunedGD, BarzilaiBorweinGD, StochasticGV])
def test_companions_handle_groups_kept_gradients_and_missing_gradients(cls):
    """Groups with different lr are a vector alpha in the twin.

    zero_grad may keep the tensors, and a missing gradient counts as zero.
    """
    alpha = np.repeat([0.1, 0.03, 0.05], 2)
    start = np.array([1.0, -0.5, 2.0, 0.3, 5.0, 5.0])

    def gradient(k, t):
        return np.concatenate([np.sin(1.3 * t[:4]) + 0.2 * t[:4], np.zeros(2)])

    params = [torch.tensor(part, requires_grad=True) for part in np.split(start, 3)]
    opt = cls([{"params": [p], "lr": a} for p, a in zip(params, (0.1, 0.03, 0.05), strict=True)])
    twin = {
        StepTunedGD: lambda: reference.step_tuned_gd(start, gradient, alpha=alpha, nu=2.0),
        BarzilaiBorweinGD: lambda: reference.barzilai_borwein(start, gradient, alpha=alpha),
        StochasticGV: lambda: reference.stochastic_gv(
            start, gradient, alpha=alpha, nu=2.0, m=0.5, M=2.0, delta=0.001
        ),
    }[cls]()
    for expected, gamma, *_ in islice(twin, 12):
        opt.zero_grad(set_to_none=False)
        for p in params[:2]:
            (torch.cos(1.3 * p).sum() / -1.3 + 0.1 * p.square().sum()).backward()
        opt.step()
        close(np.concatenate([p.detach().numpy() for p in params]), expected)
        close(opt.gamma.item(), gamma)


def vector():
    return [torch.ones(2)]


def test_a_copy_keeps_its_function():
    import pickle

    theta = torch.ones(2, requires_grad=True)
    opt = ExactGV([theta], vector)
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        copied = other.param_groups[0]["params"][0]
        copied.grad = torch.ones(2)
        other.step()
        assert (copied < 1).all()


@pytest.mark.parametrize("cls", [StepTunedGD, BarzilaiBorweinGD, StochasticGV])
def test_companions_refuse_sparse_gradients(cls):
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support sparse gradients"):
        cls(embedding.parameters()).step()


def test_companions_return_the_loss():
    theta = torch.ones(2, requires_grad=True)
    opt = StepTunedGD([theta])

    def closure():
        opt.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0


def test_a_parameter_may_get_its_first_gradient_late():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = StepTunedGD([a], lr=0.1)
    a.grad = a.detach().clone()
    opt.step()
    opt.add_param_group({"params": [b]})
    a.grad, b.grad = a.detach().clone(), b.detach().clone()
    opt.step()
    assert opt.gamma.item() == pytest.approx(1.0)
    torch.testing.assert_close(b.detach(), torch.full((2,), 0.9))


def test_armijo_works_with_kept_gradients():
    theta = torch.tensor([1.0, -2.0], requires_grad=True)
    opt = ArmijoGD([theta], lr=3.0)

    def closure():
        opt.zero_grad(set_to_none=False)
        loss = theta.square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    torch.testing.assert_close(
        theta.detach(), torch.tensor([1.0, -2.0]) * (1 - 2 * 3.0 * opt.scale)
    )
    assert opt.scale == 0.25
    torch.testing.assert_close(theta.grad, torch.tensor([2.0, -4.0]))
