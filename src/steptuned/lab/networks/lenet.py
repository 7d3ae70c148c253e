"""LeNet for 32x32 colour images (after LeCun et al., 1998), with or without BatchNorm."""

from torch import nn


def lenet(classes: int, activation: type[nn.Module] = nn.ELU, *, batchnorm: bool) -> nn.Module:
    def then(norm: type[nn.Module], outputs: int) -> list[nn.Module]:
        return [*([norm(outputs)] if batchnorm else []), activation()]

    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        *then(nn.BatchNorm2d, 6),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        *then(nn.BatchNorm2d, 16),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        *then(nn.BatchNorm1d, 120),
        nn.Linear(120, 84),
        *then(nn.BatchNorm1d, 84),
        nn.Linear(84, classes),
    )
