"""No synchronisation in a step, one graph per pass, any scheduler, any kind of lr."""

import contextlib
import functools
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import lr_scheduler

import steptuned
from steptuned import StepTunedSGD
from steptuned.optim import flat


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "max_grad_norm": 1.0},
        {"maximize": True, "foreach": False},
        {"decay_every": None, "lr": torch.tensor(0.1)},
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_no_step_reads_a_value_from_the_device(options, scaled):
    """Meta tensors have no values, so reading one is an error.

    On an accelerator, the same read would wait for the device.
    """
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2)).to("meta")
    opt = StepTunedSGD(model.parameters(), **options)
    assert opt.param_groups[0]["gamma"].device.type == "meta"
    for _ in range(2):
        for half in (True, False):
            for p in model.parameters():
                p.grad = torch.empty_like(p)
            turn = opt.first_pass if half else opt
            if scaled:
                turn.grad_scale, turn.found_inf = (
                    torch.empty((), device="meta"),
                    torch.empty((), device="meta"),
                )
            turn.step()
            if scaled:
                del turn.grad_scale, turn.found_inf
            assert (
                opt.gamma.device
                == opt.raw_gamma.device
                == opt.curvature.device
                == torch.device("meta")
            )
            assert opt.param_groups[0]["effective_lr"].device.type == "meta"
    assert all(state["G"].device.type == "meta" for state in opt.state.values())


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 25),
        ({"decay_every": 1}, 25),
        ({"weight_decay": 0.1}, 27),
        ({"maximize": True}, 27),
        ({"max_grad_norm": 1.0}, 49),
        ({"relative": True}, 50),
        ({"tune_every": 2}, 55),
    ],
    ids=str,
)
def test_the_number_of_launches_is_small_and_the_same_for_many_tensors(options, most, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from launches import SHAPES, launches

    assert len(SHAPES) == 59
    counts = launches(SHAPES, **options)
    assert counts == launches([(5, 3), (2,)], **options)
    assert counts.total() <= most


def train(model, opt, iterations=8, each=lambda k: None):
    for k in range(iterations):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        for _ in opt.passes():
            opt.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
        each(k)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    return model, StepTunedSGD(model.parameters(), **{"lr": 0.1, "bounds": (0.05, 20.0), **options})


def shrink_lr(opt):
    def each(k):
        for group in opt.param_groups:
            group["lr"] *= 0.9

    return each


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.2, "weight_decay": 0.01}])
def test_each_pass_compiles_to_one_full_graph_and_never_again(options, monkeypatch):
    torch._dynamo.reset()
    model, opt = make(**options)
    expected = train(model, opt, 50, each=shrink_lr(opt))
    gamma = opt.gamma

    counters = {}
    for name in ("first_pass", "second_pass"):
        counters[name] = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(getattr(flat, name), fullgraph=True, backend=counters[name])
        monkeypatch.setattr(flat, name, compiled)
    model, opt = make(**options)
    actual = train(model, opt, 50, each=shrink_lr(opt))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(opt.gamma, gamma, rtol=1e-8, atol=0)
    for counter in counters.values():
        graphs = [
            graph
            for graph in counter.graphs
            if any(node.op == "call_function" for node in graph.graph.nodes)
        ]
        assert len(graphs) == 1


def test_a_compiled_step_gives_the_same():
    """torch.compile(opt.step), as users of torch.optim write it, is harmless: it runs eagerly."""
    torch._dynamo.reset()
    model, opt = make()
    expected = train(model, opt)
    model, opt = make()
    step, half_step = (
        torch.compile(opt.step, backend="aot_eager"),
        torch.compile(opt.half_step, backend="aot_eager"),
    )
    for k in range(8):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        for act in (half_step, step):
            opt.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            act()
    actual = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(actual, expected)


def test_a_compiled_model_in_a_closure_stays_compiled():
    torch._dynamo.reset()
    model, opt = make()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    x = torch.ones(8, 5, dtype=torch.float64)

    def closure():
        opt.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        return loss

    first, last = opt.step(closure), opt.step(closure)
    assert last < first
    assert counter.frame_count >= 1


def by_passes(model, opt, x):
    for _ in opt.passes():
        opt.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()


def by_closure(model, opt, x):
    def closure():
        opt.zero_grad()
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        return loss

    opt.step(closure)


def by_hand(model, opt, x):
    noise = steptuned.replay(opt)
    opt.zero_grad()
    (model(x) - x[:, :2]).square().mean().backward()
    opt.half_step()
    noise.rewind()
    (model(x) - x[:, :2]).square().mean().backward()
    opt.step()


def compiled_run(step, what, make_layer, backend="aot_eager"):
    """Parameters after some iterations with dropout or BatchNorm, and the number of graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), make_layer(), nn.Linear(9, 2)).double()
    opt = StepTunedSGD(model.parameters(), lr=0.1, bounds=(0.05, 20.0))
    counter = CompileCounterWithBackend(backend)
    used = torch.compile(model, backend=counter) if what == "model" else model
    step = torch.compile(step, backend=counter) if what == "step" else step
    for k in range(4):
        step(
            used,
            opt,
            torch.randn(8, 5, generator=torch.Generator().manual_seed(k), dtype=torch.float64),
        )
    assert opt.stats().iterations == 4
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), counter.frame_count


GRAPHS = {
    ("model", by_passes): 1,
    ("model", by_closure): 1,
    ("model", by_hand): 1,
    # torch.compile skips a function with such a loop, and nn.Sequential's forward is not user code.
    ("step", by_passes): 0,
    ("step", by_closure): 1,
    ("step", by_hand): 2,
}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile looks at the loss's
@pytest.mark.parametrize(
    ("what", "step"), GRAPHS, ids=[f"{what} {step.__name__}" for what, step in GRAPHS]
)
def test_what_is_compiled_and_that_it_changes_nothing(what, step):
    """The table of docs/recipes/training.md, with dropout: compiled code replays its masks too."""
    expected, _ = compiled_run(step, "nothing", lambda: nn.Dropout(0.3))
    skipped = (what, step) == ("step", by_passes)
    with (
        pytest.warns(UserWarning, match=r"contains a passes\(\) loop")
        if skipped
        else contextlib.nullcontext()
    ):
        actual, graphs = compiled_run(step, what, lambda: nn.Dropout(0.3))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert graphs == GRAPHS[what, step]


def test_a_compiled_body_is_compiled_once_for_both_passes():
    def body(model, x):
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(body, backend=counter)

    def step(model, opt, x, body=body):
        for _ in opt.passes():
            opt.zero_grad()
            body(model, x)

    expected, _ = compiled_run(step, "nothing", nn.Tanh)
    actual, _ = compiled_run(functools.partial(step, body=compiled), "nothing", nn.Tanh)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert counter.frame_count == 1


def test_frozen_statistics_compile_a_model_once_for_each_pass():
    def step(model, opt, x):
        for _ in opt.passes(freeze=model):
            opt.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()

    expected, _ = compiled_run(step, "nothing", lambda: nn.BatchNorm1d(9))
    actual, graphs = compiled_run(step, "model", lambda: nn.BatchNorm1d(9))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert graphs == 2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_dropout_compiled_by_inductor_draws_the_same_masks_in_both_passes():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1))
    opt = StepTunedSGD(model.parameters(), lr=0.1)
    compiled, x = torch.compile(model), torch.randn(8, 6)

    def closure():
        opt.zero_grad()
        compiled(x).square().mean().backward()

    found = steptuned.check(opt, closure)
    assert found, found


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_every_scheduler_of_torch_drives_the_step(name, as_tensor):
    """Each first half step uses the scheduler's current lr, as SGD with the same scheduler does."""
    theta, twin = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

    def lr():
        return torch.tensor(0.05) if as_tensor else 0.05

    opt = StepTunedSGD([theta], lr=lr(), decay_every=None, bounds=(1.0, 1.0), nu=1.0)
    sgd = torch.optim.SGD([twin], lr=lr())
    schedulers = [SCHEDULERS[name](opt), SCHEDULERS[name](sgd)]
    for _ in range(10):
        theta.grad, twin.grad = torch.full((3,), 0.1), torch.full((3,), 0.1)
        opt.half_step()
        sgd.step()
        torch.testing.assert_close(theta, twin)
        theta.grad, twin.grad = torch.full((3,), 0.2), torch.full((3,), 0.2)
        opt.step()
        sgd.step()
        torch.testing.assert_close(theta, twin)
        for scheduler in schedulers:
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(float(sgd.param_groups[0]["lr"]))


def test_long_lists_are_worked_on_in_parts(monkeypatch):
    model, opt = make(foreach=True)
    expected = train(model, opt)
    monkeypatch.setattr("steptuned.optim.bucket.FULL", 20)
    lengths = []
    first_pass = flat.first_pass
    monkeypatch.setattr(
        flat,
        "first_pass",
        lambda params, *rest: lengths.append(len(params)) or first_pass(params, *rest),
    )
    model, opt = make(foreach=True)
    torch.testing.assert_close(train(model, opt), expected, rtol=1e-10, atol=1e-12)
    assert lengths[:3] == [1, 2, 1]  # 45, 9 + 18, 2 elements


def test_a_tensor_lr_gives_the_same_as_a_float():
    model, opt = make()
    expected = train(model, opt)
    model, opt = make(lr=torch.tensor(0.1, dtype=torch.float64))
    assert torch.equal(train(model, opt), expected)


def test_an_lr_changed_between_the_passes_counts_from_the_next_iteration():
    """Both half steps of an iteration have the same step."""
    theta = torch.zeros(1, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    theta.grad = torch.ones(1)
    opt.half_step()
    opt.param_groups[0]["lr"] = 10.0
    theta.grad = torch.ones(1)
    opt.step()
    torch.testing.assert_close(theta.detach(), torch.tensor([-0.2]))


def test_an_lr_that_falls_quickly_drives_gamma_to_its_lower_bound():
    """A documented caveat: G remembers the larger steps."""
    theta = torch.ones(4, dtype=torch.float64, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.01, decay_every=None, bounds=(0.1, 10.0))
    gammas = []
    for _ in range(40):
        for _ in opt.passes():
            theta.grad = theta.detach() / 2
        gammas.append(opt.gamma.item())
        opt.param_groups[0]["lr"] *= 0.5
    assert gammas[0] == pytest.approx(2.0)
    assert gammas[-1] == 0.1


def test_a_model_moved_after_the_optimizer_was_made_takes_its_scalars_along():
    theta = torch.ones(3, requires_grad=True)
    opt = StepTunedSGD([theta], lr=0.1)
    torch.utils.swap_tensors(theta, torch.empty(3, device="meta", requires_grad=True))
    theta.grad = torch.empty_like(theta)
    opt.half_step()
    assert opt.param_groups[0]["gamma"].device.type == "meta"
