"""Barzilai and Borwein's step, with the absolute value of the curvature."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import BarzilaiBorweinGD
from steptuned.lab.methods.base import Method
from steptuned.lab.problems.base import Problem


class BarzilaiBorwein(Method):
    name: ClassVar[str] = "barzilai-borwein"
    label: ClassVar[str] = "BB with absolute values"
    colour: ClassVar[str] = "#D55E00"
    full_batch: ClassVar[bool] = True
    logs_gamma: ClassVar[bool] = True

    lr: float = 0.1

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return BarzilaiBorweinGD(problem.parameters, self.lr)
