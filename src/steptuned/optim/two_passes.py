"""Optimizers that use a mini-batch twice: the three call forms, the state and the diagnostics."""

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steptuned import rule
from steptuned.frozen import frozen_statistics
from steptuned.optim import sharded
from steptuned.optim.arguments import (
    BETA,
    BOUNDS,
    COUNT,
    FLAG,
    POSITIVE,
    Option,
    Options,
    check,
    check_group,
    check_params,
    tuned_groups,
    warn,
)
from steptuned.optim.bucket import params_of
from steptuned.optim.notices import (
    check_groups_agree,
    is_initialization,
    refuse_in_body,
    refuse_pending,
    refuse_unneeded,
    warn_compiled,
    warn_if_stuck,
    warn_stale_gradients,
)
from steptuned.optim.record import Stats, count_recent, last, stats_of
from steptuned.optim.scaling import (
    SCALING_MODES,
    Scalable,
    Scaling,
    all_or_nothing,
    scaling_mode,
    take_scaling,
)
from steptuned.optim.state import (
    EMPTY,
    SCALARS,
    Measurement,
    check_fits,
    clear_pending,
    filled,
    fresh_group,
    fresh_scalars,
    fresh_state,
    restore,
    scalar_device,
    share,
    upgrade,
)
from steptuned.rng import Replay, replay


class TwoPasses(Scalable, Optimizer):
    """Base class of optimizers that measure curvature by a second pass over a mini-batch.

    A subclass defines what each pass does with the gradients.
    """

    OPTIONS: ClassVar[Options] = {
        "nu": POSITIVE.per("gamma"),
        "beta": BETA.per("gamma"),
        "bounds": BOUNDS.per("gamma"),
        "relative": FLAG.per("gamma"),
        "tune_every": COUNT.per("optimizer"),
        "per_group": FLAG.per("optimizer"),
        "replay_rng": FLAG.per("optimizer"),
        "max_grad_norm": Option(
            lambda v: v is None or v == math.inf or POSITIVE.is_valid(v),
            "positive, or None for no clipping",
            "optimizer",
        ),
    }
    """The valid values of the options. A subclass with more options adds them."""
    _has_own_rule: ClassVar[bool] = False
    _load_hint = ""  # what to do with a state_dict of another optimizer
    _steps_as = "SGD"  # the optimizer that this one is if gamma is constant

    @abstractmethod
    def _first_half(self, scaling: Scaling | None) -> None:
        """theta_k to theta_{k+1/2}."""

    @abstractmethod
    def _second_half(self, scaling: Scaling | None) -> None:
        """theta_{k+1/2} to theta_{k+1}; sets the next gamma."""

    @abstractmethod
    def _single_pass(self, scaling: Scaling | None) -> None:
        """theta_k to theta_{k+1}, with the current gamma."""

    def _start(self) -> None:
        """Set the attributes that are not part of the state."""
        self._first_pass = FirstPass(self)
        self._versions: list[tuple[Tensor, int]] = []
        self._warned: set[str] = set()
        self._form = "hand"  # the call form of the current iteration
        self._in_body = False  # whether the body of passes() is running
        self._closure_grads: list[weakref.ref[Tensor]] = []  # gradients of the closure's last call
        self._has_measured = False
        self._is_scaled = (
            False  # whether a GradScaler was used: overflows are counted on the device
        )
        self._noise: Replay | None = None  # random states after the first pass
        self._noise_checks = 0

    # ---------------------------------------------------------------- options and the rule

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._has_own_rule = cls.unclipped_gamma is not TwoPasses.unclipped_gamma

    def add_options(self, **values: Any) -> None:
        """Add options to all parameter groups, in the constructor of a subclass.

        The subclass lists their valid values in ``OPTIONS``. A group that was given its own value
        keeps it.
        """
        check(self.OPTIONS, values)
        self.defaults.update(values)
        for group in self.param_groups:
            for name, value in values.items():
                group.setdefault(name, value)
            check(self.OPTIONS, {name: group[name] for name in values})
        check_groups_agree(self)

    def unclipped_gamma(self, group: dict[str, Any], measured: Measurement) -> Tensor:
        """The next gamma of a group, before it is clipped to the bounds.

        A subclass may change the rule here. This runs after every measurement, on the device: use
        ``torch.where`` instead of branches on values, which would synchronize.
        """
        if not group["relative"]:
            return measured.raw_gamma
        raw, log_mean, n = measured.raw_gamma, group["log_mean"], group["positives"]
        counts = measured.is_finite & measured.is_positive & torch.isfinite(raw.log())
        log_mean.copy_(torch.where(counts, rule.remember(log_mean, raw), log_mean))
        n.add_(counts)
        return torch.where(measured.is_positive, raw / rule.reference(log_mean, n), raw)

    # --------------------------------------------------------------------- the three forms

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, freeze: torch.nn.Module | None = None
    ) -> Any:
        """Run one iteration with a closure, or its second half without one.

        If `needs_second_pass` is False, ``step()`` without a closure is the whole iteration.

        Args:
            closure: zeroes the gradients, computes the loss of the mini-batch, back-propagates and
                returns the loss. Called twice, or once if `needs_second_pass` is False. ``step``
                returns the loss of the first pass, at theta_k.
            freeze: a model whose running statistics the second pass does not update; see
                `steptuned.frozen_statistics`.
        """
        scaling = take_scaling(self)
        refuse_in_body(self, "step()")
        if closure is None:
            self._finish(scaling)
            return None
        if scaling is not None:
            raise RuntimeError(
                "a closure cannot be used with an enabled GradScaler: call "
                "scaler.step(opt.first_pass) after the first backward and scaler.step(opt) after "
                "the second"
            )
        refuse_pending(self, "step(closure)")
        warn_stale_gradients(self)
        self._form = "closure"
        noise = replay(self) if self.needs_second_pass else None
        with torch.enable_grad():
            loss = closure()
        if noise is None:
            self._single_pass(None)
        else:
            self._first_half(None)
            with all_or_nothing(self.cancel):
                noise.rewind()
                with torch.enable_grad(), frozen_statistics(freeze):
                    closure()
                self._second_half(None)
        self._closure_grads = [weakref.ref(p.grad) for p in params_of(self) if p.grad is not None]
        return loss

    def passes(self, *, freeze: torch.nn.Module | None = None) -> "Passes":
        """Run one iteration: the body of a ``for`` loop runs twice, with the same random numbers.

        If `needs_second_pass` is False, the body runs once.

        The body zeroes the gradients, computes the loss and back-propagates, on the same mini-batch
        in both passes. Leaving the loop early, by ``break`` or by an exception, ends the iteration:
        what the first pass changed stays, nothing is measured, and nothing is pending. If you keep
        the iterator in a variable, use it as a context manager, or call its ``close()`` after a
        ``break``.

        Args:
            freeze: a model whose running statistics the second pass does not update; see
                `steptuned.frozen_statistics`.
        """
        if torch.compiler.is_compiling():
            warn_compiled(self)
        refuse_in_body(self, "passes()")
        refuse_pending(self, "passes()")
        return Passes(self._passes(freeze))

    def _passes(self, freeze: torch.nn.Module | None) -> Generator[int, None, None]:
        self._form = "passes"
        noise = replay(self) if self.needs_second_pass else None
        try:
            self._in_body = True
            yield 0
            self._in_body = False
            if noise is None:
                self.step()
                return
            with torch.no_grad():
                self._first_half(None)
            with all_or_nothing(self.cancel):
                noise.rewind()
                self._in_body = True
                with frozen_statistics(freeze):
                    yield 1
                self._in_body = False
                self.step()
        finally:
            self._in_body = False

    def half_step(self) -> None:
        """Do the first half of an iteration, with the gradients of the first pass.

        `step` does the second half. If `needs_second_pass` is False, `step` alone is the iteration,
        and ``half_step`` raises an error.

        This method takes ownership of the gradients: ``p.grad`` is None afterwards, so the second
        pass cannot be added to the first. If you keep a reference to a gradient, do not write to it
        before the second half.
        """
        self._first_pass.step()

    def _finish(self, scaling: Scaling | None) -> None:
        """``step()`` without a closure."""
        pending = self.param_groups[0]["pending"]
        if not pending:
            if is_initialization(self):
                self._initialize()
                return
            if not self.needs_second_pass:
                self._single_pass(scaling)
                return
            raise RuntimeError(
                "step() without a pending half step: call opt.half_step() between the two backward "
                "passes, or give step() a closure"
            )
        mode = scaling_mode(scaling)
        if pending not in (EMPTY, mode):
            raise RuntimeError(
                f"the first pass came {SCALING_MODES[pending]} and the second "
                f"{SCALING_MODES[mode]}, so one of them is scaled wrongly: call opt.cancel(), and "
                "use the same mode for both"
            )
        self._second_half(scaling)

    def _initialize(self) -> None:
        """Create the state, for torch.distributed.checkpoint."""
        for p in params_of(self):
            if p.requires_grad:
                self.state[p].update(fresh_state(p))

    def _default_state(self, p: Tensor) -> dict[str, Any]:
        """What a state_dict contains for a parameter that has no state yet."""
        return fresh_state(p) if p.requires_grad and not is_lazy(p) else {}

    def _clear_state(self) -> None:
        self.state.clear()

    @property
    def needs_second_pass(self) -> bool:
        """Whether this mini-batch is used twice. Always True with ``tune_every=1``.

        May be read at any time: before an iteration it refers to the next one, and it changes only
        when ``step()`` finishes an iteration. It is a Python value, so reading it does not
        synchronize.
        """
        group = self.param_groups[0]
        is_cleared = self._has_measured and not self.state
        return is_cleared or min(group["countdown"], group["tune_every"] - 1) == 0

    @property
    def first_pass(self) -> Optimizer:
        """The first half of an iteration as an optimizer, for ``scaler.step(opt.first_pass)``."""
        return cast(Optimizer, self._first_pass)

    @property
    def half(self) -> Optimizer:
        """The former name of `first_pass`."""
        warn("opt.half is now called opt.first_pass", DeprecationWarning)
        return self.first_pass

    @property
    def pending(self) -> bool:
        """Whether the first pass of an iteration is done and its second is not."""
        return bool(self.param_groups[0]["pending"])

    def cancel(self) -> None:
        """Forget a pending half step, without undoing it.

        Parameters and gradients stay as they are now, nothing is measured, and the iteration is not
        counted.
        """
        clear_pending(self)
        self._versions.clear()
        self._noise = None

    def reset(self) -> None:
        """Forget all measurements, for example before fine-tuning.

        G, gamma, k and `stats` are then those of a new optimizer.
        """
        self.cancel()
        self._clear_state()
        scalars = fresh_scalars(scalar_device(self))
        for group in self.param_groups:
            group.update(scalars, **fresh_group(scalars, group["tune_every"]))
        share(self)
        self._has_measured = False
        self._warned.discard("stuck")

    # ------------------------------------------------------------------------- diagnostics

    @property
    def gamma(self) -> Tensor:
        """The current gamma, a 0-d tensor on the first parameter's device.

        Reading it does not synchronize. With ``per_group=True`` this, `raw_gamma`, `reference` and
        `curvature` are 1-d tensors, with one entry per parameter group.
        """
        return self._per_gamma([group["gamma"].clone() for group in tuned_groups(self)])

    def _per_gamma(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values) if self.param_groups[0]["per_group"] else values[0]

    @property
    def raw_gamma(self) -> Tensor:
        """The last measured gamma, before clipping.

        It is 1 / curvature (for StepTuned, the slope along the step / curvature), or nu if the
        curvature is not positive; nan before the first measurement and if the last one was ignored.
        """
        return self._per_gamma([last(group).raw_gamma for group in tuned_groups(self)])

    @property
    def reference(self) -> Tensor:
        """What the raw gamma is divided by with ``relative=True``: its running geometric mean.

        1 before the first measurement with positive curvature.
        """
        groups = tuned_groups(self)
        return self._per_gamma([rule.reference(g["log_mean"], g["positives"]) for g in groups])

    @property
    def curvature(self) -> Tensor:
        """The curvature of the loss along the last measured step, <G, dtheta> / |dtheta|^2.

        A 0-d tensor; nan before the first measurement and if the last one was ignored.
        """
        return self._per_gamma([last(group).curvature for group in tuned_groups(self)])

    def stats(self, group: int = 0) -> Stats:
        """How often the curvature was negative, gamma was at a bound, or a measurement was ignored.

        Also has the quartiles of the recent raw gammas.

        Args:
            group: with ``per_group=True``, the index of the parameter group. Otherwise the result
                is the same for all groups.
        """
        warn_if_stuck(self)
        return stats_of(self, self.param_groups[group])

    # ------------------------------------------------------------------------------- state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Not allowed while a half step is pending.

        Its part of G starts at zero. With ``per_group=True`` the group has its own gamma, which
        starts at 1.
        """
        if self.param_groups:
            refuse_pending(self, "add_param_group()")
        check_group(param_group, self, self.OPTIONS)
        super().add_param_group(param_group)
        first, group = self.param_groups[0], self.param_groups[-1]
        with all_or_nothing(self.param_groups.pop):
            check_params(group, type(self).__name__)
            sharded.refuse(group["params"], type(self).__name__)
        if group is first or first["per_group"]:
            group.update(fresh_scalars(scalar_device(self)))
            m, M = group["bounds"]
            if not m <= group["nu"] <= M:
                warn(
                    f"nu={group['nu']} lies outside bounds=({m}, {M}) and will be clipped to them: "
                    "widen the bounds to use it"
                )
        scalars = {name: (group if first["per_group"] else first)[name] for name in SCALARS}
        counts = () if first["per_group"] else ("k", "single", "counted")
        names = ("skipped", "countdown", "divided", *counts)
        shared = {name: first[name] for name in names if name in first}
        group.update(scalars, **fresh_group(scalars, group["tune_every"]) | shared)

    def __getstate__(self) -> dict[str, Any]:
        count_recent(self)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_first_pass" not in self.__dict__:
            self._start()
        upgrade(self)
        self._has_measured = bool(self.state)

    def state_dict(self) -> dict[str, Any]:
        """The state. It has the same keys at any time: zeros stand for what is not in memory."""
        count_recent(self)
        with filled(self):
            saved = super().state_dict()
        for group in saved["param_groups"]:
            counts = {n: torch.tensor(group[n], device="cpu") for n in ("k", "single")}
            group.update(counts)
            # Without clipping both are one tensor. A distributed checkpoint loads them in place.
            group["moved"] = group["moved"].clone()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Tensors are copied and keep the precision in which they were saved."""
        saved: dict[str, Any] = {}

        def take(_: Optimizer, state_dict: dict[str, Any]) -> None:
            check_fits(self, state_dict)
            saved.update(state_dict)

        # Registered last, so that it sees what the other hooks return.
        hook = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._versions.clear()
        self._noise = None
        self._restore(saved)
        self._has_measured = bool(self.state)

    def _restore(self, saved: dict[str, Any]) -> None:
        """Restore what torch has cast to the parameters' precision."""
        restore(self, saved)


class FirstPass(Scalable):
    """The first half of an iteration, as an optimizer that ``GradScaler.step`` accepts."""

    def __init__(self, optimizer: TwoPasses) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _owner(self) -> TwoPasses:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer of this half is gone"
        return optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._owner().param_groups

    def _refuse_second_unscaling(self, scaler: Any) -> None:
        states = getattr(scaler, "_per_optimizer_states", {})
        stage = states[id(self._owner())]["stage"] if id(self._owner()) in states else None
        if getattr(stage, "name", "") == "UNSCALED":
            raise RuntimeError(
                "scaler.unscale_(opt) has unscaled the gradients, and scaler.step(opt.first_pass) "
                "would unscale them again: call scaler.unscale_(opt.first_pass) before the first "
                "half, scaler.unscale_(opt) before the second"
            )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        scaling = take_scaling(self)
        owner = self._owner()
        take_scaling(owner)  # left over if the last iteration was not finished
        refuse_in_body(owner, "half_step()")
        owner._form = "hand"
        if closure is not None:
            raise RuntimeError(
                "the first half takes no closure: run the first backward, then "
                "scaler.step(opt.first_pass)"
            )
        refuse_unneeded(owner)
        owner._first_half(scaling)


class Passes(Iterator[int]):
    """The two passes of an iteration: a ``for`` loop over them runs its body twice.

    As a context manager, it ends the iteration at the end of its block.
    """

    def __init__(self, run: Generator[int, None, None]) -> None:
        self._run = run

    def __next__(self) -> int:
        return next(self._run)

    def close(self) -> None:
        """End an unfinished iteration: nothing is measured, and nothing is pending."""
        self._run.close()

    def __enter__(self) -> "Passes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
