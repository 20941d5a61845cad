"""The native decoder against its plain twin: the same pixels, bit for bit, and the same refusals.

Equality is exact although the two sit on different releases of libjpeg-turbo: all that is used gives the same pixels in
each. There is one allowed disagreement, and `test_damage_is_judged_as_by_the_plain_twin` leaves it out: a header that
Pillow's own parser refuses and libjpeg accepts. The index reads every header by Pillow, so such a file gets no further.
"""

import io
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageFile

from podscale.data import decode
from podscale.errors import UserError

native = pytest.importorskip("podscale.data._native", reason="built without a C compiler or libjpeg-turbo")

DATA = Path(os.environ.get("PODSCALE_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
SIZES = [8, 9, 17, 32, 63, 100, 224]


@pytest.fixture(autouse=True)
def _room_to_write(monkeypatch):
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 2**22)  # Pillow cannot write some small progressive files without it


def picture(rng, width, height):
    """Smooth with some noise, like a photo."""
    coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + rng.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8))


def jpeg(rng, width, height, gray=False, **options):
    file = io.BytesIO()
    drawn = picture(rng, width, height)
    (drawn.convert("L") if gray else drawn).save(file, "JPEG", **options)
    return file.getvalue()


def any_jpeg(rng, most=(700, 500)):
    """One of the many kinds: (bytes, width, height)."""
    width, height = (int(rng.integers(1, side + 1 if rng.random() < 0.7 else 40)) for side in most)
    options = {"quality": int(rng.integers(20, 101)), "progressive": bool(rng.random() < 0.3)}
    options["optimize"] = bool(rng.random() < 0.5)
    if rng.random() < 0.3:
        options["restart_marker_blocks"] = int(rng.integers(1, 12))
    gray = bool(rng.random() < 0.2)
    if not gray:
        options["subsampling"] = int(rng.integers(0, 3))
    return jpeg(rng, width, height, gray, **options), width, height


def resampled(data, factors, width, height):
    """A 4:2:x file relabelled as one of other sampling factors and another size, of as many blocks."""
    at = data.index(b"\xff\xc0")
    size = struct.pack(">HH", height, width)
    return data[: at + 5] + size + data[at + 9 : at + 11] + bytes([factors]) + data[at + 12 :]


def any_box(rng, width, height):
    if rng.random() < 0.1:
        return (0.0, 0.0, float(width), float(height))
    sides = [np.sort(rng.choice(n + 1, 2, replace=False)).astype(float) for n in (width, height)]
    if rng.random() < 0.1:  # a single pixel
        sides = [np.array([edges[0], edges[0] + 1]) for edges in sides]
    if rng.random() < 0.2:  # parts of pixels
        sides = [edges + rng.uniform(0, 0.5, 2) * [1, -1] for edges in sides]
    return (sides[0][0], sides[1][0], sides[0][1], sides[1][1])


def both(data, box, flip, size):
    """(native pixels or None, plain pixels)."""
    ours, plain = np.zeros((2, 1, size, size, 3), np.uint8)
    edges, flips = np.array([box], np.float64), np.array([flip])
    left = native.crop_jpegs([data], edges, flips, size, ours, 1, decode.MAX_PIXELS, decode._TALL_FIRST)
    decode.crop(data, box, flip, size, plain[0])
    return None if left else ours[0], plain[0]


def files(*contents):
    """An index of files that exist in memory alone."""
    return SimpleNamespace(images=None, read=lambda i: contents[i], name=lambda i: f"photo {i}.jpg")


def cropped(data, box, size=16, flip=False):
    out = np.zeros((1, size, size, 3), np.uint8)
    decode.crop_batch(files(data), np.array([0]), np.array([box], np.float64), np.array([flip]), size, out)
    return out[0]


def reason(data, box=(0, 0, 8, 8)):
    """Why the native decoder leaves a file, or None."""
    out = np.zeros((1, 8, 8, 3), np.uint8)
    left = native.crop_jpegs([data], np.array([box], np.float64), np.array([False]), 8, out, 1, 2**28, True)
    return left[0][1] if left else None


# --- pixels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_pixels_are_those_of_the_plain_twin(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        data, width, height = any_jpeg(rng)
        for _ in range(3):
            box, flip, size = any_box(rng, width, height), bool(rng.random() < 0.5), int(rng.choice(SIZES))
            ours, plain = both(data, box, flip, size)
            if ours is None:  # the one kind of these that it may leave
                assert not decode._TALL_FIRST
                assert height > 100 * width
            else:
                assert np.array_equal(ours, plain), (width, height, box, flip, size)


@pytest.mark.parametrize(
    ("subsampling", "factors", "width", "height"),
    [(1, 0x12, 32, 128), (2, 0x41, 128, 32), (2, 0x14, 32, 128), (1, 0x12, 29, 121), (2, 0x41, 121, 29)],
    ids=["4:4:0", "4:1:1", "4:4:1", "4:4:0 odd", "4:1:1 odd"],
)
def test_rare_chroma_sampling_is_exact(subsampling, factors, width, height):
    rng = np.random.default_rng(factors)
    data = resampled(jpeg(rng, 64, 64, subsampling=subsampling, quality=90), factors, width, height)
    for _ in range(60):
        ours, plain = both(data, any_box(rng, width, height), bool(rng.random() < 0.5), int(rng.choice(SIZES)))
        assert ours is not None
        assert np.array_equal(ours, plain)


def test_photos_are_exact():
    paths = sorted((DATA / "photos").rglob("*.JPEG")) + sorted((DATA / "photos").rglob("*.jpg"))
    if not paths:
        pytest.skip("no photos here")
    rng = np.random.default_rng(0)
    for path in paths[:40]:
        data = path.read_bytes()
        with open(path, "rb") as file:
            header = decode.read_header(file)
        ours, plain = both(data, any_box(rng, header.width, header.height), True, 224)
        assert ours is not None
        assert np.array_equal(ours, plain), path


def test_a_batch_is_the_same_in_any_number_of_threads():
    rng = np.random.default_rng(1)
    made = [any_jpeg(rng, (200, 150)) for _ in range(50)]
    sources = [data for data, _, _ in made]
    boxes = np.array([any_box(rng, width, height) for _, width, height in made])
    flips, samples = rng.random(50) < 0.5, np.arange(50)
    expected, found = np.zeros((2, 50, 32, 32, 3), np.uint8)
    for i in samples:
        decode.crop(sources[i], boxes[i], bool(flips[i]), 32, expected[i])
    for threads in (1, 2, 7):
        found[:] = 0
        for i, _ in native.crop_jpegs(sources, boxes, flips, 32, found, threads, 2**28, decode._TALL_FIRST):
            found[i] = expected[i]
        assert np.array_equal(found, expected)
    found[:] = 0
    with ThreadPoolExecutor(3) as pool:
        decode.crop_batch(files(*sources), samples, boxes, flips, 32, found, pool)
    assert np.array_equal(found, expected)


# --- what is left to the plain twin --------------------------------------------------------------------------------


def exif(orientation):
    return b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 274, 3, 1, orientation, 0, 0)


def oddities():
    rng = np.random.default_rng(5)
    plain = jpeg(rng, 40, 30, quality=80)
    inks, transparent = io.BytesIO(), io.BytesIO()
    picture(rng, 40, 30).convert("CMYK").save(inks, "JPEG")
    picture(rng, 40, 30).convert("RGBA").save(transparent, "PNG")
    return {
        "inks": (inks.getvalue(), (0, 0, 20, 20)),
        "PNG": (transparent.getvalue(), (0, 0, 20, 20)),
        "turned": (jpeg(rng, 40, 30, exif=exif(6)), (0, 0, 30, 40)),
        "box outside": (plain, (-5, 3, 50, 20)),
        "warning": (plain.replace(b"\xff\xda", b"\0\0\0\xff\xda"), (0, 0, 20, 20)),
    }


@pytest.mark.parametrize("kind", oddities())
def test_what_the_native_decoder_leaves_is_cropped_all_the_same(kind):
    data, box = oddities()[kind]
    assert reason(data, box)
    expected = np.zeros((16, 16, 3), np.uint8)
    decode.crop(data, box, True, 16, expected)
    assert np.array_equal(cropped(data, box, flip=True), expected)


@pytest.mark.parametrize("orientation", [0, 1, 9])
def test_upright_pictures_are_not_left(orientation):
    assert reason(jpeg(np.random.default_rng(0), 20, 20, exif=exif(orientation))) is None


def refused(data, box=(0, 0, 8, 8)):
    with pytest.raises(UserError) as caught:
        cropped(data, box)
    return str(caught.value)


def test_a_refusal_is_the_plain_twins_sentence():
    data = jpeg(np.random.default_rng(2), 64, 64, quality=90)
    huge = data.replace(struct.pack(">HH", 64, 64), struct.pack(">HH", 65000, 65000))
    for bad in (b"", b"no picture", data[:1500], data[:-2], huge):
        with pytest.raises(UserError) as caught:
            decode.crop(bad, (0, 0, 8, 8), False, 16, np.zeros((16, 16, 3), np.uint8), "photo 0.jpg")
        assert refused(bad) == str(caught.value)
    assert reason(huge) == "too many pixels"


def test_a_file_cut_off_below_the_crop_is_refused():
    data = jpeg(np.random.default_rng(3), 200, 200, quality=90)
    assert "truncated" in refused(data[: len(data) * 9 // 10], (0, 0, 20, 20))


def test_damage_is_judged_as_by_the_plain_twin(monkeypatch):
    rng = np.random.default_rng(4)
    seeds = [any_jpeg(rng, (120, 90)) for _ in range(25)]
    natively = 0
    for _ in range(2000):
        data = mutated(rng, seeds[rng.integers(len(seeds))][0])
        try:
            header = decode.read_header(io.BytesIO(data))
        except UserError:
            continue
        if header.width * header.height > 2**18:  # right, but slow
            continue
        box, results = any_box(rng, header.width, header.height), []
        natively += reason(data, box) is None
        for forced in ("native", "plain"):
            monkeypatch.setenv("PODSCALE_DECODER", forced)
            try:
                results.append(cropped(data, box).tobytes())
            except UserError as error:
                results.append(str(error))
        assert results[0] == results[1]
    assert natively > 200


def mutated(rng, data):
    """One to four flipped bits, in half of all cases near the header; or cut off; or both."""
    changed = bytearray(data)
    kind = rng.integers(4)
    if kind < 3:
        for _ in range(rng.integers(1, 5)):
            changed[rng.integers(700 if kind == 0 and len(data) > 700 else len(data))] ^= 1 << rng.integers(8)
    if kind > 1:
        del changed[rng.integers(2, len(data)) :]
    return bytes(changed)


# --- the choice ----------------------------------------------------------------------------------------------------


def test_without_the_module_the_plain_twin_decodes(monkeypatch):
    data = jpeg(np.random.default_rng(6), 50, 40)
    expected = cropped(data, (3, 4, 40, 35))
    monkeypatch.setattr(decode, "_native", None)
    assert decode.decoder().startswith("plain (the native decoder was not built")
    assert np.array_equal(cropped(data, (3, 4, 40, 35)), expected)


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setattr(decode, "_crop_files", None)
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    assert decode.decoder() == "plain (PODSCALE_DECODER asks for it)"
    cropped(jpeg(np.random.default_rng(7), 50, 40), (3, 4, 40, 35))
    monkeypatch.setenv("PODSCALE_DECODER", "fast")
    with pytest.raises(UserError, match="PODSCALE_DECODER"):
        decode.decoder()


def test_wrong_arguments_are_refused():
    boxes, flips, out = np.zeros((1, 4)), np.zeros(1, bool), np.zeros((1, 8, 8, 3), np.uint8)
    good = ([b"x"], boxes, flips, 8, out, 1, 2**28, True)
    assert native.crop_jpegs(*good)
    for place, wrong in [(1, np.zeros(3)), (2, np.zeros(2, bool)), (3, 9), (3, 0), (4, out[:0]), (5, 0), (5, 10**6)]:
        with pytest.raises(ValueError, match=r"must be|out of range"):
            native.crop_jpegs(*good[:place], wrong, *good[place + 1 :])
    for place, wrong in [(0, (b"x",)), (0, ["x"]), (4, bytes(192))]:
        with pytest.raises(TypeError):
            native.crop_jpegs(*good[:place], wrong, *good[place + 1 :])
    assert native.crop_jpegs([], boxes[:0], flips[:0], 8, out[:0], 1, 2**28, True) == []
