"""The tasks: the same batches for every method, no overlap of what must be apart, and clear errors."""

from __future__ import annotations

import gzip
from itertools import islice

import numpy as np
import pytest

from experiments.training import tasks


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    return tasks.digits()


@pytest.fixture(scope="module")
def text():
    return tasks.stdlib_bytes(max_bytes=500_000)


def rows(x):
    return {row.tobytes() for row in x}


def test_digits_are_split_once_and_for_all(digits):
    assert digits.x.shape == (1348, 1, 8, 8) and digits.x_held_out.shape == (449, 1, 8, 8)
    again = tasks.digits()
    assert (again.y_held_out == digits.y_held_out).all()
    assert not rows(digits.x) & rows(digits.x_held_out)


@pytest.mark.parametrize("source", ["digits", "text"])
def test_batches_depend_on_seed_and_rank_only(source, request):
    data = request.getfixturevalue(source)

    def first(rank, seed):
        return np.concatenate([x for x, _ in islice(data.batches(rank, 2, seed, 16), 5)])

    assert (first(0, 7) == first(0, 7)).all()
    assert (first(0, 7) != first(1, 7)).any()
    assert (first(0, 7) != first(0, 8)).any()


def test_ranks_have_shards_of_their_own(digits):
    shards = [rows(np.concatenate([x for x, _ in islice(digits.batches(r, 3, 0, 50), 9)])) for r in range(3)]
    assert not shards[0] & shards[1] and not shards[1] & shards[2]
    assert len(set().union(*shards)) == len(rows(digits.x))  # an epoch shows every example


@pytest.mark.parametrize("source", ["digits", "text"])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_share_the_held_out_set(source, world_size, request):
    data = request.getfixturevalue(source)
    whole = np.concatenate([y for _, y in data.held_out(0, 1)])
    parts = np.concatenate([y for rank in range(world_size) for _, y in data.held_out(rank, world_size)])
    assert sorted(rows(parts)) == sorted(rows(whole)) and len(parts) == len(whole)


# -- Fashion-MNIST -------------------------------------------------------------------------------


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def test_mnists_files_are_read(tmp_path):
    random, written = np.random.default_rng(0), {}
    for part, size in (("train", 30), ("t10k", 10)):
        x, y = random.integers(0, 256, (size, 28, 28), np.uint8), (np.arange(size) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
        written[part] = x, y
    data = tasks.fashion_mnist(tmp_path)
    x, y = written["train"]
    assert (data.x[:, 0] == x).all() and (data.y == y).all() and data.classes == 10
    assert data.x_held_out.shape == (10, 1, 28, 28) and data.y.dtype == np.int64
    batch, _ = next(data.batches(0, 1, 0, 4))
    assert batch.dtype == np.float32 and batch.min() >= -2 and batch.max() <= 2


# -- the nets ------------------------------------------------------------------------------------


def pictures(channels=1, side=28):
    x = np.random.default_rng(0).integers(0, 256, (8, channels, side, side), np.uint8)
    y = np.arange(8) % 10
    return tasks.Images(x, y, x, y, classes=10)


DATA = {"digits": (1, 8), "fashion": (1, 28), "colour": (3, 32)}
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
    ("mlp_wide", "fashion", 5_824_522),
    ("cnn", "fashion", 409_082),
    ("cnn_wide", "fashion", 3_238_602),
    ("transformer", "text", 276_480),
    ("transformer_wide", "text", 1_720_320),
    ("lstm", "text", 263_936),
    ("lstm_wide", "text", 1_773_824),
    ("transformer_deep", "text", 19_170_000),
]


@pytest.mark.parametrize(("name", "source", "parameters"), NETS)
def test_nets_learn_and_are_nearly_all_compressible(name, source, parameters, request):
    torch = pytest.importorskip("torch")
    from experiments.training import models_torch

    data = request.getfixturevalue("text") if source == "text" else pictures(*DATA[source])
    torch.manual_seed(0)
    net = models_torch.build(name, data)
    sizes = [parameter.numel() for parameter in net.parameters()]
    assert sum(sizes) == pytest.approx(parameters, rel=0.01)
    assert sum(size for size in sizes if size < 1024) < 0.03 * sum(sizes)
    x, y = map(torch.from_numpy, next(data.batches(0, 1, 0, 4)))
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        logits = net(x)
        assert logits.shape == (*y.shape, data.classes)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()))
        sgd.zero_grad()
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        sgd.step()
    assert losses[-1] < losses[0]
