"""Algorithm 2 of the paper: Step-Tuned SGD."""

from typing import ClassVar

from torch.optim import Optimizer

from steptuned import StepTunedSGD
from steptuned.lab.methods.base import Bounds, Decay, Method, widened
from steptuned.lab.methods.stepping import SinglePass, TwoPasses
from steptuned.lab.problems.base import Problem


class StepTunedSGDMethod(Method):
    name: ClassVar[str] = "step-tuned-sgd"
    label: ClassVar[str] = "Step-Tuned SGD"
    colour: ClassVar[str] = "#0072B2"
    variants: ClassVar[dict[str, tuple[str, str]]] = {
        "step-tuned-sgd-default-bounds": ("#56B4E9", "-"),
        "constant-05": ("#CC6677", "-."),
        "constant-1": ("#999933", "-."),
        "constant-2": ("#882255", "-."),
    }
    family: ClassVar[str] = "sgd"
    logs_gamma: ClassVar[bool] = True
    stepping: ClassVar[type[SinglePass]] = TwoPasses

    lr: float = 0.1
    delta: float = 0.001
    decay: Decay = "epoch"
    nu: float = 2.0
    bounds: Bounds = (0.5, 2.0)
    beta: float = 0.9

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return self._optimizer(problem)

    def _optimizer(
        self, problem: Problem, tune_every: int = 1, relative: bool = False
    ) -> Optimizer:
        """An epoch is ``per_epoch`` back-propagations, of which a mini-batch takes 1 + 1/T."""
        per_epoch = problem.stream.per_epoch / (1 + 1 / tune_every)
        every = {"iteration": 1, "epoch": per_epoch, "none": None}[self.decay]
        return StepTunedSGD(
            problem.parameters,
            self.lr,
            nu=self.nu,
            beta=self.beta,
            bounds=widened(self.bounds, self.nu),
            delta=self.delta,
            decay_every=every,
            weight_decay=problem.weight_decay,
            replay_rng=problem.same_noise,
            tune_every=tune_every,
            relative=relative,
        )
