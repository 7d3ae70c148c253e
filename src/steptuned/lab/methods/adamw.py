"""AdamW with the paper's decay."""

from typing import ClassVar

import torch
from torch.optim import Optimizer

from steptuned import RobbinsMonroLR
from steptuned.lab.methods.base import Decay, Method, robbins_monro
from steptuned.lab.options import Count
from steptuned.lab.problems.base import Problem


class AdamW(Method):
    name: ClassVar[str] = "adamw"
    label: ClassVar[str] = "AdamW"
    colour: ClassVar[str] = "#CC79A7"
    family: ClassVar[str] = "adamw"

    lr: float = 0.001
    delta: float = 0.001
    decay: Decay = "epoch"
    beta1: float = 0.9
    weight_decay: float = 0.01
    uses: Count = 1

    def make_optimizer(self, problem: Problem) -> Optimizer:
        # AdamW keeps its decay out of the gradient, so the problem's lambda is added to it.
        betas, decay = (self.beta1, 0.999), self.weight_decay + problem.weight_decay
        return torch.optim.AdamW(problem.parameters, self.lr, betas, weight_decay=decay)

    def make_scheduler(self, optimizer: Optimizer, problem: Problem) -> RobbinsMonroLR | None:
        return robbins_monro(optimizer, problem, self.delta, self.decay)
