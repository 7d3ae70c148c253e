"""The paper's problem (d): an autoencoder on MNIST."""

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from steptuned.lab.networks import ACTIVATIONS
from steptuned.lab.networks.autoencoder import autoencoder
from steptuned.lab.options import one_of
from steptuned.lab.problems.image_problem import ImageOptions, ImageProblem


class Autoencoder(ImageProblem):
    """J = mean squared difference between a pixel in [0, 1] and its reconstruction
    + lambda/2 |theta|^2."""

    class Options(ImageOptions):
        data: Literal["mnist"] = "mnist"
        activation: Annotated[str, one_of(ACTIVATIONS)] = "silu"
        normalisation: Literal["none"] = "none"

    name: ClassVar[str] = "autoencoder"
    description: ClassVar[str] = "MNIST through an autoencoder (Figures 4 and 5)"

    def __init__(self, options: Options, seed: int, device: torch.device) -> None:
        super().__init__(options, seed, device, "autoencoder")

    def _network(self) -> nn.Module:
        return autoencoder(ACTIVATIONS[self.options.activation])

    def _criterion(self, output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, x.flatten(1))

    def _measured(self, output: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self._criterion(output, x, y)}
