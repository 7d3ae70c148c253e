"""Check that both passes over a mini-batch evaluate the same function."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steptuned.rng import Replay, replay

TOLERANCE = 1e-5
"""Gradients whose relative difference is at most this count as equal.

Some devices add in a different order each time.
"""


@dataclass(frozen=True)
class Check:
    """The result of `check`: true if both passes are the same function. Prints as a sentence."""

    same: bool
    difference: float
    """The norm of the difference between the two gradients, relative to the norm of the first."""
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
    """Call the closure twice at the same point with the same random numbers; compare the gradients.

    Step-Tuned SGD compares two gradients of one mini-batch. Anything other than the parameters that
    differs between the passes is mistaken for curvature: a mini-batch drawn inside the closure, a
    hidden state carried from pass to pass, noise from NumPy. Run this once in a new program, with
    the first mini-batch; it calls the closure up to four times. Parameters, gradients, the model's
    buffers, and the random states of torch, NumPy and Python are restored afterwards.

    Args:
        optimizer: the optimizer whose parameters' gradients are compared.
        closure: zeroes the gradients, computes the loss and back-propagates; or the body of your
            ``passes()`` loop as a function.
        model: the model whose buffers are restored, and named if they cause the difference.

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
    noise, other_noise, buffers = replay(optimizer), _OtherNoise(), _Buffers(model)
    try:
        return _compare(_Passes(params, closure, noise), other_noise, buffers)
    finally:
        for p, g in zip(params, kept, strict=True):
            p.grad = g
        for each in (noise, other_noise, buffers):
            each.rewind()


class _Passes:
    """Passes at the same point, with the same random numbers from torch."""

    def __init__(self, params: list[Tensor], closure: Callable[[], Any], noise: Replay) -> None:
        self._params = params
        self._closure = closure
        self._noise = noise
        self.first = self._gradients()

    def repeat(self, *restore: "_OtherNoise | _Buffers") -> float:
        """Repeat the pass, and return how much its gradients differ from the first ones."""
        for each in (self._noise, *restore):
            each.rewind()
        return _difference(self.first, self._gradients())

    def _gradients(self) -> list[Tensor | None]:
        for p in self._params:
            p.grad = None
        with torch.enable_grad():
            self._closure()
        return [None if p.grad is None else p.grad.detach().clone() for p in self._params]


def _compare(passes: _Passes, other_noise: "_OtherNoise", buffers: "_Buffers") -> Check:
    if all(g is None for g in passes.first):
        return Check(
            False, 0.0, "the closure computed no gradients: it must back-propagate the loss"
        )
    changed = buffers.changed()
    difference = passes.repeat()
    if difference <= TOLERANCE:
        return Check(True, difference, "both passes are the same function")
    return Check(
        False,
        difference,
        f"the gradients of two passes at the same point differ by {difference:.2g} of their norm: "
        + _reason(passes, other_noise, buffers, changed),
    )


def _reason(
    passes: _Passes, other_noise: "_OtherNoise", buffers: "_Buffers", changed: list[str]
) -> str:
    if passes.repeat(other_noise) <= TOLERANCE:
        return (
            "noise comes from NumPy or Python's random module, which is not replayed; "
            "draw it from torch, or before the passes"
        )
    if changed and passes.repeat(other_noise, buffers) <= TOLERANCE:
        return (
            f"the forward pass changes buffers that it uses ({', '.join(changed[:3])}); "
            "see steptuned.frozen_statistics"
        )
    return (
        "the closure may draw its own mini-batch, carry a hidden state from call to call, or use a "
        "random generator of its own; draw the mini-batch before the passes and start both from "
        "the same state"
    )


def _difference(a: list[Tensor | None], b: list[Tensor | None]) -> float:
    """|a - b| / |a|; infinite if that is not finite, or if only one of them has some gradient."""
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


class _OtherNoise:
    """The random states of Python and, if it is imported, NumPy."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def rewind(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class _Buffers:
    """The buffers of the model, if one is given."""

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
        """The model's current buffers: a forward pass may replace one by another tensor."""
        return (
            []
            if self._model is None
            else [(n, b) for n, b in self._model.named_buffers() if n in self._kept]
        )
