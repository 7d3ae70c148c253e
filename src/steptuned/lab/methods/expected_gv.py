"""Algorithm 5 of the paper: the expected variation of a mini-batch gradient."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import ExpectedGV
from steptuned.lab.methods.gradient_variation import GradientVariationMethod
from steptuned.lab.problems.base import Problem


class ExpectedGVMethod(GradientVariationMethod):
    name: ClassVar[str] = "expected-gv"
    label: ClassVar[str] = "Expected-GV"
    colour: ClassVar[str] = "#009E73"
    line: ClassVar[str] = "--"

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return ExpectedGV(problem.parameters, problem.expectation, **self.options())
