"""fp16 with a real GradScaler, low-precision parameters, autocast."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from compare import same
from steptuned import StepTunedSGD


def setup(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, StepTunedSGD(model.parameters(), lr=0.1, bounds=(0.05, 20.0), **options)


def data(n=1):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator))
        for _ in range(n)
    ]


def backward(model, x, y, scaler=None, overflow=False):
    for p in model.parameters():
        p.grad = None
    loss = nn.functional.mse_loss(model(x), y)
    (scaler.scale(loss) if scaler else loss).backward()
    if overflow:
        next(model.parameters()).grad[0, 0] = torch.inf


def make_scaler(**options):
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, **options)


def scaled_iteration(model, opt, scaler, x, y, overflow=()):
    backward(model, x, y, scaler, 0 in overflow)
    scaler.step(opt.first_pass)
    backward(model, x, y, scaler, 1 in overflow)
    scaler.step(opt)
    scaler.update()


def values(model, opt):
    group = opt.param_groups[0]
    G = [state["G"] for state in opt.state.values()]
    return copy.deepcopy((dict(model.state_dict()), G, group["gamma"], opt.stats().iterations))


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.01, "max_grad_norm": 0.5}, {"maximize": True}]
)
def test_the_scaler_recipe_gives_the_same_as_no_scaler(options):
    plain_model, plain = setup(**options)
    model, opt = setup(**options)
    scaler = make_scaler()
    for x, y in data(20):
        backward(plain_model, x, y)
        plain.half_step()
        backward(plain_model, x, y)
        plain.step()
        scaled_iteration(model, opt, scaler, x, y)
    # The scale is a power of two: scaling and unscaling are exact.
    for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(opt.gamma, plain.gamma, rtol=1e-4, atol=0)
    assert opt.stats() == plain.stats()


def test_a_disabled_scaler_is_no_scaler():
    model, opt = setup()
    plain_model, plain = setup()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in data(3):
        scaled_iteration(model, opt, scaler, x, y)
        backward(plain_model, x, y)
        plain.half_step()
        backward(plain_model, x, y)
        plain.step()
    assert same(values(model, opt), values(plain_model, plain))


@pytest.mark.parametrize("overflow", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_an_overflow_skips_its_pass_and_the_measurement_and_halves_the_scale_once(
    overflow, weight_decay
):
    model, opt = setup(weight_decay=weight_decay)
    scaler = make_scaler()
    batches = data(5)
    for x, y in batches[:3]:
        scaled_iteration(model, opt, scaler, x, y)
    before = values(model, opt)
    scale = scaler.get_scale()
    step = 0.1 * opt.gamma.item()

    x, y = batches[3]
    expected = [p.detach().clone() for p in model.parameters()]
    if len(overflow) == 1:  # the sound pass is one step of SGD from where the iteration began
        backward(model, x, y)
        for e, p in zip(expected, model.parameters(), strict=True):
            e -= step * (p.grad + weight_decay * e)
    scaled_iteration(model, opt, scaler, x, y, overflow)

    after = values(model, opt)
    assert same(after[1:], before[1:]), "G, gamma and k stay"
    for e, p in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), e)
    assert scaler.get_scale() == scale / 2
    assert opt.stats().ignored == 1
    assert not opt.param_groups[0]["pending"]

    scaled_iteration(model, opt, scaler, *batches[4])
    assert opt.stats().iterations == 4
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_an_overflow_leaves_G_of_a_parameter_without_a_gradient_as_it_was():
    model, opt = setup()
    scaler = make_scaler()
    (x, y), *_ = data(1)
    scaled_iteration(model, opt, scaler, x, y)
    before = values(model, opt)[1]
    last = model[2].bias
    for half in (opt.first_pass, opt):
        backward(model, x, y, scaler, overflow=True)
        last.grad = None
        scaler.step(half)
    assert same(values(model, opt)[1], before)


def test_a_real_fp16_overflow_is_survived():
    model, opt = setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    scales = []
    for x, y in data(30):
        for half in (True, False):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt.first_pass if half else opt)
        scaler.update()
        scales.append(scaler.get_scale())
    stats = opt.stats()
    assert stats.ignored >= 1
    assert stats.iterations == 30 - stats.ignored
    assert scales[-1] == 2.0 ** (24 - stats.ignored)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("keyword", [True, False])
def test_a_refused_closure_leaves_no_scaling_behind(keyword):
    model, opt = setup()
    plain_model, plain = setup()
    scaler = make_scaler()
    (x, y), *_ = data(1)
    backward(model, x, y, scaler)

    def closure():
        raise AssertionError("the closure must not be called")

    with pytest.raises(RuntimeError, match=r"(?i)closure"):
        scaler.step(opt, closure=closure) if keyword else scaler.step(opt, closure)
    for m, o in ((model, opt), (plain_model, plain)):
        backward(m, x, y)
        o.half_step()
        backward(m, x, y)
        o.step()
    assert same(values(model, opt), values(plain_model, plain))


def test_a_refused_half_step_leaves_no_scaling_behind():
    model, opt = setup()
    scaler = make_scaler()
    (x, y), *_ = data(1)
    backward(model, x, y)
    opt.half_step()
    backward(model, x, y, scaler)
    with pytest.raises(RuntimeError, match="pending"):
        scaler.step(opt.first_pass)
    opt.cancel()
    other_model, other = setup()
    backward(other_model, x, y)
    other.half_step()
    other.cancel()
    for m, o in ((model, opt), (other_model, other)):
        backward(m, x, y)
        o.half_step()
    assert same(values(model, opt)[0], values(other_model, other)[0])


@pytest.mark.parametrize("culprit", ["closure for the half", "pre-hook", "post-hook"])
def test_no_error_during_a_scaled_step_scales_a_later_one(culprit):
    model, opt = setup()
    other_model, other = setup()
    scaler, other_scaler = make_scaler(), make_scaler()
    batches = data(3)

    def fail(*_):
        raise KeyError("a hook of the user's")

    backward(model, *batches[0], scaler)
    if culprit == "closure for the half":
        with pytest.raises(RuntimeError, match="takes no closure"):
            scaler.step(opt.first_pass, lambda: None)
    scaler.step(opt.first_pass)
    backward(model, *batches[0], scaler)
    if culprit != "closure for the half":
        hook = (
            opt.register_step_pre_hook(fail)
            if culprit == "pre-hook"
            else opt.register_step_post_hook(fail)
        )
        with pytest.raises(KeyError):
            scaler.step(opt)
        hook.remove()
    if culprit != "post-hook":  # there the step itself was done
        scaler.step(opt)
    scaler.update()
    scaled_iteration(other_model, other, other_scaler, *batches[0])
    for x, y in batches[1:]:
        scaled_iteration(model, opt, scaler, x, y)
        scaled_iteration(other_model, other, other_scaler, x, y)
    assert same(values(model, opt), values(other_model, other))


def by_hand_then_scaler(model, opt, scaler, x, y):
    backward(model, x, y, scaler)
    scaler.unscale_(opt)
    opt.half_step()
    backward(model, x, y, scaler)
    scaler.step(opt)


def scaler_then_by_hand(model, opt, scaler, x, y):
    backward(model, x, y, scaler)
    scaler.step(opt.first_pass)
    backward(model, x, y)
    opt.step()


def unscaled_for_the_wrong_half(model, opt, scaler, x, y):
    backward(model, x, y, scaler)
    scaler.unscale_(opt)
    scaler.step(opt.first_pass)
    backward(model, x, y, scaler)
    scaler.step(opt)


def test_gradients_unscaled_for_the_wrong_half_are_refused_before_anything_moves():
    model, opt = setup()
    (x, y), *_ = data(1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"would unscale them again: call scaler\.unscale_\(opt\.first_pass\)"
    ):
        unscaled_for_the_wrong_half(model, opt, make_scaler(), x, y)
    assert same([p.detach() for p in model.parameters()], before)
    scaled_iteration(model, opt, make_scaler(), x, y)
    assert opt.stats().iterations == 1


@pytest.mark.parametrize("road", [by_hand_then_scaler, scaler_then_by_hand])
def test_passes_with_different_scaling_modes_are_refused(road):
    model, opt = setup()
    scaler = make_scaler()
    (x, y), *_ = data(1)
    with pytest.raises(RuntimeError, match="scaled wrongly"):
        road(model, opt, scaler, x, y)
    opt.cancel()
    scaled_iteration(model, opt, make_scaler(), x, y)
    assert opt.stats().iterations == 1


def test_unscaling_both_passes_by_hand_through_the_scaler_is_correct():
    model, opt = setup()
    other_model, other = setup()
    scaler, other_scaler = make_scaler(), make_scaler()
    for x, y in data(3):
        backward(model, x, y, scaler)
        scaler.unscale_(opt.first_pass)
        scaler.step(opt.first_pass)
        backward(model, x, y, scaler)
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        scaled_iteration(other_model, other, other_scaler, x, y)
    assert same(values(model, opt), values(other_model, other))


# ------------------------------------------------------------------------------------ low precision


@pytest.mark.filterwarnings("ignore:parameters are:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_low_precision_parameters_are_measured_along_the_real_displacement(dtype, weight_decay):
    torch.manual_seed(0)
    theta = torch.randn(50).to(dtype).requires_grad_()
    A = torch.randn(50, 50) / 7
    opt = StepTunedSGD(
        [theta], lr=0.02, beta=0.5, bounds=(1e-3, 1e3), weight_decay=weight_decay, decay_every=None
    )
    G = torch.zeros(50, dtype=torch.float64)
    gamma = 1.0
    for k in range(8):
        points, gradients = [theta.detach().clone()], []
        for _ in opt.passes():
            theta.grad = (A.T @ (A @ theta.detach().float())).to(dtype)
            points.append(theta.detach().clone())
            gradients.append(theta.grad.double() + weight_decay * theta.detach().double())
        assert theta.dtype == dtype
        moved = points[2].double() - points[1].double()
        G = 0.5 * G + 0.5 * (gradients[1] - gradients[0])
        curvature = (G @ moved / (1 - 0.5 ** (k + 1))).item()
        assert math.isclose(
            opt.curvature.item(), curvature / (moved @ moved).item(), rel_tol=1e-4, abs_tol=1e-9
        )
        gamma = (moved @ moved).item() / curvature if curvature > 0 else 2.0
        assert math.isclose(opt.gamma.item(), min(max(gamma, 1e-3), 1e3), rel_tol=1e-4)
    state = opt.state[theta]
    assert state["G"].dtype == torch.float32
    assert opt.gamma.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:parameters are:UserWarning")
def test_a_low_precision_parameter_without_a_second_gradient_counts_with_its_real_displacement():
    theta = torch.tensor([1.0, 100.0], dtype=torch.bfloat16, requires_grad=True)
    opt = StepTunedSGD([theta], lr=1.0, beta=0.5, decay_every=None, bounds=(1e-3, 1e3))
    other = torch.ones(1, requires_grad=True)
    opt.add_param_group({"params": [other]})
    for k in range(2):
        start = theta.detach().double()
        for i in opt.passes():
            theta.grad = (
                torch.tensor([0.1, 0.1], dtype=torch.bfloat16) * (1 + i)
                if k == 0 or i == 0
                else None
            )
            other.grad = torch.zeros(1)
            if k == 1 and i == 1:
                moved = theta.detach().double() - start
                G = opt.state[theta]["G"].double()
    assert moved[1] == 0, "0.1 is less than the rounding of 100"
    # the second measurement: G fades to half, its debias is 1 / (1 - 0.5^2)
    assert opt.curvature.item() == pytest.approx(
        (0.5 * G @ moved / 0.75 / (moved @ moved)).item(), rel=1e-6
    )


def test_the_warning_about_low_precision_comes_once():
    theta = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for _ in opt.passes():
                theta.grad = torch.ones(3, dtype=torch.bfloat16)
    assert len(caught) == 1
    assert "smaller than their rounding" in str(caught[0].message)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_float32_parameters_just_works(dtype):
    model, opt = setup()
    (x, y), *_ = data(1)
    losses = []
    for _ in range(40):
        for _ in opt.passes():
            opt.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert opt.stats().ignored == 0
    assert all(state["G"].dtype == torch.float32 for state in opt.state.values())


def test_G_of_double_parameters_keeps_its_precision_through_a_scaler():
    ends = []
    for scaled in (False, True):
        theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
        opt = StepTunedSGD([theta], lr=0.1, foreach=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scaled)
        for _ in range(2):
            for half in (opt.first_pass, opt):
                opt.zero_grad()
                scaler.scale((theta**4).sum()).backward()
                scaler.step(half)
                scaler.update()
        ends.append(opt.state[theta]["G"])
    assert torch.allclose(ends[0], ends[1], rtol=1e-14, atol=0)


def test_an_overflow_after_a_state_is_loaded_between_the_passes_is_not_counted():
    model, opt = setup()
    scaler = make_scaler()
    ((x, y),) = data(1)
    backward(model, x, y, scaler)
    scaler.step(opt.first_pass)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    backward(model, x, y, scaler, True)
    scaler.step(opt)
    assert opt.stats().iterations == 0
    assert opt.stats().ignored == 1
