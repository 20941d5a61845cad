"""The format of checkpoints: how arrays are cut into parts, and which manifests are refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from podscale.errors import UserError
from podscale.parallel import checksum
from podscale.training.checkpoint import format as formats
from podscale.training.checkpoint.format import ArraySpec, FilePart, InvalidManifestError, Manifest

ARRAYS = {"a": jnp.zeros((3, 5)), "b": jnp.zeros((7,), jnp.bfloat16), "c": jnp.zeros((), jnp.int32)}


@pytest.mark.parametrize("size", [0, 1, 15, 65_536, 131_072, 131_073, 10_000_001])
@pytest.mark.parametrize("writers", [1, 2, 4, 7, 100])
def test_parts_cover_the_stream_once_and_divide_no_value(size, writers):
    parts = formats.cut_stream(size, writers)
    assert [byte for part in parts for byte in (part.start, part.stop)][1:-1:2] == [part.start for part in parts[1:]]
    assert (parts[0].start, parts[-1].stop) == (0, size)
    assert all(part.start % formats.ALIGNMENT == 0 for part in parts)
    assert 1 <= len(parts) <= min(writers, formats.MAX_PARTS)


def test_pieces_of_all_parts_make_up_every_array():
    specs = [ArraySpec(str(i), "float32", (n,)) for i, n in enumerate((1000, 0, 7, 90_000, 1, 50_000))]
    whole = {i: np.zeros(spec.size, int) for i, spec in enumerate(specs)}
    for part in formats.cut_stream(sum(spec.size for spec in specs), 5):
        pieces = list(formats.find_pieces(specs, part))
        assert sum(piece.stop - piece.start for piece in pieces) == len(part)
        for piece in pieces:
            whole[piece.array][piece.start : piece.stop] += 1
    assert all((count == 1).all() for count in whole.values())


def test_arrays_with_wide_values_come_first_so_that_none_is_misaligned():
    assert [spec.name for spec in formats.order_arrays(ARRAYS)] == ["a", "c", "b"]


DTYPES = ["float32", "bfloat16", "float16", "int32", "uint16", "int8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 35, 70_001])
def test_the_host_computes_the_same_checksum_as_the_devices_also_in_parts(dtype, size):
    array = (jnp.arange(size) * 37 % 101 - 50).astype(dtype)
    on_host, cut = np.asarray(array), size // 3
    expected = int(checksum.checksum_arrays([array])[0])
    assert checksum.checksum_host_array(on_host) == expected
    parts = checksum.checksum_host_array(on_host[:cut]), checksum.checksum_host_array(on_host[cut:], cut)
    assert sum(parts) % checksum.MODULUS == expected


def make_manifest(**changes):
    values = {"step": 3, "accuracy": 0.5, "about": {"decoder": "native"}, "files": (FilePart("arrays-0.bin", 60),)}
    values |= {"arrays": (ArraySpec("a", "float32", (3, 5)),), "digests": (17,)}
    return Manifest(**(values | changes))


def test_a_manifest_is_read_as_it_was_written():
    for manifest in (make_manifest(), make_manifest(accuracy=None, about=None)):
        assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_any_flipped_bit_of_a_manifest_is_noticed():
    data = make_manifest().to_bytes()
    for byte in range(len(data)):
        changed = bytearray(data)
        changed[byte] ^= 4
        try:
            same = Manifest.from_bytes(bytes(changed)) == make_manifest()
        except InvalidManifestError:
            same = True
        assert same  # blanks between values may change


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"3", b"[" * 100_000, b"\xff\xfe", b"{}"])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(InvalidManifestError, match="its metadata is not valid JSON"):
        Manifest.from_bytes(data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"files": (FilePart("../secret", 60),)}, "is not a valid file name"),
        ({"files": (FilePart(".hidden", 60),)}, "is not a valid file name"),
        ({"files": (FilePart("arrays-0.bin", 61),)}, "different sizes"),
        ({"arrays": (ArraySpec("a", "float32", (-3, -5)),)}, "negative size"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(InvalidManifestError, match=words):
        Manifest.from_bytes(make_manifest(**changes).to_bytes())


@pytest.mark.parametrize("dtype", ["object", "O", "V8", "(2,)f4", "str", "f4,f4", "nothing"])
def test_types_that_are_not_numbers_are_refused(dtype):
    content = json.loads(make_manifest().to_bytes())
    content["arrays"][0]["dtype"] = dtype
    del content["sha256"]
    content["sha256"] = formats._digest(content)
    with pytest.raises(InvalidManifestError, match="is not a numeric type"):
        Manifest.from_bytes(json.dumps(content).encode())


def test_a_newer_format_is_refused_by_its_number_and_is_no_damage():
    content = json.loads(make_manifest().to_bytes())
    del content["sha256"]
    content["format"] = 99
    content["sha256"] = formats._digest(content)
    with pytest.raises(UserError, match="has the format 99, which this version of Podscale does not know: a newer one"):
        Manifest.from_bytes(json.dumps(content).encode())
