"""The tasks: the same batches for every method, no overlap of what must be apart, and clear errors."""

from __future__ import annotations

import gzip
import pickle
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


# -- data of the user's own ----------------------------------------------------------------------


def cifar_python(folder, test_labels=10):
    random = np.random.default_rng(0)
    for name, count in (("data_batch_1", 20), ("data_batch_2", 20), ("test_batch", test_labels)):
        raw = {
            b"data": random.integers(0, 256, (count, 3072), np.uint8),
            b"labels": random.integers(0, 10, count).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(raw, protocol=2))


def cifar_binary(folder):
    random = np.random.default_rng(0)
    for name, count in (("data_batch_1.bin", 20), ("data_batch_2.bin", 20), ("test_batch.bin", 10)):
        raw = random.integers(0, 256, (count, 3073), np.uint8)
        raw[:, 0] %= 10
        raw.tofile(folder / name)


@pytest.mark.parametrize(
    ("write", "subfolder"),
    [
        (cifar_python, ""),
        (cifar_python, "cifar-10-batches-py"),
        (cifar_binary, ""),
        (cifar_binary, "cifar-10-batches-bin"),
    ],
)
def test_cifar10_in_both_forms(tmp_path, write, subfolder):
    (tmp_path / subfolder).mkdir(exist_ok=True)
    write(tmp_path / subfolder)
    data = tasks.cifar10(path=str(tmp_path))
    assert data.x.shape == (40, 3, 32, 32) and data.x_held_out.shape == (10, 3, 32, 32)
    x, y = next(data.batches(0, 2, 0, 8))
    assert x.shape == (8, 3, 32, 32) and x.dtype == np.float32 and abs(x).max() <= 2
    assert y.dtype == np.int64 and y.min() >= 0 and y.max() < 10


class Harmful:
    def __reduce__(self):
        return (print, ("code from a pickle ran",))


def test_a_pickle_cannot_run_code(tmp_path, capsys):
    cifar_python(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Harmful(), b"labels": []}))
    with pytest.raises(ValueError, match="not a CIFAR-10 batch: it wants to load builtins.print"):
        tasks.cifar10(path=str(tmp_path))
    assert "ran" not in capsys.readouterr().out


def image_folder(folder, count=6):
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for name, extension in (("cats", "png"), ("dogs", "jpg"), ("eels", "ppm")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = random.integers(0, 256, (20 + i, 30, 3), np.uint8)
            image.fromarray(pixels).save(folder / name / f"{i}.{extension}")


def test_an_image_folder(tmp_path):
    image_folder(tmp_path)
    data = tasks.images(path=str(tmp_path), image_size=16)
    assert data.classes == 3 and data.x.shape == (16, 3, 16, 16) and len(data.x_held_out) == 2
    assert sorted(np.concatenate([data.y, data.y_held_out])) == [0] * 6 + [1] * 6 + [2] * 6


# -- Fashion-MNIST, and other data in MNIST's files ----------------------------------------------


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def mnist(folder, count=30, zipped=True):
    """Four tiny files; returns the training pictures and labels."""
    random, written = np.random.default_rng(0), {}
    for part, size in (("train", count), ("t10k", 10)):
        x, y = random.integers(0, 256, (size, 28, 28), np.uint8), (np.arange(size) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            name, raw = f"{part}-{kind}-ubyte", idx(array)
            (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(raw) if zipped else raw)
        written[part] = x, y
    return written["train"]


@pytest.mark.parametrize("zipped", [True, False])
def test_mnists_files_are_read(tmp_path, zipped):
    x, y = mnist(tmp_path, zipped=zipped)
    data = tasks.fashion_mnist(path=str(tmp_path))
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
NETS = [
    ("digits_net", "digits", 123_690),
    ("digits_net", "fashion", 860_970),
    ("fnn3", "fashion", 199_210),  # as Gaussian-k's authors have it
    ("lenet5", "fashion", 61_706),
    ("resnet", "colour", 696_000),
    ("resnet20", "colour", 275_000),
    ("resnet32", "colour", 469_000),
    ("vgg11", "fashion", 9_223_000),
    ("vgg11", "digits", 9_223_000),
    ("byte_transformer", "text", 466_944),
    ("byte_lstm", "text", 493_000),
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
