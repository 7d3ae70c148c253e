"""Whether both passes over a mini-batch are passes of the same function."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steptuned.rng import replay

TOLERANCE = 1e-5
"""Gradients that differ by less, relative to their norm, are the same: devices may add in another order each time."""


@dataclass(frozen=True)
class Check:
    """What `check` found. True in a condition if both passes are the same function; printed, it is a sentence."""

    same: bool
    difference: float
    """The norm of the difference of the two gradients, relative to that of the first."""
    message: str

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        return self.message


def check(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any],
    model: torch.nn.Module | None = None,
) -> Check:
    """Call the closure twice at the same point, with the same random numbers, and compare the gradients.

    Step-Tuned SGD compares two gradients of one mini-batch, so whatever differs between the passes besides the parameters is
    taken for curvature: a mini-batch that the closure draws itself, a hidden state carried on, noise from NumPy. Do this once
    in a new program, with the first mini-batch; it costs up to four calls of the closure. Parameters, gradients, the model's
    buffers and the random states of torch, NumPy and Python are afterwards as before.

    Args:
        optimizer: its parameters' gradients are compared.
        closure: zeroes the gradients, computes the loss, back-propagates; or the body of your ``passes()`` loop as a function.
        model: its buffers are restored, and named if they are what differs.

    Examples:
        >>> import torch, steptuned
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = steptuned.StepTunedSGD(model.parameters(), lr=0.1)
        >>> x = torch.randn(4, 2)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> print(steptuned.check(opt, closure))
        both passes are the same function
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.grad for p in params]
    noise, others, buffers = replay(optimizer), _Others(), _Buffers(model)

    def gradients() -> list[Tensor | None]:
        for p in params:
            p.grad = None
        with torch.enable_grad():
            closure()
        return [None if p.grad is None else p.grad.detach().clone() for p in params]

    def again(*restore: Any) -> float:
        for each in (noise, *restore):
            each.rewind()
        return _difference(first, gradients())

    try:
        first = gradients()
        if all(g is None for g in first):
            return Check(
                False, 0.0, "the closure made no gradients: it must back-propagate the loss"
            )
        changed = buffers.changed()
        difference = again()
        if difference <= TOLERANCE:
            return Check(True, difference, "both passes are the same function")
        return Check(False, difference, _reason(difference, again, others, buffers, changed))
    finally:
        for p, g in zip(params, kept, strict=True):
            p.grad = g
        for each in (noise, others, buffers):
            each.rewind()


def _reason(
    difference: float,
    again: Callable[..., float],
    others: "_Others",
    buffers: "_Buffers",
    changed: list[str],
) -> str:
    told = (
        f"the gradients of two passes at the same point differ by {difference:.2g} of their norm: "
    )
    if again(others) <= TOLERANCE:
        return (
            told
            + "noise comes from NumPy or Python's random module, which is not replayed; draw it from torch, or before the passes"
        )
    if changed and again(others, buffers) <= TOLERANCE:
        return (
            told
            + f"the forward pass changes buffers that it uses ({', '.join(changed[:3])}); see steptuned.frozen_statistics"
        )
    return told + (
        "the closure may draw a mini-batch of its own, carry a hidden state on, or use a random generator of its own; "
        "draw the mini-batch before the passes and start both from the same state"
    )


def _difference(a: list[Tensor | None], b: list[Tensor | None]) -> float:
    """Relative to the norm of a; infinite where only one of them has a gradient or is not finite."""
    if any((x is None) != (y is None) for x, y in zip(a, b, strict=True)):
        return float("inf")
    pairs = [
        (x.double(), y.double())
        for x, y in zip(a, b, strict=True)
        if x is not None and y is not None
    ]
    away = sum(float((x - y).square().sum()) for x, y in pairs)
    size = sum(float(x.square().sum()) for x, _ in pairs)
    if not away:
        return 0.0
    return float((away / size) ** 0.5) if size and away == away else float("inf")


class _Others:
    """Random states that are not torch's: those of Python and, where it is used, of NumPy."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def rewind(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class _Buffers:
    """The buffers of a model, if there is one."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._kept = (
            {name: b.detach().clone() for name, b in model.named_buffers()}
            if model is not None
            else {}
        )

    def changed(self) -> list[str]:
        return [name for name, buffer in self._now() if not torch.equal(buffer, self._kept[name])]

    @torch.no_grad()
    def rewind(self) -> None:
        for name, buffer in self._now():
            buffer.copy_(self._kept[name])

    def _now(self) -> list[tuple[str, Tensor]]:
        """The buffers that the model has now: a forward pass may put another tensor in the place of one."""
        return (
            []
            if self._model is None
            else [(n, b) for n, b in self._model.named_buffers() if n in self._kept]
        )
