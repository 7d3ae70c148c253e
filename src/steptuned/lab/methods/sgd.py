"""Stochastic gradient descent with the paper's decay."""

from typing import ClassVar

import torch
from torch.optim import Optimizer

from steptuned import RobbinsMonroLR
from steptuned.lab.methods.base import Decay, Method, robbins_monro
from steptuned.lab.options import Count
from steptuned.lab.problems.base import Problem


class SGD(Method):
    name: ClassVar[str] = "sgd"
    label: ClassVar[str] = "SGD"
    colour: ClassVar[str] = "#000000"
    variants: ClassVar[dict[str, tuple[str, str]]] = {
        "finer": ("#117733", "--"),
        "twice": ("#3A9C8C", ":"),
    }
    family: ClassVar[str] = "sgd"

    lr: float = 0.1
    delta: float = 0.001
    decay: Decay = "epoch"
    uses: Count = 1

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return torch.optim.SGD(problem.parameters, lr=self.lr, weight_decay=problem.weight_decay)

    def make_scheduler(self, optimizer: Optimizer, problem: Problem) -> RobbinsMonroLR | None:
        return robbins_monro(optimizer, problem, self.delta, self.decay)
