"""The autoencoder of Hinton and Salakhutdinov (2006): 784-1000-500-250-30 and back.

The code is linear, and the pixels come from a sigmoid.
"""

from itertools import pairwise

from torch import nn

WIDTHS = (784, 1000, 500, 250, 30)


def autoencoder(activation: type[nn.Module] = nn.SiLU) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise((*WIDTHS, *WIDTHS[-2::-1])):
        layers.append(nn.Linear(inputs, outputs))
        layers += [activation()] if outputs not in (WIDTHS[0], WIDTHS[-1]) else []
    return nn.Sequential(*layers, nn.Sigmoid())
