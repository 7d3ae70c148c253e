"""Mistakes and needs of real programs, one test for each."""

import functools
import gc
import random
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

import steptuned
from steptuned import (
    ArmijoGD,
    BarzilaiBorweinGD,
    RobbinsMonroLR,
    StepTunedGD,
    StepTunedSGD,
    StochasticGV,
)


def simple(*layers, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 1))
    return model, StepTunedSGD(model.parameters(), **{"lr": 0.1, **options}), torch.randn(8, 4)


def body_of(model, opt, x):
    def body():
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return body


def iterate(model, opt, x, n=1, **options):
    for _ in range(n):
        for _ in opt.passes(**options):
            body_of(model, opt, x)()


# ---------------------------------------------------------------------------------------- arguments

COMPANIONS = [StepTunedGD, BarzilaiBorweinGD, StochasticGV, ArmijoGD]


@pytest.mark.parametrize("cls", [StepTunedSGD, *COMPANIONS])
def test_all_optimizers_refuse_complex_parameters_at_construction(cls):
    z = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(ValueError, match=f"{cls.__name__} does not support complex parameters"):
        cls([z])
    opt = cls([torch.ones(2, requires_grad=True)])
    with pytest.raises(ValueError, match="does not support complex parameters"):
        opt.add_param_group({"params": [z]})


@pytest.mark.parametrize("cls", [StepTunedSGD, *COMPANIONS])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_lr_of_one_element_means_that_number(cls, shape):
    ends = []
    for lr in (0.05, torch.full(shape, 0.05, dtype=torch.float64)):
        theta = torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()
        opt = cls([theta], lr=lr)

        def closure(theta=theta, opt=opt):
            opt.zero_grad()
            loss = theta.square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            opt.step(closure)
        assert theta.shape == (3,)
        ends.append(theta.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("cls", [StepTunedSGD, *COMPANIONS])
def test_an_lr_of_two_elements_is_refused(cls):
    with pytest.raises(ValueError, match=r"^lr must be"):
        cls([torch.ones(2, requires_grad=True)], lr=torch.tensor([0.1, 0.1]))


def test_an_option_of_gamma_edited_in_one_group_is_detected_at_the_next_iteration():
    model, opt, x = simple()
    opt.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    iterate(model, opt, x)
    opt.param_groups[1]["beta"] = 0.5
    with pytest.raises(
        ValueError,
        match=r"beta must be the same for all parameter groups.*has 0\.9, another has 0\.5",
    ):
        iterate(model, opt, x)
    opt.param_groups[0]["beta"] = 0.5
    iterate(model, opt, x)
    assert opt.stats().iterations == 2


# ------------------------------------------------------------------------------------------ state


def test_a_removed_state_starts_over_like_reset():
    model, opt, x = simple()
    iterate(model, opt, x, 5)
    twin_model, twin, _ = simple()
    twin_model.load_state_dict(model.state_dict())
    opt.state.clear()
    iterate(model, opt, x, 3)
    iterate(twin_model, twin, x, 3)
    assert opt.stats().iterations == 3
    assert torch.equal(opt.gamma, twin.gamma)
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_reset_gives_a_new_optimizer_at_the_current_point():
    model, opt, x = simple(decay_every=1)
    iterate(model, opt, x, 5)
    body_of(model, opt, x)()
    opt.half_step()  # a pending half step is dropped
    opt.reset()
    twin_model, twin, _ = simple(decay_every=1)
    twin_model.load_state_dict(model.state_dict())
    assert opt.gamma == 1.0
    assert opt.stats()[:5] == twin.stats()[:5]
    assert opt.state_dict()["param_groups"][0].keys() == twin.state_dict()["param_groups"][0].keys()
    iterate(model, opt, x, 4)
    iterate(twin_model, twin, x, 4)
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_model_cast_between_the_passes_is_refused_in_one_sentence():
    for dtype in (torch.bfloat16, torch.float64):
        model, opt, x = simple()
        body_of(model, opt, x)()
        opt.half_step()
        model.to(dtype)
        body_of(model, opt, x.to(dtype))()
        with pytest.raises(
            RuntimeError, match=f"a parameter was cast to {dtype} between the two passes.*cancel"
        ):
            opt.step()
        opt.cancel()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="parameters are")
            iterate(model, opt, x.to(dtype))


def test_a_warm_up_from_zero_without_half_step_is_reported():
    model, opt, x = simple(lr=0.0)
    body_of(model, opt, x)()
    with pytest.raises(RuntimeError, match="without a pending half step"):
        opt.step()
    assert not opt.state
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="without a pending half step"):
        opt.step()


# ------------------------------------------------------------------------------------------ forms


def test_passes_kept_in_a_variable_end_with_their_block_or_with_close():
    model, opt, x = simple()
    for end in ("with", "close"):
        kept = opt.passes()
        for i in kept:
            body_of(model, opt, x)()
            if i == 1:
                break
        assert opt.pending, "nobody can see a break"
        if end == "with":
            with kept:
                pass
        else:
            kept.close()
        assert not opt.pending
    with opt.passes() as passes:
        for _ in passes:
            body_of(model, opt, x)()
    assert opt.stats().iterations == 1
    for i in opt.passes():
        body_of(model, opt, x)()
        if i == 1:
            break
    gc.collect()
    assert not opt.pending


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("call", ["step", "half_step", "closure", "scaler"])
def test_a_step_inside_passes_is_an_error_that_says_to_remove_it(turn, call):
    model, opt, x = simple()
    body = body_of(model, opt, x)
    calls = {
        "step": lambda: opt.step(),
        "half_step": lambda: opt.half_step(),
        "closure": lambda: opt.step(body),
        "scaler": lambda: opt.first_pass.step(),
    }

    def loop():
        for i in opt.passes():
            body()
            if i == turn:
                calls[call]()

    with pytest.raises(RuntimeError, match=r"inside the body of passes\(\): remove it"):
        loop()
    iterate(model, opt, x)
    assert opt.stats().iterations == 1


def test_a_backward_before_a_closure_warns_once_and_a_usual_loop_does_not():
    model, opt, x = simple()
    body = body_of(model, opt, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            opt.step(body)
        opt.zero_grad(set_to_none=False)
        opt.step(body)
        opt.zero_grad()
        opt.step(body)
    body()
    with pytest.warns(
        UserWarning,
        match=r"found gradients of an earlier backward.*remove the backward before step\(closure\)",
    ):
        opt.step(body)
    body()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(body)


def test_the_noise_of_both_passes_is_compared_by_hand():
    model, opt, x = simple(nn.Dropout(0.5))
    body = body_of(model, opt, x)

    def by_hand(rewind):
        noise = steptuned.replay(opt)
        body()
        opt.half_step()
        if rewind:
            noise.rewind()
        body()
        opt.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_hand(rewind=True)
        opt.step(body)
        iterate(model, opt, x)
    with pytest.warns(UserWarning, match=r"drew different random numbers.*noise.rewind\(\)"):
        by_hand(rewind=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_hand(rewind=False)  # said once


def test_the_noise_is_not_compared_if_replay_is_off():
    model, opt, x = simple(nn.Dropout(0.5), replay_rng=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        body_of(model, opt, x)()
        opt.half_step()
        body_of(model, opt, x)()
        opt.step()


def test_pending_shows_the_state_of_the_iteration_and_half_is_its_old_name():
    model, opt, x = simple()
    body_of(model, opt, x)()
    assert not opt.pending
    with pytest.warns(DeprecationWarning, match="now called opt.first_pass"):
        opt.half.step()
    assert opt.pending
    body_of(model, opt, x)()
    opt.step()
    assert not opt.pending


def test_replay_records_nothing_if_the_optimizer_does_not_need_it():
    _, opt, _ = simple(replay_rng=False)
    noise = steptuned.replay(opt)
    first = torch.rand(3)
    noise.rewind()
    assert not torch.equal(torch.rand(3), first)


# ---------------------------------------------------------------------------------------- schedules


def test_the_default_lr_is_not_decayed():
    model, opt, x = simple(bounds=(1.0, 1.0), nu=1.0)
    iterate(model, opt, x, 20)
    assert opt.param_groups[0]["effective_lr"].item() == pytest.approx(0.1)


@pytest.mark.parametrize("decay_every", [None, 5])
def test_a_scheduler_with_decay_every_warns_once(decay_every):
    model, opt, x = simple(decay_every=decay_every)
    iterate(model, opt, x)
    scheduler = RobbinsMonroLR(opt)
    if decay_every is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            iterate(model, opt, x)
            scheduler.step()
        return
    with pytest.warns(
        UserWarning,
        match=r"decay_every=5 and a learning-rate scheduler.*decay_every=None.*or do without",
    ):
        iterate(model, opt, x)
    scheduler.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterate(model, opt, x)


# ---------------------------------------------------------------------------------- steptuned.check


class Recurrent(nn.Module):
    """A layer that carries a hidden state from one pass to the next."""

    def __init__(self, as_buffer):
        super().__init__()
        state = torch.ones(6)
        if as_buffer:
            self.register_buffer("hidden", state)
        else:
            self.hidden = state

    def forward(self, x):
        self.hidden = 0.5 * self.hidden + x.detach().mean(0)
        return x + self.hidden


class Noise(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * self.draw(x)


CHECKED = {
    "plain": (lambda: nn.Tanh(), True, "same function"),
    "dropout": (lambda: nn.Dropout(0.5), True, "same function"),
    "batchnorm": (lambda: nn.BatchNorm1d(6), True, "same function"),
    "numpy": (
        lambda: Noise(lambda x: torch.tensor(np.random.rand(6), dtype=x.dtype)),  # noqa: NPY002
        False,
        "NumPy",
    ),
    "python": (lambda: Noise(lambda x: 1 + random.random()), False, "Python"),
    "own generator": (
        lambda: Noise(
            functools.partial(lambda g, x: torch.rand(6, generator=g), torch.Generator())
        ),
        False,
        "generator of its own",
    ),
    "hidden": (lambda: Recurrent(as_buffer=False), False, "hidden state"),
    "hidden buffer": (
        lambda: Recurrent(as_buffer=True),
        False,
        r"buffers that it uses \(1.hidden\)",
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_check_says_whether_both_passes_are_the_same_function(name):
    layer, same, message = CHECKED[name]
    model, opt, x = simple(layer())
    for _ in opt.passes():
        body_of(nn.Sequential(model[0], model[2]), opt, x)()
    before = [p.detach().clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    numpy_before, python_before, torch_before = (
        np.random.get_state()[1].copy(),  # noqa: NPY002
        random.getstate(),
        torch.get_rng_state(),
    )
    kept = [p.grad for p in model.parameters()]
    found = steptuned.check(opt, body_of(model, opt, x), model)
    assert bool(found) is same, found
    assert (found.difference == 0) is same
    assert re.search(message, str(found)), found
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert all(map(torch.equal, model.parameters(), before))
    assert all(map(torch.equal, model.buffers(), buffers))
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002
    assert random.getstate() == python_before
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert opt.stats().iterations == 1


def test_check_finds_a_data_loader_that_is_read_in_the_body():
    model, opt, _ = simple()
    loader = iter(
        torch.utils.data.DataLoader(
            torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), batch_size=8
        )
    )

    def body():
        opt.zero_grad()
        model(next(loader)).square().mean().backward()

    found = steptuned.check(opt, body)
    assert not found
    assert "draw the mini-batch before the passes" in str(found)
    assert found.difference > 0.01


def test_check_reports_a_closure_without_a_backward_pass():
    model, opt, x = simple()
    assert "computed no gradients" in str(steptuned.check(opt, lambda: model(x).sum()))


# ------------------------------------------------------------------------------- running statistics

STATISTICS = {
    "batchnorm": lambda: nn.BatchNorm1d(6),
    "batchnorm, cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten()
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral norm by hook": lambda: spectral_norm(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("form", ["passes", "closure", "hand"])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("name", STATISTICS)
def test_the_second_pass_leaves_frozen_statistics_alone(name, form):
    model, opt, x = simple(STATISTICS[name]())
    body = body_of(model, opt, x)
    buffers = []

    def watched():
        loss = body()
        buffers.append([b.clone() for b in model.buffers()])
        return loss

    start = [b.clone() for b in model.buffers()]
    if form == "passes":
        for _ in opt.passes(freeze=model):
            watched()
    elif form == "closure":
        opt.step(watched, freeze=model)
    else:
        watched()
        opt.half_step()
        with steptuned.frozen_statistics(model):
            watched()
        opt.step()
    assert not all(map(torch.equal, start, buffers[0])), "the first pass updates them"
    assert all(map(torch.equal, *buffers)), "the second does not"
    body()
    assert not all(map(torch.equal, buffers[1], model.buffers())), (
        "afterwards they are updated again"
    )


@pytest.mark.parametrize("kind", ["spectral norm", "spectral norm by hook"])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_with_frozen_statistics_spectral_norm_is_one_function(kind):
    model, opt, x = simple(STATISTICS[kind]())
    body = body_of(model, opt, x)
    assert not steptuned.check(opt, body)

    def gradient():
        body()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    first = gradient()
    with steptuned.frozen_statistics(model):
        second = gradient()
    assert torch.equal(first, second)


def test_statistics_thaw_after_an_error():
    norm = nn.BatchNorm1d(2)
    with (
        pytest.raises(ValueError, match="Expected more than 1 value"),
        steptuned.frozen_statistics(norm),
    ):
        norm(torch.randn(1, 2))
    norm(torch.randn(4, 2))
    assert norm.num_batches_tracked == 1
