"""The 8x8 handwritten digits of scikit-learn, which need no download."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from steptuned.lab.problems.base import Batch, NetworkProblem, ProblemOptions, Stream
from steptuned.lab.problems.mode import as_trained, as_used
from steptuned.lab.spec import derive_seed

TRAINING = 1437


class Digits(NetworkProblem):
    """A small convolutional network, with or without BatchNorm, on 1,437 training images.

    The other 360 images are the test set.
    """

    class Options(ProblemOptions):
        batchnorm: bool = True
        weight_decay: float = 1e-4

        @property
        def training_rows(self) -> int:
            return TRAINING

    name: ClassVar[str] = "digits"
    description: ClassVar[str] = "8x8 handwritten digits, a small convolutional network"

    def __init__(self, options: Options, seed: int, device: torch.device) -> None:
        from sklearn.datasets import load_digits  # slow to import

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(derive_seed("split", "digits")).permutation(len(labels))
        x = torch.tensor(images[order] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8).to(device)
        y = torch.tensor(labels[order]).to(device)
        self.x, self.y, self.x_test, self.y_test = (
            x[:TRAINING],
            y[:TRAINING],
            x[TRAINING:],
            y[TRAINING:],
        )
        self.weight_decay = options.weight_decay
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("initial point", "digits", options.batchnorm, seed))
            self.set_model(_network(options.batchnorm).to(device))
        parts = ["digits", options.batch, seed]
        self.stream = Stream(len(self.y), options.batch, reshuffled=True, seed_parts=parts)

    def loss(self, batch: Batch) -> Tensor:
        return self._loss(self.replica, batch)

    def _loss(self, network: nn.Module, batch: Batch) -> Tensor:
        x, y = (self.x, self.y) if batch is None else (self.x[batch], self.y[batch])
        return nn.functional.cross_entropy(network(x), y)

    def evaluate(self) -> dict[str, float]:
        with as_trained(self.model, self.x.device):
            rows = torch.arange(TRAINING).split(self.stream.batch)
            plain = sum(self._loss(self.model, some).item() * len(some) for some in rows) / TRAINING
            penalty = self.weight_decay / 2 * sum(p.square().sum().item() for p in self.parameters)
        with as_used(self.model):
            accuracy = (self.model(self.x_test).argmax(1) == self.y_test).float().mean().item()
        return {"loss": plain + penalty, "plain loss": plain, "accuracy": accuracy}


def _network(batchnorm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1),
            *([nn.BatchNorm2d(outputs)] if batchnorm else []),
        ]
        layers += [nn.ELU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))
