"""What the optimizers' arguments may be, and the sentence that says so."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _non_negative(value: Any) -> bool:
    return _number(value) and 0 <= value < math.inf


def _positive(value: Any) -> bool:
    return _number(value) and 0 < value < math.inf


def _lr(value: Any) -> bool:
    return value.numel() == 1 and not value.is_complex() if isinstance(value, Tensor) else _non_negative(value)


def _bounds(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_positive, value)) and value[0] <= value[1]


VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_lr, "a finite number at least 0, or a tensor of one element"),
    "nu": (_positive, "positive and finite"),
    "beta": (lambda v: _number(v) and 0 <= v < 1, "in [0, 1)"),
    "bounds": (_bounds, "two finite numbers (m, M) with 0 < m <= M"),
    "delta": (lambda v: _number(v) and 0 <= v < 0.5, "in [0, 0.5)"),
    "decay_every": (lambda v: v is None or _positive(v), "positive and finite, or None for no decay"),
    "weight_decay": (_non_negative, "finite and at least 0"),
    "maximize": (lambda v: isinstance(v, bool), "True or False"),
    "max_grad_norm": (lambda v: v is None or (_number(v) and v > 0), "positive, or None for no clipping"),
    "foreach": (lambda v: v is None or isinstance(v, bool), "True, False or None"),
    "replay_rng": (lambda v: isinstance(v, bool), "True or False"),
    "slope": (lambda v: _number(v) and 0 < v < 1, "in (0, 1)"),
    "shrink": (lambda v: _number(v) and 0 < v < 1, "in (0, 1)"),
    "max_backtracks": (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "a whole number at least 0"),
    "every": (_positive, "positive and finite"),
}


def check(**arguments: Any) -> None:
    """Raise a ValueError for the first argument that is not valid."""
    for name, value in arguments.items():
        valid, what = VALID[name]
        if not valid(value):
            raise ValueError(f"{name} must be {what}, got {value!r}")
