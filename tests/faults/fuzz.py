"""Everything that reads what others wrote, on damaged files: thousands of cases, in bounded memory and time.

Each target takes bytes and may refuse them in words, by a `UserError`; what it accepts is used. Anything else that is
raised, more than MOST_S seconds of work or more than MOST_BYTES of memory for one case is a finding: its bytes are
written to a file, and the program ends with 1. The same seed gives the same cases.

    python tests/faults/fuzz.py --cases 100000 --seed 0          # damage at random, spread over the targets
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

if "--atheris" in sys.argv:  # before anything that it shall follow is imported
    import atheris

    with atheris.instrument_imports(include=["podscale"]):
        import podscale.data.check

        import podscale.data.index
        import podscale.recipe  # noqa: F401

import numpy as np
from PIL import Image
from support import writers
from support.damage import refused_or_within

from podscale import recipe as recipes
from podscale.data import decode
from podscale.data.index import table as tables
from podscale.data.index.containers import parquet, tar, tfrecord
from podscale.data.index.dataset import open_index
from podscale.data.order import eval_boxes
from podscale.data.tools.check import check
from podscale.errors import UserError
from podscale.models.weights.torchvision import read_tensors

MOST_S, MOST_WAIT_S, MOST_BYTES = 30, 900, 6 * 2**30  # a machine may be busy with other things
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


# --- targets: what reads the bytes -----------------------------------------------------------------------------------


def _tar(data: bytes) -> None:
    refused_or_within(tar.scan, data, "train.tar")


def _tfrecord(data: bytes) -> None:
    refused_or_within(tfrecord.scan, data, "train-00000-of-00001")


def _parquet(data: bytes) -> None:
    refused_or_within(parquet.scan, data, "train.parquet")


def _index(data: bytes) -> None:
    """A table that is kept; it is used where it is whole."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        path.write_bytes(data)
        found = tables.load(path)
        if found is not None:
            assert len(found.train.labels) == len(found.train.offsets)
            assert all(0 <= label < len(found.classes) for label in found.train.labels.tolist())


def _picture(data: bytes) -> None:
    """The header first; pixels by both decoders; a crop."""
    try:
        header = decode.read_header(io.BytesIO(data))
        pixels = decode.decode(data)
    except UserError:
        return
    assert pixels.shape == (header.height, header.width, 3)
    out = np.empty((16, 16, 3), np.uint8)
    decode.crop(data, eval_boxes(0.9, np.array([[header.width, header.height]]))[0], True, 16, out)


def _header(data: bytes) -> None:
    decode.read_header(io.BytesIO(data))


def _recipe(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_bytes(data)
        found = recipes.load(str(path))
        again = recipes.parse(found.to_toml(), name=found.name)
        assert again.digest() == found.digest()


def _npz(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        path.write_bytes(data)
        splits = open_index(recipes.Data(source="npz", path=str(path)))
        assert len(splits.train.labels) == len(splits.train.images)


def _safetensors(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        path.write_bytes(data)
        read_tensors(path)


def _folder(data: bytes) -> None:
    """A damaged file in a data set that `data check` looks at."""
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            place = Path(folder) / split / "a"
            place.mkdir(parents=True)
            (place / "x.jpg").write_bytes(data)
        check(folder, threads=1)


# --- seeds: whole files ----------------------------------------------------------------------------------------------


def _pictures() -> list[bytes]:
    found = [writers.picture(seed, extension) for seed in range(4) for extension in ("jpg", "png", "webp")]
    found += [writers.turned(9), writers.picture(5, quality=30, progressive=True), b"P6 3 2 255\n" + bytes(range(18))]
    held = io.BytesIO()
    Image.new("CMYK", (9, 9), (1, 200, 3, 40)).save(held, "JPEG")
    return [*found, held.getvalue()]


def _written(write: Callable[..., None], pattern: str, **options: object) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), **options)
        return [path.read_bytes() for path in sorted(Path(folder).rglob(pattern))]


def _tables() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        writers.write_folder(Path(folder))
        writers.old(Path(folder))
        open_index(recipes.Data(source="folder", path=folder))
        return [path.read_bytes() for path in Path(cache).rglob("*") if path.is_file()]


def _archives() -> list[bytes]:
    found, images, labels = [], np.zeros((6, 4, 4, 3), np.uint8), np.arange(6) % 2
    for save in (np.savez, np.savez_compressed):
        held = io.BytesIO()
        save(held, train_images=images, train_labels=labels, val_images=images, val_labels=labels)
        found.append(held.getvalue())
    return found


def _weights() -> list[bytes]:
    from safetensors.numpy import save

    return [save({"a.b": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.zeros((), np.int64)}, {"format": "x"})]


def _recipes() -> list[bytes]:
    folder = Path(recipes.__file__).parent / "recipes"
    return [path.read_bytes() for path in sorted(folder.glob("*.toml"))]


# A target, its seeds, and its share of the cases.
TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]], int]] = {
    "tar": (_tar, lambda: _written(writers.write_tar, "*.tar") + _written(writers.write_tar, "*.tar", style="cls"), 20),
    "tfrecord": (_tfrecord, lambda: _written(writers.write_tfrecord, "*-of-*"), 20),
    "parquet": (_parquet, lambda: _written(writers.write_parquet, "*.parquet"), 10),
    "index": (_index, _tables, 15),
    "header": (_header, _pictures, 15),
    "picture": (_picture, _pictures, 10),
    "recipe": (_recipe, _recipes, 15),
    "npz": (_npz, _archives, 8),
    "safetensors": (_safetensors, _weights, 8),
    "folder": (_folder, _pictures, 4),
}


# --- damage ----------------------------------------------------------------------------------------------------------


def harmed(seeds: list[bytes], draw: random.Random) -> bytes:
    """One of the seeds after one to five things that happened to it."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
        at = draw.randrange(len(data) + 1)
        # Formats keep what matters at their ends.
        at = at if draw.random() < 0.5 else min(draw.randrange(200), len(data))
        at = len(data) - at if draw.random() < 0.2 else at
        match draw.randrange(7):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
            case 1:
                data[at : at + 1] = draw.randbytes(1)
            case 2:
                value = draw.choice(INTERESTING)
                data[at : at + len(value)] = value
            case 3:
                data[at:at] = draw.choice(INTERESTING)
            case 4:
                del data[at : at + draw.choice((1, 2, 4, 16, 500, len(data)))]
            case 5:
                start = draw.randrange(len(data) + 1)
                data[at:at] = data[start : start + draw.choice((1, 8, 64, 512))]
            case _:
                other = draw.choice(seeds)
                start = draw.randrange(len(other) + 1)
                data[at : at + 64] = other[start : start + 64]
    return bytes(data)


class FoundError(Exception):
    """Bytes that a target did not bear."""


def tried(name: str, data: bytes) -> bool:
    """Whether the target took the bytes, rather than refused them; a `FoundError` where it did neither."""
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    signal.alarm(MOST_WAIT_S)
    try:
        TARGETS[name][0](data)
        return True
    except UserError:
        return False
    except Exception as error:
        path = Path(tempfile.gettempdir()) / f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        raise FoundError(f"{name}: {type(error).__name__}: {error} (the bytes are in {path})") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"more than {MOST_S} s of work, or {MOST_WAIT_S} s of waiting, for one case")


def run(name: str, cases: int, seed: int) -> None:
    """So many cases of one target."""
    seeds, draw, began = TARGETS[name][1](), random.Random(f"{name} {seed}"), time.monotonic()
    assert seeds
    for data in seeds:
        assert tried(name, data), f"{name} refuses a whole file"
    for _ in range(cases):
        tried(name, harmed(seeds, draw))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took = f"{time.monotonic() - began:.0f} s, at most {most:.0f} MiB"
    print(f"{name}: {cases} cases, {took}", flush=True)


def guided(name: str, cases: int) -> None:
    """The same target under atheris, which finds its own way; seeds are given as a corpus."""
    with tempfile.TemporaryDirectory() as corpus:
        for i, data in enumerate(TARGETS[name][1]()):
            (Path(corpus) / str(i)).write_bytes(data)
        atheris.Setup(
            [sys.argv[0], corpus, f"-runs={cases}", "-max_len=20000"], lambda data: tried(name, data) and None
        )
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--atheris", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    if asked.atheris:
        guided(asked.target or "tar", asked.cases)
        return
    shares = {name: share for name, (_, _, share) in TARGETS.items() if asked.target in (None, name)}
    for name, share in shares.items():
        run(name, -(-asked.cases * share // sum(shares.values())), asked.seed)


if __name__ == "__main__":
    main()
