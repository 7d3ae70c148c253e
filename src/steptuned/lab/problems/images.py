"""Classification of images by a network: problems (a), (b), (c), (e) and (f) of the paper."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from typing_extensions import Self

from steptuned.lab.data.sets import SETS
from steptuned.lab.networks import ACTIVATIONS, NETWORKS, ONLY_32
from steptuned.lab.options import conflict, one_of
from steptuned.lab.problems.image_problem import ImageOptions, ImageProblem


class Images(ImageProblem):
    """J = mean cross-entropy + lambda/2 |theta|^2."""

    class Options(ImageOptions):
        network: Annotated[str, one_of(NETWORKS)] = "resnet-20"
        masks: Literal["same", "fresh"] = "same"
        """Dropout's masks in the second pass of Step-Tuned SGD."""
        statistics: Literal["both", "first"] = "both"
        """The passes of Step-Tuned SGD that update BatchNorm's running statistics."""
        size: Literal[32, 16] = 32
        """16 reduces CIFAR's 32x32 images to 16x16: means of 2x2 pixels, stored as float32, in
        which they are exact. They are standardised by the statistics of the 16x16 training
        images, and augmentation pads them by 2 pixels instead of 4."""

        @model_validator(mode="after")
        def _check_size(self) -> Self:
            if self.size == 16 and self.network in ONLY_32:
                raise conflict("size", f"network {self.network} takes images of 32x32 pixels only")
            if self.size == 16 and self.data == "mnist":
                raise conflict(
                    "size", "only the 32x32 images of CIFAR can be made 16x16, and mnist has 28x28"
                )
            return self

    name: ClassVar[str] = "images"
    description: ClassVar[str] = "images classified by a network (Figures 4 to 6)"
    options: Options

    def __init__(self, options: Options, seed: int, device: torch.device) -> None:
        self.same_noise = options.masks == "same"
        super().__init__(
            options,
            seed,
            device,
            options.network,
            halve=options.size == 16,
            statistics=options.statistics,
        )

    def _network(self) -> nn.Module:
        make = NETWORKS[self.options.network]
        return make(SETS[self.options.data].classes, ACTIVATIONS[self.options.activation])

    def _criterion(self, output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y)

    def _measured(self, output: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        right = (output.argmax(1) == y).float().mean()
        return {"loss": self._criterion(output, x, y), "accuracy": right}
