"""The shapes of well-known nets' parameters, which are those of the gradients to exchange.

>>> from experiments import nets
>>> tensors = nets.get("resnet50")
>>> len(tensors), nets.total(tensors), tensors["layer4.2.conv2.weight"]
(161, 25557032, (512, 512, 3, 3))

Names and order are those of the usual PyTorch implementations (torchvision; GPT-2: Hugging Face's, whose linear
layers lie the other way round, and whose output layer is the embedding); shapes are the papers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt, prod

from hvdcompress.registry import suggest

Shapes = dict[str, tuple[int, ...]]


def alexnet() -> Shapes:
    """Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014 (arXiv 1404.5997)."""
    convolutions = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
    return _plain(convolutions, {1: (4096, 256 * 6 * 6), 4: (4096, 4096), 6: (1000, 4096)})


def vgg16() -> Shapes:
    """Simonyan and Zisserman, "Very Deep Convolutional Networks", 2015 (arXiv 1409.1556), configuration D."""
    convolutions, channels, place = {}, 3, 0
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            convolutions[place], channels, place = (width, channels, 3), width, place + 2  # a ReLU follows
        place += 1  # pooling
    return _plain(convolutions, {0: (4096, 512 * 7 * 7), 3: (4096, 4096), 6: (1000, 4096)})


def resnet32() -> Shapes:
    """He et al., "Deep Residual Learning", 2016 (arXiv 1512.03385), §4.2, for CIFAR-10: shortcuts have no weights."""
    shapes = _convolution("conv1", "bn1", 16, 3, 3)
    before = 16
    for stage, width in enumerate((16, 32, 64), 1):
        for block in range(5):
            for number in (1, 2):
                name = f"layer{stage}.{block}"
                shapes |= _convolution(f"{name}.conv{number}", f"{name}.bn{number}", width, before, 3)
                before = width
    return shapes | _linear("linear", 10, 64)


def resnet50() -> Shapes:
    """He et al. 2016, table 1, for ImageNet."""
    shapes = _convolution("conv1", "bn1", 64, 3, 7)
    before = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(count):
            name = f"layer{stage}.{block}"
            kinds = ((1, width, before, 1), (2, width, width, 3), (3, 4 * width, width, 1))
            for number, outputs, inputs, window in kinds:
                shapes |= _convolution(f"{name}.conv{number}", f"{name}.bn{number}", outputs, inputs, window)
            if block == 0:
                shapes |= _convolution(f"{name}.downsample.0", f"{name}.downsample.1", 4 * width, before, 1)
            before = 4 * width
    return shapes | _linear("fc", 1000, 2048)


def gpt2() -> Shapes:
    """Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: the smallest, 12 blocks of 768."""
    width = 768
    shapes: Shapes = {"wte.weight": (50257, width), "wpe.weight": (1024, width)}
    for block in range(12):
        for name, inputs, outputs in (
            ("ln_1", 0, width),
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("ln_2", 0, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes[f"h.{block}.{name}.weight"] = (inputs, outputs) if inputs else (outputs,)
            shapes[f"h.{block}.{name}.bias"] = (outputs,)
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


NETS: Mapping[str, Callable[[], Shapes]] = {
    function.__name__: function for function in (alexnet, vgg16, resnet32, resnet50, gpt2)
}


def get(name: str) -> Shapes:
    """Return the shapes of a net in :data:`NETS`, by parameter name, in the order of the net.

    Args:
        name: the net's, or a number of elements: one nearly square matrix of so many, or a few less.

    Raises:
        ValueError: there is no such net.
    """
    if name.isdigit() and int(name):
        rows = isqrt(int(name))
        return {"w": (rows, int(name) // rows)}
    if name not in NETS:
        raise ValueError(f"there is no net {name!r}{suggest(name, list(NETS))}; known: {', '.join(NETS)}")
    return NETS[name]()


def total(tensors: Mapping[str, tuple[int, ...]]) -> int:
    """The number of elements of all tensors."""
    return sum(prod(shape) for shape in tensors.values())


def _plain(convolutions: Mapping[int, tuple[int, int, int]], linear: Mapping[int, tuple[int, int]]) -> Shapes:
    """Convolutions (outputs, inputs, window) with biases, then linear layers, by their places in the net."""
    shapes: Shapes = {}
    for place, (outputs, inputs, window) in convolutions.items():
        shapes[f"features.{place}.weight"] = (outputs, inputs, window, window)
        shapes[f"features.{place}.bias"] = (outputs,)
    for place, (outputs, inputs) in linear.items():
        shapes |= _linear(f"classifier.{place}", outputs, inputs)
    return shapes


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _convolution(name: str, norm: str, outputs: int, inputs: int, window: int) -> Shapes:
    """A convolution without bias, and its batch normalisation."""
    return {
        f"{name}.weight": (outputs, inputs, window, window),
        f"{norm}.weight": (outputs,),
        f"{norm}.bias": (outputs,),
    }
