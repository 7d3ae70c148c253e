"""Algorithm 1 of the paper: gradient descent with the tuned step."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import StepTunedGD
from steptuned.lab.methods.base import Method
from steptuned.lab.problems.base import Problem


class StepTunedGDMethod(Method):
    name: ClassVar[str] = "step-tuned-gd"
    label: ClassVar[str] = "Algorithm 1"
    colour: ClassVar[str] = "#0072B2"
    full_batch: ClassVar[bool] = True
    logs_gamma: ClassVar[bool] = True

    lr: float = 0.1
    nu: float = 2.0

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return StepTunedGD(problem.parameters, self.lr, nu=self.nu)
