"""Algorithms 3 to 5 of the paper, and the base class of Algorithms 1 and 3 to 5.

They differ in where the variation of the gradient comes from.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steptuned import rule
from steptuned.optim import sharded
from steptuned.optim.arguments import (
    BOUNDS,
    DELTA,
    LR,
    POSITIVE,
    Options,
    check,
    check_group,
    check_params,
    scalar,
)

Vector = Sequence[Tensor]
"""A vector in parameter space: one tensor per parameter, in the same order."""


class GradientVariation(Optimizer):
    r"""Gradient descent with the step $\mathrm{lr}\,\gamma_k$, tuned along the last displacement.

    Iteration k measures $\gamma_k = |\Delta\theta_k|^2 / \langle G_k, \Delta\theta_k \rangle$ with
    $\Delta\theta_k = \theta_k - \theta_{k-1}$; the first has $\gamma_0 = 1$. A subclass defines
    $G_k$, and how gamma is clipped and decayed. Used like any torch optimizer, with one
    back-propagation per iteration. A missing gradient counts as zero. A measurement that is not
    finite is ignored, and gamma stays as it was.
    """

    OPTIONS: ClassVar[Options] = {
        "lr": LR,
        "nu": POSITIVE.per("gamma"),
        "bounds": BOUNDS.per("gamma"),
        "delta": DELTA.per("optimizer"),
    }

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        check(self.OPTIONS, defaults)
        super().__init__(params, defaults)
        gamma = torch.ones((), dtype=torch.float64, device="cpu")
        unknown = torch.full_like(gamma, torch.nan)
        self.param_groups[0].update(k=0, gamma=gamma, raw_gamma=unknown, curvature=unknown)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        first = self.param_groups[0]
        # Older versions stored the curvature in another unit.
        if "raw_gamma" not in first and "gamma" in first:
            first["raw_gamma"] = first["curvature"] = torch.full_like(first["gamma"], torch.nan)
        for group in self.param_groups:
            if "step" in group:
                group["effective_lr"] = group.pop("step")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, which may have its own ``lr``."""
        check_group(param_group, self, self.OPTIONS)
        super().add_param_group(param_group)
        check_params(self.param_groups[-1], type(self).__name__)
        sharded.refuse(self.param_groups[-1]["params"], type(self).__name__, sharded=False)

    @property
    def gamma(self) -> Tensor:
        """The gamma of the last step."""
        return self.param_groups[0]["gamma"].clone()

    @property
    def raw_gamma(self) -> Tensor:
        """The gamma of the last step before clipping; nan before the first measurement.

        It is nu where the curvature is not positive.
        """
        return self.param_groups[0]["raw_gamma"].clone()

    @property
    def curvature(self) -> Tensor:
        """The curvature along the last displacement, <G, dtheta> / |dtheta|^2; nan before that."""
        return self.param_groups[0]["curvature"].clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one iteration, with the current gradients or those that the closure computes.

        Args:
            closure: zeroes the gradients, computes the loss, back-propagates and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = self.param_groups[0]
        params = self._params()
        states = [self.state[p] for p in params]
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        if any(g.layout is not torch.strided for g in gradient):
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients: make the layer's "
                "gradients dense"
            )
        observed = self._observe(gradient)
        for p, state, o in zip(params, states, observed, strict=True):
            if not state:  # this parameter has not moved yet
                state.update(displacement=torch.zeros_like(p), observed=o)
        if first["k"] > 0:
            displacement = [state["displacement"] for state in states]
            variation = self._variation(observed, [state["observed"] for state in states])
            square, curvature = _inner(displacement, displacement), _inner(variation, displacement)
            if math.isfinite(square) and math.isfinite(curvature):
                raw_gamma = self._raw_gamma(square, curvature)
                first["raw_gamma"] = _scalar(raw_gamma)
                first["gamma"] = _scalar(self._clip(raw_gamma))
                first["curvature"] = _scalar(_per_unit(curvature, square))
        decay = self._decay(first["k"])
        for group in self.param_groups:
            group["effective_lr"] = scalar(group["lr"]) * decay * first["gamma"]
            for p in group["params"]:
                before = p.clone()
                if p.grad is not None:
                    p.sub_(group["effective_lr"].to(p.device) * p.grad)
                self.state[p].update(displacement=p - before)
        for state, o in zip(states, observed, strict=True):
            state["observed"] = o.clone()
        first["k"] += 1
        return loss

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _observe(self, gradient: Vector) -> Vector:
        """What is observed at theta_k, to be compared with the observation at theta_{k-1}."""
        return gradient

    def _variation(self, observed: Vector, before: Vector) -> Vector:
        """G_k, from the observations at theta_k and theta_{k-1}."""
        return [new - old for new, old in zip(observed, before, strict=True)]

    def _raw_gamma(self, square: float, curvature: float) -> float:
        """`rule.gamma` in Python floats, which on small problems is faster than with tensors."""
        return square / curvature if curvature > 0 else float(self.param_groups[0]["nu"])

    def _clip(self, gamma: float) -> float:
        """`rule.clip` in Python floats, for methods with bounds."""
        return gamma

    def _decay(self, k: int) -> float:
        return 1.0


class StochasticGV(GradientVariation):
    r"""Algorithm 3: G is the difference of two mini-batch gradients.

    That is $\nabla J_{B_k}(\theta_k) - \nabla J_{B_{k-1}}(\theta_{k-1})$, so one back-propagation
    per iteration is enough. The step is $\mathrm{lr}\,\gamma_k / (k+1)^{1/2+\delta}$, with gamma
    clipped to the bounds [m, M].

    Args:
        params: parameters or parameter groups, which may have their own ``lr``.
        lr: the scaling factor alpha.
        nu: gamma where the curvature is not positive.
        bounds: (m, M); gamma is clipped to this interval.
        delta: exponent of the decay beyond 1/2.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        nu: float = 2.0,
        bounds: tuple[float, float] = (0.5, 2.0),
        delta: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "nu": nu, "bounds": bounds, "delta": delta})

    def _clip(self, gamma: float) -> float:
        m, M = self.param_groups[0]["bounds"]
        return min(max(gamma, m), M)

    def _decay(self, k: int) -> float:
        return rule.robbins_monro(float(k), self.param_groups[0]["delta"], 1)


class _CallbackGV(StochasticGV):
    """A method that calls a function of the problem for a vector at the current parameters."""

    def __init__(self, params: ParamsT, ask: Callable[[], Vector], **options: Any) -> None:
        super().__init__(params, **options)
        self._ask = ask

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_ask": self._ask}

    def _observe(self, gradient: Vector) -> Vector:
        with torch.enable_grad():
            answer = [t.detach() for t in self._ask()]
        shapes = [tuple(t.shape) for t in answer]
        expected = [tuple(p.shape) for p in self._params()]
        if shapes != expected:
            raise ValueError(
                f"the function given to {type(self).__name__} must return tensors with the shapes "
                f"{expected}, got {shapes}"
            )
        return answer


class ExactGV(_CallbackGV):
    r"""Algorithm 4: G is the difference of two full gradients.

    That is $\nabla J(\theta_k) - \nabla J(\theta_{k-1})$.

    Args:
        params: parameters or parameter groups, which may have their own ``lr``.
        full_gradient: called at theta_k; returns the gradient of J there, one tensor per parameter.
        **options: ``lr``, ``nu``, ``bounds`` and ``delta``, as for `StochasticGV`.
    """

    def __init__(
        self, params: ParamsT, full_gradient: Callable[[], Vector], **options: Any
    ) -> None:
        super().__init__(params, full_gradient, **options)


class ExpectedGV(_CallbackGV):
    r"""Algorithm 5: G is $-s_{k-1}\,\mathbb{E}[\mathcal{C}_{J_S}(\theta_{k-1})]$.

    Here $\mathcal{C}_{J_S} = \nabla^2 J_S \nabla J_S$, and $s_{k-1}$ is the step from theta_{k-1}
    to theta_k. The expectation is over the draw of a mini-batch S. For a finite sum of N terms and
    mini-batches of b terms, drawn without replacement, it is

    $$\frac1b \Bigl(1 - \frac{b-1}{N-1}\Bigr) \frac1N \sum_n H_n g_n + \frac{(b-1)N}{b(N-1)} H g,$$

    where $H_n, g_n$ are the Hessian and the gradient of the n-th term and H, g are their means.

    Args:
        params: parameters or parameter groups, which may have their own ``lr``.
        expectation: called at theta_k; returns this expectation there, one tensor per parameter.
        **options: ``lr``, ``nu``, ``bounds`` and ``delta``, as for `StochasticGV`.
    """

    def __init__(self, params: ParamsT, expectation: Callable[[], Vector], **options: Any) -> None:
        super().__init__(params, expectation, **options)

    def _variation(self, observed: Vector, before: Vector) -> Vector:
        steps = [
            group.get("effective_lr", 0.0) for group in self.param_groups for _ in group["params"]
        ]
        return [-step * C for step, C in zip(steps, before, strict=True)]


def _inner(xs: Vector, ys: Vector) -> float:
    sums = [(x.double() * y.double()).sum() for x, y in zip(xs, ys, strict=True)]
    return (sums[0] if len(sums) == 1 else torch.stack([s.cpu() for s in sums]).sum()).item()


def _per_unit(curvature: float, square: float) -> float:
    """`rule.per_unit` in Python floats."""
    return curvature / square if square > 0 else curvature


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")
