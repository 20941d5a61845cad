"""Fuzz every reader of untrusted files with damaged files: thousands of cases, in bounded memory and time.

Each target takes bytes and may refuse them by a `UserError`; data that it accepts is used. Any other exception, more
than MAX_S seconds of work or more than MAX_BYTES of memory for one case is a failure: its bytes are written to a file,
and the program exits with 1. The same seed gives the same cases.

    python tests/faults/fuzz.py --cases 100000 --seed 0          # random damage, spread over the targets
    python tests/faults/fuzz.py --target recipe --cases 5000
    python tests/faults/fuzz.py --target tar --atheris           # guided by coverage, if atheris is installed
"""

import argparse
import hashlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of `support`, where this is run as a program

if "--atheris" in sys.argv:  # before the import of modules whose coverage it follows
    import atheris

    with atheris.instrument_imports(include=["podscale"]):
        import podscale.data.index.dataset
        import podscale.data.tools.check
        import podscale.recipe  # noqa: F401

import numpy as np
from PIL import Image
from support import writers
from support.damage import assert_refused_or_within
from support.jpegs import make_many_scans

from podscale import recipe as recipes
from podscale.data import decode
from podscale.data.index import table as tables
from podscale.data.index.containers import parquet, tar, tfrecord
from podscale.data.index.dataset import open_index
from podscale.data.order import compute_eval_boxes
from podscale.data.tools.check import check_data_set
from podscale.errors import UserError
from podscale.models.weights.files import read_tensors
from podscale.study.grid import load_study

MAX_S, MAX_WAIT_S, MAX_BYTES = 30, 900, 6 * 2**30  # wait long: the machine may be busy
INTERESTING = [bytes(n) for n in (1, 2, 4, 8)] + [b"\xff" * n for n in (1, 2, 4, 8)]
INTERESTING += [
    b"\x7f",
    b"\x80",
    b"\x7f\xff\xff\xff",
    b"\x80\0\0\0",
    b"\0\0\0\x80",
    b"9" * 11,
    b"-1",
    b"[" * 3000,
    b"{" * 9,
]


# --- targets: readers of bytes ---------------------------------------------------------------------------------------


def _read_tar(data: bytes) -> None:
    assert_refused_or_within(tar.scan, data, "train.tar")


def _read_tfrecord(data: bytes) -> None:
    assert_refused_or_within(tfrecord.scan, data, "train-00000-of-00001")


def _read_parquet(data: bytes) -> None:
    assert_refused_or_within(parquet.scan, data, "train.parquet")


def _read_index(data: bytes) -> None:
    """Load a stored table; use it if it is intact."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        path.write_bytes(data)
        result = tables.load_tables(path)
        if result is not None:
            assert len(result.train.labels) == len(result.train.offsets)
            assert all(0 <= label < len(result.classes) for label in result.train.labels.tolist())


def _decode_image(data: bytes) -> None:
    """Read the header, then decode all pixels, then decode a crop."""
    try:
        header = decode.read_header(io.BytesIO(data))
        pixels = decode.decode_image(data)
    except UserError:
        return
    assert pixels.shape == (header.height, header.width, 3)
    out = np.empty((16, 16, 3), np.uint8)
    decode.crop_image(data, compute_eval_boxes(0.9, np.array([[header.width, header.height]]))[0], True, 16, out)


def _read_header(data: bytes) -> None:
    decode.read_header(io.BytesIO(data))


def _read_recipe(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_bytes(data)
        recipe = recipes.load_recipe(str(path))
        parsed = recipes.parse_recipe(recipe.to_toml(), name=recipe.name)
        assert parsed.digest() == recipe.digest()


def _read_study(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_bytes(data)
        assert load_study(path).cases


def _read_npz(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        path.write_bytes(data)
        splits = open_index(recipes.Data(source="npz", path=str(path)))
        assert len(splits.train.labels) == len(splits.train.images)


def _read_safetensors(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        path.write_bytes(data)
        read_tensors(path)


def _check_folder(data: bytes) -> None:
    """Check a data set that contains a damaged file, as `data check` does."""
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            class_folder = Path(folder) / split / "a"
            class_folder.mkdir(parents=True)
            (class_folder / "x.jpg").write_bytes(data)
        check_data_set(folder, threads=1)


# --- seeds: intact files ---------------------------------------------------------------------------------------------


def _make_images() -> list[bytes]:
    images = [writers.make_image(seed, extension) for seed in range(4) for extension in ("jpg", "png", "webp")]
    images += [writers.make_rotated_image(9), writers.make_image(5, quality=30, progressive=True)]
    images += [b"P6 3 2 255\n" + bytes(range(18)), make_many_scans(40, 24, 30)]
    file = io.BytesIO()
    Image.new("CMYK", (9, 9), (1, 200, 3, 40)).save(file, "JPEG")
    return [*images, file.getvalue()]


def _write_files(write: Callable[..., None], pattern: str, **options: object) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), **options)
        return [path.read_bytes() for path in sorted(Path(folder).rglob(pattern))]


def _make_tables() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        writers.write_folder(Path(folder))
        writers.backdate(Path(folder))
        open_index(recipes.Data(source="folder", path=folder))
        return [path.read_bytes() for path in Path(cache).rglob("*") if path.is_file()]


def _make_npz_files() -> list[bytes]:
    archives, images, labels = [], np.zeros((6, 4, 4, 3), np.uint8), np.arange(6) % 2
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, train_images=images, train_labels=labels, val_images=images, val_labels=labels)
        archives.append(file.getvalue())
    return archives


def _make_safetensors() -> list[bytes]:
    from safetensors.numpy import save

    return [save({"a.b": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.zeros((), np.int64)}, {"format": "x"})]


def _list_recipes() -> list[bytes]:
    folder = Path(recipes.__file__).parents[1] / "recipes"
    return [path.read_bytes() for path in sorted(folder.glob("*.toml"))]


STUDY = b"""
recipe = "digits"
seeds = [0, 1]
set.train.epochs = 5
grid.batch.size = [128, 256]
[[case]]
name = "LARS"
set.optimizer.name = "lars"
[[at]]
grid.batch.size = [256]
set.schedule.peak = 2.0
"""


# A target, its seeds, and its share of the cases.
TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]], int]] = {
    "tar": (
        _read_tar,
        lambda: _write_files(writers.write_tar, "*.tar") + _write_files(writers.write_tar, "*.tar", style="cls"),
        20,
    ),
    "tfrecord": (_read_tfrecord, lambda: _write_files(writers.write_tfrecord, "*-of-*"), 20),
    "parquet": (_read_parquet, lambda: _write_files(writers.write_parquet, "*.parquet"), 10),
    "index": (_read_index, _make_tables, 15),
    "header": (_read_header, _make_images, 15),
    "image": (_decode_image, _make_images, 10),
    "recipe": (_read_recipe, _list_recipes, 15),
    "study": (_read_study, lambda: [STUDY], 5),
    "npz": (_read_npz, _make_npz_files, 8),
    "safetensors": (_read_safetensors, _make_safetensors, 8),
    "folder": (_check_folder, _make_images, 4),
}


# --- damage ----------------------------------------------------------------------------------------------------------


def damage_seed(seeds: list[bytes], rng: random.Random) -> bytes:
    """Return one of the seeds after one to five random changes."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        at = rng.randrange(len(data) + 1)
        # Half of the changes are near the start or the end, where formats have the bytes that matter most.
        at = at if rng.random() < 0.5 else min(rng.randrange(200), len(data))
        at = len(data) - at if rng.random() < 0.2 else at
        match rng.randrange(7):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 1] = rng.randbytes(1)
            case 2:
                value = rng.choice(INTERESTING)
                data[at : at + len(value)] = value
            case 3:
                data[at:at] = rng.choice(INTERESTING)
            case 4:
                del data[at : at + rng.choice((1, 2, 4, 16, 500, len(data)))]
            case 5:
                start = rng.randrange(len(data) + 1)
                data[at:at] = data[start : start + rng.choice((1, 8, 64, 512))]
            case _:
                other = rng.choice(seeds)
                start = rng.randrange(len(other) + 1)
                data[at : at + 64] = other[start : start + 64]
    return bytes(data)


class TargetError(Exception):
    """A target neither accepted nor refused some bytes."""


def run_case(name: str, data: bytes) -> bool:
    """Return whether the target accepts the bytes.

    Raises:
        TargetError: the target neither accepts nor refuses them.
    """
    signal.setitimer(signal.ITIMER_PROF, MAX_S)
    signal.alarm(MAX_WAIT_S)
    try:
        TARGETS[name][0](data)
        return True
    except UserError:
        return False
    except Exception as error:
        path = Path(tempfile.gettempdir()) / f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        raise TargetError(f"{name}: {type(error).__name__}: {error} (the bytes are in {path})") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def _raise_timeout(*_: object) -> None:
    raise TimeoutError(f"more than {MAX_S} s of work, or {MAX_WAIT_S} s of waiting, for one case")


def run_target(name: str, cases: int, seed: int) -> None:
    """Run cases of one target."""
    seeds, rng, start = TARGETS[name][1](), random.Random(f"{name} {seed}"), time.monotonic()
    assert seeds
    for data in seeds:
        assert run_case(name, data), f"{name} refuses an intact file"
    for _ in range(cases):
        run_case(name, damage_seed(seeds, rng))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name}: {cases} cases, {time.monotonic() - start:.0f} s, at most {peak:.0f} MiB", flush=True)


def run_guided(name: str, cases: int) -> None:
    """Run a target under atheris, guided by coverage, with the seeds as its corpus."""
    with tempfile.TemporaryDirectory() as corpus:
        for i, data in enumerate(TARGETS[name][1]()):
            (Path(corpus) / str(i)).write_bytes(data)
        atheris.Setup(
            [sys.argv[0], corpus, f"-runs={cases}", "-max_len=20000"], lambda data: run_case(name, data) and None
        )
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--atheris", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _raise_timeout)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    if arguments.atheris:
        run_guided(arguments.target or "tar", arguments.cases)
        return
    shares = {name: share for name, (_, _, share) in TARGETS.items() if arguments.target in (None, name)}
    for name, share in shares.items():
        run_target(name, -(-arguments.cases * share // sum(shares.values())), arguments.seed)


if __name__ == "__main__":
    main()
