"""Gradient descent with Armijo line search, which the paper compares with Algorithm 1."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steptuned.optim import sharded
from steptuned.optim.arguments import (
    FRACTION,
    LR,
    WHOLE,
    Options,
    check,
    check_group,
    check_params,
)


class ArmijoGD(Optimizer):
    r"""Gradient descent with Armijo line search by backtracking.

    The step t is the first of lr, lr shrink, lr shrink^2, ... that satisfies

    $$J(\theta - t \nabla J(\theta)) \le J(\theta) - \mathrm{slope}\; t\, |\nabla J(\theta)|^2.$$

    If none of ``max_backtracks + 1`` trials does, the parameters do not move. An iteration takes
    one back-propagation, and one evaluation of J per trial, which `evaluations` counts.

    Args:
        params: parameters or parameter groups. If they have different ``lr``, all learning rates
            are multiplied by the same factor 1, shrink, shrink^2, ...
        lr: the first trial.
        slope: the required share of the decrease that the gradient predicts, in (0, 1).
        shrink: factor from one trial to the next, in (0, 1).
        max_backtracks: maximum number of trials after the first.
    """

    OPTIONS: ClassVar[Options] = {
        "lr": LR,
        "slope": FRACTION.per("optimizer"),
        "shrink": FRACTION.per("optimizer"),
        "max_backtracks": WHOLE.per("optimizer"),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        slope: float = 1e-4,
        shrink: float = 0.5,
        max_backtracks: int = 50,
    ) -> None:
        defaults = {"lr": lr, "slope": slope, "shrink": shrink, "max_backtracks": max_backtracks}
        check(self.OPTIONS, defaults)
        super().__init__(params, defaults)
        self.param_groups[0].update(evaluations=0, scale=0.0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have its own ``lr``."""
        check_group(param_group, self, self.OPTIONS)
        super().add_param_group(param_group)
        check_params(self.param_groups[-1], type(self).__name__)
        sharded.refuse(self.param_groups[-1]["params"], type(self).__name__, sharded=False)

    @property
    def evaluations(self) -> int:
        """How often J was evaluated, including the evaluation of each back-propagation."""
        return self.param_groups[0]["evaluations"]

    @property
    def scale(self) -> float:
        """What the last search multiplied lr by: shrink^backtracks, or 0 if every trial failed."""
        return self.param_groups[0]["scale"]

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any], value: Callable[[], Any] | None = None
    ) -> Any:
        """Run one iteration.

        Args:
            closure: zeroes the gradients, computes the loss, back-propagates and returns the loss.
            value: returns the loss without back-propagating. By default the closure is used for the
                trials too, at the cost of its back-propagations.
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
                torch.clear_autocast_cache()  # its copies of the parameters are those of before
                first["evaluations"] += 1
                if self._evaluate(closure, value) <= start - first["slope"] * scale * promised:
                    first["scale"] = scale
                    break
                scale *= first["shrink"]
        finally:
            if not first["scale"]:  # no trial succeeded, or one raised an error
                for p, theta, _, _ in moves:
                    p.copy_(theta)
                torch.clear_autocast_cache()
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
