"""Nets for labelled pictures, in PyTorch: small ones, those of the papers' studies, and VGG's real layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def _kaiming(net: nn.Module) -> None:
    """He's start for layers before a ReLU."""
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")


def digits_net(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """Three convolutions and two linear layers: 124 thousand parameters for pictures of 8x8."""
    channels, height, width = data.x.shape[1:]
    net = nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 256, bias=False),
        nn.ReLU(),
        nn.Linear(256, data.classes),
    )
    _kaiming(net)  # PyTorch's own start is slow here
    return net


def fnn3(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """The FNN-3 of Gaussian-k's study (arXiv 1911.08772): layers of 200, 200 and, for each class, one.

    199 210 parameters for pictures of 28x28, as in the authors' code.
    """
    pixels = data.x[0].size
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, data.classes),
    )


def lenet5(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """LeNet-5 with ReLUs and maxima, as Gaussian-k's study has it: 62 thousand parameters for grey pictures of 28x28.

    Raises:
        ValueError: a side of the pictures has fewer than 12 pixels.
    """
    channels, height, width = data.x.shape[1:]
    if min(height, width) < 12:
        raise ValueError(f"the net 'lenet5' needs pictures of 12 pixels a side or more, not {height}x{width}")
    sides = [(side // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2),  # MNIST's 28 pixels as the 32 that the net was made for
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * sides[0] * sides[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, data.classes),
    )


VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512)


def vgg11(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """The eight convolutions of VGG-11 in their real widths, and one linear layer: 9.2 million parameters.

    Small pictures are what makes it bearable on a CPU; poolings for which they are too small are left out.
    """
    layers: list[nn.Module] = []
    channels, side = data.x.shape[1], min(data.x.shape[2:])
    for wanted in VGG11:
        if isinstance(wanted, int):
            layers += [nn.Conv2d(channels, wanted, 3, padding=1, bias=False), nn.ReLU()]
            channels = wanted
        elif side >= 2:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    net = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(channels, data.classes))
    _kaiming(net)
    return net


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with group norm, around a (strided, where the shape changes) shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(8, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(8, channels_out)
        same = channels_in == channels_out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet(data, width: int = 32) -> nn.Module:  # type: ignore[no-untyped-def]
    """A small residual net for colour pictures of any size: about 0.7 million parameters."""
    stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
    return nn.Sequential(
        nn.Conv2d(data.x.shape[1], width, 3, padding=1, bias=False),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        *(block for i, o, s in stages for block in (ResidualBlock(i, o, s), ResidualBlock(o, o, 1))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, data.classes),
    )


def _cifar_resnet(data, blocks: int) -> nn.Module:  # type: ignore[no-untyped-def]
    """He et al.'s nets for CIFAR (arXiv 1512.03385, §4.2): three stages of 16, 32 and 64 channels.

    Group norm is in the place of batch norm, and a 1x1 convolution where the paper's shortcut pads with zeros.
    """
    layers: list[nn.Module] = [nn.Conv2d(data.x.shape[1], 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    channels = 16
    for stage, wanted in enumerate((16, 32, 64)):
        for number in range(blocks):
            layers.append(ResidualBlock(channels, wanted, 2 if stage and not number else 1))
            channels = wanted
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, data.classes))


def resnet20(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """ResNet-20 for small pictures: 0.27 million parameters."""
    return _cifar_resnet(data, 3)


def resnet32(data) -> nn.Module:  # type: ignore[no-untyped-def]
    """ResNet-32 for small pictures, GradiVeQ's net: 0.47 million parameters."""
    return _cifar_resnet(data, 5)
