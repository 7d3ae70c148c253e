"""Gradient descent with Armijo's line search, which the paper compares with Algorithm 1."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steptuned.optim import sharded
from steptuned.optim.arguments import check, check_group, check_params


class ArmijoGD(Optimizer):
    r"""Gradient descent with backtracking: the first t of lr, lr shrink, lr shrink^2, ... that satisfies

    $$J(\theta - t \nabla J(\theta)) \le J(\theta) - \mathrm{slope}\; t\, |\nabla J(\theta)|^2.$$

    Where none of ``max_backtracks + 1`` trials does, the parameters stay where they are. One back-propagation an iteration and
    one evaluation of J a trial, which `evaluations` counts.

    Args:
        params: parameters or groups of them. With different ``lr``, t is one factor for all of them, from 1 on.
        lr: the first trial.
        slope: share of the decrease promised by the gradient that is asked for, in (0, 1).
        shrink: factor from one trial to the next, in (0, 1).
        max_backtracks: trials after the first.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        slope: float = 1e-4,
        shrink: float = 0.5,
        max_backtracks: int = 50,
    ) -> None:
        defaults = {"lr": lr, "slope": slope, "shrink": shrink, "max_backtracks": max_backtracks}
        check(**defaults)
        super().__init__(params, defaults)
        self.param_groups[0].update(evaluations=0, scale=0.0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have its own ``lr``."""
        check_group(param_group, self, ("slope", "shrink", "max_backtracks"))
        super().add_param_group(param_group)
        check_params(self.param_groups[-1], type(self).__name__)
        sharded.refuse(self.param_groups[-1]["params"], type(self).__name__, sharded=False)

    @property
    def evaluations(self) -> int:
        """How often J was evaluated, the evaluation of each back-propagation included."""
        return self.param_groups[0]["evaluations"]

    @property
    def scale(self) -> float:
        """What the last search multiplied lr with: shrink^trials, or 0 where it found nothing."""
        return self.param_groups[0]["scale"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any], value: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One iteration.

        Args:
            closure: zeroes the gradients, computes the loss, back-propagates and returns the loss.
            value: returns the loss only; by default the closure serves for that too, at the cost of its back-propagation.
        """
        first = self.param_groups[0]
        with torch.enable_grad():
            loss = closure()
        start = _number(loss)
        moves = [
            (p, p.clone(), float(group["lr"]), p.grad.clone())
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        promised = sum(lr * float(g.double().square().sum()) for _, _, lr, g in moves)
        first["evaluations"] += 1
        first["scale"] = 0.0
        scale = 1.0
        try:
            for _ in range(first["max_backtracks"] + 1):
                for p, theta, lr, g in moves:
                    p.copy_(theta - scale * lr * g)
                first["evaluations"] += 1
                if self._evaluate(closure, value) <= start - first["slope"] * scale * promised:
                    first["scale"] = scale
                    break
                scale *= first["shrink"]
        finally:
            if not first["scale"]:  # no trial was good enough, or one failed
                for p, theta, _, _ in moves:
                    p.copy_(theta)
        for p, _, _, g in moves:
            p.grad = g
        return loss

    def _evaluate(self, closure: Callable[[], Any], value: Callable[[], Any] | None) -> float:
        if value is not None:
            return _number(value())
        with torch.enable_grad():
            return _number(closure())


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
