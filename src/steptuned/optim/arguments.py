"""Valid values of the optimizers' arguments, and the error messages."""

import math
import numbers
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


class Option(NamedTuple):
    """The valid values of an option, and where its value may differ."""

    is_valid: Callable[[Any], bool]
    what: str
    """The valid values in words, as they follow "must be"."""
    scope: Literal["group", "gamma", "optimizer"] = "group"
    """What has its own value: every parameter group, every gamma, or only the whole optimizer."""

    def per(self, scope: Literal["gamma", "optimizer"]) -> "Option":
        """This option with another scope."""
        return self._replace(scope=scope)


LR = Option(_lr, "a finite number at least 0, or a tensor of one such number")
POSITIVE = Option(_positive, "positive and finite")
NON_NEGATIVE = Option(_non_negative, "finite and at least 0")
BETA = Option(lambda v: _number(v) and 0 <= v < 1, "in [0, 1)")
DELTA = Option(lambda v: _number(v) and 0 <= v < 0.5, "in [0, 0.5)")
FRACTION = Option(lambda v: _number(v) and 0 < v < 1, "in (0, 1)")
BOUNDS = Option(_bounds, "two finite numbers (m, M) with 0 < m <= M")
COUNT = Option(lambda v: _whole(v) and v >= 1, "a whole number at least 1")
WHOLE = Option(lambda v: _whole(v) and v >= 0, "a whole number at least 0")
FLAG = Option(lambda v: isinstance(v, bool), "True or False")
FLAG_OR_NONE = Option(lambda v: v is None or isinstance(v, bool), "True, False or None")

Options = Mapping[str, Option]


def check(options: Options, values: Mapping[str, Any]) -> None:
    """Raise a ValueError for the first invalid value."""
    for name, value in values.items():
        if not options[name].is_valid(value):
            raise ValueError(f"{name} must be {options[name].what}, got {value!r}")


def check_params(group: dict[str, Any], name: str) -> None:
    """Raise an error for complex parameters, which no optimizer here supports."""
    if any(p.is_complex() for p in group["params"]):
        raise ValueError(
            f"{name} does not support complex parameters: optimize torch.view_as_real(p) instead"
        )


def scalar(lr: float | Tensor) -> float | Tensor:
    """A learning rate as a number or a 0-d tensor."""
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


def check_group(group: Any, optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Check the options of a new parameter group, which must agree with those of the first."""
    if not isinstance(group, dict):
        return  # torch raises the error
    if isinstance(group.get("bounds"), list):
        group["bounds"] = tuple(group["bounds"])
    values = {
        name: group.get(name, default)
        for name, default in optimizer.defaults.items()
        if name in options
    }
    check(options, values)
    if optimizer.param_groups:
        first = optimizer.param_groups[0]
        for name in shared_options(options, first):
            if name in values and values[name] != first[name]:
                refuse_differing(
                    name, first, f"got {values[name]}, but the first group has {first[name]}"
                )


def refuse_differing(name: str, first: dict[str, Any], what: str) -> None:
    """Raise an error for an option that differs between parameter groups."""
    reason = "" if first.get("per_group") else ", as gamma is one number for all of them"
    raise ValueError(f"{name} must be the same for all parameter groups{reason}: {what}")


def shared_options(options: Options, first: dict[str, Any]) -> list[str]:
    """The options that must be the same for all groups, given the first group."""
    scopes = ("optimizer",) if first.get("per_group") else ("optimizer", "gamma")
    return [name for name, option in options.items() if option.scope in scopes]


def tuned_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups with their own gamma: all of them, or the first, whose gamma all groups share."""
    groups = optimizer.param_groups
    return groups if groups[0]["per_group"] else groups[:1]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning. From Python 3.12 on, it shows the line of the user's code."""
    if sys.version_info >= (3, 12):
        inner = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
        warnings.warn(message, category, skip_file_prefixes=inner)
    else:
        warnings.warn(message, category, stacklevel=3)
