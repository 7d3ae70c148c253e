"""What was measured: counts, the last measurements, and statistics of them.

An accelerator takes a few microseconds to start each operation, however small. So a measurement
only computes gamma there and writes one row of ``measured``. Everything else is computed from these
rows, when it is read or when the ring buffer is full.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from steptuned import rule
from steptuned.optim.arguments import tuned_groups

if TYPE_CHECKING:
    from steptuned.optim.two_passes import TwoPasses

RECENT = 100
"""How many measurements are kept for `StepTunedSGD.stats`."""


class Stats(NamedTuple):
    """Statistics of the measurements of a run."""

    iterations: int
    """Finished iterations, each of one mini-batch."""
    negative: float
    """Share of measurements without positive curvature, so that gamma was nu."""
    at_lower: float
    """Share of measurements that left gamma at its lower bound."""
    at_upper: float
    """Share of measurements that left gamma at its upper bound, by the curvature or by nu."""
    ignored: int
    """Measurements ignored because a gradient was not finite or, with tune_every > 1, lr was 0."""
    raw_gamma: tuple[float, float, float]
    """Lower quartile, median and upper quartile of gamma before clipping.

    Over the last 100 measurements; nan before the first.
    """
    skipped: int
    """Iterations in which no parameter had a gradient in either pass. They change nothing."""
    measurements: int
    """Iterations that measured: all of them, or every T-th with ``tune_every=T``."""


def iterations(opt: "TwoPasses", group: dict[str, Any]) -> int | Tensor:
    """Finished iterations: k. A tensor if only the device knows how many have overflowed."""
    if not opt._is_scaled:
        return int(group["k"])
    return int(group["k"]) - _value(group["overflows"].sum())


def measurements(opt: "TwoPasses", group: dict[str, Any]) -> int | Tensor:
    """Those of `iterations` that have measured. The bias correction of G counts these."""
    n: int | Tensor = group["k"] - group["single"]
    if opt._is_scaled:
        n = n - _value(group["overflows"][0])
    if group["divided"]:
        n = n - _value(group["still"])
    return n


def _value(count: Tensor) -> int | Tensor:
    """A number if reading it is free, else the tensor."""
    return int(count) if count.is_cpu else count


class Rows(NamedTuple):
    """Measurements, as vectors."""

    curvature: Tensor
    """<G, dtheta> / |dtheta|^2; nan if the measurement was ignored.

    For `StepTuned` only its sign is right; `StepTuned.curvature` has the value.
    """
    raw_gamma: Tensor
    gamma: Tensor
    """gamma after the measurement."""


def read(group: dict[str, Any], rows: Tensor) -> Rows:
    """What rows of ``measured`` say."""
    curvature, square, gamma = rows.unbind(-1)
    return Rows(rule.per_unit(curvature, square), rule.gamma(square, curvature, group["nu"]), gamma)


def last_row(group: dict[str, Any]) -> Tensor:
    """The row of the last measurement; nan before the first."""
    row: Tensor = group["measured"][(group["k"] - group["single"] - 1) % RECENT]
    return row


def last(group: dict[str, Any]) -> Rows:
    """The last measurement, as 0-d tensors."""
    return read(group, last_row(group))


def count_recent(opt: "TwoPasses") -> None:
    """Add the measurements that were not counted yet to the tally.

    They are never more than the ring buffer holds: this is called whenever its end is reached.
    """
    for group in tuned_groups(opt):
        n = group["k"] - group["single"]
        start, new = group["counted"] % RECENT, n - group["counted"]
        if new:
            rows = read(group, group["measured"][start : start + new])
            ignored, (m, M) = rows.raw_gamma.isnan(), group["bounds"]
            found = (rows.curvature <= 0, rows.gamma == m, rows.gamma == M, ignored)
            group["tally"] += torch.stack([f & ~ignored for f in found[:3]] + [ignored]).sum(1)
    for group in opt.param_groups:
        group["counted"] = group["k"] - group["single"]


def bound_reached(group: dict[str, Any]) -> float | None:
    """The bound at which gamma was after all of the last RECENT measurements. Synchronizes."""
    rows = read(group, group["measured"])
    for bound in group["bounds"]:
        if bool(((rows.gamma == bound) & ~rows.raw_gamma.isnan()).all()):
            return float(bound)
    return None


def stats_of(opt: "TwoPasses", group: dict[str, Any]) -> Stats:
    """The statistics of a group's measurements. Synchronizes."""
    count_recent(opt)
    n = int(measurements(opt, group))
    negative, lower, upper, ignored = group["tally"].tolist()
    raw = read(group, group["measured"]).raw_gamma.cpu().double()
    quarters = torch.tensor((0.25, 0.5, 0.75), dtype=torch.float64, device="cpu")
    low, middle, high = raw.nanquantile(quarters).tolist()
    return Stats(
        int(iterations(opt, group)),
        negative / max(n, 1),
        lower / max(n, 1),
        upper / max(n, 1),
        ignored,
        (low, middle, high),
        group["skipped"],
        n,
    )
