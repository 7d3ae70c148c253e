"""StepTuned: any torch optimizer with a tuned step, against its twin.

In every call form, and resumed from a checkpoint after any pass.
"""

import copy
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import reference
import steptuned
import test_state
from compare import same
from problems import Network, Regression
from steptuned import StepTuned, StepTunedSGD
from steptuned.optim import wrapped
from test_diagnostics import run
from test_twins import close, joined
from test_variants import (
    FORMS,
    batches,
    dropout_network,
    follow,
    go_on,
    rates,
    scaled_run,
    with_rates,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:gamma has been at", "ignore:torch.distributed is disabled:UserWarning"
)


def network():
    problem = Network()
    return problem, [
        torch.tensor(part, requires_grad=True) for part in problem.split(problem.start)
    ]


# -------------------------------------------------------------------------------------------- twins

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
BASES = {
    "SGD": (SGD, {"lr": 0.1}, reference.Momentum, {}),
    "SGD, weight decay": (
        SGD,
        {"lr": 0.1, "weight_decay": 0.03},
        reference.Momentum,
        {"decay": 0.03},
    ),
    "SGD, maximize": (
        SGD,
        {"lr": 0.002, "maximize": True, "weight_decay": 0.5},
        reference.Momentum,
        {"sign": -1.0, "decay": 0.5},
    ),
    "momentum": (SGD, {"lr": 0.005, "momentum": 0.9}, reference.Momentum, {"mu": 0.9}),
    "nesterov": (
        SGD,
        {"lr": 0.01, "momentum": 0.8, "nesterov": True},
        reference.Momentum,
        {"mu": 0.8, "nesterov": True},
    ),
    "nesterov, weight decay": (
        SGD,
        {"lr": 0.02, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
        reference.Momentum,
        {"mu": 0.8, "nesterov": True, "decay": 0.01},
    ),
    "Adam": (Adam, {"lr": 0.005}, reference.Adam, {}),
    "Adam, weight decay": (
        Adam,
        {"lr": 0.005, "weight_decay": 0.02},
        reference.Adam,
        {"decay": 0.02},
    ),
    "AdamW": (
        AdamW,
        {"lr": 0.005, "weight_decay": 0.1},
        reference.Adam,
        {"decay": 0.1, "decoupled": True},
    ),
}
TUNING = {
    "defaults": {},
    "every mini-batch, absolute": {"tune_every": 1, "relative": False, "bounds": (0.2, 5.0)},
    "every third": {"tune_every": 3, "beta": 0.5},
    "clipped": {"tune_every": 2, "max_grad_norm": 0.2},
}


def twin_of(problem, base, tuning, **more):
    _, options, twin, hyper = BASES[base]
    bounds = tuning.get("bounds", (0.5, 2.0))
    decay = 0.0 if base == "AdamW" else options.get("weight_decay", 0.0)
    return reference.step_tuned(
        problem.start,
        problem.gradient,
        twin(**hyper),
        alpha=options["lr"],
        T=tuning.get("tune_every", 8),
        relative=tuning.get("relative", base[:3] != "SGD"),
        beta=tuning.get("beta", 0.9),
        m=bounds[0],
        M=bounds[1],
        clip=tuning.get("max_grad_norm", np.inf),
        decay=decay,
        sign=hyper.get("sign", 1.0),
        **more,
    )


@pytest.fixture(params=["scaled lr", "any base"])
def path(request, monkeypatch):
    """How gamma scales the base's update: by its lr, or by going back part of the way."""
    if request.param == "any base":
        monkeypatch.setattr(wrapped, "PROPORTIONAL", frozenset())


@pytest.mark.parametrize("tuning", TUNING)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.usefixtures("path")
def test_a_tuned_base_matches_its_twin(base, tuning):
    problem, params = network()
    cls, options, _, _ = BASES[base]
    opt = StepTuned(cls(params, **options), **TUNING[tuning])
    gammas = follow(
        opt,
        params,
        lambda k: problem.torch_loss(k, *params),
        twin_of(problem, base, TUNING[tuning]),
    )
    assert len(np.unique(gammas)) > 3 or "maximize" in base


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("base", ["momentum", "nesterov", "Adam", "AdamW"])
@pytest.mark.usefixtures("path")
def test_foreach_and_fused_bases_match_the_same_twin(base, how):
    """torch's foreach SGD with nesterov writes into the gradients that it is given."""
    problem, params = network()
    cls, options, _, _ = BASES[base]
    opt = StepTuned(cls(params, **options, **how), tune_every=3)
    twin = twin_of(problem, base, {"tune_every": 3})
    follow(opt, params, lambda k: problem.torch_loss(k, *params), twin)


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("base", ["momentum", "AdamW"])
def test_groups_may_have_their_own_lr(base, per_group):
    problem, params = network()
    cls, options, twin, hyper = BASES[base]
    factors, parts = (1.0, 0.3, 0.5), [params[:1], params[1:3], params[3:]]
    groups = [
        {"params": part, "lr": options["lr"] * f} for part, f in zip(parts, factors, strict=True)
    ]
    sizes = [sum(p.numel() for p in part) for part in parts]
    indices = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]) if per_group else None
    opt = StepTuned(cls(groups, **options), tune_every=2, per_group=per_group)
    expected = reference.step_tuned(
        problem.start,
        problem.gradient,
        twin(**hyper),
        alpha=options["lr"] * np.repeat(factors, sizes),
        T=2,
        groups=indices,
    )
    follow(opt, params, lambda k: problem.torch_loss(k, *params), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.3},
        {"lr": 0.2, "weight_decay": 0.01, "bounds": (0.1, 10.0)},
        {"lr": 0.2, "beta": 0.0, "nu": 1.0, "bounds": (0.2, 5.0)},
        {"lr": 0.002, "maximize": True, "weight_decay": 0.5},
        {"lr": 0.5, "max_grad_norm": 0.1},
        {"lr": 0.1, "tune_every": 3, "bounds": (0.1, 5.0)},
        {"lr": 0.1, "relative": True},
        {"lr": 0.1, "per_group": True, "bounds": (0.1, 5.0)},
    ],
    ids=str,
)
def test_with_sgd_as_its_base_it_is_step_tuned_sgd(options):
    for (ours, tuned), (theirs, plain) in beside_step_tuned_sgd(options):
        close(ours, theirs)
        close(tuned.gamma, plain.gamma)
        # Where the curvature is nearly zero, rounding of its terms dominates it.
        torch.testing.assert_close(tuned.curvature, plain.curvature, rtol=1e-8, atol=1e-10)
    assert tuned.stats().iterations == plain.stats().iterations
    assert tuned.stats().at_upper == plain.stats().at_upper


@pytest.mark.parametrize("more", [{"weight_decay": 0.5}, {"tune_every": 3}], ids=str)
def test_with_clipping_it_is_not_step_tuned_sgd(more):
    """The exceptions of docs/variants.md. The twins have the numbers."""
    for (ours, _), (theirs, _) in beside_step_tuned_sgd({"lr": 0.5, "max_grad_norm": 0.1, **more}):
        difference = np.abs(ours - theirs).max()
    assert difference > 1e-3


def beside_step_tuned_sgd(options):
    """StepTuned(SGD) and StepTunedSGD, each with its parameters, after each iteration."""
    problem, ours = network()
    _, theirs = network()
    of_base = {
        name: options[name] for name in ("lr", "weight_decay", "maximize") if name in options
    }
    rest = {"tune_every": 1, "relative": False} | {
        name: value for name, value in options.items() if name not in of_base
    }

    def groups(params):
        return [{"params": params[:2]}, {"params": params[2:], "lr": options["lr"] / 2}]

    tuned = StepTuned(SGD(groups(ours), **of_base), **rest)
    plain = StepTunedSGD(groups(theirs), **of_base, **rest)
    for k in range(250):
        for opt, params in ((tuned, ours), (plain, theirs)):
            for _ in opt.passes():
                opt.zero_grad()
                problem.torch_loss(k, *params).backward()
        yield (joined(ours), tuned), (joined(theirs), plain)


def test_relative_is_the_default_unless_the_base_is_plain_sgd():
    def relative(base, **options):
        theta = torch.ones(2, requires_grad=True)
        return StepTuned(base([theta], lr=0.1, **options)).param_groups[0]["relative"]

    assert relative(SGD) is False
    assert relative(SGD, weight_decay=0.1) is False
    assert relative(SGD, momentum=0.9) is True
    assert relative(Adam) is True


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("base", ["momentum", "AdamW"])
def test_a_measurement_at_lr_zero_is_ignored(base, per_group, on_host, monkeypatch):
    if not on_host:
        monkeypatch.setattr("steptuned.optim.flat.is_on_host", lambda tensors: False)
    problem, params = network()
    cls, options, twin, hyper = BASES[base]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    sizes = [sum(p.numel() for p in group["params"]) for group in groups]
    opt = StepTuned(cls(groups, **options), tune_every=2, per_group=per_group)
    expected = reference.step_tuned(
        problem.start,
        problem.gradient,
        twin(**hyper),
        alpha=lambda k: np.repeat(rates(k), sizes),
        T=2,
        groups=np.split(np.arange(sum(sizes)), sizes[:1]) if per_group else None,
    )
    follow(opt, params, with_rates(opt, lambda k: problem.torch_loss(k, *params)), expected, 60)
    assert [opt.stats(i).ignored for i in range(2)] == ([1, 8] if per_group else [1, 1])


@pytest.mark.parametrize("base", [SGD, Adam])
def test_curvature_is_that_of_the_loss_and_not_the_inverse_of_the_raw_gamma(base):
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTuned(base([theta], lr=0.01), tune_every=2, beta=0.0)
    assert opt.curvature.isnan()
    for k in range(3):
        for _ in opt.passes():
            theta.grad = (5 if k < 2 else 7) * theta.detach()
        if k < 2:
            seen = opt.curvature
            assert seen.item() == pytest.approx(5.0, rel=1e-9)
    assert opt.curvature.item() == pytest.approx(7.0, rel=1e-9)
    assert seen.item() == pytest.approx(5.0, rel=1e-9), "a snapshot"
    assert (opt.raw_gamma * opt.curvature == pytest.approx(1.0)) == (base is SGD)


def test_curvature_has_one_entry_per_group_with_per_group():
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    opt = StepTuned(
        SGD([{"params": [a]}, {"params": [b]}], lr=1e-4, momentum=0.9), per_group=True, beta=0.0
    )
    for _ in opt.passes():
        a.grad, b.grad = 3 * a.detach(), -2 * b.detach()
    torch.testing.assert_close(opt.curvature, torch.tensor([3.0, -2.0], dtype=torch.float64))
    assert [opt.stats(i).negative for i in range(2)] == [0.0, 1.0]


def test_a_direction_that_does_not_descend_gives_the_lower_bound_and_leaves_the_reference():
    theta = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    opt = StepTuned(SGD([theta], lr=0.1, momentum=0.9), tune_every=1, beta=0.0)
    for shift in (-5.0, -5.0, 0.9):  # now the momentum goes away from the minimum
        before = opt.reference.item()
        for _ in opt.passes():
            theta.grad = theta.detach() - shift
    assert opt.raw_gamma < 0
    assert opt.curvature.item() == pytest.approx(1.0)
    assert opt.gamma == 0.5
    assert opt.reference.item() == before


def test_the_warning_of_a_stuck_gamma_names_the_base():
    theta = torch.full((2,), 50.0, dtype=torch.float64, requires_grad=True)
    opt = StepTuned(AdamW([theta], lr=1e-6), tune_every=1, relative=False)
    with pytest.warns(UserWarning, match=r"so this is AdamW with the step 2 x lr: the raw gamma"):
        run(opt, theta, 100, 1.0)


class Ascent(torch.optim.SGD):
    """Steps along the gradient, or not at all where the gradient is zero."""

    def step(self, closure=None):
        (p,) = self.param_groups[0]["params"]
        with torch.no_grad():
            p += self.param_groups[0]["lr"] * p.grad


def test_the_warning_of_a_stuck_gamma_says_if_the_base_does_not_descend():
    theta = torch.full((2,), 1.0, dtype=torch.float64, requires_grad=True)
    opt = StepTuned(Ascent([theta], lr=1e-6), tune_every=1, relative=False)
    with pytest.warns(UserWarning, match=r"mostly does not decrease along the step"):
        run(opt, theta, 100, 1.0)


# ------------------------------------------------------------------------- forms, hooks, schedulers


def adamw(model, **options):
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.003}]
    return StepTuned(AdamW(groups, lr=0.01), **{"tune_every": 3, **options})


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5, "per_group": True}], ids=str)
def test_the_three_forms_give_the_same_bits_with_dropout(options):
    runs = []
    for form in FORMS:
        model = dropout_network()
        opt = adamw(model, **options)
        torch.manual_seed(2)
        for x, y in batches(20):
            form(model, opt, x, y)
        runs.append((dict(model.state_dict()), opt.gamma, opt.stats(), opt.state_dict()))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of_base", [False, True])
def test_a_scheduler_acts_on_the_groups_of_the_base(form, of_base):
    model = dropout_network()
    opt = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(
        opt.base if of_base else opt, step_size=1, gamma=0.5
    )
    steps = []
    opt.register_step_post_hook(lambda *_: steps.append(1))
    for x, y in batches(4):
        form(model, opt, x, y)
        scheduler.step()
    assert [group["lr"] for group in opt.base.param_groups] == [0.01 / 16, 0.003 / 16]
    assert opt.param_groups is opt.base.param_groups
    assert len(steps) == opt.stats().iterations == 4
    assert opt.base.state[model[0].weight]["step"] == 6, "twice on every third mini-batch"


@pytest.mark.parametrize("form", FORMS)
def test_a_step_leaves_the_users_gradients_unchanged(form):
    model = dropout_network().eval()
    opt = adamw(model, max_grad_norm=0.01, tune_every=2)
    for x, y in batches(3):
        form(model, opt, x, y)
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        assert norm > 0.1, "not the clipped ones"


def test_steptuned_check_accepts_it():
    model = dropout_network()
    opt = adamw(model)
    (x, y), *_ = batches(1)

    def closure():
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()

    assert steptuned.check(opt, closure)


def test_lr_as_a_tensor_stays_one_and_capturable_is_left_alone():
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    lr = torch.tensor(0.01, dtype=torch.float64)
    opt = StepTuned(Adam([theta], lr=lr, foreach=False), tune_every=2)
    for _ in range(4):
        for _ in opt.passes():
            theta.grad = theta.detach().clone()
    assert opt.param_groups[0]["lr"] is lr


@pytest.mark.parametrize(
    "name",
    ["NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop", "Adafactor"],
)
def test_other_bases_of_torch_descend(name):
    torch.manual_seed(0)
    theta = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    opt = StepTuned(getattr(torch.optim, name)([theta], lr=0.05), tune_every=2)
    start = theta.square().sum().item()
    for _ in range(20):
        for _ in opt.passes():
            opt.zero_grad()
            theta.square().sum().backward()
    assert theta.square().sum() < start
    assert opt.stats().measurements == 10
    assert opt.stats().ignored == 0


PROPORTIONAL = {
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
}


def test_every_proportional_base_is_compared():
    assert {base.__name__ for base in wrapped.PROPORTIONAL} == PROPORTIONAL.keys()


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_gamma_in_lr_gives_the_update_that_any_base_gets(name, monkeypatch):
    """Otherwise the base's update is not proportional to lr, or its state depends on lr."""
    ends = []
    for bases in (wrapped.PROPORTIONAL, frozenset()):
        monkeypatch.setattr(wrapped, "PROPORTIONAL", bases)
        problem, params = network()
        base = getattr(torch.optim, name)(params, lr=0.01, **PROPORTIONAL[name])
        opt = StepTuned(base, tune_every=3, nu=0.7, bounds=(0.1, 10.0))
        gammas = []
        for k in range(40):
            for _ in opt.passes():
                opt.zero_grad()
                problem.torch_loss(k, *params).backward()
            gammas.append(opt.gamma.item())
        ends.append((joined(params), gammas))
    assert len({*ends[0][1]}) > 3
    np.testing.assert_allclose(*(gammas for _, gammas in ends), rtol=1e-10)
    np.testing.assert_allclose(*(theta for theta, _ in ends), rtol=1e-10, atol=1e-12)


# -------------------------------------------------------------------------------- what can go wrong


def test_a_base_that_fails_keeps_its_lr():
    theta = torch.ones(3, requires_grad=True)
    opt = StepTuned(SGD([theta], lr=0.5), tune_every=1)
    for _ in range(2):
        for _ in opt.passes():
            theta.grad = theta.detach().clone()
    assert opt.gamma != 1

    def fail(*_):
        raise KeyError("broken")

    opt.base.register_step_post_hook(fail)
    theta.grad = theta.detach().clone()
    with pytest.raises(KeyError):
        opt.half_step()
    assert opt.param_groups[0]["lr"] == 0.5


def test_an_invalid_base_is_refused_and_left_unchanged():
    theta = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match="tunes a torch optimizer, got list"):
        StepTuned([theta])
    for base in (torch.optim.LBFGS([theta]), StepTunedSGD([theta])):
        with pytest.raises(ValueError, match=f"does not support {type(base).__name__}"):
            StepTuned(base)
    base = SGD([{"params": [theta], "beta": 3}], lr=0.1)
    with pytest.raises(ValueError, match="already have beta, which StepTuned would overwrite"):
        StepTuned(base)
    base = SGD([theta], lr=0.1)
    StepTuned(base)
    with pytest.raises(ValueError, match="already have beta, bounds,"):
        StepTuned(base)
    base = SGD([torch.ones(2, dtype=torch.complex64, requires_grad=True)], lr=0.1)
    groups = copy.deepcopy(base.param_groups)
    with pytest.raises(ValueError, match="complex"):
        StepTuned(base)
    assert [group.keys() for group in base.param_groups] == [group.keys() for group in groups]
    for name, value in {
        "tune_every": 0,
        "relative": 1,
        "per_group": "yes",
        "bounds": (2, 1),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be"):
            StepTuned(SGD([theta], lr=0.1), **{name: value})


def test_a_group_is_added_to_the_base():
    model = dropout_network()
    opt = adamw(model, tune_every=2)
    x, y = batches(1)[0]
    FORMS[1](model, opt, x, y)
    extra = torch.ones(3, requires_grad=True)
    opt.add_param_group({"params": [extra], "lr": 0.1})
    assert opt.base.param_groups[2]["weight_decay"] == opt.base.defaults["weight_decay"]
    for _ in range(3):
        for _ in opt.passes():
            opt.zero_grad()
            (nn.functional.mse_loss(model(x), y) + extra.square().sum()).backward()
    assert extra[0] < 1
    assert opt.stats().iterations == 4
    with pytest.raises(ValueError, match="bounds must be the same"):
        opt.add_param_group({"params": [torch.ones(1, requires_grad=True)], "bounds": (0.1, 1.0)})


def test_a_parameter_may_lack_a_gradient_in_some_passes():
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    opt = StepTuned(SGD([a, b], lr=0.1), tune_every=2, bounds=(0.01, 100.0), beta=0.5)
    plain = [p.detach().clone().requires_grad_() for p in (a, b)]
    theirs = StepTunedSGD(plain, lr=0.1, tune_every=2, bounds=(0.01, 100.0), beta=0.5)
    for k in range(8):
        for each, (p, q) in ((opt, (a, b)), (theirs, plain)):
            for i in each.passes():
                p.grad, q.grad = 0.7 * p.detach(), 0.3 * q.detach()
                if (k, i) in ((2, 1), (4, 0), (5, 0)):
                    q.grad = None
        close(joined([a, b]), joined(plain))
        close(opt.gamma.item(), theirs.gamma.item())


def test_gradients_that_are_not_finite_leave_gamma_and_G_finite():
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    opt = StepTuned(SGD([theta], lr=1e-6), tune_every=1)
    for k in range(3):
        for i in opt.passes():
            theta.grad = theta.detach() * (torch.inf if (k, i) == (1, 1) else 1.0)
        theta.data.nan_to_num_(1.0, 1.0, 1.0)
    assert opt.stats().ignored == 1
    assert torch.isfinite(opt.gamma)
    assert torch.isfinite(opt.state[theta]["G"]).all()


def test_errors_of_the_closure_leave_nothing_pending():
    model = dropout_network()
    opt = adamw(model)
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("broken")
        opt.zero_grad()
        model(batches(1)[0][0]).sum().backward()

    with pytest.raises(KeyError):
        opt.step(closure)
    assert not opt.pending
    assert opt.needs_second_pass
    opt.step(closure)
    assert opt.stats().iterations == 1


def test_reset_restarts_the_measurement_and_keeps_the_base():
    model = dropout_network()
    opt = adamw(model)
    for x, y in batches(5):
        FORMS[1](model, opt, x, y)
    names = ("step", "exp_avg", "exp_avg_sq")

    def of_base():
        return [{name: state[name].clone() for name in names} for state in opt.base.state.values()]

    moments = of_base()
    opt.reset()
    assert same(of_base(), moments)
    assert opt.gamma == 1
    assert opt.needs_second_pass
    get_optimizer_state_dict(model, opt)
    assert same(of_base(), moments), "nor does a distributed checkpoint step it"


# --------------------------------------------------------------------------------------- GradScaler


SCALED = {
    "Adam": (Adam, {"lr": 0.01}),
    "fused Adam": (Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "momentum": (SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}),
}


def to_scale(base, **options):
    """A network whose layers are two groups, and its optimizer."""
    model = dropout_network().eval()
    cls, hyper = SCALED[base]
    groups = [
        {"params": model[0].parameters()},
        {"params": model[3].parameters(), "lr": hyper["lr"] / 2},
    ]
    return model, StepTuned(cls(groups, **hyper), **options)


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("base", SCALED)
def test_a_scaler_gives_the_same_results(base, clip, per_group):
    runs = []
    for through in (True, False):
        model, opt = to_scale(base, tune_every=3, max_grad_norm=clip, per_group=per_group)
        scaled_run(model, opt, batches(20), through=through)
        runs.append((joined(model.parameters()), opt.gamma.numpy(), opt.stats(1).iterations))
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-2)
    assert runs[0][1].shape == ((2,) if per_group else ())
    assert runs[0][2] == runs[1][2] == 20


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("overflow", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("base", SCALED)
def test_a_pass_that_overflows_does_not_step_the_base_and_measures_nothing(
    base, overflow, per_group
):
    model, opt = to_scale(base, tune_every=2, per_group=per_group)
    before = copy.deepcopy(dict(model.state_dict()))
    scaled_run(model, opt, batches(1), overflow=overflow)
    steps = {int(state["step"]) for state in opt.base.state.values() if "step" in state}
    assert steps == ({1} if len(overflow) == 1 and base != "momentum" else set())
    assert same(dict(model.state_dict()), before) == (len(overflow) == 2)
    assert opt.gamma.tolist() == ([1.0, 1.0] if per_group else 1.0)
    assert not any(state["G"].any() for state in opt.base.state.values() if "G" in state)
    for i in range(2):
        stats = opt.stats(i)
        assert (stats.iterations, stats.measurements, stats.ignored) == (0, 0, 1)
    assert not opt.pending


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("base", SCALED)
def test_an_overflow_in_both_passes_is_as_if_the_mini_batch_were_left_out(base, per_group):
    data, runs = batches(8), []
    for used, overflow in ((data, (6, 7)), (data[:3] + data[4:], ())):
        model, opt = to_scale(base, tune_every=1, per_group=per_group)
        scaled_run(model, opt, used, overflow)
        assert opt.stats(1).iterations == 7
        runs.append((dict(model.state_dict()), opt.gamma, opt.reference, dict(opt.state)))
    assert same(runs[0][:3], runs[1][:3])
    assert same(*(list(run[3].values()) for run in runs)), "and that of the base"


def test_a_first_iteration_that_overflows_in_both_passes_is_remembered():
    """The base has no state then, as if the user had cleared it."""
    model = dropout_network().eval()
    opt = StepTuned(Adam(model.parameters(), lr=0.01), tune_every=2)
    scaled_run(model, opt, batches(1), overflow=(0, 1))
    assert not opt.state
    assert not opt.needs_second_pass, "a lost measurement is not repeated"
    resumed = StepTuned(Adam(model.parameters(), lr=0.01), tune_every=2)
    resumed.load_state_dict(opt.state_dict())
    for each in (opt, resumed):
        scaled_run(model, each, batches(2))
        stats = each.stats()
        assert (stats.iterations, stats.measurements, stats.ignored) == (2, 1, 1)


def test_an_overflow_on_a_mini_batch_that_is_used_once_is_not_counted():
    model = dropout_network().eval()
    opt = StepTuned(Adam(model.parameters(), lr=0.01), tune_every=3)
    scaled_run(model, opt, batches(2), overflow=(2,))
    assert (opt.stats().iterations, opt.stats().measurements) == (1, 1)
    assert {int(state["step"]) for state in opt.base.state.values()} == {2}


# -------------------------------------------------------------------------------------- checkpoints


def make(dtype=torch.float32, base="AdamW", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 2)).to(dtype)
    groups = [
        {"params": model[0].parameters(), "lr": 0.005},
        {"params": model[2].parameters(), "weight_decay": 0.01},
    ]
    inner = {"AdamW": AdamW, "momentum": SGD}[base](
        groups, lr=0.01, **{"momentum": 0.9} if base == "momentum" else {}
    )
    return model, StepTuned(inner, **{"tune_every": 3, **options})


def assert_same_run(a, b):
    for (model_a, opt_a), (model_b, opt_b) in ((a, b),):
        assert same(dict(model_a.state_dict()), dict(model_b.state_dict()))
        assert same(opt_a.state_dict(), opt_b.state_dict())


@pytest.mark.filterwarnings("ignore:parameters are:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", test_state.WAYS)
@pytest.mark.parametrize("base", ["AdamW", "momentum"])
def test_a_checkpoint_after_any_pass_resumes_bit_for_bit(base, way, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(test_state, "make", make)
    options = {"base": base, "per_group": True}
    straight = make(dtype, **options)
    go_on(*straight, 0, 14)
    for moment in (4, 5, 6):
        run = make(dtype, **options)
        k = go_on(*run, 0, moment)
        arguments = {"tmp_path": tmp_path / str(moment)} if "distributed" in way else {}
        resumed = test_state.WAYS[way](*run, **arguments, **options)
        assert resumed[1].pending == run[1].pending
        assert_same_run(run, resumed)
        go_on(*resumed, k, 14 - moment)
        assert_same_run(straight, resumed)


def test_a_state_has_the_same_keys_between_the_passes_and_the_base_loads_its_part():
    model, opt = make()
    k = go_on(model, opt, 0, 4)
    boundary = opt.state_dict()
    go_on(model, opt, k, 1)
    between = opt.state_dict()
    assert {name for state in boundary["state"].values() for name in state} == {
        *("G", "g0", "held", "displacement"),
        *("step", "exp_avg", "exp_avg_sq"),
    }
    assert [sorted(state) for state in boundary["state"].values()] == [
        sorted(state) for state in between["state"].values()
    ]


def test_a_state_of_the_base_alone_is_refused_with_a_solution():
    _, opt = make()
    alone = AdamW([{"params": group["params"]} for group in opt.param_groups], lr=0.1)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=r"not one of StepTuned: .*opt\.base\.load_state_dict"):
        opt.load_state_dict(alone.state_dict())
    assert same(opt.state_dict(), before)


def test_a_parameter_may_get_its_first_gradient_after_loading():
    """Adam assumes that a state that is not empty is its own."""
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    opt = StepTuned(Adam([a, b], lr=0.01), tune_every=2)
    for k in range(4):
        for _ in opt.passes():
            a.grad, b.grad = a.detach().clone(), b.detach().clone() if k > 1 else None
        if k < 2:
            saved = copy.deepcopy(opt.state_dict())
            opt = StepTuned(Adam([a, b], lr=0.01), tune_every=2)
            opt.load_state_dict(saved)
    assert opt.base.state[b]["step"] == 3
    assert opt.stats().iterations == 4


def test_a_trained_base_continues():
    theta = torch.ones(2, requires_grad=True)
    base = Adam([theta], lr=0.01)
    theta.grad = theta.detach().clone()
    base.step()
    opt = StepTuned(base, tune_every=2)
    for _ in opt.passes():
        theta.grad = theta.detach().clone()
    assert opt.base.state[theta]["step"] == 3


def test_low_precision_parameters_are_measured_by_their_rounded_displacement():
    model, opt = make(torch.bfloat16, tune_every=2)
    with pytest.warns(UserWarning, match="parameters are torch.bfloat16"):
        go_on(model, opt, 0, 9)
    assert opt.stats().ignored == 0
    assert all(state["G"].dtype == torch.float32 for state in opt.state.values())


def test_a_model_converted_to_double_during_a_run_continues():
    model, opt = make(tune_every=2)
    go_on(model, opt, 0, 6)
    model.double()
    for state in opt.base.state.values():
        state["exp_avg"], state["exp_avg_sq"] = (
            state["exp_avg"].double(),
            state["exp_avg_sq"].double(),
        )
    go_on(model, opt, 4, 6)
    assert all(state["G"].dtype == torch.float64 for state in opt.state.values())


def test_a_tuned_base_matches_its_twin_on_the_regression():
    problem = Regression()
    theta = torch.tensor(problem.start, requires_grad=True)
    opt = StepTuned(AdamW([theta], lr=0.005, weight_decay=0.1), tune_every=4)
    twin = reference.step_tuned(
        problem.start, problem.gradient, reference.Adam(decay=0.1, decoupled=True), alpha=0.005, T=4
    )
    assert (
        len(
            np.unique(
                follow(opt, [theta], lambda k: problem.torch_loss(k, theta), islice(twin, 250))
            )
        )
        > 10
    )


ON_META = {
    "StepTunedSGD": lambda groups: StepTunedSGD(
        groups, lr=0.1, tune_every=3, relative=True, per_group=True, max_grad_norm=1.0
    ),
    "StepTuned(Adam)": lambda groups: StepTuned(
        Adam(groups, lr=0.1, weight_decay=0.1), tune_every=3, max_grad_norm=1.0
    ),
    "StepTuned(SGD)": lambda groups: StepTuned(
        SGD(groups, lr=0.1, momentum=0.9, foreach=True), tune_every=3, per_group=True
    ),
}


@pytest.mark.parametrize("name", ON_META)
def test_no_step_reads_a_value_from_the_device(name):
    """Meta tensors have no values, so reading one is an error.

    On an accelerator, the same read would wait for the device.
    """
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2)).to("meta")
    opt = ON_META[name]([{"params": layer.parameters()} for layer in model])
    passes = 0
    for _ in range(5):
        for _ in opt.passes():
            passes += 1
            for p in model.parameters():
                p.grad = torch.empty_like(p)
        assert (
            opt.gamma.device == opt.reference.device == opt.curvature.device == torch.device("meta")
        )
    assert passes == 7
    assert all(state["G"].device.type == "meta" for state in opt.state.values())
