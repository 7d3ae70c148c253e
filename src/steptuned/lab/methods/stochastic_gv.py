"""Algorithm 3 of the paper: the variation between the gradients of two mini-batches."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import StochasticGV
from steptuned.lab.methods.gradient_variation import GradientVariationMethod
from steptuned.lab.problems.base import Problem


class StochasticGVMethod(GradientVariationMethod):
    name: ClassVar[str] = "stochastic-gv"
    label: ClassVar[str] = "Stochastic-GV"
    colour: ClassVar[str] = "#CC79A7"
    line: ClassVar[str] = "--"

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return StochasticGV(problem.parameters, **self.options())
