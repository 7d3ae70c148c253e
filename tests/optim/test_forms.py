"""The three call forms give the same iterates with the same noise.

One step is one iteration, and the passes of two mini-batches are never paired.
"""

import copy
import re

import pytest
import torch
from torch import nn

import steptuned
from compare import same
from steptuned import StepTunedSGD
from steptuned.rng import Replay


def dropout_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 3))


def batches(n):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(10, 6, generator=generator), torch.randn(10, 3, generator=generator))
        for _ in range(n)
    ]


def criterion(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def with_closure(model, opt, x, y):
    def closure():
        opt.zero_grad()
        loss = criterion(model, x, y)
        loss.backward()
        return loss

    return opt.step(closure)


def with_passes(model, opt, x, y):
    for _ in opt.passes():
        opt.zero_grad()
        criterion(model, x, y).backward()


def by_hand(model, opt, x, y):
    noise = steptuned.replay(opt)
    opt.zero_grad()
    criterion(model, x, y).backward()
    opt.half_step()
    noise.rewind()
    opt.zero_grad()
    criterion(model, x, y).backward()
    opt.step()


FORMS = [with_closure, with_passes, by_hand]


def train(form, n=30, **options):
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1, bounds=(0.05, 20.0), **options)
    torch.manual_seed(2)
    for x, y in batches(n):
        form(model, opt, x, y)
    return model, opt


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.01, "max_grad_norm": 0.5}])
def test_the_three_forms_give_the_same_bits_with_dropout(options):
    runs = [train(form, **options) for form in FORMS]
    for model, opt in runs[1:]:
        assert torch.equal(flat(model), flat(runs[0][0]))
        assert torch.equal(opt.gamma, runs[0][1].gamma)
        assert torch.equal(opt.curvature, runs[0][1].curvature)
        assert opt.stats() == runs[0][1].stats()


@pytest.mark.parametrize("form", FORMS)
def test_one_step_is_one_iteration_for_hooks_schedulers_and_profilers(form):
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1, decay_every=None)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    before, after = [], []
    opt.register_step_pre_hook(lambda *_: before.append(1))
    opt.register_step_post_hook(lambda *_: after.append(1))
    with torch.profiler.profile() as profile:
        for x, y in batches(4):
            form(model, opt, x, y)
            scheduler.step()  # warns where it does not see that opt.step was called
    assert len(before) == len(after) == 4
    assert opt.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert opt.stats().iterations == 4
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#StepTunedSGD.step"] == 4


def test_step_with_a_closure_returns_the_loss_of_the_first_pass():
    model = dropout_network().eval()
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    before = criterion(model, x, y)
    loss = with_closure(model, opt, x, y)
    assert torch.equal(loss, before)
    assert criterion(model, x, y) < before


def masked_curvature(model, x, y, seed):
    """<dtheta, g1 - g0> / |dtheta|^2 of the loss with its dropout masks held fixed."""
    params = list(model.parameters())

    def gradient(seed):
        torch.manual_seed(seed)
        return torch.autograd.grad(criterion(model, x, y), params)

    g0 = gradient(seed)
    with torch.no_grad():
        for p, g in zip(params, g0, strict=True):
            p.sub_(0.1 * g)
    g1 = gradient(seed)
    return (
        sum((a * (a - b)).sum() for a, b in zip(g0, g1, strict=True))
        / sum(0.1 * a.square().sum() for a in g0)
    ).item()


@pytest.mark.parametrize("form", [with_closure, with_passes])
def test_with_dropout_the_curvature_is_that_of_the_masked_loss_and_without_replay_it_is_not(form):
    (x, y), *_ = batches(1)
    measured = {}
    for replay_rng in (True, False):
        model = dropout_network().double()
        opt = StepTunedSGD(model.parameters(), lr=0.1, beta=0.0, replay_rng=replay_rng)
        torch.manual_seed(5)
        form(model, opt, x.double(), y.double())
        measured[replay_rng] = opt.curvature.item()
    true = masked_curvature(dropout_network().double(), x.double(), y.double(), seed=5)
    assert abs(measured[True] - true) < 1e-12 * abs(true)
    assert abs(measured[False] - true) > 0.5 * abs(true)


def test_replay_leaves_the_random_stream_where_one_pass_leaves_it():
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    torch.manual_seed(3)
    criterion(model, x, y)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with_passes(model, opt, x, y)
    assert torch.equal(torch.rand(4), expected)


def test_replay_remembers_every_device_of_the_parameters(monkeypatch):
    """Without an accelerator, a fake device that records its calls stands in for one."""

    class Books:
        state = torch.tensor([7], dtype=torch.uint8)

        @classmethod
        def get_rng_state(cls, device):
            return cls.state

        @classmethod
        def set_rng_state(cls, state, device):
            cls.state = state

    original = torch.get_device_module
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda d: Books if torch.device(d).type == "xpu" else original(d),
    )
    noise = Replay([torch.device("cpu"), torch.device("xpu", 1)])
    Books.state = torch.tensor([9], dtype=torch.uint8)
    noise.rewind()
    assert Books.state.item() == 7
    assert noise.state_dict().keys() == {"cpu", "xpu:1"}


def test_replay_state_goes_through_a_checkpoint(tmp_path):
    noise = steptuned.replay()
    expected = torch.rand(4)
    torch.save(noise.state_dict(), tmp_path / "noise.pt")
    torch.manual_seed(9)
    other = steptuned.replay()
    other.load_state_dict(torch.load(tmp_path / "noise.pt", weights_only=True))
    other.rewind()
    assert torch.equal(torch.rand(4), expected)


# ------------------------------------------------------------------------------------------ pairing


@pytest.fixture
def pending():
    """A model and its optimizer after a half step, and the mini-batch of that step."""
    model = dropout_network().eval()
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    criterion(model, x, y).backward()
    opt.half_step()
    return model, opt, x, y


def refused(opt, model, message, act):
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    with pytest.raises(RuntimeError, match=message) as error:
        act()
    assert "\n" not in str(error.value)
    after = model.state_dict(), opt.state_dict()
    assert same(after, before)


def test_step_without_a_half_step_is_an_error_with_a_solution():
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    criterion(model, *batches(1)[0]).backward()
    refused(opt, model, re.escape("call opt.half_step() between"), opt.step)


def test_an_iteration_without_any_gradient_does_nothing_and_is_counted():
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    with_passes(model, opt, x, y)
    opt.zero_grad()
    before, state = flat(model), copy.deepcopy(opt.state_dict())
    opt.step(lambda: None)
    for _ in opt.passes():
        pass
    opt.half_step()
    opt.step()
    assert torch.equal(flat(model), before)
    after = opt.state_dict()
    assert same(after["state"], state["state"])
    assert [group.pop("skipped") for group in (*after["param_groups"], *state["param_groups"])] == [
        3,
        0,
    ]
    assert same(after["param_groups"], state["param_groups"])
    assert (opt.stats().iterations, opt.stats().skipped) == (1, 3)


@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.parametrize("form", ["closure", "passes", "hand"])
def test_gradients_in_only_one_pass_are_an_error_for_each_form(form, which):
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    turns = iter([which == "first", which == "second"])

    def body():
        opt.zero_grad()
        if next(turns):
            criterion(model, x, y).backward()

    def by_hand():
        body()
        opt.half_step()
        body()
        opt.step()

    def by_passes():
        for _ in opt.passes():
            body()

    words = {
        "closure": r"the closure computed gradients in its {} call",
        "passes": r"the body of passes\(\) computed gradients in its {}",
    }
    expected = words.get(
        form, r"gradients in the {} pass.*before both half_step\(\) and step\(\)"
    ).format(which)
    with pytest.raises(RuntimeError, match=expected) as caught:
        {"closure": lambda: opt.step(body), "passes": by_passes, "hand": by_hand}[form]()
    assert ("half_step" in str(caught.value)) == (form == "hand")
    opt.cancel()
    with_passes(model, opt, x, y)
    assert (opt.stats().iterations, opt.stats().skipped) == (1, 0)


def test_two_half_steps_in_a_row_are_an_error_that_mentions_cancel(pending):
    model, opt, x, y = pending
    criterion(model, x, y).backward()
    refused(opt, model, re.escape("opt.cancel()"), opt.half_step)


def test_a_closure_while_a_half_step_is_pending_is_an_error_that_mentions_cancel(pending):
    model, opt, *_ = pending
    called = []
    refused(
        opt,
        model,
        re.escape("step(closure) in the middle of an iteration") + ".*cancel",
        lambda: opt.step(lambda: called.append(1)),
    )
    assert not called


def test_passes_while_a_half_step_is_pending_are_an_error_that_mentions_cancel(pending):
    model, opt, x, y = pending
    refused(opt, model, re.escape("opt.cancel()"), lambda: with_passes(model, opt, x, y))


def test_a_step_without_a_second_backward_is_an_error(pending):
    model, opt, x, y = pending
    refused(opt, model, "none in the second: run a backward of the same mini-batch", opt.step)
    criterion(model, x, y).backward()
    opt.step()
    assert opt.stats().iterations == 1


def test_a_group_added_while_a_half_step_is_pending_is_an_error(pending):
    model, opt, *_ = pending
    refused(
        opt,
        model,
        re.escape("opt.cancel()"),
        lambda: opt.add_param_group({"params": [torch.zeros(2, requires_grad=True)]}),
    )


def test_cancel_drops_the_half_step_and_leaves_the_parameters(pending):
    model, opt, x, y = pending
    here = flat(model)
    opt.cancel()
    assert torch.equal(flat(model), here)
    assert opt.stats().iterations == 0
    assert all(state["g0"] is None for state in opt.state.values())
    opt.cancel()
    with_passes(model, opt, x, y)
    assert opt.stats().iterations == 1


class Interrupted(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("how", ["break", "raise"])
@pytest.mark.parametrize("where", [0, 1])
def test_leaving_the_passes_early_leaves_nothing_pending(how, where):
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    (x, y), (x2, y2) = batches(2)
    start = flat(model)

    def leave():
        for i in opt.passes():
            opt.zero_grad()
            criterion(model, x, y).backward()
            if i == where:
                if how == "break":
                    break
                raise Interrupted

    if how == "raise":
        with pytest.raises(Interrupted):
            leave()
    else:
        leave()
    assert torch.equal(flat(model), start) == (where == 0)
    assert not opt.param_groups[0]["pending"]
    assert opt.stats().iterations == 0
    assert opt.gamma.item() == 1.0
    with_passes(model, opt, x2, y2)
    assert opt.stats().iterations == 1


@pytest.mark.parametrize("where", [0, 1])
def test_a_closure_that_raises_leaves_nothing_pending(where):
    model = dropout_network()
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == where + 1:
            raise Interrupted
        opt.zero_grad()
        criterion(model, x, y).backward()

    with pytest.raises(Interrupted):
        opt.step(closure)
    assert not opt.param_groups[0]["pending"]
    assert opt.stats().iterations == 0


def test_an_early_exit_never_pairs_two_mini_batches():
    """After an exit in the second pass, the next iteration is that of a new optimizer there."""
    (x, y), (x2, y2) = batches(2)
    model = dropout_network().double().eval()
    opt = StepTunedSGD(model.parameters(), lr=0.1, beta=0.0)
    for i in opt.passes():
        opt.zero_grad()
        criterion(model, x.double(), y.double()).backward()
        if i == 1:
            break
    fresh_model = copy.deepcopy(model)
    fresh = StepTunedSGD(fresh_model.parameters(), lr=0.1, beta=0.0)
    with_passes(model, opt, x2.double(), y2.double())
    with_passes(fresh_model, fresh, x2.double(), y2.double())
    assert torch.equal(opt.gamma, fresh.gamma)
    assert torch.equal(flat(model), flat(fresh_model))
