"""Valid values of the optimizers' arguments, and the error messages."""

import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _non_negative(value: Any) -> bool:
    return _number(value) and 0 <= value < math.inf


def _positive(value: Any) -> bool:
    return _number(value) and 0 < value < math.inf


def _lr(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return _non_negative(value)
    # The value of a tensor on an accelerator is not checked: reading it would synchronize.
    return (
        value.numel() == 1
        and not value.is_complex()
        and (value.device.type != "cpu" or _non_negative(value.item()))
    )


def _bounds(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(map(_positive, value))
        and value[0] <= value[1]
    )


SHARED_OPTIONS = ("delta", "decay_every", "max_grad_norm", "replay_rng", "tune_every", "per_group")
"""Options that must be the same for all parameter groups."""

GAMMA_OPTIONS = ("nu", "beta", "bounds", "relative")
"""Options that must be the same too, unless each group has its own gamma."""

VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_lr, "a finite number at least 0, or a tensor of one such number"),
    "nu": (_positive, "positive and finite"),
    "beta": (lambda v: _number(v) and 0 <= v < 1, "in [0, 1)"),
    "bounds": (_bounds, "two finite numbers (m, M) with 0 < m <= M"),
    "delta": (lambda v: _number(v) and 0 <= v < 0.5, "in [0, 0.5)"),
    "decay_every": (
        lambda v: v is None or _positive(v),
        "positive and finite, or None for no decay",
    ),
    "weight_decay": (_non_negative, "finite and at least 0"),
    "maximize": (lambda v: isinstance(v, bool), "True or False"),
    "max_grad_norm": (
        lambda v: v is None or (_number(v) and v > 0),
        "positive, or None for no clipping",
    ),
    "foreach": (lambda v: v is None or isinstance(v, bool), "True, False or None"),
    "replay_rng": (lambda v: isinstance(v, bool), "True or False"),
    "tune_every": (
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1,
        "a whole number at least 1",
    ),
    "relative": (lambda v: isinstance(v, bool), "True or False"),
    "per_group": (lambda v: isinstance(v, bool), "True or False"),
    "slope": (lambda v: _number(v) and 0 < v < 1, "in (0, 1)"),
    "shrink": (lambda v: _number(v) and 0 < v < 1, "in (0, 1)"),
    "max_backtracks": (
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
        "a whole number at least 0",
    ),
    "every": (_positive, "positive and finite"),
}


def check(**arguments: Any) -> None:
    """Raise a ValueError for the first invalid argument."""
    for name, value in arguments.items():
        valid, what = VALID[name]
        if not valid(value):
            raise ValueError(f"{name} must be {what}, got {value!r}")


def check_params(group: dict[str, Any], name: str) -> None:
    """Raise an error for complex parameters, which no optimizer here supports."""
    if any(p.is_complex() for p in group["params"]):
        raise ValueError(
            f"{name} does not support complex parameters: optimize torch.view_as_real(p) instead"
        )


def scalar(lr: float | Tensor) -> float | Tensor:
    """A learning rate as a number or a 0-d tensor."""
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


def check_group(group: Any, optimizer: torch.optim.Optimizer, shared: Iterable[str]) -> None:
    """Check the options of a new parameter group.

    The shared options must be the same as in the first group.
    """
    if not isinstance(group, dict):
        return  # torch raises the error
    if isinstance(group.get("bounds"), list):
        group["bounds"] = tuple(group["bounds"])
    options = {
        name: group.get(name, default)
        for name, default in optimizer.defaults.items()
        if name in VALID
    }
    check(**options)
    if optimizer.param_groups:
        for name in shared:
            if name in options and options[name] != optimizer.param_groups[0][name]:
                first = optimizer.param_groups[0]
                refuse_differing(name, first, f"got {options[name]} after {first[name]}")


def refuse_differing(name: str, first: dict[str, Any], what: str) -> None:
    """Raise an error for an option that differs between parameter groups."""
    reason = "" if first.get("per_group") else ", as gamma is one number for all of them"
    raise ValueError(f"{name} must be the same for all parameter groups{reason}: {what}")


def shared_options(first: dict[str, Any]) -> tuple[str, ...]:
    """The options that must be the same for all groups, given the first group."""
    return SHARED_OPTIONS if first["per_group"] else SHARED_OPTIONS + GAMMA_OPTIONS


def tuned_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups with their own gamma: all of them, or the first, whose gamma all groups share."""
    groups = optimizer.param_groups
    return groups if groups[0]["per_group"] else groups[:1]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's code, not to torch or this package."""
    inner = tuple(str(Path(file).parent) for file in (torch.__file__, Path(__file__).parent))
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(inner) or "contextlib" in frame.f_code.co_filename
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
