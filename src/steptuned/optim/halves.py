"""The two halves of an iteration of StepTunedSGD, or its single pass."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from steptuned import rule
from steptuned.optim import flat, sharded
from steptuned.optim.arguments import scalar, tuned_groups
from steptuned.optim.bucket import (
    Bucket,
    g0_of,
    gather,
    is_low_precision,
    owns_memory,
    params_of,
    precision,
)
from steptuned.optim.kernel import COMPLETE, RawGradient, Workspace
from steptuned.optim.notices import (
    NOISE_CHECKS,
    ONE_PASS_ONLY,
    check_groups_agree,
    check_unit_of_G,
    refuse_pending,
    warn_other_noise,
    warn_two_schedules,
)
from steptuned.optim.record import iterations
from steptuned.optim.scaling import Scaling, all_or_nothing, scaling_mode
from steptuned.optim.state import EMPTY, fresh_state, place_scalars
from steptuned.optim.tuning import count_single, finish
from steptuned.rng import replay

if TYPE_CHECKING:
    from steptuned.optim.step_tuned_sgd import StepTunedSGD
    from steptuned.optim.two_passes import TwoPasses


@_disable_dynamo  # gathering stays in Python; only the arithmetic in flat.py compiles
def first_half(opt: "StepTunedSGD", scaling: Scaling | None) -> None:
    """theta_k to theta_{k+1/2}; keeps g0."""
    refuse_pending(opt, "half_step()")
    begin(opt, scaling)
    buckets = gather(opt, scaling)
    if not buckets:
        for group in opt.param_groups:
            group["pending"] = EMPTY
        return
    coefficient = _clip_coefficient(opt, buckets, scaling)
    set_steps(opt)
    for group in opt.param_groups:
        group["moved"] = _clipped(group["effective_lr"], coefficient)
    with all_or_nothing(opt.cancel):
        for bucket in buckets:
            _move(opt, bucket, scaling)
            bucket.release()
    if scaling is not None:
        opt.param_groups[0]["sound"].copy_(scaling.found_inf == 0)
    for group in opt.param_groups:
        group["pending"] = scaling_mode(scaling)
    torch.clear_autocast_cache()  # its copies of the parameters are those of theta_k
    watch_noise(opt)


def watch_noise(opt: "TwoPasses") -> None:
    """In the manual form, record the random states, to compare them after the second pass."""
    if (
        opt._form == "hand"
        and opt.param_groups[0]["replay_rng"]
        and opt._noise_checks < NOISE_CHECKS
    ):
        opt._noise = replay(opt)


def begin(opt: "TwoPasses", scaling: Scaling | None) -> None:
    """Checks and preparation before an iteration."""
    if scaling is not None:
        sharded.refuse_scaling(params_of(opt))
    check_groups_agree(opt)
    warn_two_schedules(opt)
    if not opt.state and opt._has_measured:  # the user has cleared the state
        opt.reset()
    check_unit_of_G(opt)
    place_scalars(opt)


def set_steps(opt: "TwoPasses") -> None:
    """Set the step of each group for this iteration."""
    first = opt.param_groups[0]
    decay: Tensor | None = None
    if first.get("decay_every") is not None:
        k, dtype = iterations(opt, first), first["gamma"].dtype
        k = k.to(dtype) if isinstance(k, Tensor) else torch.tensor(k, dtype=dtype, device="cpu")
        decay = rule.robbins_monro(k, first["delta"], first["decay_every"])
    for group in opt.param_groups:
        gamma, lr = group["gamma"], scalar(group["lr"])
        if flat.is_on_host([gamma]):
            group["effective_lr"] = gamma * lr if decay is None else gamma * decay * lr
            continue
        if decay is not None:
            lr = lr * (decay.item() if decay.is_cpu else decay)
        step = torch.empty_like(gamma, dtype=_step_dtype(group, gamma))
        group["effective_lr"] = torch.mul(gamma, lr, out=step)


def _step_dtype(group: dict[str, Any], gamma: Tensor) -> torch.dtype:
    """The precision in which a step is used."""
    return precision(group["params"][0]) if group["params"] else gamma.dtype


def _clipped(step: Tensor, coefficient: Tensor | None) -> Tensor:
    return step if coefficient is None else step * coefficient


@_disable_dynamo
def single_pass(opt: "StepTunedSGD", scaling: Scaling | None) -> None:
    """theta_k to theta_{k+1} for a mini-batch that is used once: SGD with the current gamma."""
    begin(opt, scaling)
    buckets = gather(opt, scaling)
    if buckets:
        coefficient = _clip_coefficient(opt, buckets, scaling)
        set_steps(opt)
        for bucket in buckets:
            step = _clipped(bucket.group["effective_lr"], coefficient).to(bucket.device)
            _descend(bucket, step, scaling)
            bucket.release()
    count_single(opt, bool(buckets), scaling)


def _descend(bucket: Bucket, step: Tensor, scaling: Scaling | None) -> None:
    """A step of SGD."""
    if bucket.workspace is not None:
        decay = bucket.group["weight_decay"]
        bucket.workspace.first_pass(bucket.grads, None, step.item(), sign=bucket.sign, decay=decay)
    else:
        flat.subtract_scaled(bucket.params, bucket.gradient_of_J(scaling), step)


def _move(opt: "StepTunedSGD", bucket: Bucket, scaling: Scaling | None) -> None:
    """The first half step of a bucket's parameters. Takes ownership of their gradients."""
    if bucket.workspace is not None:
        _move_by_kernel(opt, bucket, bucket.workspace)
        return
    params = bucket.params
    moved, weight_decay = bucket.group["moved"].to(bucket.device), bucket.group["weight_decay"]
    displacement: list[Tensor] = []
    if bucket.in_chunks:
        g0 = [
            g if not weight_decay and owns_memory(g) else torch.empty_like(p)
            for p, g in zip(params, bucket.grads, strict=True)
        ]
        flat.first_pass_in_chunks(params, bucket.grads, g0, moved, weight_decay)
    else:
        grads = bucket.gradient_of_J(scaling)
        g0 = [
            new.clone() if new is g and not owns_memory(g) else new
            for new, g in zip(grads, bucket.grads, strict=True)
        ]
        before = [p.clone() for p in params] if bucket.is_low_precision else []
        flat.first_pass(params, g0, moved)
        displacement = [p.to(precision(p)) - b for p, b in zip(params, before, strict=bool(before))]
    _hold(opt, bucket, g0, 1)
    for state, p, moved_by in zip(
        bucket.states, bucket.owners, displacement, strict=bool(displacement)
    ):
        state["displacement"] = sharded.shard_like(p, moved_by)


def _move_by_kernel(opt: "StepTunedSGD", bucket: Bucket, workspace: Workspace) -> None:
    """`_move` by the kernel, which holds a large gradient that has its own memory, uncopied."""
    sign, decay = bucket.sign, bucket.group["weight_decay"]
    step = bucket.group["moved"].item()
    g0 = workspace.own_g0
    if g0 is None:
        may_hold = step * decay <= 0.5  # otherwise rebuilding g0 would lose precision
        if may_hold and all(map(owns_memory, bucket.grads)):
            workspace.first_pass(bucket.grads, None, step, sign=sign, decay=decay)
            _hold(opt, bucket, bucket.grads, RawGradient(sign, decay, 1 / (1 - step * decay)))
            return
        g0 = [torch.empty_like(p) for p in bucket.params]
    workspace.first_pass(bucket.grads, g0, step, sign=sign, decay=decay)
    _hold(opt, bucket, g0, COMPLETE)


def _hold(opt: "StepTunedSGD", bucket: Bucket, g0: list[Tensor], held: RawGradient | int) -> None:
    """Keep g0 until the second pass. If it is the gradient itself, record its version."""
    if not all(bucket.states):
        for i, (state, p) in enumerate(zip(bucket.states, bucket.owners, strict=True)):
            if not state:
                bucket.states[i] = opt.state[p]  # it may have entries of other programs
                bucket.states[i].update(fresh_state(p))
    if bucket.G is not None and held is COMPLETE:  # plain tensors, and copies of the gradients
        for p, new, state in zip(bucket.owners, g0, bucket.states, strict=True):
            state["g0"], state["held"], p.grad = new, held, None
        return
    for p, g, new, state in zip(bucket.owners, bucket.grads, g0, bucket.states, strict=True):
        if new is g:
            if g.requires_grad:
                new = g.detach()  # without the graph that create_graph=True leaves on it
            opt._versions.append((new, new._version))
        state["g0"], state["held"] = (
            new if type(p) in sharded.PLAIN else sharded.shard_like(p, new),
            held,
        )
        p.grad = None


@_disable_dynamo
def second_half(opt: "StepTunedSGD", scaling: Scaling | None) -> None:
    """theta_{k+1/2} to theta_{k+1}; measures the curvature and sets gamma_{k+1}."""
    if any(held._version != version for held, version in opt._versions):
        raise RuntimeError(
            "a gradient of the first pass was overwritten in place before the second pass was "
            "done: let backward make new gradients (zero_grad with set_to_none=True), or drop the "
            "half step with opt.cancel()"
        )
    buckets = gather(opt, scaling)
    if end_if_no_gradients(opt, bool(buckets)):
        return
    coefficient = _clip_coefficient(opt, buckets, scaling)
    first = opt.param_groups[0]
    valid = (
        None
        if scaling is None
        else first["sound"] & (scaling.found_inf == 0).to(first["sound"].device)
    )
    sums: Tensor | list[tuple[float, float]]
    with all_or_nothing(opt.cancel):
        if len(tuned_groups(opt)) == 1 and all(bucket.is_paired for bucket in buckets):
            sums = [_measure_on_host(buckets, coefficient)]
        else:
            sums = _measure_all(opt, buckets, coefficient, scaling, valid)
        for bucket in buckets:
            bucket.release()
    finish(opt, sums, valid)


def _measure_on_host(buckets: list[Bucket], coefficient: Tensor | None) -> tuple[float, float]:
    """`_measure_all` if the kernel does all of it."""
    along = square = 0.0
    for bucket in buckets:
        assert bucket.workspace is not None
        step = _clipped(bucket.group["effective_lr"], coefficient)
        if is_still(bucket.group, bucket.params):
            _descend(bucket, step, None)
            continue
        share = _measure_by_kernel(bucket, bucket.workspace, step.item())
        along, square = along + share[0], square + share[1]
    return along, square


def _measure_all(
    opt: "StepTunedSGD",
    buckets: list[Bucket],
    coefficient: Tensor | None,
    scaling: Scaling | None,
    valid: Tensor | None,
) -> Tensor:
    """The second half step of all parameters. Returns the sums of each gamma."""
    shares = sharded.Shares(opt.param_groups[0]["gamma"], len(tuned_groups(opt)), 2)
    measured: set[int] = set()
    for bucket in buckets:
        step = _clipped(bucket.group["effective_lr"], coefficient).to(bucket.device)
        paired, single = bucket.split()
        if single.params:
            _descend(single, step, scaling)
        if not paired.params:
            continue
        measured.update(map(id, paired.states))
        if is_still(paired.group, paired.params):
            _descend(paired, step, scaling)
        else:
            share = _measure(opt, paired, step, scaling, valid)
            shares.add(paired.place, in_row(opt, paired.group, share))
    _measure_the_rest(opt, measured, valid, shares)
    return sharded.reduce(shares, params_of(opt))


def is_still(group: dict[str, Any], params: list[Tensor]) -> bool:
    """Whether dg / step is 0 / 0, so that G of these parameters must not change.

    False on an accelerator, where reading the step would synchronize; see `unless_still`.
    """
    return bool(group["divided"] and flat.is_on_host(params) and not group["moved"])


def unless_still(group: dict[str, Any], valid: Tensor | None) -> Tensor | None:
    """``valid``, but false if dg / step is 0 / 0."""
    if not group["divided"]:
        return valid
    return group["moved"] != 0 if valid is None else valid & (group["moved"] != 0)


def end_if_no_gradients(opt: "TwoPasses", found: bool) -> bool:
    """End the iteration if neither pass had gradients; return whether it ended.

    An error if only one pass had gradients.
    """
    warn_other_noise(opt)
    had = opt.param_groups[0]["pending"] != EMPTY
    if found != had:
        raise RuntimeError(
            ONE_PASS_ONLY[opt._form].format(*(("first", "second") if had else ("second", "first")))
        )
    if not found:
        for group in opt.param_groups:
            group["skipped"] += 1
        opt.cancel()
    return not found


def in_row(opt: "TwoPasses", group: dict[str, Any], share: Tensor) -> Tensor:
    """A group's share of the sums, in the row of its gamma."""
    groups = tuned_groups(opt)
    if len(groups) == 1:
        return share.unsqueeze(0)
    return torch.stack([share if each is group else torch.zeros_like(share) for each in groups])


def _measure(
    opt: "StepTunedSGD", bucket: Bucket, step: Tensor, scaling: Scaling | None, valid: Tensor | None
) -> Tensor:
    """The second half step of a bucket's parameters, all of which have g0.

    Returns their share of <G, d> and |d|^2, where d = theta_k - theta_{k+1/2}.
    """
    group, params = bucket.group, bucket.params
    if bucket.workspace is not None:
        share = _measure_by_kernel(bucket, bucket.workspace, step.item())
        return torch.tensor(share, dtype=torch.float64, device="cpu")
    g0, G = bucket.held("g0"), bucket.held("G")
    moved = group["moved"].to(bucket.device)
    along_g0 = flat.powers(moved, (2, 2) if group["divided"] else (1, 2))
    scale = rule.reciprocal(moved) if group["divided"] else 1.0
    if bucket.in_chunks:
        return along_g0 * flat.second_pass_in_chunks(
            params, bucket.grads, g0, G, step, group["beta"], group["weight_decay"], scale
        )
    if not flat.is_on_host(params):
        valid = unless_still(group, valid)
    valid = None if valid is None else valid.to(bucket.device)
    grads = bucket.gradient_of_J(scaling)
    if bucket.is_low_precision:
        sums = flat.second_pass(
            params, grads, g0, G, bucket.held("displacement"), step, group["beta"], valid, scale
        )
        return along_displacement(sums, group, moved)
    sums = flat.second_pass(params, grads, g0, G, g0, step, group["beta"], valid, scale)
    return flat.add_product(sums, along_g0)


def along_displacement(sums: Tensor, group: dict[str, Any], step: Tensor) -> Tensor:
    """<G, d> and |d|^2 from <G, dtheta> and |dtheta|^2. G may be an average of dg / step."""
    along, square = sums.unbind()
    return torch.stack((-along * step if group["divided"] else -along, square))


def _measure_by_kernel(bucket: Bucket, workspace: Workspace, step: float) -> tuple[float, float]:
    """`_measure` by the kernel."""
    group, held = bucket.group, bucket.states[0]["held"]
    moved = group["moved"].item()
    unit = moved if group["divided"] else 1.0
    along, square = workspace.second_pass(
        bucket.grads,
        bucket.held("g0"),
        bucket.held("G"),
        step,
        sign=bucket.sign,
        decay=group["weight_decay"],
        raw=held if isinstance(held, RawGradient) else COMPLETE,
        beta=group["beta"],
        scale=1 / unit,
    )
    return moved * along * unit, moved * moved * square


def _measure_the_rest(
    opt: "StepTunedSGD", measured: set[int], valid: Tensor | None, shares: sharded.Shares
) -> None:
    """`_measure` for parameters without a gradient: dg is zero, so their part of G decays."""
    if len(measured) == len(opt.state):
        return
    for group in opt.param_groups:
        counts = unless_still(group, valid)
        for p in group["params"]:
            state = opt.state.get(p)
            if not state or "G" not in state or id(state) in measured:
                continue
            G = sharded.local(state["G"])
            flat.fade(G, group["beta"], None if counts is None else counts.to(p.device))
            if state["held"]:
                displacement = (
                    sharded.local(state["displacement"])
                    if is_low_precision(p)
                    else g0_of(state, p) * -group["moved"].to(p.device)
                )
                share = torch.stack((flat.inner([G], [displacement]), flat.square([displacement])))
                share = along_displacement(share, group, group["moved"].to(p.device))
                shares.add(sharded.place(p), in_row(opt, group, share))


def _clip_coefficient(
    opt: "StepTunedSGD", buckets: list[Bucket], scaling: Scaling | None
) -> Tensor | None:
    limit = opt.param_groups[0]["max_grad_norm"]
    if limit is None or not buckets:
        return None
    shares = sharded.Shares(opt.param_groups[0]["gamma"])
    for bucket in buckets:
        if bucket.workspace is None:
            share = flat.square(bucket.gradient_of_J(scaling))
        else:
            decay = bucket.group["weight_decay"]
            square = bucket.workspace.square(bucket.grads, sign=bucket.sign, decay=decay)
            share = torch.tensor(square, dtype=torch.float64, device="cpu")
        shares.add(bucket.place, share)
    norm = sharded.reduce(shares, params_of(opt)).sqrt()
    return (limit / (norm + 1e-6)).clamp(max=1.0)
