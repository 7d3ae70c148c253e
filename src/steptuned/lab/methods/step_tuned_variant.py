"""Step-Tuned SGD that measures every T-th mini-batch, or has relative bounds. Beyond the paper."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned.lab.methods.step_tuned_sgd import StepTunedSGDMethod
from steptuned.lab.options import Count
from steptuned.lab.problems.base import Problem


class StepTunedVariant(StepTunedSGDMethod):
    name: ClassVar[str] = "step-tuned-variant"
    label: ClassVar[str] = "Step-Tuned SGD, T = 4"
    colour: ClassVar[str] = "#882255"
    line: ClassVar[str] = "--"
    variants: ClassVar[dict[str, tuple[str, str]]] = {
        "every-4": ("#882255", "--"),
        "every-16": ("#882255", ":"),
        "relative": ("#009E73", "-"),
        "relative-4": ("#009E73", "--"),
        "relative-16": ("#009E73", ":"),
    }

    tune_every: Count = 4
    relative: bool = False

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return self._optimizer(problem, self.tune_every, self.relative)
