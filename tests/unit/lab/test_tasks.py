"""The tasks: the same batches for every method, no overlap of what must be apart, and clear errors."""

from __future__ import annotations

import gzip
import pickle
from itertools import islice

import numpy as np
import pytest

from hvdcompress.lab.training import readers, tasks


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


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: gzip.compress(raw)[:-9], "damaged gzip"),
        (lambda raw: raw[:-1], "not a whole IDX file: .* for the shape .30, 28, 28."),
        (lambda raw: b"\0\0\x0d" + raw[3:], "not an IDX file of unsigned bytes: it begins with 00 00 0d 03"),
        (lambda raw: b"", "begins with nothing"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, damage, words):
    mnist(tmp_path, zipped=False)
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=f"{file.name} is .*{words}"):
        tasks.fashion_mnist(path=str(tmp_path))


def test_pictures_and_labels_must_fit(tmp_path):
    mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(29, np.uint8))))
    with pytest.raises(ValueError, match="train has pictures of shape"):
        tasks.fashion_mnist(path=str(tmp_path))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match="holds neither t10k-labels-idx1-ubyte nor"):
        readers.mnist(tmp_path, "t10k")


def test_missing_data_names_the_package(tmp_path, monkeypatch):
    absent = tasks.Task(**{**vars(tasks.TASKS["fashion_mnist"]), "default_path": tmp_path / "nowhere"})
    monkeypatch.setitem(tasks.TASKS, "fashion_mnist", absent)
    with pytest.raises(ValueError, match="apt-get install dataset-fashion-mnist"):
        tasks.fashion_mnist()
    assert "dataset-fashion-mnist" in absent.missing(None) and absent.missing(str(tmp_path)) is None


@pytest.fixture(scope="module")
def fashion():
    if problem := tasks.TASKS["fashion_mnist"].missing(None):
        pytest.skip(f"the data {problem}")
    return tasks.fashion_mnist()


def test_fashion_mnist_is_whole(fashion):
    assert fashion.x.shape == (60_000, 1, 28, 28) and fashion.x_held_out.shape == (10_000, 1, 28, 28)
    assert (np.bincount(fashion.y) == 6000).all() and (np.bincount(fashion.y_held_out) == 1000).all()


# -- variants of what scikit-learn carries -------------------------------------------------------


def test_noisy_digits_differ_only_while_training(digits):
    noisy = tasks.noisy_digits()
    assert (noisy.x == digits.x).all() and (noisy.y == digits.y).all()
    drawn = {name: next(data.batches(0, 1, 3, 1000)) for name, data in (("plain", digits), ("noisy", noisy))}
    wrong = np.mean(drawn["plain"][1] != drawn["noisy"][1])
    assert 0.12 < wrong < 0.24  # a fifth is drawn again, of which a tenth comes out right
    moved = (drawn["plain"][0] != drawn["noisy"][0]).any(axis=(1, 2, 3)).mean()
    assert 0.8 < moved < 0.95  # 8 of the 9 places
    held_out = [next(data.held_out(0, 1)) for data in (digits, noisy)]
    assert all((a == b).all() for a, b in zip(*held_out, strict=True))


def test_photographs_are_cut_into_patches():
    pytest.importorskip("sklearn")
    pytest.importorskip("PIL")
    data = tasks.photographs(patches=240)
    assert data.x.shape == (240, 3, 32, 32) and data.x.dtype == np.uint8 and data.classes == 24
    assert len(data.x_held_out) == 24 and (np.bincount(data.y) == 10).all()
    neighbours = [np.corrcoef(p[0, :, :-1].ravel(), p[0, :, 1:].ravel())[0, 1] for p in data.x.astype(float)]
    assert np.nanmedian(neighbours) > 0.7  # as in photographs, and not in noise


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
    from hvdcompress.lab.training import models_torch

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


def test_every_net_is_built_and_tested():
    models_torch = pytest.importorskip("hvdcompress.lab.training.models_torch")
    assert set(models_torch.NETS) == set(tasks.NETS) == {name for name, _, _ in NETS}


def test_a_net_must_suit_the_task():
    assert tasks.net_of("digits", None) == "digits_net" and tasks.net_of("digits", "fnn3") == "fnn3"
    with pytest.raises(ValueError, match="did you mean 'lenet5'"):
        tasks.net_of("digits", "lenet")
    with pytest.raises(ValueError, match="'byte_lstm' cannot learn 'digits'"):
        tasks.net_of("digits", "byte_lstm")


def test_pictures_can_be_too_small():
    models_torch = pytest.importorskip("hvdcompress.lab.training.models_torch")
    with pytest.raises(ValueError, match="'lenet5' needs pictures of 12 pixels"):
        models_torch.build("lenet5", pictures(side=8))


def test_the_windows_that_are_saved():
    save_gradients = pytest.importorskip("hvdcompress.lab.training.save_gradients")
    assert sorted(save_gradients.windows(100, 2)) == [0, 1, 49, 50, 98, 99]
    assert sorted(save_gradients.windows(5, 4)) == [0, 1, 2, 3, 4]
