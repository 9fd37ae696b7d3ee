"""The nets that the tasks train, by the names in ``tasks.NETS``; ``torch_pictures`` and ``torch_text`` have them.

There is no batch normalisation, whose running means would differ between ranks, and hardly a bias:
tensors too small to compress travel dense, and would hide what the methods save.
"""

from __future__ import annotations

from torch import nn

from experiments.training import torch_pictures, torch_text

NETS = {
    "digits_net": torch_pictures.digits_net,
    "fnn3": torch_pictures.fnn3,
    "lenet5": torch_pictures.lenet5,
    "resnet": torch_pictures.resnet,
    "resnet20": torch_pictures.resnet20,
    "resnet32": torch_pictures.resnet32,
    "vgg11": torch_pictures.vgg11,
    "byte_transformer": torch_text.byte_transformer,
    "byte_lstm": torch_text.byte_lstm,
}


def build(net: str, data, **sizes: int) -> nn.Module:  # type: ignore[no-untyped-def]
    """Return a new net for the data's shapes; its initial weights depend on PyTorch's seed.

    Args:
        net: a key of :data:`NETS`.
        data: the data set.
        sizes: arguments of the net, such as ``width``.

    Raises:
        ValueError: the data's pictures are too small for it.
    """
    return NETS[net](data, **sizes)
