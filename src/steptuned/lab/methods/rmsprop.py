"""RMSprop, without decay."""

from typing import ClassVar

import torch
from torch.optim import Optimizer

from steptuned.lab.methods.base import Method
from steptuned.lab.options import Count
from steptuned.lab.problems.base import Problem


class RMSprop(Method):
    name: ClassVar[str] = "rmsprop"
    label: ClassVar[str] = "RMSprop"
    colour: ClassVar[str] = "#009E73"

    lr: float = 0.001
    uses: Count = 1

    def make_optimizer(self, problem: Problem) -> Optimizer:
        decay = problem.weight_decay
        return torch.optim.RMSprop(problem.parameters, lr=self.lr, weight_decay=decay)
