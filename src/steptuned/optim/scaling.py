"""What a GradScaler tells an optimizer, and by which road a gradient came."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

ROADS = {
    "plain": "without a GradScaler",
    "scaled": "through a GradScaler",
    "unscaled": "through a GradScaler after unscale_()",
}
"""The ways by which a gradient can come. Both passes of an iteration must have come by the same."""


class Scaling(NamedTuple):
    """What a GradScaler leaves on an optimizer for the time of its step."""

    inverse: Tensor | None
    """What unscales a gradient; None where it is unscaled already."""
    found_inf: Tensor
    """Not zero where some gradient of this pass is not finite."""


def road(scaling: Scaling | None) -> str:
    if scaling is None:
        return "plain"
    return "scaled" if scaling.inverse is not None else "unscaled"


class FromScaler:
    """An attribute that a GradScaler sets before a step and deletes after it.

    What it sets is there for one step, and for that step only: after an error the scaler does not come to delete it, and would
    multiply its next scale with the old one.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_scaler_{name}"

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._slot] = value
        if self._slot == "_scaler_grad_scale" and value is not None:
            instance._refuse_second_unscaling(sys._getframe(1).f_locals.get("self"))

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError("set by a GradScaler, and not to be read again")

    def __delete__(self, instance: Any) -> None:
        instance.__dict__.pop(self._slot, None)

    def take(self, instance: Any) -> Any:
        return instance.__dict__.pop(self._slot, None)


class Scalable:
    """What makes a GradScaler leave unscaling to the optimizer."""

    _step_supports_amp_scaling = True
    grad_scale = FromScaler()
    found_inf = FromScaler()

    def _refuse_second_unscaling(self, scaler: Any) -> None:
        """Told the GradScaler that is about to have this one's gradients unscaled."""


def take_scaling(owner: Scalable) -> Scaling | None:
    """The scaling of this step, for once."""
    scale, found_inf = (vars(Scalable)[name].take(owner) for name in ("grad_scale", "found_inf"))
    return (
        None
        if found_inf is None
        else Scaling(None if scale is None else scale.reciprocal(), found_inf)
    )


@contextmanager
def all_or_nothing(cancel: Any) -> Iterator[None]:
    """What fails in the middle of moving the parameters leaves no half step behind that could be paired with another."""
    try:
        yield
    except BaseException:
        cancel()
        raise
