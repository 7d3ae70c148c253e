"""Algorithm 4 of the paper: the variation of the gradient of J."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import ExactGV
from steptuned.lab.methods.gradient_variation import GradientVariationMethod
from steptuned.lab.problems.base import Problem


class ExactGVMethod(GradientVariationMethod):
    name: ClassVar[str] = "exact-gv"
    label: ClassVar[str] = "Exact-GV"
    colour: ClassVar[str] = "#D55E00"
    line: ClassVar[str] = "--"

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return ExactGV(problem.parameters, problem.full_gradient, **self.options())
