"""What the integrations log about Step-Tuned SGD, under the same names in every framework."""

from typing import TypeVar

from torch import Tensor

from steptuned.optim.record import Stats
from steptuned.optim.two_passes import TwoPasses

Value = TypeVar("Value", float, Tensor)


def measurements(opt: TwoPasses) -> dict[str, Tensor]:
    """Values of the last iteration, as 0-d tensors on the device. Does not synchronize."""
    steps = _of_groups("effective_lr", [group["effective_lr"] for group in opt.param_groups])
    if not opt.param_groups[0]["per_group"]:
        return {"gamma": opt.gamma, "curvature": opt.curvature} | steps
    return (
        _of_groups("gamma", list(opt.gamma)) | _of_groups("curvature", list(opt.curvature)) | steps
    )


def summary(opt: TwoPasses) -> dict[str, float]:
    """Statistics of the run, as in `steptuned.StepTunedSGD.stats`. Waits for the device."""
    if not opt.param_groups[0]["per_group"]:
        return _named(opt.stats())
    each = [_named(opt.stats(i)) for i, _ in enumerate(opt.param_groups)]
    return {
        key: value
        for name in each[0]
        for key, value in _of_groups(name, [e[name] for e in each]).items()
    }


def _of_groups(name: str, values: list[Value]) -> dict[str, Value]:
    """One value per group. Several are numbered from 1, as in Lightning's LearningRateMonitor."""
    if len(values) == 1:
        return {name: values[0]}
    return {f"{name}/pg{i}": value for i, value in enumerate(values, start=1)}


def _named(stats: Stats) -> dict[str, float]:
    return {
        "raw_gamma": stats.raw_gamma[1],  # the median
        "negative": stats.negative,
        "at_lower": stats.at_lower,
        "at_upper": stats.at_upper,
        "ignored": float(stats.ignored),
        "skipped": float(stats.skipped),
    }
