"""Adam, without decay."""

from typing import ClassVar

import torch
from torch.optim import Optimizer

from steptuned.lab.methods.base import Method
from steptuned.lab.options import Count
from steptuned.lab.problems.base import Problem


class Adam(Method):
    name: ClassVar[str] = "adam"
    label: ClassVar[str] = "Adam"
    colour: ClassVar[str] = "#D55E00"

    lr: float = 0.001
    beta1: float = 0.9
    uses: Count = 1

    def make_optimizer(self, problem: Problem) -> Optimizer:
        betas, decay = (self.beta1, 0.999), problem.weight_decay
        return torch.optim.Adam(problem.parameters, self.lr, betas, weight_decay=decay)
