"""The tasks: the same batches for every method, no overlap of what must be apart, and clear errors."""

from __future__ import annotations

import pickle
from itertools import islice

import numpy as np
import pytest

from hvdcompress.lab.training import tasks


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
@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_share_the_held_out_set(source, world, request):
    data = request.getfixturevalue(source)
    whole = np.concatenate([y for _, y in data.held_out(0, 1)])
    parts = np.concatenate([y for rank in range(world) for _, y in data.held_out(rank, world)])
    assert sorted(rows(parts)) == sorted(rows(whole)) and len(parts) == len(whole)


def test_the_next_byte_is_the_class(text):
    x, y = next(text.batches(0, 1, 0, 4))
    assert x.shape == y.shape == (4, 64) and x.dtype == np.int64
    assert (x[:, 1:] == y[:, :-1]).all()
    assert b"import" in text.text.tobytes() and b"import" in text.text_held_out.tobytes()


def test_metrics():
    assert tasks.ACCURACY.value(0.0, 3, 4) == 75
    assert tasks.BITS_PER_BYTE.value(8 * np.log(2), 0, 4) == pytest.approx(2)


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


def test_cifar10_planes_are_red_green_blue(tmp_path):
    cifar_binary(tmp_path)
    raw = np.fromfile(tmp_path / "data_batch_1.bin", np.uint8).reshape(-1, 3073)
    data = tasks.cifar10(path=str(tmp_path))
    assert (data.x[0, 1].ravel() == raw[0, 1 + 1024 : 1 + 2048]).all() and data.y[0] == raw[0, 0]


class Harmful:
    def __reduce__(self):
        return (print, ("code from a pickle ran",))


def test_a_pickle_cannot_run_code(tmp_path, capsys):
    cifar_python(tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Harmful(), b"labels": []}))
    with pytest.raises(ValueError, match="not a CIFAR-10 batch: it wants to load builtins.print"):
        tasks.cifar10(path=str(tmp_path))
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x02}q\x00."])
def test_a_damaged_cifar10_file_is_named(tmp_path, content):
    cifar_python(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match="data_batch_2 is not a CIFAR-10 batch"):
        tasks.cifar10(path=str(tmp_path))


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


def test_an_image_folder_with_train_and_val(tmp_path):
    image_folder(tmp_path / "train")
    image_folder(tmp_path / "val", count=2)
    data = tasks.images(path=str(tmp_path))
    assert len(data.x) == 18 and len(data.x_held_out) == 6 and data.x.shape[2:] == (32, 32)
    (tmp_path / "val" / "foxes").mkdir()
    with pytest.raises(ValueError, match="classes that the training set lacks: foxes"):
        tasks.images(path=str(tmp_path))


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    for load in (tasks.images, tasks.cifar10):
        with pytest.raises(ValueError, match="no such folder: .*nowhere"):
            load(path=str(tmp_path / "nowhere"))
        with pytest.raises(ValueError, match="is empty"):
            load(path=str(tmp_path))
    (tmp_path / "only").mkdir()
    with pytest.raises(ValueError, match="holds 0 images in 0 classes"):
        tasks.images(path=str(tmp_path))
    with pytest.raises(ValueError, match="no CIFAR-10 in"):
        tasks.cifar10(path=str(tmp_path))
    image_folder(tmp_path / "set")
    (tmp_path / "set" / "cats" / "bad.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="bad.png is not a readable image"):
        tasks.images(path=str(tmp_path / "set"))


# -- the nets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "least"), [("digits", 100_000), ("text", 400_000), ("cifar", 600_000)])
def test_nets_are_nearly_all_compressible(source, least, request, tmp_path):
    torch = pytest.importorskip("torch")
    from hvdcompress.lab.training import models_torch

    if source == "cifar":
        cifar_python(tmp_path)
        data, name = tasks.cifar10(path=str(tmp_path)), "resnet"
    else:
        data = request.getfixturevalue(source)
        name = tasks.TASKS["digits" if source == "digits" else "bytes"].model
    torch.manual_seed(0)
    net = getattr(models_torch, name)(data)
    sizes = [parameter.numel() for parameter in net.parameters()]
    assert sum(sizes) >= least
    assert sum(size for size in sizes if size < 1024) < 0.01 * sum(sizes)
    x, y = next(data.batches(0, 1, 0, 2))
    logits = net(torch.from_numpy(x))
    assert logits.shape == (*y.shape, data.classes) and torch.isfinite(logits).all()
