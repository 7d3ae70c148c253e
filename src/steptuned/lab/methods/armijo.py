"""Gradient descent whose step is found by Armijo's backtracking line search."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import ArmijoGD
from steptuned.lab.methods.base import Method
from steptuned.lab.methods.stepping import LineSearch, SinglePass
from steptuned.lab.problems.base import Problem


class Armijo(Method):
    name: ClassVar[str] = "armijo"
    label: ClassVar[str] = "Armijo"
    colour: ClassVar[str] = "#009E73"
    full_batch: ClassVar[bool] = True
    stepping: ClassVar[type[SinglePass]] = LineSearch

    lr: float = 1.0
    slope: float = 1e-4
    shrink: float = 0.5

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return ArmijoGD(problem.parameters, self.lr, slope=self.slope, shrink=self.shrink)
