"""From the sums of a measurement to the next gamma.

The sums are <G, d> and |d|^2, where d = theta_k - theta_{k+1/2} is the step of the first pass. The
curvature is -<G, d>.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from steptuned import rule
from steptuned.optim import flat
from steptuned.optim.arguments import tuned_groups
from steptuned.optim.notices import warn_if_stuck
from steptuned.optim.record import RECENT, count_recent, measurements
from steptuned.optim.scaling import Scaling
from steptuned.optim.state import Measurement

if TYPE_CHECKING:
    from steptuned.optim.two_passes import TwoPasses


def finish(
    opt: "TwoPasses", sums: Tensor | list[tuple[float, float]], valid: Tensor | None
) -> None:
    """Finish a measured iteration: compute the next gamma of each tuned group from its sums."""
    groups = tuned_groups(opt)
    opt._is_scaled = opt._is_scaled or valid is not None
    for group, row in zip(groups, sums, strict=True):
        _tune(opt, group, row, valid)
    opt._has_measured = bool(opt.state)  # StepTuned: none yet if both first passes overflowed
    opt.cancel()
    torch.clear_autocast_cache()  # its copies of the parameters are those of theta_{k+1/2}
    for group in opt.param_groups:
        group["countdown"] = group["tune_every"] - 1
        group["k"] += 1
    if 0 in [(group["k"] - group["single"]) % RECENT for group in groups]:
        count_recent(opt)
        if flat.is_on_host([groups[0]["gamma"]]):
            warn_if_stuck(opt)


def count_single(opt: "TwoPasses", had_gradients: bool, scaling: Scaling | None) -> None:
    """Finish an iteration of one pass. It counts if it had gradients and did not overflow."""
    torch.clear_autocast_cache()  # its copies of the parameters are those of theta_k
    for group in opt.param_groups:
        group["skipped"] += not had_gradients
        group["countdown"] = min(group["countdown"], group["tune_every"] - 1) - had_gradients
        group["k"] += had_gradients
        group["single"] += had_gradients
    if had_gradients and scaling is not None:
        opt._is_scaled = True
        for group in tuned_groups(opt):
            overflows = group["overflows"]
            overflows[1] += (scaling.found_inf != 0).reshape(()).to(overflows.device)


def _tune(
    opt: "TwoPasses",
    group: dict[str, Any],
    sums: Tensor | tuple[float, float],
    valid: Tensor | None,
) -> None:
    """Set gamma. It stays as it is if the sums are not finite or not valid, or the step is zero."""
    n = measurements(opt, group)
    row = group["measured"][(group["k"] - group["single"]) % RECENT]
    gamma, nu = group["gamma"], group["nu"]
    valid = _count_lost(opt, group, valid)
    is_plain = not (group["relative"] or opt._has_own_rule)
    if flat.is_on_host([gamma]) and valid is None and is_plain and isinstance(n, int):
        along, square = sums.tolist() if isinstance(sums, Tensor) else sums
        _tune_on_host(group, row, -along, square, n)
        return
    if not isinstance(sums, Tensor):
        sums = torch.tensor(sums, dtype=gamma.dtype, device="cpu")
    beta = group["beta"]
    debias = rule.debias(beta, n.to(sums.dtype)) if isinstance(n, Tensor) else rule.debias(beta, n)
    curvature, square = _curvature_and_square(sums, debias).unbind()
    if valid is not None:
        curvature = torch.where(valid, curvature, torch.nan)
    raw = rule.gamma(square, curvature, nu)
    ignored = raw.isnan()
    if is_plain:
        tuned = raw
    else:
        tuned = opt.unclipped_gamma(group, Measurement(raw, curvature > 0, ~ignored))
    torch.where(ignored, gamma, rule.clip(tuned, group["bounds"]), out=gamma)
    torch.stack((curvature, square, gamma), out=row)


def _count_lost(opt: "TwoPasses", group: dict[str, Any], valid: Tensor | None) -> Tensor | None:
    """Count a measurement that overflowed or, if G averages dg / step, had a step of zero.

    Returns whether neither is the case; None if the host knows that without a GradScaler.
    """
    if valid is not None:
        group["overflows"][0] += ~valid
    if not group["divided"]:
        return valid
    groups = [group] if group["per_group"] else opt.param_groups
    has_moved = torch.stack([each["moved"] != 0 for each in groups]).any()
    if flat.is_on_host([has_moved]) and has_moved:
        return valid
    group["still"] += ~has_moved if valid is None else valid & ~has_moved
    return has_moved if valid is None else valid & has_moved


def _curvature_and_square(sums: Tensor, debias: float | Tensor) -> Tensor:
    """<G, dtheta> and |dtheta|^2, with G debiased; nan if they are not finite."""
    if isinstance(debias, Tensor) or flat.is_on_host([sums]):
        along, square = sums + 0 * sums.sum()  # zero times infinity is nan
        return torch.stack((along * -debias, square))
    # The same in one operation. -<G, d> debias is written as <G, d> (1 - (1 + debias)).
    first = flat.constant((1.0, 0.0), sums.device, sums.dtype)
    return torch.addcmul(sums, sums, first, value=-1 - debias)


def _tune_on_host(
    group: dict[str, Any], row: Tensor, curvature: float, square: float, n: int
) -> None:
    """`_tune` in Python floats, bit for bit: faster than operations on 0-d tensors."""
    m, M = group["bounds"]
    curvature *= rule.debias(group["beta"], n)
    if not (math.isfinite(curvature) and math.isfinite(square)):
        row.fill_(math.nan)
        return
    gamma = min(max(square / curvature if curvature > 0 else group["nu"], m), M)
    group["gamma"].fill_(gamma)
    row.copy_(torch.tensor((curvature, square, gamma), dtype=row.dtype, device="cpu"))
