"""The passes of StepTuned: the base moves the parameters, and gamma scales the move.

The curvature is measured along the displacement.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from steptuned import rule
from steptuned.optim import flat, sharded
from steptuned.optim.arguments import tuned_groups
from steptuned.optim.bucket import gradients_of, is_low_precision, params_of, precision
from steptuned.optim.halves import (
    begin,
    end_if_no_gradients,
    in_row,
    is_still,
    set_steps,
    unless_still,
    watch_noise,
)
from steptuned.optim.notices import refuse_pending, warn_low_precision
from steptuned.optim.scaling import Scaling, all_or_nothing, scaling_mode
from steptuned.optim.state import EMPTY, fresh_state
from steptuned.optim.tuning import count_single, finish

if TYPE_CHECKING:
    from steptuned.optim.step_tuned import StepTuned

COUPLED = {
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "ASGD",
    )
}
"""Bases whose weight decay is the gradient of lambda/2 |theta|^2, unless a group decouples it."""

PROPORTIONAL = COUPLED - {torch.optim.ASGD} | {torch.optim.AdamW}
"""Bases whose update is proportional to lr, and whose state does not depend on lr."""


@dataclass(slots=True)
class Part:
    """This rank's parameters with a gradient, of one group, device, precision and place."""

    group: dict[str, Any]
    place: sharded.Place | None
    owners: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)


@_disable_dynamo
def first_half(opt: "StepTuned", scaling: Scaling | None) -> None:
    """theta_k to theta_{k+1/2}; keeps g0 and the displacement."""
    refuse_pending(opt, "half_step()")
    begin(opt, scaling)
    parts = _gather(opt)
    if parts:
        coefficient = _clip_coefficient(opt, parts, scaling)
        set_steps(opt)
        for group in opt.param_groups:
            group["moved"] = group["effective_lr"] * coefficient
        overflow = _overflow(scaling)
        with all_or_nothing(opt.cancel):
            if not overflow:
                _first_move(opt, parts, scaling, coefficient)
        for p in params_of(opt):
            p.grad = None
        opt.param_groups[0]["sound"].fill_(not overflow)
    for group in opt.param_groups:
        group["pending"] = scaling_mode(scaling) if parts else EMPTY
    torch.clear_autocast_cache()  # its copies of the parameters are those of theta_k
    watch_noise(opt)


def _first_move(
    opt: "StepTuned", parts: list[Part], scaling: Scaling | None, coefficient: Tensor
) -> None:
    g0 = [[g.clone() for g in _gradient_of_J(opt, part, scaling)] for part in parts]
    before = _copies(parts)
    _move(opt, parts, scaling, coefficient, before)
    for part, gradients, points in zip(parts, g0, before, strict=True):
        for p, here, g, point in zip(part.owners, part.params, gradients, points, strict=True):
            state, kind = opt.state[p], precision(p)
            if "G" not in state:  # after the base's own: it may test whether its state is empty
                state.update(fresh_state(p, displaced=True))
            state["G"] = state["G"].to(p.device, kind)
            state["g0"], state["held"] = sharded.shard_like(p, g), 1
            displacement = torch.sub(here.to(kind), point, out=point.to(kind))
            state["displacement"] = sharded.shard_like(p, displacement)


@_disable_dynamo
def second_half(opt: "StepTuned", scaling: Scaling | None) -> None:
    """theta_{k+1/2} to theta_{k+1}; measures the curvature and sets gamma_{k+1}."""
    parts = _gather(opt)
    if end_if_no_gradients(opt, bool(parts)):
        return
    coefficient = _clip_coefficient(opt, parts, scaling)
    first = opt.param_groups[0]
    overflow = _overflow(scaling)
    valid = None if scaling is None else first["sound"] & (not overflow)
    with all_or_nothing(opt.cancel):
        if valid is None or valid:
            sums = _per_length(sharded.reduce(_measure(opt, parts, scaling), params_of(opt)))
        else:
            sums = first["gamma"].new_full((len(tuned_groups(opt)), 2), torch.nan)
        if not overflow:
            _move(opt, parts, scaling, coefficient)
    finish(opt, sums, valid)


@_disable_dynamo
def single_pass(opt: "StepTuned", scaling: Scaling | None) -> None:
    """theta_k to theta_{k+1} for a mini-batch that is used once. G does not change."""
    begin(opt, scaling)
    parts = _gather(opt)
    if parts:
        coefficient = _clip_coefficient(opt, parts, scaling)
        set_steps(opt)
        if not _overflow(scaling):
            _move(opt, parts, scaling, coefficient)
    count_single(opt, bool(parts), scaling)


def _gather(opt: "StepTuned") -> list[Part]:
    parts: dict[Any, Part] = {}
    for i, group in enumerate(opt.param_groups):
        for p, g in gradients_of(group, type(opt).__name__):
            place = sharded.place(p)
            part = parts.setdefault((i, p.device, p.dtype, place), Part(group, place))
            part.owners.append(p)
            part.params.append(sharded.local(p))
            part.grads.append(sharded.local(g))
            if is_low_precision(p):
                warn_low_precision(opt, p.dtype)
    return list(parts.values())


def _overflow(scaling: Scaling | None) -> bool:
    """Whether the base must not step. Synchronizes, as a GradScaler does for most optimizers."""
    return scaling is not None and bool(scaling.found_inf)


def _gradient_of_J(opt: "StepTuned", part: Part, scaling: Scaling | None) -> list[Tensor]:
    """The gradients unscaled, signed and with coupled weight decay.

    Where nothing changes, these are the gradients themselves, not copies.
    """
    group, kind = part.group, precision(part.params[0])
    grads = [g.to(kind) for g in part.grads]
    if scaling is not None and scaling.inverse is not None:
        grads = list(torch._foreach_mul(grads, scaling.inverse.to(grads[0].device, kind)))
    if group.get("maximize", False):
        grads = list(torch._foreach_neg(grads))
    if (
        type(opt.base) in COUPLED
        and group["weight_decay"]
        and not group.get("decoupled_weight_decay", False)
    ):
        grads = [
            g.add(p, alpha=group["weight_decay"]) for g, p in zip(grads, part.params, strict=True)
        ]
    return grads


def _clip_coefficient(opt: "StepTuned", parts: list[Part], scaling: Scaling | None) -> Tensor:
    """The factor that limits the norm of the base's gradients, which exclude weight decay."""
    one = torch.ones_like(opt.param_groups[0]["gamma"])
    limit = opt.param_groups[0]["max_grad_norm"]
    if limit is None:
        return one
    shares = sharded.Shares(one)
    for part in parts:
        shares.add(part.place, flat.square([g.to(precision(g)) for g in part.grads]))
    norm = sharded.reduce(shares, params_of(opt)).sqrt()
    if scaling is not None and scaling.inverse is not None:
        norm = norm * scaling.inverse.to(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def _copies(parts: list[Part]) -> list[list[Tensor]]:
    return [[p.clone() for p in part.params] for part in parts]


def _move(
    opt: "StepTuned",
    parts: list[Part],
    scaling: Scaling | None,
    coefficient: Tensor,
    before: list[list[Tensor]] | None = None,
) -> None:
    """theta + gamma (update of the base). ``before``: copies of theta, if there are any."""
    with _base_gradients(opt, parts, scaling, coefficient):
        if _may_scale_lr(opt):
            with _scaled_lr(opt):
                opt.base.step()
            return
        before = before or _copies(parts)
        opt.base.step()
    for part, points in zip(parts, before, strict=True):
        params, kind = part.params, precision(part.params[0])
        back = (1 - part.group["gamma"]).to(params[0].device, kind)  # fraction of the way back
        if params[0].dtype != kind:
            for p, point in zip(params, points, strict=True):
                p.copy_(p.to(kind).lerp(point.to(kind), back))
        elif params[0].device.type == "cpu":
            torch._foreach_lerp_(params, points, back.item())
        else:
            torch._foreach_lerp_(params, points, [back] * len(params))


def _may_scale_lr(opt: "StepTuned") -> bool:
    """Whether gamma can be multiplied into lr instead, which needs no copy of the parameters.

    Reading gamma must be free. A parameter in low precision would round differently.
    """
    return type(opt.base) in PROPORTIONAL and all(
        p.is_cpu and not is_low_precision(p) for p in params_of(opt)
    )


@contextmanager
def _scaled_lr(opt: "StepTuned") -> Iterator[None]:
    """Within this block, the base's learning rates are multiplied by gamma."""
    rates = [group["lr"] for group in opt.param_groups]
    try:
        for group in opt.param_groups:
            group["lr"] = group["lr"] * group["gamma"].item()
        yield
    finally:
        for group, lr in zip(opt.param_groups, rates, strict=True):
            group["lr"] = lr


@contextmanager
def _base_gradients(
    opt: "StepTuned", parts: list[Part], scaling: Scaling | None, coefficient: Tensor
) -> Iterator[None]:
    """Within this block, the parameters' gradients are unscaled and clipped, for the base."""
    inverse = None if scaling is None else scaling.inverse
    if inverse is None and opt.param_groups[0]["max_grad_norm"] is None:
        yield
        return
    kept = [[p.grad for p in part.owners] for part in parts]
    for part in parts:
        factor = (coefficient if inverse is None else coefficient * inverse.to(coefficient)).to(
            part.grads[0]
        )
        for p, g in zip(part.owners, torch._foreach_mul(part.grads, factor), strict=True):
            p.grad = sharded.shard_like(p, g)
    try:
        yield
    finally:
        for part, grads in zip(parts, kept, strict=True):
            for p, grad in zip(part.owners, grads, strict=True):
                p.grad = grad


def _measure(opt: "StepTuned", parts: list[Part], scaling: Scaling | None) -> sharded.Shares:
    """Update G; return each group's share of <G, d>, s <g0, d> and |d|^2, where d = -dtheta."""
    shares = sharded.Shares(opt.param_groups[0]["gamma"], len(tuned_groups(opt)), 3)
    measured: set[int] = set()
    for part in parts:
        if is_still(part.group, part.params):
            continue
        grads = _gradient_of_J(opt, part, scaling)
        pairs = [
            (opt.state[p], g)
            for p, g in zip(part.owners, grads, strict=True)
            if opt.state.get(p, {}).get("held")
        ]
        if pairs:
            states = [state for state, _ in pairs]
            shares.add(
                part.place,
                in_row(opt, part.group, _average(part.group, states, [g for _, g in pairs])),
            )
            measured.update(map(id, states))
    for group in opt.param_groups:
        counts = unless_still(group, None)
        for p in group["params"]:
            state = opt.state.get(p)
            if state and "G" in state and id(state) not in measured:
                G = sharded.local(state["G"])
                flat.fade(G, group["beta"], None if counts is None else counts.to(G.device))
                if state["held"]:
                    share = _sums_without_gradient(group, state)
                    shares.add(sharded.place(p), in_row(opt, group, share))
    return shares


def _average(group: dict[str, Any], states: list[dict[str, Any]], g1: list[Tensor]) -> Tensor:
    """Update G = beta G + (1 - beta) dg and return the sums. Overwrites g0, to save memory.

    If dg is not finite, it counts as zero in G, and the inner product is nan.
    """
    G, g0, dtheta = (_local(states, name) for name in ("G", "g0", "displacement"))
    slope = flat.inner(g0, dtheta)
    dg = g0
    torch._foreach_sub_(dg, g1)
    if group["divided"]:
        torch._foreach_mul_(dg, -rule.reciprocal(group["effective_lr"]).to(dg[0]))
    else:
        torch._foreach_neg_(dg)
    finite = torch.isfinite(flat.square(dg).to(dg[0].dtype))
    for d in dg:
        d.masked_fill_(~finite, 0.0)
    valid = None if flat.is_on_host(G) else unless_still(group, None)
    _mix(G, dg, 1 - group["beta"], valid)
    along = torch.where(finite, flat.inner(G, dtheta), torch.nan)
    return _sums(group, along, slope, flat.square(dtheta))


def _mix(G: list[Tensor], dg: list[Tensor], share: float, valid: Tensor | None) -> None:
    """G += share (dg - G), unless ``valid`` is given and false. Overwrites dg."""
    if valid is None:
        torch._foreach_lerp_(G, dg, share)
        return
    torch._foreach_sub_(dg, G)
    torch._foreach_mul_(dg, valid.to(dg[0]) * share)
    torch._foreach_add_(G, dg)


def _sums_without_gradient(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    """The sums of a parameter that has no gradient in the second pass."""
    G, g0, dtheta = (_local([state], name) for name in ("G", "g0", "displacement"))
    return _sums(group, flat.inner(G, dtheta), flat.inner(g0, dtheta), flat.square(dtheta))


def _local(states: list[dict[str, Any]], name: str) -> list[Tensor]:
    """This rank's shards of a state tensor."""
    return [sharded.local(state[name]) for state in states]


def _sums(group: dict[str, Any], along: Tensor, slope: Tensor, square: Tensor) -> Tensor:
    """<G, d>, s <g0, d> and |d|^2 with d = -dtheta, from <G, dtheta> and <g0, dtheta>."""
    moved, step = (group[name].to(along.device) for name in ("moved", "effective_lr"))
    return torch.stack((-along * step if group["divided"] else -along, -moved * slope, square))


def _per_length(sums: Tensor) -> Tensor:
    """<G, d> and s <g0, d>, divided by |d|^2: the first is then the curvature."""
    square = sums[:, 2:]
    return sums[:, :2] / torch.where(square > 0, square, 1.0)
