"""The paper's Table 1: the six deep-learning problems, their budgets and those of the grid search.

An experiment file names one of them with ``setting = "a"`` and overrides whatever it sets itself.
"""

from typing import Any


def _setting(title: str, problem: str, epochs: int, **options: Any) -> dict[str, Any]:
    return {
        "title": title,
        "problem": problem,
        "options": options,
        "budget": {"epochs": epochs},
        "selection": {"after": {"epochs": epochs // 10}},
    }


_LENET = {"data": "cifar-10", "activation": "elu", "layout": "channels_last"}
_RESNET = {"network": "resnet-20", "activation": "relu", "layout": "channels_last"}

TABLE_1: dict[str, dict[str, Any]] = {
    "a": _setting("CIFAR-10, ResNet-20", "images", 500, data="cifar-10", **_RESNET),
    "b": _setting("CIFAR-100, ResNet-20", "images", 500, data="cifar-100", **_RESNET),
    "c": _setting(
        "CIFAR-10, Network in Network",
        "images",
        300,
        data="cifar-10",
        network="nin",
        activation="elu",
        layout="channels_last",
    ),
    "d": _setting("MNIST, autoencoder", "autoencoder", 500, activation="silu"),
    "e": _setting("CIFAR-10, LeNet without BatchNorm", "images", 300, network="lenet", **_LENET),
    "f": _setting(
        "CIFAR-10, LeNet with BatchNorm", "images", 300, network="lenet-batchnorm", **_LENET
    ),
}
