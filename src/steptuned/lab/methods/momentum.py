"""SGD with momentum and the paper's decay."""

from typing import ClassVar

import torch
from torch.optim import Optimizer

from steptuned import RobbinsMonroLR
from steptuned.lab.methods.base import Decay, Method, robbins_monro
from steptuned.lab.options import Count
from steptuned.lab.problems.base import Problem


class Momentum(Method):
    name: ClassVar[str] = "momentum"
    label: ClassVar[str] = "SGD with momentum"
    colour: ClassVar[str] = "#E69F00"
    family: ClassVar[str] = "momentum"

    lr: float = 0.1
    delta: float = 0.001
    decay: Decay = "epoch"
    momentum: float = 0.9
    uses: Count = 1

    def make_optimizer(self, problem: Problem) -> Optimizer:
        decay = problem.weight_decay
        return torch.optim.SGD(problem.parameters, self.lr, self.momentum, weight_decay=decay)

    def make_scheduler(self, optimizer: Optimizer, problem: Problem) -> RobbinsMonroLR | None:
        return robbins_monro(optimizer, problem, self.delta, self.decay)
