"""The networks of the paper's Table 1, one per file."""

from collections.abc import Callable

from torch import nn

from steptuned.lab.networks.lenet import lenet
from steptuned.lab.networks.nin import nin, nin_author
from steptuned.lab.networks.resnet import resnet20

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}

NETWORKS: dict[str, Callable[[int, type[nn.Module]], nn.Module]] = {
    "resnet-20": resnet20,
    "nin": nin,
    "nin-author": nin_author,
    "lenet": lambda classes, activation: lenet(classes, activation, batchnorm=False),
    "lenet-batchnorm": lambda classes, activation: lenet(classes, activation, batchnorm=True),
}
"""Classifiers by name, made from the number of classes and the activation."""

ONLY_32 = ("lenet", "lenet-batchnorm", "nin-author")
"""Classifiers that only take images of 32x32 pixels."""
