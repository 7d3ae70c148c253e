"""Network in Network for CIFAR (Lin et al., 2013), in two forms."""

from torch import nn


def nin(classes: int, activation: type[nn.Module] = nn.ELU) -> nn.Module:
    """With BatchNorm after every convolution but the last."""

    def convolution(inputs: int, outputs: int, size: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, size, padding=size // 2),
            nn.BatchNorm2d(outputs),
            activation(),
        ]

    return nn.Sequential(
        *convolution(3, 192, 5),
        *convolution(192, 160, 1),
        *convolution(160, 96, 1),
        nn.MaxPool2d(3, 2, padding=1),
        nn.Dropout(0.5),
        *convolution(96, 192, 5),
        *convolution(192, 192, 1),
        *convolution(192, 192, 1),
        nn.AvgPool2d(3, 2, padding=1),
        nn.Dropout(0.5),
        *convolution(192, 192, 3),
        *convolution(192, 192, 1),
        nn.Conv2d(192, classes, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def nin_author(classes: int, activation: type[nn.Module] = nn.ELU) -> nn.Module:
    """The form published by the paper's first author in 2019 (camcastera/Keras-Networks).

    For 32x32 images only: no padding, no BatchNorm, an activation after the last convolution too,
    and a dense layer after the global pooling.
    """

    def convolution(inputs: int, outputs: int, size: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, size), activation()]

    return nn.Sequential(
        *convolution(3, 192, 5),
        *convolution(192, 160, 1),
        *convolution(160, 96, 1),
        nn.MaxPool2d(3, 2),
        nn.Dropout(0.5),
        *convolution(96, 192, 5),
        *convolution(192, 192, 1),
        *convolution(192, 192, 1),
        nn.AvgPool2d(3, 2),
        nn.Dropout(0.5),
        *convolution(192, 192, 3),
        *convolution(192, 192, 1),
        *convolution(192, classes, 1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(classes, classes),
    )
