"""Warnings and errors for common mistakes with two passes."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from steptuned.optim import sharded
from steptuned.optim.arguments import refuse_differing, shared_options, tuned_groups, warn
from steptuned.optim.record import RECENT, bound_reached, read

if TYPE_CHECKING:
    from steptuned.optim.two_passes import TwoPasses

NOISE_CHECKS = 10
"""Compare the random numbers of the two passes in this many iterations by hand."""

ONE_PASS_ONLY = {
    "closure": "the closure computed gradients in its {0} call and none in its {1}: it must do the "
    "same in both",
    "passes": "the body of passes() computed gradients in its {0} pass and none in its {1}: it "
    "must do the same in both",
    "hand": "there were gradients in the {0} pass and none in the {1}: run a backward of the same "
    "mini-batch before both half_step() and step(), or drop the half step with opt.cancel()",
}


def warn_if_stuck(opt: "TwoPasses") -> None:
    """Warn if the last 100 measurements have all left gamma at the same bound. Synchronizes."""
    for i, group in enumerate(tuned_groups(opt)):
        m, M = group["bounds"]
        if "stuck" in opt._warned or m == M:
            continue
        bound = bound_reached(group)
        if bound is not None:
            opt._warned.add("stuck")
            name = f"gamma of parameter group {i}" if group["per_group"] else "gamma"
            _warn_stuck(group, name, opt._steps_as, is_lower=bound == m)


def _warn_stuck(group: dict[str, Any], name: str, steps_as: str, is_lower: bool) -> None:
    raw = read(group, group["measured"]).raw_gamma.nanmedian().item()
    bound, value = ("lower", group["bounds"][0]) if is_lower else ("upper", group["bounds"][1])
    what = "iterations" if group["tune_every"] == 1 else "measurements"
    if not 0 < raw < math.inf:
        cause = "mostly does not decrease" if raw <= 0 else "is mostly linear"
        advice = f"the raw gamma has a median of {raw:.3g}, because the loss {cause} along the step"
    elif raw == group["nu"]:
        advice = (
            "the curvature is mostly not positive, where gamma is nu: lower nu if the loss is "
            "unstable"
        )
    elif group["relative"]:
        advice = (
            f"the raw gamma, now {raw:.3g}, keeps {'falling' if is_lower else 'rising'} away "
            "from its running reference: widen the bounds, or "
            f"{'lower' if is_lower else 'raise'} lr"
        )
    else:
        advice = (
            f"the raw gamma has a median of {raw:.3g}; to let it tune the step, put the bounds "
            f"around that, such as bounds=({raw / 2:.2g}, {2 * raw:.2g}), and multiply lr by "
            f"{value / raw:.2g}, so that the steps keep their length"
        )
    warn(
        f"{name} has been at its {bound} bound {value} for {RECENT} {what}, so this is "
        f"{steps_as} with the step {value:g} x lr: {advice}"
    )


def warn_stale_gradients(opt: "TwoPasses") -> None:
    """Warn of a backward before step(closure): its gradients are added to the first call's."""
    if "stale" in opt._warned or (opt._has_measured and opt._form != "closure"):
        return
    known = {id(ref()) for ref in opt._closure_grads}
    if any(
        p.grad is not None and id(p.grad) not in known
        for p in [p for group in opt.param_groups for p in group["params"]]
    ):
        opt._warned.add("stale")
        warn(
            "step(closure) found gradients of an earlier backward, which are added to those of the "
            "closure's first call unless it zeroes them: remove the backward before step(closure), "
            "since the closure back-propagates itself"
        )


def warn_two_schedules(opt: "TwoPasses") -> None:
    decay_every = opt.param_groups[0].get("decay_every")
    if (
        decay_every is None
        or "schedule" in opt._warned
        or not hasattr(opt.step, "_wrapped_by_lr_sched")
    ):
        return
    opt._warned.add("schedule")
    warn(
        f"decay_every={decay_every} and a learning-rate scheduler both lower the step: use "
        "decay_every=None to leave it to the scheduler, or do without the scheduler"
    )


def warn_other_noise(opt: "TwoPasses") -> None:
    """Warn if the user forgot to replay the random numbers, in the manual form."""
    if opt._noise is None:
        return
    opt._noise_checks += 1
    if "noise" not in opt._warned and not opt._noise.is_current():
        opt._warned.add("noise")
        warn(
            "the two passes drew different random numbers, so gamma measures noise: "
            "for dropout, call noise = steptuned.replay(opt) before the first pass and "
            "noise.rewind() before the second; if this is intended, replay_rng=False turns this "
            "check off"
        )


def warn_low_precision(opt: "TwoPasses", dtype: torch.dtype) -> None:
    if "low precision" not in opt._warned:
        opt._warned.add("low precision")
        warn(
            f"parameters are {dtype}: steps smaller than their rounding are lost, and the "
            "curvature measured from the rest is noisy; float32 parameters under autocast train "
            "better"
        )


@_disable_dynamo
def warn_compiled(opt: "TwoPasses") -> None:
    if "compiled" not in opt._warned:
        opt._warned.add("compiled")
        warn(
            "torch.compile does not compile a function that contains a passes() loop: compile the "
            "model or the loss instead, or use step(closure)"
        )


def refuse_pending(opt: "TwoPasses", what: str) -> None:
    if not opt.param_groups[0]["pending"]:
        return
    if what in ("step(closure)", "passes()"):
        raise RuntimeError(
            f"{what} in the middle of an iteration: the first pass over another mini-batch was not "
            "followed by a second; drop it with opt.cancel()"
        )
    raise RuntimeError(
        f"{what} while a half step is pending: finish it with a second backward of the same "
        "mini-batch and opt.step(), or drop it with opt.cancel()"
    )


def refuse_unneeded(opt: "TwoPasses") -> None:
    if not opt.needs_second_pass:
        raise RuntimeError(
            "half_step() on a mini-batch that is used once: with "
            f"tune_every={opt.param_groups[0]['tune_every']} call it only if opt.needs_second_pass "
            "is True, and opt.step() once per mini-batch"
        )


def check_unit_of_G(opt: "TwoPasses") -> None:
    """Raise an error if G, an average of dg or of dg / step, does not match tune_every.

    tune_every may have been edited, or an older state loaded.
    """
    first = opt.param_groups[0]
    if not any("G" in state for state in opt.state.values()):
        for group in opt.param_groups:
            group["divided"] = first["tune_every"] > 1
    if first["divided"] != (first["tune_every"] > 1):
        raise RuntimeError(
            f"tune_every is {first['tune_every']} now, but the average G was made with "
            f"{'tune_every above 1' if first['divided'] else 'tune_every=1'}: start a new one with "
            "opt.reset()"
        )


def refuse_in_body(opt: "TwoPasses", what: str) -> None:
    if opt._in_body:
        raise RuntimeError(
            f"{what} inside the body of passes(): remove it, passes() does both halves of the step "
            "itself"
        )


def check_groups_agree(opt: "TwoPasses") -> None:
    """Raise an error if a shared option was edited in one group only."""
    first = opt.param_groups[0]
    for group in opt.param_groups[1:]:
        for name in shared_options(opt.OPTIONS, first):
            if name in group and group[name] != first[name]:
                refuse_differing(
                    name, first, f"the first group has {first[name]}, another has {group[name]}"
                )


def is_initialization(opt: "TwoPasses") -> bool:
    """Whether this step only creates the state, as torch.distributed.checkpoint asks for.

    It calls step() of a new optimizer with lr = 0 and zero gradients.
    """
    if opt.state or any(float(group["lr"]) != 0 for group in opt.param_groups):
        return False
    grads = [
        p.grad
        for p in [p for group in opt.param_groups for p in group["params"]]
        if p.requires_grad
    ]
    return all(
        g is not None and (g.device.type == "meta" or not sharded.local(g).any()) for g in grads
    )
