"""The paper's problem (d): an autoencoder on MNIST."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from steptuned.lab.networks import ACTIVATIONS, autoencoder
from steptuned.lab.problems.images import Images

OMITTED = ("network", "masks", "statistics", "size")
"""Options of the classifiers that mean nothing here."""


class Autoencoder(Images):
    """J = mean square of the difference of a pixel, in [0, 1], and its reconstruction, + lambda/2 |theta|^2."""

    defaults: ClassVar[dict[str, Any]] = {
        **{name: value for name, value in Images.defaults.items() if name not in OMITTED},
        "data": "mnist",
        "activation": "silu",
        "normalisation": "none",
    }
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {**Images.choices, "data": ("mnist",), "normalisation": ("none",)}
    description: ClassVar[str] = "MNIST through an autoencoder (Figures 4 and 5)"

    def __init__(self, options: dict[str, Any], seed: int, device: torch.device) -> None:
        super().__init__({**options, "masks": "same", "statistics": "both"}, seed, device)

    def _network_name(self) -> str:
        return "autoencoder"

    def _network(self) -> nn.Module:
        return autoencoder(ACTIVATIONS[self.options["activation"]])

    def _criterion(self, output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, x.flatten(1))

    def _measured(self, output: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self._criterion(output, x, y)}
