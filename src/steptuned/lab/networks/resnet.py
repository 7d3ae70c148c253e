"""ResNet-20 for 32x32 images (He et al., 2015), with shortcuts that have no parameters."""

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Where the size changes, the shortcut takes every other pixel and adds zero channels.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.activation = activation()
        self.stride, self.missing = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.missing:
            before = self.missing // 2
            x = nn.functional.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.missing - before)
            )
        return self.activation(y + x)


class ResNet20(nn.Module):
    """A convolution, three stages of three blocks, global average pooling and a linear layer.

    The stages have 16, 32 and 64 channels.
    """

    def __init__(self, classes: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.activation = activation()
        blocks: list[nn.Module] = []
        inputs = 16
        for outputs, first_stride in ((16, 1), (32, 2), (64, 2)):
            for stride in (first_stride, 1, 1):
                blocks.append(Block(inputs, outputs, stride, activation))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.activation(self.bn(self.conv(x))))
        return self.head(x.mean((2, 3)))


def resnet20(classes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return ResNet20(classes, activation)
