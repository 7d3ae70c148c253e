"""What a GradScaler tells an optimizer, and by which road a gradient came."""

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


@contextmanager
def scaling_of(owner: Any) -> Iterator[Scaling | None]:
    """The scaling of this step. After an error nothing of it may stay behind, or it would scale the next one."""
    scale, found_inf = getattr(owner, "grad_scale", None), getattr(owner, "found_inf", None)
    try:
        yield None if found_inf is None else Scaling(None if scale is None else scale.reciprocal(), found_inf)
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            owner.__dict__.pop(name, None)
        raise
