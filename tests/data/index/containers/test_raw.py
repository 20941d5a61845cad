"""CIFAR's and MNIST's own files: written as their authors write them, read, and refused."""

import gzip
import pickle

import numpy as np
import pytest

from podscale.data.index.dataset import open_index
from podscale.data.tools.survey import survey
from podscale.errors import UserError
from podscale.recipe import Data

RANDOM = np.random.default_rng(0)
NAMES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def pictures(n, side=32, channels=3):
    return RANDOM.integers(0, 256, (n, side, side, channels), np.uint8)


def record(image, *labels):
    """One record of CIFAR: labels, then the red, the green and the blue plane."""
    return bytes(labels) + image.transpose(2, 0, 1).tobytes()


@pytest.fixture
def cifar10(tmp_path):
    images, labels = pictures(25), np.arange(25) % 10
    for batch in range(5):
        part = range(5 * batch, 5 * batch + 5)
        data = b"".join(record(images[i], labels[i]) for i in part)
        (tmp_path / f"data_batch_{batch + 1}.bin").write_bytes(data)
    (tmp_path / "test_batch.bin").write_bytes(b"".join(record(images[i], labels[i]) for i in range(10)))
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    return tmp_path, images, labels


def test_cifar10_is_read(cifar10):
    folder, images, labels = cifar10
    found = open_index(Data(source="cifar", path=str(folder)))
    assert found.classes == tuple(NAMES)
    assert np.array_equal(found.train.images, images)
    assert np.array_equal(found.train.labels, labels)
    assert np.array_equal(found.val.images, images[:10])
    assert found.train.sizes.tolist()[0] == [32, 32]


def test_cifar10_is_found_one_folder_down(cifar10):
    folder, images, _ = cifar10
    inner = folder / "all" / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    for path in folder.glob("*.*"):
        path.rename(inner / path.name)
    found = open_index(Data(source="cifar", path=str(folder / "all")))
    assert np.array_equal(found.train.images, images)


def test_cifar100_is_read_by_its_fine_labels(tmp_path):
    images = pictures(4)
    for name, part in (("train.bin", range(4)), ("test.bin", range(2))):
        (tmp_path / name).write_bytes(b"".join(record(images[i], 7, 90 + i) for i in part))
    found = open_index(Data(source="cifar", path=str(tmp_path)))
    assert found.train.labels.tolist() == [90, 91, 92, 93]
    assert np.array_equal(found.val.images, images[:2])
    assert len(found.classes) == 100
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"name {i}" for i in range(100)))
    assert open_index(Data(source="cifar", path=str(tmp_path))).classes[90] == "name 90"


def refusal(source, folder):
    with pytest.raises(UserError) as error:
        open_index(Data(source=source, path=str(folder)))
    return str(error.value)


def test_the_pickled_version_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps(Bomb()))
    assert "download the binary version" in refusal("cifar", tmp_path)
    with pytest.raises(UserError, match="pickled and not read"):
        survey(str(tmp_path))


def test_damaged_cifar_is_refused(cifar10):
    folder, *_ = cifar10
    (folder / "data_batch_2.bin").write_bytes(b"x" * 3072)
    assert "data_batch_2.bin has 3072 bytes, no whole number of records of 3073" in refusal("cifar", folder)
    (folder / "data_batch_2.bin").write_bytes(bytes([10]) + bytes(3072))
    assert "has label 10, which CIFAR has not" in refusal("cifar", folder)
    (folder / "data_batch_2.bin").unlink()
    assert "does not hold CIFAR's binary files" in refusal("cifar", folder)


# --- MNIST -----------------------------------------------------------------------------------------------------------


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture(params=["plain", "gzip", "dots"])
def mnist(tmp_path, request):
    gray, labels = RANDOM.integers(0, 256, (12, 28, 28), np.uint8), np.arange(12) % 10
    for word, count in (("train", 12), ("t10k", 10)):
        for what, array in (("images-idx3", gray[:count]), ("labels-idx1", labels[:count])):
            name = f"{word}-{what.replace('-', '.') if request.param == 'dots' else what}-ubyte"
            data = idx(array)
            zipped = request.param == "gzip"
            (tmp_path / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
    return tmp_path, gray, labels


def test_mnist_is_read(mnist):
    folder, gray, labels = mnist
    found = open_index(Data(source="mnist", path=str(folder)))
    assert np.array_equal(found.train.images, np.repeat(gray[..., None], 3, axis=3))
    assert np.array_equal(found.train.labels, labels)
    assert len(found.val) == 10
    assert found.classes == tuple(map(str, range(10)))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not an idx file"),
        (b"\0\0\x0d\x03" + bytes(12), "is not an idx file"),
        (idx(np.zeros((2, 28, 28)))[:-1], "fewer bytes than the 1568"),
        (idx(np.zeros((2, 28, 28))) + b"x", "more bytes than the 1568"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "says that it holds"),
        (idx(np.zeros((2, 28, 28))), "has 2 pictures but"),
    ],
)
def test_damaged_mnist_is_refused(tmp_path, data, words):
    for word in ("train", "t10k"):
        (tmp_path / f"{word}-images-idx3-ubyte").write_bytes(data)
        (tmp_path / f"{word}-labels-idx1-ubyte").write_bytes(idx(np.zeros(3)))
    assert words in refusal("mnist", tmp_path)


def test_a_cut_off_gzip_is_refused(tmp_path):
    for word in ("train", "t10k"):
        whole = gzip.compress(idx(RANDOM.integers(0, 256, (3, 28, 28), np.uint8)))
        (tmp_path / f"{word}-images-idx3-ubyte.gz").write_bytes(whole[: len(whole) // 2])
        (tmp_path / f"{word}-labels-idx1-ubyte").write_bytes(idx(np.zeros(3)))
    assert "download it again" in refusal("mnist", tmp_path)


# --- what is found ---------------------------------------------------------------------------------------------------


def test_the_index_tells_what_these_files_hold(cifar10, tmp_path_factory):
    folder, *_ = cifar10
    found = survey(str(folder))
    assert (found["source"], found["splits"]["train"]["pictures"]) == ("cifar", 25)
    assert found["splits"]["train"]["class_counts"] == np.bincount(np.arange(25) % 10).tolist()
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    np.savez(path, train_images=pictures(4), train_labels=np.arange(4), val_images=pictures(4), val_labels=np.arange(4))
    found = survey(str(path))
    assert (found["source"], found["splits"]["val"]["bytes"]) == ("npz", 4 * 32 * 32 * 3)
