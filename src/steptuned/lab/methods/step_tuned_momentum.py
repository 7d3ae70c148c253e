"""SGD with momentum with a tuned step. Not the paper's."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import StepTuned
from steptuned.lab.methods.base import Bounds, widened
from steptuned.lab.methods.momentum import Momentum
from steptuned.lab.methods.stepping import SinglePass, TwoPasses
from steptuned.lab.options import Count
from steptuned.lab.problems.base import Problem


class StepTunedMomentum(Momentum):
    name: ClassVar[str] = "step-tuned-momentum"
    label: ClassVar[str] = "SGD with momentum, step-tuned"
    colour: ClassVar[str] = "#E69F00"
    line: ClassVar[str] = "-."
    logs_gamma: ClassVar[bool] = True
    stepping: ClassVar[type[SinglePass]] = TwoPasses

    nu: float = 2.0
    bounds: Bounds = (0.5, 2.0)
    beta: float = 0.9
    tune_every: Count = 8

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return StepTuned(
            super().make_optimizer(problem),
            tune_every=self.tune_every,
            nu=self.nu,
            beta=self.beta,
            bounds=widened(self.bounds, self.nu),
            replay_rng=problem.same_noise,
        )
