"""The step-size rule of the paper, in one place.

Every method of the paper multiplies its learning rate by a number gamma, measured as

    gamma = |dtheta|^2 / <G, dtheta>   if the curvature <G, dtheta> is positive,
    gamma = nu                         otherwise,

and differs from the others only in where G, the variation of the gradient along dtheta, comes from.
The functions here are pure, take 0-d tensors and never branch on their values, so they run on any
device without synchronizing and compile to a single graph.
"""

from typing import TypeVar

import torch
from torch import Tensor

MEMORY = 0.99
"""Decay factor of the running mean of log gamma, the reference of a relative gamma."""

Number = TypeVar("Number", float, Tensor)


def gamma(square: Tensor, curvature: Tensor, nu: float) -> Tensor:
    """The measured step: ``square / curvature`` where the curvature is positive, else ``nu``.

    ``square`` is |dtheta|^2 and ``curvature`` is <G, dtheta>. A zero displacement has zero
    curvature, which is not positive, so it gives ``nu``. nan stays nan.
    """
    return torch.where(curvature <= 0, nu, square / curvature)


def per_unit(curvature: Tensor, square: Tensor) -> Tensor:
    """The curvature per unit length, <G, dtheta> / |dtheta|^2; zero for a zero displacement."""
    return curvature / torch.where(square > 0, square, 1.0)


def remember(log_mean: Tensor, raw: Tensor) -> Tensor:
    """The running mean of log gamma, which starts at zero, after one more positive measurement."""
    return MEMORY * log_mean + (1 - MEMORY) * raw.log()


def reference(log_mean: Tensor, n: Tensor) -> Tensor:
    """The geometric mean of n positive measurements, weighted towards recent ones; 1 if n is 0."""
    none = n == 0
    weights = 1 - MEMORY ** n.to(log_mean.dtype)
    return (log_mean / torch.where(none, 1.0, weights)).exp()


def reciprocal(step: Tensor) -> Tensor:
    """1 / step, or zero if the step is zero, which changes no gradient."""
    return torch.where(step > 0, 1 / torch.where(step > 0, step, 1.0), 0.0)


def clip(value: Tensor, bounds: tuple[float, float]) -> Tensor:
    """``value`` clipped to the bounds [m, M]."""
    return value.clamp(*bounds)


def debias(beta: float, k: Number) -> Number:
    """The bias correction of the moving average G_k, which starts at zero."""
    return 1 / (1 - beta ** (k + 1.0))


def robbins_monro(k: Number, delta: float, every: float) -> Number:
    """The decay 1 / q^(1/2 + delta), where q = 1 + k // every."""
    return (1 + k // every) ** -(0.5 + delta)
