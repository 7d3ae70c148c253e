"""Random sequences of calls of StepTunedSGD, compared with the twin in `reference` after each pass.

After each comparison the twin continues from the state of the optimizer, so that every transition
is checked by itself and rounding errors do not add up.
"""

import contextlib
import copy
import io
import sys
import warnings

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import reference
from compare import same
from steptuned import StepTunedSGD

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

STEPS = 20
"""Calls in a sequence."""

BATCH = 250
"""Sequences with one seed."""

DTYPES = {
    "double": [torch.float64],
    "single": [torch.float32],
    "bfloat16": [torch.bfloat16],
    "mixed": [torch.float32, torch.bfloat16, torch.float64],
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-5}
"""Of G and of sums, for which bfloat16 parameters have single precision."""
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Of the parameters themselves."""
LARGE = 1 << 16
"""The number of elements from which the optimizer works on a tensor in chunks."""
SPIKE = 1e25
"""Finite in single precision, but its square is not."""

SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(["all", "all", "all", "some", "nan", "inf", "spike"])
LRS = st.sampled_from([0.3, 0.05, 1.0, 0.0])
ROADS = st.sampled_from(["plain", "plain", "scaled", "scaled", "unscaled"])


class DifferenceError(AssertionError):
    """The optimizer differs from its twin."""


class UserError(Exception):
    """An error of the user's code, in the middle of an iteration."""


class Sequence(RuleBasedStateMachine):
    """One sequence."""

    count = 0

    @initialize(
        dtypes=st.sampled_from(sorted(DTYPES)),
        beta=st.sampled_from([0.9, 0.0, 0.99]),
        bounds=st.sampled_from([(0.5, 2.0), (0.05, 20.0), (1.0, 1.0)]),
        nu=st.sampled_from([2.0, 0.7]),
        decay_every=st.sampled_from([None, 1, 2.5]),
        delta=st.sampled_from([0.001, 0.0]),
        max_grad_norm=st.sampled_from([None, None, 0.5]),
        foreach=st.sampled_from([None, True, False]),
        lr=LRS,
        weight_decay=st.sampled_from([0.0, 0.1]),
        maximize=st.booleans(),
        tensors=st.integers(1, 3),
        large=st.integers(0, 9),
        seed=SEEDS,
    )
    def begin(
        self,
        dtypes,
        beta,
        bounds,
        nu,
        decay_every,
        delta,
        max_grad_norm,
        foreach,
        lr,
        weight_decay,
        maximize,
        tensors,
        large,
        seed,
    ):
        type(self).count += 1
        self.shared = {
            "beta": beta,
            "bounds": bounds,
            "nu": nu,
            "decay_every": decay_every,
            "delta": delta,
            "max_grad_norm": max_grad_norm,
        }
        self.twin = reference.StepTunedSGDByPass(
            nu=nu,
            beta=beta,
            m=bounds[0],
            M=bounds[1],
            delta=delta,
            decay_every=decay_every,
            clip=np.inf if max_grad_norm is None else max_grad_norm,
        )
        self.dtypes, self.params, self.options = DTYPES[dtypes], [], []
        self.pending, self.scaler = "", None
        self.before = []  # kept alive, because a GradScaler knows optimizers by their id
        group = self._new_group(
            tensors, seed, lr, weight_decay, maximize, foreach, large=large == 0
        )
        self.opt = StepTunedSGD([group], **self.shared)
        self.chance = np.random.default_rng(seed)
        self.curve = [self._curve(p) for p in self.params]

    # ------------------------------------------------------------------------ whole iterations

    @precondition(lambda self: not self.pending)
    @rule(
        seed=SEEDS,
        kinds=st.tuples(KINDS, KINDS),
        error=st.sampled_from([None, None, None, None, 0, 1]),
    )
    def closure(self, seed, kinds, error):
        """The first form; sometimes the closure fails."""
        drawn = []

        def closure():
            number = len(drawn)
            drawn.append(torch.rand(()).item())
            if number == 1:
                self._check_first()
            if number == error:
                raise UserError
            self._backward(kinds[number], seed + number)
            return torch.tensor(float(seed))

        if error is None:
            assert self.opt.step(closure) == float(torch.tensor(float(seed))), (
                "the loss of the first pass"
            )
            self._check_second()
        else:
            try:
                self.opt.step(closure)
            except UserError:
                self._drop()
        assert len(set(drawn)) == 1, "both passes draw the same random numbers"

    @precondition(lambda self: not self.pending)
    @rule(
        seed=SEEDS,
        kinds=st.tuples(KINDS, KINDS),
        last=st.sampled_from([None, None, None, None, 0, 1]),
    )
    def passes(self, seed, kinds, last):
        """The second form; sometimes the loop is left early."""
        drawn = []
        for number in self.opt.passes():
            drawn.append(torch.rand(()).item())
            if number == 1:
                self._check_first()
            if number == last:
                break
            self._backward(kinds[number], seed + number)
        else:
            self._check_second()
        if last is not None:
            self._drop()
        assert len(set(drawn)) == 1, "both passes draw the same random numbers"

    # ------------------------------------------------------------------------ half iterations

    @precondition(lambda self: not self.pending)
    @rule(seed=SEEDS, kind=KINDS, road=ROADS)
    def half_step(self, seed, kind, road):
        """The first half of the third form, with or without a GradScaler."""
        self._through(
            road, self.opt.first_pass if road != "plain" else None, kind, seed, self.opt.half_step
        )
        self._check_first()
        self.pending = road

    @precondition(lambda self: self.pending)
    @rule(seed=SEEDS, kind=KINDS)
    def step(self, seed, kind):
        """The second half."""
        self._through(
            self.pending, self.opt if self.pending != "plain" else None, kind, seed, self.opt.step
        )
        self._check_second()
        if self.pending != "plain":
            self.scaler.update()
        self.pending = ""

    @precondition(lambda self: self.pending)
    @rule(seed=SEEDS, road=ROADS)
    def step_by_another_road(self, seed, road):
        """Refused, because one of the gradients would be scaled wrongly."""
        if road == self.pending:
            return
        with self._unchanged():
            self._refuses(
                lambda: self._through(
                    road, self.opt if road != "plain" else None, "all", seed, self.opt.step
                )
            )
        self._drop()
        self.opt.cancel()

    @precondition(lambda self: self.pending)
    @rule()
    def cancel(self):
        self.opt.cancel()
        self._drop()

    @precondition(lambda self: self.pending in ("", "plain"))
    @rule(way=st.sampled_from(["closure", "passes", "by hand", "second pass only"]), seed=SEEDS)
    def no_gradient(self, way, seed):
        """What passes do without any gradient."""
        for p in self.params:
            p.grad = None
        if self.pending:
            with self._unchanged():
                self._refuses(self.opt.step)
            return
        before = self.opt.stats()
        with self._unchanged(skipped=way != "second pass only"):
            if way == "closure":
                self.opt.step(lambda: None)
            elif way == "passes":
                for _ in self.opt.passes():
                    pass
            else:
                self.opt.half_step()
                if way == "by hand":
                    self.opt.step()
                else:
                    self._backward("all", seed)
                    self._refuses(self.opt.step)
                    self.opt.cancel()
        _check(
            "the number of skipped iterations",
            self.opt.stats().skipped,
            before.skipped + (way != "second pass only"),
            0,
        )

    @rule(what=st.sampled_from(["half_step", "passes", "closure", "group", "step"]))
    def misuse(self, what):
        """Calls that do not fit the moment are refused and change nothing."""
        calls = {
            "half_step": self.opt.half_step,
            "passes": self.opt.passes,
            "closure": lambda: self.opt.step(lambda: 1 / 0),
            "group": lambda: self.opt.add_param_group(
                {"params": [torch.ones(1, requires_grad=True)]}
            ),
        }
        with self._unchanged():
            if self.pending and what in calls:
                self._refuses(calls[what])
            elif not self.pending and what == "step" and any(self.twin.alpha):
                self._refuses(self.opt.step)

    # ------------------------------------------------------------------------ in between

    @rule(lr=LRS, tensor=st.booleans(), group=st.integers(0, 3))
    def change_lr(self, lr, tensor, group):
        """As a scheduler does. A pending half step keeps the step size it began with."""
        group %= len(self.twin.alpha)
        self.twin.alpha[group] = float(torch.tensor(lr)) if tensor else lr
        self.opt.param_groups[group]["lr"] = torch.tensor(lr) if tensor else lr

    @precondition(lambda self: not self.pending and len(self.params) < 6)
    @rule(
        seed=SEEDS,
        lr=LRS,
        weight_decay=st.sampled_from([0.0, 0.2]),
        maximize=st.booleans(),
        tensors=st.integers(1, 2),
    )
    def add_group(self, seed, lr, weight_decay, maximize, tensors):
        group = self._new_group(tensors, seed, lr, weight_decay, maximize, foreach=None)
        self.opt.add_param_group(group)
        self.curve += [self._curve(p) for p in group["params"]]

    @rule(way=st.sampled_from(["itself", "another", "file"]))
    def save_and_load(self, way):
        """At any moment, even between the passes."""
        saved = copy.deepcopy(self.opt.state_dict())
        if way == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        if way != "itself":
            groups, start = [], 0
            for group in self.opt.param_groups:
                groups.append({"params": self.params[start : start + len(group["params"])]})
                start += len(group["params"])
            self.before.append(self.opt)
            self.opt = StepTunedSGD(groups, lr=7.0, **self.shared)
        self.opt.load_state_dict(saved)
        if not same(self.opt.state_dict(), saved):
            raise DifferenceError("the state that was loaded is not the one that was saved")

    @rule(seed=SEEDS)
    def reset(self, seed):
        """Forget all measurements; only rarely, so that sequences make progress in between."""
        if seed % 8:
            return
        self.opt.reset()
        self._drop()
        self.twin.G = [np.zeros_like(G) for G in self.twin.G]
        self.twin.k, self.twin.gamma, self.twin.ignored = 0, 1.0, 0

    @precondition(lambda self: not self.pending and self._is_bad())
    @rule()
    def restore(self):
        """Restore the parameters, as a user does who has lost them."""
        self._restore()

    def teardown(self):
        if "opt" in self.__dict__:
            for p in self.params:
                if p in self.opt.state and not torch.isfinite(self.opt.state[p]["G"]).all():
                    raise DifferenceError("G is not finite")

    # ------------------------------------------------------------------------ to set up

    def _new_group(self, tensors, seed, lr, weight_decay, maximize, foreach, large=False):
        generator = torch.Generator().manual_seed(seed)
        new = []
        for number in range(tensors):
            dtype = self.dtypes[(len(self.params) + number) % len(self.dtypes)]
            shape = (LARGE + 3,) if large and number == 0 else [(3,), (2, 2), ()][number % 3]
            new.append(torch.randn(shape, generator=generator).to(dtype).requires_grad_())
        self.params += new
        sign = -1.0 if maximize else 1.0
        self.twin.add_group([_array(p) for p in new], alpha=lr, decay=weight_decay, sign=sign)
        return {
            "params": new,
            "lr": lr,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
        }

    def _curve(self, p):
        """The gradient is a sin(theta) + b, bounded, with curvature of either sign."""
        generator = torch.Generator().manual_seed(p.numel())
        return [torch.randn(p.shape, generator=generator).to(torch.float64) for _ in range(2)]

    def _backward(self, kind, seed, scale=1.0):
        """Give the parameters gradients, and the twin the same."""
        chance = np.random.default_rng(seed)
        chosen = [kind != "some" or bool(chance.integers(2)) for _ in self.params]
        if not any(chosen):
            chosen[int(chance.integers(len(chosen)))] = True
        self.gradients = {}
        victim = int(chance.integers(len(self.params)))
        for i, p in enumerate(self.params):
            p.grad = None
            if not chosen[i]:
                continue
            a, b = self.curve[i]
            g = a * p.detach().double().sin() + b + 0.1 * float(chance.normal())
            p.grad = (g * scale).to(p.dtype)
            if i == victim and kind in ("nan", "inf"):
                p.grad.view(-1)[0] = {"nan": np.nan, "inf": np.inf}[kind]
            if i == victim and kind == "spike" and self._can_spike(p):
                p.grad.view(-1)[0] = SPIKE * scale
            self.gradients[i] = _array(p.grad) / scale
        self.scaled = scale != 1.0
        self.overflow = self.scaled and not all(
            np.isfinite(g).all() for g in self.gradients.values()
        )

    def _can_spike(self, p):
        """Whether the square of a spike overflows."""
        is_plain = self.twin.clip == np.inf and all(self.twin.alpha)
        return p.dtype != torch.float64 and is_plain

    def _through(self, road, half, kind, seed, call):
        """A pass by hand, or through the scaler."""
        if road == "plain":
            self._backward(kind, seed)
            call()
            return
        if self.scaler is None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            self.scaler.scale(torch.ones(()))
        self._backward(kind, seed, self.scaler.get_scale())
        if road == "unscaled":
            self.scaler.unscale_(half)
        self.scaler.step(half)

    def _drop(self):
        """Drop the pending half step."""
        self.twin.cancel()
        self.pending, self.scaler = "", None

    def _is_bad(self):
        return any(not p.detach().abs().lt(1e6).all() for p in self.params)

    def _restore(self):
        with torch.no_grad():
            for i, p in enumerate(self.params):
                p.copy_(torch.where(p.abs() < 1e6, p, torch.ones_like(p)))
                self.twin.theta[i] = _array(p)

    # ------------------------------------------------------------------------ to compare

    def _check_first(self):
        before = [theta.copy() for theta in self.twin.theta]
        self.twin.first(self.gradients, self.overflow)
        self._check_parameters(before)
        for group, step in zip(self.opt.param_groups, self.twin.step, strict=True):
            _check("the step", float(group["effective_lr"]), step, 1e-12 * abs(step))
        for i in self.twin.dtheta:
            if self.params[i].dtype == torch.bfloat16:  # the displacement that rounding left
                self.twin.dtheta[i] = self.twin.theta[i] - before[i]

    def _check_second(self):
        twin = self.twin
        theta, G, g0 = ([a.copy() for a in twin.theta], [a.copy() for a in twin.G], dict(twin.g0))
        k, gamma = twin.k, twin.gamma
        measured = twin.second(self.gradients, self.overflow)
        self._check_parameters(theta)
        if measured is None:
            twin.G, twin.gamma, twin.ignored = G, gamma, twin.ignored + 1
            self._check_G(G, G, [0.0] * len(G))
        else:
            dg, curvature, square = measured
            faded = [twin.beta * before for before in G]
            size = [
                np.abs(before)
                + sum(np.abs(_finite(each[i])) for each in (g0, dg) if i in each)
                + 0.2 * np.abs(_finite(theta[i]))
                for i, before in enumerate(G)
            ]
            margins = [self._tolerance(p) * s for p, s in zip(self.params, size, strict=True)]
            if self._is_finite(dg):
                self._check_G(twin.G, twin.G, margins)
                off = sum(np.sum(margins[i] * np.abs(d)) for i, d in twin.dtheta.items()) / (
                    1 - twin.beta ** (k + 1)
                )
                self._check_gamma(curvature, square, off)
            else:
                twin.ignored += 1
                self._check_G(faded, twin.G, margins)
                _check(
                    "gamma after a measurement that is not finite",
                    self.opt.gamma.item(),
                    gamma,
                    0.0,
                )
        twin.cancel()
        stats = self.opt.stats()
        _check("k", stats.iterations, twin.k, 0)
        _check("the number of ignored measurements", stats.ignored, twin.ignored, 0)
        if any(np.abs(_finite(theta)).max(initial=0) > 1e6 for theta in twin.theta):
            self._restore()  # after a spike nothing can be compared any more

    def _is_finite(self, dg):
        """Whether the squares of all measured values are finite in their tensor's precision."""

        def fits(i, a):
            largest = np.finfo(
                np.float64 if self.params[i].dtype == torch.float64 else np.float32
            ).max
            with np.errstate(over="ignore"):
                return np.isfinite(a).all() and np.sum(a * a) < largest

        held = {i: self.twin.g0[i] for i in self.twin.g0}
        return all(fits(i, a) for each in (dg, held, self.twin.dtheta) for i, a in each.items())

    def _tolerance(self, p):
        return TOLERANCE[p.dtype]

    def _rounding(self, p):
        """The norm to which all are clipped is as precise as the least precise of them."""
        clipped = self.twin.clip < np.inf and any(
            other.dtype != torch.float64 for other in self.params
        )
        return max(ROUNDING[p.dtype], TOLERANCE[torch.float32] if clipped else 0.0)

    def _check_parameters(self, before):
        for i, p in enumerate(self.params):
            actual, wanted = _array(p), self.twin.theta[i]
            margin = self._rounding(p) * np.maximum(
                np.abs(_finite(wanted)), np.abs(_finite(before[i]))
            )
            _check(f"parameter {i}", actual, wanted, margin)
            self.twin.theta[i] = actual

    def _check_G(self, faded, full, margins):
        """Of a measurement that is not finite, each element is either left out or not."""
        for i, p in enumerate(self.params):
            actual = _array(self.opt.state[p]["G"]) if self.opt.state.get(p) else np.zeros(p.shape)
            fits = (np.abs(actual - full[i]) <= margins[i]) | (
                np.abs(actual - faded[i]) <= margins[i]
            )
            if not fits.all():
                raise DifferenceError(
                    f"G of parameter {i} is {actual[~fits][:3]} instead of {full[i][~fits][:3]}"
                )
            self.twin.G[i] = actual

    def _check_gamma(self, curvature, square, off):
        """``off`` is how far rounding may move the curvature."""
        twin, actual = self.twin, self.opt.gamma.item()
        off += 1e-12 * abs(curvature)
        if abs(curvature) > 2 * off:
            if curvature > 0:
                near = [
                    twin.clipped(square * (1 + side * 1e-4) / (curvature - side * off))
                    for side in (-1, 1)
                ]
            else:
                near = [twin.clipped(twin.nu)] * 2
            if not near[0] * (1 - 1e-12) <= actual <= near[1] * (1 + 1e-12):
                raise DifferenceError(f"gamma is {actual} instead of {near}")
            _check(
                "the curvature",
                self.opt.curvature.item(),
                curvature / square,
                off / square + 1e-4 * abs(curvature / square),
            )
        elif curvature == off == 0:
            _check("gamma without any displacement", actual, twin.clipped(twin.nu), 0.0)
        elif not twin.m <= actual <= twin.M:
            raise DifferenceError(f"gamma is {actual}, beyond its bounds")
        twin.gamma = actual

    def _unchanged(self, skipped=False):
        return _Unchanged(self.opt, self.params, skipped)

    def _refuses(self, call):
        try:
            call()
        except RuntimeError:
            return
        raise DifferenceError("a call that does not fit the moment was not refused")


class _Unchanged:
    """The block changes neither state nor parameters, except perhaps the skipped iterations."""

    def __init__(self, opt, params, skipped):
        self.opt, self.params, self.skipped = opt, params, skipped

    def _now(self):
        state = copy.deepcopy(self.opt.state_dict())
        for group in state["param_groups"] if self.skipped else ():
            del group["skipped"]
        return state, [p.detach().clone() for p in self.params]

    def __enter__(self):
        self.before = self._now()

    def __exit__(self, kind, *_):
        if kind is None and not same(self._now(), self.before):
            raise DifferenceError("a call that was refused has changed something")


def _array(tensor):
    return tensor.detach().double().numpy().copy()


def _finite(a):
    return np.nan_to_num(a, nan=0.0, posinf=0.0, neginf=0.0)


def _check(what, actual, wanted, margin):
    actual, wanted = np.asarray(actual, dtype=float), np.asarray(wanted, dtype=float)
    with np.errstate(invalid="ignore"):
        fits = (
            (np.abs(actual - wanted) <= margin)
            | (actual == wanted)
            | (np.isnan(actual) & np.isnan(wanted))
        )
    if not fits.all():
        raise DifferenceError(f"{what} is {actual[~fits][:3]} instead of {wanted[~fits][:3]}")


def fuzz(sequences, seed, shrink=True):
    """Try random sequences, the same for the same seed. Returns how many, and what differed."""

    class Counted(Sequence):
        count = 0

    chosen = settings(
        max_examples=sequences,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    found = []
    with (
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            run_state_machine_as_test(hypothesis.seed(seed)(Counted), settings=chosen)
        except BaseExceptionGroup as several:
            found = list(several.exceptions)
        except Exception as error:
            found = [error]
    differences = [
        "\n".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", [])]) for e in found
    ]
    return min(Counted.count, sequences), differences
