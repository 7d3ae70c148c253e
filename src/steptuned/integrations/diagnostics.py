"""What the integrations log about Step-Tuned SGD, under the same names in every framework."""

from torch import Tensor

from steptuned import StepTunedSGD


def measurements(opt: StepTunedSGD) -> dict[str, Tensor]:
    """The last iteration, as 0-d tensors on the device. Does not synchronise."""
    names = ["effective_lr"]
    if len(opt.param_groups) > 1:  # numbered from 1, as Lightning's LearningRateMonitor does
        names = [f"effective_lr/pg{i}" for i, _ in enumerate(opt.param_groups, start=1)]
    steps = [group["effective_lr"] for group in opt.param_groups]
    return {"gamma": opt.gamma, "curvature": opt.curvature} | dict(zip(names, steps, strict=True))


def summary(opt: StepTunedSGD) -> dict[str, float]:
    """The run so far: see `steptuned.StepTunedSGD.stats`. Synchronises with the device."""
    stats = opt.stats()
    return {
        "raw_gamma": stats.raw_gamma[1],  # the median
        "negative": stats.negative,
        "at_lower": stats.at_lower,
        "at_upper": stats.at_upper,
        "ignored": float(stats.ignored),
        "skipped": float(stats.skipped),
    }
