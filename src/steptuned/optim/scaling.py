"""What a GradScaler tells an optimizer, and in which mode a gradient was scaled."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

SCALING_MODES = {
    "plain": "without a GradScaler",
    "scaled": "through a GradScaler",
    "unscaled": "through a GradScaler after unscale_()",
}
"""How gradients can reach the optimizer. Both passes of an iteration must use the same mode."""


class Scaling(NamedTuple):
    """What a GradScaler sets on an optimizer for one step."""

    inverse: Tensor | None
    """The factor that unscales a gradient; None if the gradients are unscaled already."""
    found_inf: Tensor
    """Not zero if any gradient of this pass is not finite."""


def scaling_mode(scaling: Scaling | None) -> str:
    """A key of `SCALING_MODES`."""
    if scaling is None:
        return "plain"
    return "scaled" if scaling.inverse is not None else "unscaled"


class FromScaler:
    """An attribute that a GradScaler sets before a step and deletes after it.

    The value can be taken once. After an error the scaler does not delete it, and would otherwise
    multiply its next scale by the old one.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_scaler_{name}"

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._slot] = value
        if self._slot == "_scaler_grad_scale" and value is not None:
            instance._refuse_second_unscaling(sys._getframe(1).f_locals.get("self"))

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError("set by a GradScaler; cannot be read")

    def __delete__(self, instance: Any) -> None:
        instance.__dict__.pop(self._slot, None)

    def take(self, instance: Any) -> Any:
        return instance.__dict__.pop(self._slot, None)


class Scalable:
    """An optimizer that does the unscaling itself, instead of the GradScaler."""

    _step_supports_amp_scaling = True
    grad_scale = FromScaler()
    found_inf = FromScaler()

    def _refuse_second_unscaling(self, scaler: Any) -> None:
        """Called with the GradScaler before the gradients are unscaled."""


_GRAD_SCALE, _FOUND_INF = (vars(Scalable)[name] for name in ("grad_scale", "found_inf"))


def take_scaling(owner: Scalable) -> Scaling | None:
    """The scaling of this step. Can be taken once."""
    scale, found_inf = _GRAD_SCALE.take(owner), _FOUND_INF.take(owner)
    return (
        None
        if found_inf is None
        else Scaling(None if scale is None else scale.reciprocal(), found_inf)
    )


@contextmanager
def all_or_nothing(cancel: Any) -> Iterator[None]:
    """If this block fails, cancel the iteration, so that no half step stays pending."""
    try:
        yield
    except BaseException:
        cancel()
        raise
