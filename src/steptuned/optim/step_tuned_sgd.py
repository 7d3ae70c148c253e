"""Algorithm 2 of the paper: Step-Tuned SGD."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steptuned import rule
from steptuned.optim import flat, sharded
from steptuned.optim.arguments import VALID, check, check_group, warn
from steptuned.optim.bucket import Bucket, is_low_precision, owns_memory, precision
from steptuned.optim.scaling import ROADS, Scalable, Scaling, all_or_nothing, road, take_scaling
from steptuned.replay import replay

LARGE = 1 << 16
"""A tensor on the CPU with at least this many elements is worked on in chunks."""

FULL = 1 << 24
"""Lists of tensors are worked on about so many elements at a time, which bounds the memory for what is in between."""

STUCK = 1000
"""After this many iterations in a row at the same bound, a warning."""

OF_ALL_GROUPS = ("nu", "beta", "bounds", "delta", "decay_every", "max_grad_norm", "replay_rng")
"""Options that belong to gamma, of which there is one, and so must agree between parameter groups."""

SCALARS = ("k", "gamma", "curvature", "sound", "tally", "streak")
"""What the iteration carries on, as tensors that all parameter groups share."""


class Stats(NamedTuple):
    """What the measurements of a run were like."""

    iterations: int
    """Iterations finished."""
    negative: float
    """Share of iterations that measured no positive curvature, so that gamma was nu."""
    at_lower: float
    """Share of iterations that left gamma at its lower bound."""
    at_upper: float
    """Share of iterations that left gamma at its upper bound (nu included, where nu is not below it)."""
    ignored: int
    """Measurements ignored because a gradient was not finite."""


class StepTunedSGD(Scalable, Optimizer):
    r"""SGD with a step tuned by curvature, which a second pass over the same mini-batch shows.

    For mini-batches $B_0, B_1, \dots$, from $G_{-1} = 0$ and $\gamma_0 = 1$, iteration k is

    $$\begin{align*}
    \theta_{k+1/2} &= \theta_k - a_k \gamma_k \nabla J_{B_k}(\theta_k), \qquad
    \theta_{k+1} = \theta_{k+1/2} - a_k \gamma_k \nabla J_{B_k}(\theta_{k+1/2}), \\
    \Delta\theta &= \theta_{k+1/2} - \theta_k, \qquad
    \Delta g = \nabla J_{B_k}(\theta_{k+1/2}) - \nabla J_{B_k}(\theta_k), \\
    G_k &= \beta G_{k-1} + (1-\beta) \Delta g, \qquad \hat G_k = G_k / (1 - \beta^{k+1}), \\
    \gamma_{k+1} &= \begin{cases} |\Delta\theta|^2 / \langle \hat G_k, \Delta\theta \rangle
    & \text{if } \langle \hat G_k, \Delta\theta \rangle > 0 \\ \nu & \text{otherwise} \end{cases}
    \quad\text{clipped to } [m, M],
    \end{align*}$$

    with $a_k = \mathrm{lr} / (1 + \lfloor k / \mathrm{decay\_every} \rfloor)^{1/2+\delta}$.

    Each iteration takes two back-propagations of one mini-batch. Three ways to give them, with the same result:

        loss = opt.step(closure)      # (1) the closure, which zeroes, computes and back-propagates, is called twice

        for _ in opt.passes():        # (2) the body runs twice
            opt.zero_grad()
            criterion(model(x), y).backward()

        opt.zero_grad()                           # (3) by hand
        criterion(model(x), y).backward()
        opt.half_step()
        criterion(model(x), y).backward()
        opt.step()

    Forms (1) and (2) make torch draw the same random numbers in both passes (dropout); in form (3)
    `steptuned.replay` does. One ``step()`` is one iteration in every form.

    Args:
        params: parameters or parameter groups. A group may have its own ``lr``, ``weight_decay``, ``maximize`` and ``foreach``.
            gamma is one number for all groups.
        lr: the scaling factor alpha, at least 0; a float or a 0-d tensor.
        nu: gamma where the curvature is not positive, above 0. Beyond the bounds it is clipped to them, with a warning.
        beta: memory of the average G, in [0, 1).
        bounds: (m, M), 0 < m <= M, between which gamma is kept.
        delta: exponent of the decay beyond 1/2, in [0, 1/2).
        decay_every: iterations after which the decay goes on by one. 1 is Algorithm 2 to the letter; half the number of
            mini-batches of an epoch, ``len(loader) / 2``, is the schedule the paper trained its networks with, where an
            epoch is ``len(loader)`` back-propagations; ``None`` leaves decay to a scheduler.
        weight_decay: lambda of the term lambda/2 |theta|^2 of J, at least 0. Its gradient is part of both passes, so its
            curvature is measured too.
        maximize: maximise J instead. lambda/2 |theta|^2 is minimised all the same, as torch's SGD has it.
        max_grad_norm: clip the update of each pass as if the gradient of J, weight decay included, had at most this norm.
            The curvature is measured with the gradients as they are and the displacement as it was.
        foreach: True works on lists of tensors at once, False on one after the other, None chooses by size and device.
        replay_rng: the same random numbers in both passes of forms (1) and (2).

    Examples:
        >>> import torch
        >>> from steptuned import StepTunedSGD
        >>> theta = torch.tensor([3.0, -2.0], requires_grad=True)
        >>> opt = StepTunedSGD([theta], lr=0.4)
        >>> for _ in range(200):
        ...     for _ in opt.passes():
        ...         opt.zero_grad()
        ...         (theta**2).sum().backward()
        >>> bool(theta.abs().max() < 1e-3)
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        nu: float = 2.0,
        beta: float = 0.9,
        bounds: tuple[float, float] = (0.5, 2.0),
        delta: float = 0.001,
        decay_every: float | None = 1,
        weight_decay: float = 0.0,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        foreach: bool | None = None,
        replay_rng: bool = True,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "nu": nu,
            "beta": beta,
            "bounds": bounds,
            "delta": delta,
            "decay_every": decay_every,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "max_grad_norm": max_grad_norm,
            "foreach": foreach,
            "replay_rng": replay_rng,
        }
        check(**defaults)
        sharded.refuse_private(type(self).__name__)
        defaults["bounds"] = tuple(bounds)
        self._start()
        super().__init__(params, defaults)

    def _start(self) -> None:
        """What is not part of the state."""
        self._half = HalfStep(self)
        self._versions: list[tuple[Tensor, int]] = []
        self._warned: set[str] = set()

    # ------------------------------------------------------------------------------------------ the three forms

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One iteration with a closure; without one, its second half.

        Args:
            closure: zeroes the gradients, computes the loss of the mini-batch, back-propagates and returns the loss.
                Called twice; the loss returned is the one of the first pass, at theta_k.
        """
        scaling = take_scaling(self)
        if closure is None:
            self._finish(scaling)
            return None
        if scaling is not None:
            raise RuntimeError(
                "a closure cannot be used with an enabled GradScaler: call scaler.step(opt.half) after the first "
                "backward and scaler.step(opt) after the second"
            )
        self._refuse_pending("step(closure)")
        rewind = self._remember_noise()
        with torch.enable_grad():
            loss = closure()
        self._first(None)
        with all_or_nothing(self.cancel):
            rewind()
            with torch.enable_grad():
                closure()
            self._second(None)
        return loss

    def passes(self) -> Iterator[int]:
        """Run the body of a ``for`` loop twice, on the same mini-batch, with the same random numbers: one iteration.

        The body zeroes the gradients, computes the loss and back-propagates. Leaving the loop early, by ``break`` or by
        an exception, ends the iteration: what the first pass changed stays, nothing is measured, nothing is pending.
        """
        self._refuse_pending("passes()")
        return self._passes()

    def _passes(self) -> Iterator[int]:
        rewind = self._remember_noise()
        yield 0
        self.half_step()
        with all_or_nothing(self.cancel):
            rewind()
            yield 1
            self.step()

    def half_step(self) -> None:
        """The first half of an iteration, with the gradients of the first pass. The second half is `step`.

        It takes the gradients over: ``p.grad`` is None afterwards, so that the second pass cannot be added to the first. Who kept a
        reference to one must not write to it before the second half.
        """
        self._half.step()

    @property
    def half(self) -> Optimizer:
        """The first half as an optimizer of its own, enough of one for ``scaler.step(opt.half)``."""
        return cast(Optimizer, self._half)

    def cancel(self) -> None:
        """Drop a pending half step: parameters and gradients stay as they are, nothing is measured, k does not count it."""
        for state in self.state.values():
            if state:
                state["g0"], state["held"] = None, 0
                if "displacement" in state:
                    state["displacement"] = None
        for group in self.param_groups:
            group["pending"] = ""
        self._versions.clear()

    # ------------------------------------------------------------------------------------------ to look at

    @property
    def gamma(self) -> Tensor:
        """The current gamma, a 0-d tensor on the first parameter's device."""
        self._warn_if_stuck()
        return self.param_groups[0]["gamma"].clone()

    @property
    def curvature(self) -> Tensor:
        """The curvature measured last, <G, dtheta>, a 0-d tensor on the first parameter's device; nan before there is one."""
        return self.param_groups[0]["curvature"].clone()

    def stats(self) -> Stats:
        """How often curvature was negative, a bound was hit, a measurement was ignored."""
        self._warn_if_stuck()
        group = self.param_groups[0]
        k = int(group["k"])
        negative, lower, upper, ignored = group["tally"].tolist()
        n = max(k, 1)
        return Stats(k, negative / n, lower / n, upper / n, ignored)

    def _warn_if_stuck(self) -> None:
        group = self.param_groups[0]
        m, M = group["bounds"]
        if "stuck" in self._warned or m == M:
            return
        streak = int(group["streak"])
        if abs(streak) < STUCK:
            return
        self._warned.add("stuck")
        if streak < 0:
            bound, knob = (
                f"lower bound {m}",
                "the steps are long for the curvature: lower lr or bounds[0], or beta if lr is falling fast",
            )
        elif group["curvature"] > 0:
            bound, knob = f"upper bound {M}", "the steps are short for the curvature: raise lr or bounds[1]"
        else:
            bound, knob = f"upper bound {M}", "the curvature is negative, where gamma is nu: lower nu if the loss is unstable"
        warn(f"gamma has been at its {bound} for {abs(streak)} iterations; {knob}")

    # ------------------------------------------------------------------------------------------ state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its part of G starts at zero. Refused while a half step is pending."""
        if self.param_groups:
            self._refuse_pending("add_param_group()")
        check_group(param_group, self, OF_ALL_GROUPS)
        super().add_param_group(param_group)
        first, group = self.param_groups[0], self.param_groups[-1]
        with all_or_nothing(self.param_groups.pop):
            sharded.refuse(group["params"], type(self).__name__)
        if group is first:
            first.update(_fresh_scalars(self._home()))
            m, M = first["bounds"]
            if not m <= first["nu"] <= M:
                warn(f"nu={first['nu']} lies outside bounds=({m}, {M}) and will be clipped to them: widen the bounds to use it")
        zero = torch.zeros_like(first["gamma"])
        group.update({name: first[name] for name in SCALARS}, pending="", step=zero, moved=zero.clone())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_half" not in self.__dict__:
            self._start()
        for group in self.param_groups:
            group.update({name: self.param_groups[0][name] for name in SCALARS})
            for name in self.defaults.keys() & VALID.keys():
                group.setdefault(name, self.defaults[name])  # an option that is newer than the state

    def state_dict(self) -> dict[str, Any]:
        """The state, with the same keys at every moment: zeros stand for what is not in memory."""
        lean = self.state
        self.state = defaultdict(dict)
        for group in self.param_groups:
            for p in group["params"]:
                if (p.requires_grad or p in lean) and not is_lazy(p):
                    self.state[p] = {
                        name: torch.zeros_like(p, dtype=precision(p), requires_grad=False) if value is None else value
                        for name, value in (lean.get(p) or _fresh_state(p)).items()
                    }
        try:
            return super().state_dict()
        finally:
            self.state = lean

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state; tensors are copied, in the precision in which they were saved."""
        taken: dict[str, Any] = {}

        def take(_: Optimizer, state_dict: dict[str, Any]) -> None:
            if any("gamma" not in group or "tally" not in group for group in state_dict["param_groups"]):
                raise ValueError("this state_dict is not one of StepTunedSGD: its parameter groups have no gamma")
            for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):  # torch says if they do not match
                for key, p in zip(saved["params"], group["params"], strict=False):
                    if not all(
                        sharded.spread_alike(v, p) for v in state_dict["state"].get(key, {}).values() if isinstance(v, Tensor)
                    ):
                        raise ValueError(
                            "this state_dict is spread over ranks in another way than the parameters: save and load it with "
                            "torch.distributed.checkpoint, which reshards it"
                        )
            taken.update(state_dict)

        hook = self.register_load_state_dict_pre_hook(take)  # the last one, so it sees what the others made of it
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._versions.clear()
        # torch has cast the state to the precision of the parameters: take it once more, in its own.
        for saved, group in zip(taken["param_groups"], self.param_groups, strict=True):
            for key, p in zip(saved["params"], group["params"], strict=True):
                state = taken["state"].get(key, {})
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        value = value.detach().to(p.device, copy=True) if name == "G" or state["held"] else None
                    self.state[p][name] = value

    # ------------------------------------------------------------------------------------------ the work

    def _remember_noise(self) -> Callable[[], None]:
        """Remember the random states; returns what puts them back."""
        return replay(self).rewind if self.param_groups[0]["replay_rng"] else lambda: None

    def _refuse_pending(self, what: str) -> None:
        if self.param_groups[0]["pending"]:
            raise RuntimeError(
                f"{what} while a half step is pending: finish it with a second backward of the same mini-batch and "
                "opt.step(), or drop it with opt.cancel()"
            )

    def _finish(self, scaling: Scaling | None) -> None:
        """``step()`` without a closure."""
        came = self.param_groups[0]["pending"]
        if not came:
            if not self.state and all(float(group["lr"]) == 0 for group in self.param_groups):
                # torch.distributed.checkpoint makes a fresh optimizer create its state by such a step.
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.requires_grad:
                            self.state[p] = _fresh_state(p)
                return
            raise RuntimeError(
                "step() without a pending half step: call opt.half_step() between the two backward passes, or give step() a closure"
            )
        if came != road(scaling):
            raise RuntimeError(
                f"the first pass came {ROADS[came]} and the second {ROADS[road(scaling)]}, so one of them is scaled wrongly: "
                "let both go the same way, after opt.cancel()"
            )
        self._second(scaling)

    @_disable_dynamo  # gathering is for Python; the arithmetic in flat.py is what compiles
    def _first(self, scaling: Scaling | None) -> None:
        """theta_k to theta_{k+1/2}; keeps g0."""
        self._refuse_pending("half_step()")
        if scaling is not None:
            sharded.refuse_scaling(self._params())
        self._settle()
        first = self.param_groups[0]
        buckets = self._gather(scaling)
        if not buckets:
            raise RuntimeError("half_step() found no gradient: run the first backward of the mini-batch before it")
        coefficient = self._clip_coefficient(buckets, scaling)

        decay = 1.0
        if first["decay_every"] is not None:
            decay = rule.robbins_monro(first["k"].to(first["gamma"].dtype), first["delta"], first["decay_every"])
        for group in self.param_groups:
            lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
            group["step"].copy_(first["gamma"] * decay * lr)
            group["moved"].copy_(group["step"] * coefficient)

        with all_or_nothing(self.cancel):
            for bucket in buckets:
                self._move(bucket, scaling)
        if scaling is None:
            first["sound"].fill_(True)
        else:
            first["sound"].copy_(scaling.found_inf == 0)
        for group in self.param_groups:
            group["pending"] = road(scaling)

    def _move(self, bucket: Bucket, scaling: Scaling | None) -> None:
        """The first half step of a bucket's parameters. Takes their gradients over."""
        params = bucket.params
        moved, weight_decay = bucket.group["moved"].to(bucket.device), bucket.group["weight_decay"]
        displacement: list[Tensor] = []
        if bucket.in_chunks:
            g0 = [
                g if not weight_decay and owns_memory(g) else torch.empty_like(p) for p, g in zip(params, bucket.grads, strict=True)
            ]
            flat.first_pass_in_chunks(params, bucket.grads, g0, moved, weight_decay)
        else:
            grads = bucket.gradient_of_J(scaling)
            g0 = [new.clone() if new is g and not owns_memory(g) else new for new, g in zip(grads, bucket.grads, strict=True)]
            before = [p.clone() for p in params] if bucket.is_low_precision else []
            flat.first_pass(params, g0, moved)
            displacement = [p.to(precision(p)) - b for p, b in zip(params, before, strict=bool(before))]
        for i, (p, g, held, state) in enumerate(zip(bucket.owners, bucket.grads, g0, bucket.states, strict=True)):
            if not state:
                state = self.state[p] = _fresh_state(p)
            if held is g:
                held = held.detach()  # without the graph that create_graph=True leaves on it
                self._versions.append((held, held._version))
            state["g0"], state["held"] = sharded.as_part_of(p, held), 1
            if displacement:
                state["displacement"] = sharded.as_part_of(p, displacement[i])
            p.grad = None

    @_disable_dynamo
    def _second(self, scaling: Scaling | None) -> None:
        """theta_{k+1/2} to theta_{k+1}; measures the curvature and sets gamma_{k+1}."""
        if any(held._version != version for held, version in self._versions):
            raise RuntimeError(
                "a gradient of the first pass was overwritten in place before the second pass was done: let backward "
                "make new gradients (zero_grad with set_to_none=True), or drop the half step with opt.cancel()"
            )
        buckets = self._gather(scaling)
        if not buckets and any(state and state["held"] for state in self.state.values()):
            raise RuntimeError(
                "step() found no gradient although the first pass had some: run the second backward of the same "
                "mini-batch before it, or drop the half step with opt.cancel()"
            )
        coefficient = self._clip_coefficient(buckets, scaling)
        first = self.param_groups[0]
        valid = None if scaling is None else first["sound"] & (scaling.found_inf == 0).to(first["sound"].device)

        shares = _Shares(first["gamma"].new_zeros(2))
        measured: set[int] = set()
        with all_or_nothing(self.cancel):
            for bucket in buckets:
                step = (bucket.group["step"] * coefficient).to(bucket.device)
                paired, single = bucket.split()
                if single.params:
                    flat.add_scaled(single.params, single.gradient_of_J(scaling), -step)
                if paired.params:
                    shares.add(paired.place, self._measure(paired, step, scaling, valid))
                    measured.update(map(id, paired.states))
            self._measure_the_rest(measured, valid, shares)
            curvature, square = sharded.reduce(shares, self._params())
        self._tune(curvature, square, valid)
        self.cancel()
        if first["gamma"].device.type == "cpu":
            self._warn_if_stuck()

    def _measure(self, bucket: Bucket, step: Tensor, scaling: Scaling | None, valid: Tensor | None) -> Tensor:
        """The second half step of a bucket's parameters, which have g0, and their share of <G, dtheta> and |dtheta|^2."""
        group, params = bucket.group, bucket.params
        g0, G = bucket.held("g0"), bucket.held("G")
        moved = group["moved"].to(bucket.device)
        along_g0 = torch.stack((-moved, moved**2))
        if bucket.in_chunks:
            return along_g0 * flat.second_pass_in_chunks(params, bucket.grads, g0, G, step, group["beta"], group["weight_decay"])
        valid = None if valid is None else valid.to(bucket.device)
        grads = bucket.gradient_of_J(scaling)
        if bucket.is_low_precision:
            return flat.second_pass(params, grads, g0, G, bucket.held("displacement"), step, group["beta"], valid)
        return along_g0 * flat.second_pass(params, grads, g0, G, g0, step, group["beta"], valid)

    def _measure_the_rest(self, measured: set[int], valid: Tensor | None, shares: "_Shares") -> None:
        """The same for parameters that lack a gradient: dg is zero, so their part of G fades."""
        if len(measured) == len(self.state):
            return
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p)
                if not state or id(state) in measured:
                    continue
                G = sharded.local(state["G"])
                flat.fade(G, group["beta"], None if valid is None else valid.to(p.device))
                if state["held"]:
                    displacement = (
                        sharded.local(state["displacement"])
                        if is_low_precision(p)
                        else sharded.local(state["g0"]) * -group["moved"].to(p.device)
                    )
                    share = torch.stack((flat.inner([G], [displacement]), flat.square([displacement])))
                    shares.add(sharded.place(p), share)

    def _tune(self, curvature: Tensor, square: Tensor, valid: Tensor | None) -> None:
        """gamma_{k+1}, unless the measurement is not finite or the iteration not valid; and the counts."""
        group = self.param_groups[0]
        m, M = group["bounds"]
        k, streak = group["k"], group["streak"]
        curvature = curvature * rule.debias(group["beta"], k.to(curvature.dtype))
        fine = torch.isfinite(curvature) & torch.isfinite(square)
        if valid is not None:
            fine &= valid
        measured = rule.gamma(square, curvature, group["nu"])
        lower, upper = measured <= m, measured >= M
        group["gamma"].copy_(torch.where(fine, rule.clip(measured, (m, M)), group["gamma"]))
        group["curvature"].copy_(torch.where(fine, curvature, group["curvature"]))
        group["tally"].add_(torch.stack([fine & ~(curvature > 0), fine & lower, fine & upper, ~fine]))
        longer = torch.where(lower, streak.clamp(max=0) - 1, torch.where(upper, streak.clamp(min=0) + 1, 0))
        streak.copy_(torch.where(fine, longer, streak))
        k.add_(1 if valid is None else valid)

    def _home(self) -> torch.device:
        return next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))

    def _settle(self) -> None:
        """Bring the scalars to the first parameter's device, should the model have been moved."""
        first = self.param_groups[0]
        home = self._home()
        if first["gamma"].device != home:
            for name in SCALARS:
                first[name] = first[name].to(home)
            for group in self.param_groups:
                group.update({name: first[name] for name in SCALARS})
                group.update(step=group["step"].to(home), moved=group["moved"].to(home))

    def _gather(self, scaling: Scaling | None) -> list[Bucket]:
        """The parameters that have a gradient, in lists of one group, device, precision and way to work."""
        full: list[Bucket] = []
        filling: dict[Any, Bucket] = {}
        for i, group in enumerate(self.param_groups):
            plain = scaling is None and not group["maximize"] and group["foreach"] is not True
            for p in group["params"]:
                g = sharded.gradient(p)
                if g is None:
                    continue
                if g.layout is not torch.strided:
                    raise RuntimeError("StepTunedSGD does not support sparse gradients: make the layer's gradients dense")
                if g.is_complex():
                    raise RuntimeError("StepTunedSGD does not support complex parameters: optimise torch.view_as_real(p) instead")
                state = self.state.get(p, {})
                if state:
                    _keep_up(state, p)
                in_chunks = plain and _fits_chunks(p, g, state)
                place = sharded.place(p)
                key = (i, p.device, p.dtype, in_chunks, place)
                if key not in filling:
                    filling[key] = Bucket(group, in_chunks, place)
                bucket = filling[key]
                bucket.add(p, g, state)
                if group["foreach"] is False or bucket.size >= FULL:
                    full.append(filling.pop(key))
        buckets = [*full, *filling.values()]
        for bucket in buckets:
            if bucket.is_low_precision:
                self._warn_low_precision(bucket.params[0].dtype)
        return buckets

    def _clip_coefficient(self, buckets: list[Bucket], scaling: Scaling | None) -> Tensor | float:
        limit = self.param_groups[0]["max_grad_norm"]
        if limit is None or not buckets:
            return 1.0
        shares = _Shares(self.param_groups[0]["gamma"].new_zeros(()))
        for bucket in buckets:
            shares.add(bucket.place, flat.square(bucket.gradient_of_J(scaling)))
        norm = sharded.reduce(shares, self._params()).sqrt()
        return (limit / (norm + 1e-6)).clamp(max=1.0)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _warn_low_precision(self, dtype: torch.dtype) -> None:
        if "low precision" not in self._warned:
            self._warned.add("low precision")
            warn(
                f"parameters are {dtype}: steps smaller than their rounding are lost, and the curvature measured from the rest "
                "is noisy; float32 parameters under autocast train better"
            )


class _Shares(dict[sharded.Place | None, Tensor]):
    """This rank's shares of sums over the parameters, for each place where parameters lie."""

    def __init__(self, zeros: Tensor) -> None:
        super().__init__({None: zeros})

    def add(self, place: sharded.Place | None, share: Tensor) -> None:
        share = share.to(self[None].device)
        self[place] = self[place] + share if place in self else share


class HalfStep(Scalable):
    """The first half of an iteration, enough of an optimizer for ``GradScaler.step``."""

    def __init__(self, optimizer: StepTunedSGD) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _owner(self) -> StepTunedSGD:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer of this half is gone"
        return optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._owner().param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        scaling = take_scaling(self)
        take_scaling(self._owner())  # what an iteration left that did not come to its end
        if closure is not None:
            raise RuntimeError("the first half takes no closure: run the first backward, then scaler.step(opt.half)")
        self._owner()._first(scaling)


def _keep_up(state: dict[str, Any], p: Tensor) -> None:
    """Let G follow a parameter that was moved to another device or made of another precision."""
    G = state["G"]
    if G.device != p.device or G.dtype != precision(p):
        state["G"] = G.to(p.device, precision(p))


def _fits_chunks(p: Tensor, g: Tensor, state: dict[str, Any]) -> bool:
    """Whether this parameter, or this rank's part of it, can be worked on in chunks of flat memory."""
    if p.numel() < LARGE or p.device.type != "cpu" or p.dtype != g.dtype or is_low_precision(p):
        return False
    parts = [sharded.local(t) for t in (p, g, *(state[name] for name in ("G", "g0") if state and state[name] is not None))]
    if type(parts[0]) not in (Tensor, torch.nn.Parameter):
        return False
    return parts[0].numel() >= LARGE and flat.same_layout(*parts)


def _fresh_state(p: Tensor) -> dict[str, Any]:
    state = {"G": torch.zeros_like(p, dtype=precision(p), requires_grad=False), "g0": None, "held": 0}
    return state | {"displacement": None} if is_low_precision(p) else state


def _fresh_scalars(device: torch.device) -> dict[str, Tensor]:
    one = torch.ones((), dtype=flat.scalar_dtype(device), device=device)
    none = torch.zeros((), dtype=torch.int64, device=device)
    return {
        "k": none,
        "gamma": one,
        "curvature": torch.full_like(one, torch.nan),
        "sound": torch.ones_like(one, dtype=torch.bool),
        "tally": none.repeat(4),  # iterations with negative curvature, at the lower bound, at the upper bound, ignored
        "streak": none.clone(),  # iterations in a row at the upper bound; negative: at the lower bound
    }
