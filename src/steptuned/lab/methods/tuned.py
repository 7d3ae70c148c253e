"""What methods share whose optimizer is wrapped in StepTuned. Not the paper's."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import StepTuned
from steptuned.lab.methods.base import Bounds, Method, widened
from steptuned.lab.methods.stepping import SinglePass, TwoPasses
from steptuned.lab.options import Count
from steptuned.lab.problems.base import Problem


class Tuned(Method):
    """Tunes the step of the method that follows in the list of base classes."""

    line: ClassVar[str] = "-."
    logs_gamma: ClassVar[bool] = True
    stepping: ClassVar[type[SinglePass]] = TwoPasses

    nu: float = 2.0
    bounds: Bounds = (0.5, 2.0)
    beta: float = 0.9
    tune_every: Count = 8
    relative: bool = True

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return StepTuned(
            super().make_optimizer(problem),  # type: ignore[safe-super]
            tune_every=self.tune_every,
            nu=self.nu,
            beta=self.beta,
            bounds=widened(self.bounds, self.nu),
            relative=self.relative,
            replay_rng=problem.same_noise,
        )
