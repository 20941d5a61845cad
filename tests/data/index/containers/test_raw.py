"""CIFAR's and MNIST's own files: read as their authors write them; damaged files are refused."""

import gzip
import pickle

import numpy as np
import pytest

from podscale.data.index.dataset import open_index
from podscale.data.tools.survey import survey_data_set
from podscale.errors import UserError
from podscale.recipe import Data

RANDOM = np.random.default_rng(0)
NAMES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def make_images(n, side=32, channels=3):
    return RANDOM.integers(0, 256, (n, side, side, channels), np.uint8)


def encode_record(image, *labels):
    """Return one record of CIFAR: labels, then the red, the green and the blue plane."""
    return bytes(labels) + image.transpose(2, 0, 1).tobytes()


@pytest.fixture
def cifar10(tmp_path):
    images, labels = make_images(25), np.arange(25) % 10
    for batch in range(5):
        part = range(5 * batch, 5 * batch + 5)
        data = b"".join(encode_record(images[i], labels[i]) for i in part)
        (tmp_path / f"data_batch_{batch + 1}.bin").write_bytes(data)
    (tmp_path / "test_batch.bin").write_bytes(b"".join(encode_record(images[i], labels[i]) for i in range(10)))
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    return tmp_path, images, labels


def test_cifar10_files_give_their_images_labels_and_class_names(cifar10):
    folder, images, labels = cifar10
    splits = open_index(Data(source="cifar", path=str(folder)))
    assert splits.classes == tuple(NAMES)
    assert np.array_equal(splits.train.images, images)
    assert np.array_equal(splits.train.labels, labels)
    assert np.array_equal(splits.val.images, images[:10])
    assert splits.train.sizes.tolist()[0] == [32, 32]


def test_cifar10_is_found_in_a_subfolder(cifar10):
    folder, images, _ = cifar10
    inner = folder / "all" / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    for path in folder.glob("*.*"):
        path.rename(inner / path.name)
    splits = open_index(Data(source="cifar", path=str(folder / "all")))
    assert np.array_equal(splits.train.images, images)


def test_cifar100_is_read_with_its_fine_labels(tmp_path):
    images = make_images(4)
    for name, part in (("train.bin", range(4)), ("test.bin", range(2))):
        (tmp_path / name).write_bytes(b"".join(encode_record(images[i], 7, 90 + i) for i in part))
    splits = open_index(Data(source="cifar", path=str(tmp_path)))
    assert splits.train.labels.tolist() == [90, 91, 92, 93]
    assert np.array_equal(splits.val.images, images[:2])
    assert len(splits.classes) == 100
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"name {i}" for i in range(100)))
    assert open_index(Data(source="cifar", path=str(tmp_path))).classes[90] == "name 90"


def get_refusal(source, folder):
    with pytest.raises(UserError) as error:
        open_index(Data(source=source, path=str(folder)))
    return str(error.value)


def test_pickled_cifar_is_refused_without_unpickling(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps(Bomb()))
    assert "download the binary version" in get_refusal("cifar", tmp_path)
    with pytest.raises(UserError, match="pickled and not read"):
        survey_data_set(str(tmp_path))


def test_damaged_cifar_is_refused(cifar10):
    folder, *_ = cifar10
    (folder / "data_batch_2.bin").write_bytes(b"x" * 3072)
    assert "data_batch_2.bin has 3072 bytes, not a multiple of the 3073 of a record" in get_refusal("cifar", folder)
    (folder / "data_batch_2.bin").write_bytes(bytes([10]) + bytes(3072))
    assert "has label 10, which CIFAR does not have" in get_refusal("cifar", folder)
    (folder / "data_batch_2.bin").unlink()
    assert "does not hold CIFAR's binary files" in get_refusal("cifar", folder)


# --- MNIST -----------------------------------------------------------------------------------------------------------


def encode_idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture(params=["plain", "gzip", "dots"])
def mnist(tmp_path, request):
    gray, labels = RANDOM.integers(0, 256, (12, 28, 28), np.uint8), np.arange(12) % 10
    for prefix, count in (("train", 12), ("t10k", 10)):
        for kind, array in (("images-idx3", gray[:count]), ("labels-idx1", labels[:count])):
            name = f"{prefix}-{kind.replace('-', '.') if request.param == 'dots' else kind}-ubyte"
            data = encode_idx(array)
            zipped = request.param == "gzip"
            (tmp_path / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
    return tmp_path, gray, labels


def test_mnist_files_give_their_images_and_labels(mnist):
    folder, gray, labels = mnist
    splits = open_index(Data(source="mnist", path=str(folder)))
    assert np.array_equal(splits.train.images, np.repeat(gray[..., None], 3, axis=3))
    assert np.array_equal(splits.train.labels, labels)
    assert len(splits.val) == 10
    assert splits.classes == tuple(map(str, range(10)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not an idx file"),
        (b"\0\0\x0d\x03" + bytes(12), "is not an idx file"),
        (encode_idx(np.zeros((2, 28, 28)))[:-1], "fewer bytes than the 1568"),
        (encode_idx(np.zeros((2, 28, 28))) + b"x", "more bytes than the 1568"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "says that it holds"),
        (encode_idx(np.zeros((2, 28, 28))), "has 2 images but"),
    ],
)
def test_damaged_mnist_is_refused(tmp_path, data, message):
    for prefix in ("train", "t10k"):
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(data)
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(encode_idx(np.zeros(3)))
    assert message in get_refusal("mnist", tmp_path)


def test_truncated_gzip_is_refused(tmp_path):
    for prefix in ("train", "t10k"):
        intact = gzip.compress(encode_idx(RANDOM.integers(0, 256, (3, 28, 28), np.uint8)))
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(intact[: len(intact) // 2])
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(encode_idx(np.zeros(3)))
    assert "download it again" in get_refusal("mnist", tmp_path)


# --- survey ----------------------------------------------------------------------------------------------------------


def test_survey_counts_the_images_of_cifar_and_npz_files(cifar10, tmp_path_factory):
    folder, *_ = cifar10
    summary = survey_data_set(str(folder))
    assert (summary["source"], summary["splits"]["train"]["images"]) == ("cifar", 25)
    assert summary["splits"]["train"]["class_counts"] == np.bincount(np.arange(25) % 10).tolist()
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    np.savez(
        path, train_images=make_images(4), train_labels=np.arange(4), val_images=make_images(4), val_labels=np.arange(4)
    )
    summary = survey_data_set(str(path))
    assert (summary["source"], summary["splits"]["val"]["bytes"]) == ("npz", 4 * 32 * 32 * 3)
