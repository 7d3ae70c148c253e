"""Gradient descent on the full batch."""

from typing import ClassVar

import torch
from torch.optim import Optimizer

from steptuned.lab.methods.base import Method
from steptuned.lab.problems.base import Problem


class GradientDescent(Method):
    name: ClassVar[str] = "gd"
    label: ClassVar[str] = "Gradient descent"
    colour: ClassVar[str] = "#000000"
    full_batch: ClassVar[bool] = True

    lr: float = 0.1

    def make_optimizer(self, problem: Problem) -> Optimizer:
        return torch.optim.SGD(problem.parameters, lr=self.lr, weight_decay=problem.weight_decay)
