"""The tasks and nets of trainings: data sets, their shares for ranks, and one small step of each net."""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import cache
from itertools import islice, product

import numpy as np
import pytest

from experiments.training import tasks


def pictures(channels, side):
    x = np.random.default_rng(0).integers(0, 256, (8, channels, side, side), np.uint8)
    return tasks.Images(x, np.arange(8), x, np.arange(8), classes=10)


@cache
def data_of(source):
    if source == "digits":
        pytest.importorskip("sklearn")
    makers = {
        "digits": tasks.digits,
        "text": lambda: tasks.stdlib_bytes(max_bytes=500_000),
        "fashion": lambda: pictures(1, 28),
        "colour": lambda: pictures(3, 32),
    }
    return makers[source]()


def rows(x):
    return {row.tobytes() for row in x}


def test_digits_are_split_once_and_for_all():
    digits = data_of("digits")
    assert digits.x.shape == (1348, 1, 8, 8) and digits.x_held_out.shape == (449, 1, 8, 8)
    assert (tasks.digits().y_held_out == digits.y_held_out).all()
    assert not rows(digits.x) & rows(digits.x_held_out)


@pytest.mark.parametrize("source", ["digits", "text"])
def test_batches_depend_only_on_seed_and_rank(source):
    data = data_of(source)
    first, again, other_rank, other_seed = (
        np.concatenate([x for x, _ in islice(data.batches(rank, 2, seed, 16), 5)])
        for rank, seed in ((0, 7), (0, 7), (1, 7), (0, 8))
    )
    assert (first == again).all() and (first != other_rank).any() and (first != other_seed).any()


def test_ranks_have_different_examples():
    digits = data_of("digits")
    shards = [rows(np.concatenate([x for x, _ in islice(digits.batches(r, 3, 0, 50), 9)])) for r in range(3)]
    assert not shards[0] & shards[1] and not shards[1] & shards[2]
    assert len(set().union(*shards)) == len(rows(digits.x))  # an epoch shows every example


def test_ranks_have_different_classes():
    data = replace(pictures(1, 4), x=np.arange(200), y=np.arange(200) % 10, by_label=0.8)
    batches = [np.concatenate([y for _, y in islice(data.batches(r, 5, 0, 20), 2)]) for r in range(5)]  # an epoch
    for rank, labels in enumerate(batches):
        assert np.isin(labels, [2 * rank, 2 * rank + 1]).mean() >= 0.8
    assert (np.bincount(np.concatenate(batches)) == 20).all()


@pytest.mark.parametrize("source", ["digits", "text"])
def test_ranks_share_the_held_out_set(source):
    data = data_of(source)
    whole = np.concatenate([y for _, y in data.held_out(0, 1)])
    parts = np.concatenate([y for rank in range(5) for _, y in data.held_out(rank, 5)])
    assert sorted(rows(parts)) == sorted(rows(whole)) and len(parts) == len(whole)


def test_files_of_mnist_are_read(tmp_path):
    x, y = np.random.default_rng(0).integers(0, 256, (30, 28, 28), np.uint8), (np.arange(30) % 10).astype(np.uint8)
    for part, (kind, array) in product(("train", "t10k"), (("images-idx3", x), ("labels-idx1", y))):
        idx = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
        (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx))
    data = tasks.fashion_mnist(tmp_path)
    assert (data.x[:, 0] == x).all() and (data.y == y).all() and data.classes == 10
    assert data.x_held_out.shape == (30, 1, 28, 28) and data.y.dtype == np.int64


# -- the nets ------------------------------------------------------------------------------------

#: not mnist_example, which is Horovod's with dropout, nor resnet_wide, which is resnet
NETS = [
    ("digits_net", "digits", 123_690),
    ("digits_net", "fashion", 860_970),
    ("fnn3", "fashion", 199_210),  # as Gaussian-k's authors have it
    ("lenet5", "fashion", 61_706),
    ("resnet", "colour", 696_000),
    ("resnet20", "colour", 275_000),
    ("byte_transformer", "text", 466_944),
    ("byte_lstm", "text", 493_000),
    ("mlp", "fashion", 1_863_690),
    pytest.param("mlp_wide", "fashion", 5_824_522, marks=pytest.mark.slow),
    ("cnn", "fashion", 409_082),
    pytest.param("cnn_wide", "fashion", 3_238_602, marks=pytest.mark.slow),
    ("transformer", "text", 276_480),
    pytest.param("transformer_wide", "text", 1_720_320, marks=pytest.mark.slow),
    ("lstm", "text", 263_936),
    pytest.param("lstm_wide", "text", 1_773_824, marks=pytest.mark.slow),
    pytest.param("transformer_deep", "text", 19_170_000, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "source", "parameters"), NETS)
def test_nets_learn_and_are_nearly_all_compressible(name, source, parameters):
    torch = pytest.importorskip("torch")
    from experiments.training import models_torch

    data = data_of(source)
    torch.manual_seed(0)
    net = models_torch.build(name, data)
    sizes = [parameter.numel() for parameter in net.parameters()]
    assert sum(sizes) == pytest.approx(parameters, rel=0.01)
    assert sum(size for size in sizes if size < 1024) < 0.03 * sum(sizes)
    batch = next(data.batches(0, 1, 0, 4))
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        losses.append(models_torch.loss_of(net, batch))
        sgd.zero_grad()
        losses[-1].backward()
        sgd.step()
    assert losses[-1] < losses[0]
