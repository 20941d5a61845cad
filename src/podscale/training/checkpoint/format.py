"""The format of a checkpoint: the bytes of its arrays in a few files, and a manifest that says what they are.

All arrays, one after another and without gaps, are one stream of bytes (little-endian, in C order). The stream is cut
into as many parts as there are processes to write them, so that each array is written once and all processes have
the same work; each part is a file. `manifest.json` names the files and their sizes, the arrays in the order of the
stream, and the checksum of each array (`podscale.parallel.checksum`), of which each process computes its part. The
manifest is written last: what has none is no checkpoint. It carries a digest of itself.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from podscale.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 2**26
ALIGNMENT = 16  # bytes at which the stream may be cut: no value is divided
MIN_PART_BYTES = 2**16  # less is not worth a file of its own
MAX_PARTS = 64  # more writers make nothing faster, and all readers have to open every file
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class InvalidManifestError(ValueError):
    """A manifest that can be read, but is not what was written."""


@dataclass(frozen=True)
class ArraySpec:
    """An array of the stream.

    >>> ArraySpec("params/kernel", "float32", (3, 4)).size
    48
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * get_itemsize(self.dtype)


class FilePart(NamedTuple):
    """A file, and how many bytes of the stream it holds."""

    name: str
    size: int


class Piece(NamedTuple):
    """Bytes of one array that lie in one part of the stream: from `start` to `stop` of the array's own."""

    array: int
    start: int
    stop: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: the number of updates done.
        accuracy: validation accuracy; None if there was no evaluation.
        about: facts for people.
        files: the parts of the stream, in order.
        arrays: in the order of the stream.
        digests: the checksum of each array.
    """

    step: int
    accuracy: float | None
    about: Any
    files: tuple[FilePart, ...]
    arrays: tuple[ArraySpec, ...]
    digests: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """Return the content of `manifest.json`."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "accuracy": self.accuracy,
            "about": self.about,
            "files": [part._asdict() for part in self.files],
            "arrays": [
                {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "digest": digest}
                for spec, digest in zip(self.arrays, self.digests, strict=True)
            ],
        }
        content = json.loads(json.dumps(content))  # as it will be read
        return json.dumps(content | {"sha256": _digest(content)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Return the manifest that a file holds.

        Raises:
            InvalidManifestError: it is none, or has changed since it was written.
            UserError: a newer version of Podscale has written it.
        """
        try:
            content = json.loads(data)
            digest = content.pop("sha256")
        except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
            raise InvalidManifestError("its metadata is not valid JSON") from None
        if digest != _digest(content):
            raise InvalidManifestError("its manifest is not what was written")
        if content.get("format") != FORMAT:
            raise UserError(
                f"the checkpoint of step {content.get('step')} has the format {content.get('format')!r}, which this "
                f"version of Podscale does not know: a newer one has written it, which can read it"
            )
        try:
            return cls._parse(content)
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidManifestError(f"its manifest makes no sense: {error}") from None

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> "Manifest":
        files = tuple(FilePart(str(part["name"]), int(part["size"])) for part in content["files"])
        arrays = tuple(
            ArraySpec(str(spec["name"]), str(spec["dtype"]), tuple(map(int, spec["shape"])))
            for spec in content["arrays"]
        )
        for part in files:
            if not _FILE_NAME.fullmatch(part.name):
                raise ValueError(f"{part.name!r} is not a valid file name")
        if any(size < 0 for spec in arrays for size in spec.shape):
            raise ValueError("an array has a negative size")
        if sum(part.size for part in files) != sum(spec.size for spec in arrays):
            raise ValueError("its files and its arrays have different sizes")
        accuracy = content["accuracy"]
        return cls(
            step=int(content["step"]),
            accuracy=None if accuracy is None else float(accuracy),
            about=content["about"],
            files=files,
            arrays=arrays,
            digests=tuple(int(spec["digest"]) for spec in content["arrays"]),
        )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def get_itemsize(dtype: str) -> int:
    """Return the bytes of one value.

    Raises:
        ValueError: this is no type of plain numbers.
    """
    try:
        known = jnp.dtype(dtype) if dtype.isidentifier() else np.dtype("O")
    except TypeError:
        known = np.dtype("O")
    if not (jnp.issubdtype(known, np.number) or known == np.bool_):
        raise ValueError(f"{dtype!r} is not a numeric type")
    return int(known.itemsize)


# --- the stream ------------------------------------------------------------------------------------------------------


def order_arrays(arrays: Mapping[str, Any]) -> list[ArraySpec]:
    """Return arrays in the order of the stream: the widest values first, so that all are aligned without gaps."""
    specs = [ArraySpec(name, np.dtype(array.dtype).name, tuple(array.shape)) for name, array in arrays.items()]
    return sorted(specs, key=lambda spec: -get_itemsize(spec.dtype))


def cut_stream(size: int, writers: int) -> list[range]:
    """Return the parts of a stream of so many bytes: at most one for each writer, all of about the same size.

    >>> cut_stream(200_000, 2)
    [range(0, 100000), range(100000, 200000)]
    >>> cut_stream(1000, 4)
    [range(0, 1000)]
    """
    parts = max(1, min(writers, MAX_PARTS, size // MIN_PART_BYTES))
    edges = [size * i // parts // ALIGNMENT * ALIGNMENT for i in range(parts)] + [size]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def find_pieces(arrays: list[ArraySpec] | tuple[ArraySpec, ...], part: range) -> Iterator[Piece]:
    """Yield the pieces of arrays that lie in a part of the stream, in order; empty arrays have none."""
    offset = 0
    for number, spec in enumerate(arrays):
        start, stop = max(part.start - offset, 0), min(part.stop - offset, spec.size)
        if start < stop:
            yield Piece(number, start, stop)
        offset += spec.size
