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

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from podscale.data import crop, decode
from podscale.data.index.dataset import Index, files_index
from podscale.errors import UserError

native = pytest.importorskip("podscale.data._native", reason="built without a C compiler or libjpeg-turbo")

DATA = Path(os.environ.get("PODSCALE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
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


def natively(sources, boxes, flips, size, out, offsets=None, lengths=None, threads=1, max_pixels=2**28):
    """`native.crop` of whole sources, unless ranges are given."""
    n = len(sources)
    offsets = np.zeros(n, np.int64) if offsets is None else np.array(offsets, np.int64)
    lengths = np.full(n, -1, np.int64) if lengths is None else np.array(lengths, np.int64)
    return native.crop(
        sources, offsets, lengths, np.array(boxes, float), np.array(flips), size, out, threads, max_pixels
    )


def both(data, box, flip, size):
    """(native pixels or None, plain pixels)."""
    ours, plain = np.zeros((2, 1, size, size, 3), np.uint8)
    left = natively([data], [box], [flip], size, ours)
    decode.crop(data, box, flip, size, plain[0])
    return None if left else ours[0], plain[0]


class InMemory(Index):
    def __init__(self, contents):
        super().__init__(np.zeros(len(contents), np.int32), np.zeros((len(contents), 2), np.int32))
        object.__setattr__(self, "contents", contents)

    def sources(self, samples):
        n = len(samples)
        return [self.contents[sample] for sample in samples], np.zeros(n, np.int64), np.full(n, -1, np.int64)

    def pixels(self, sample):
        return decode.decode(self.contents[sample], self.name(sample))

    def name(self, sample):
        return f"photo {sample}.jpg"


def files(*contents):
    """An index of files that exist in memory alone."""
    return InMemory(contents)


def cropped(data, box, size=16, flip=False):
    out = np.zeros((1, size, size, 3), np.uint8)
    crop.crop_batch(files(data), np.array([0]), np.array([box], np.float64), np.array([flip]), size, out)
    return out[0]


def reason(data, box=(0, 0, 8, 8)):
    """Why the native decoder leaves a file, or None."""
    out = np.zeros((1, 8, 8, 3), np.uint8)
    left = natively([data], [box], [False], 8, out)
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
            assert ours is not None
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


def triangle(inputs, start, end, places):
    """Pillow's weights of one pass, [places, inputs], in units of 2**-22."""
    start, end = np.float32(start), np.float32(end)
    scale = float(end - start) / places
    support = max(scale, 1.0)
    weights = np.zeros((places, inputs), np.int64)
    for place in range(places):
        centre = float(start) + (place + 0.5) * scale
        reached = np.arange(max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), inputs))
        real = np.maximum(1 - np.abs((reached - centre + 0.5) * (1 / support)), 0)
        weights[place, reached] = (0.5 + real / np.cumsum(real)[-1] * 2**22).astype(np.int64)
    return weights


def reference(pixels, box, flip, size):
    """Across, rounded to 8 bits, then down, in whole numbers of 2**-22."""
    height, width = pixels.shape[:2]
    across, down = triangle(width, box[0], box[2], size), triangle(height, box[1], box[3], size)
    rows = (np.einsum("pw,hwc->hpc", across, pixels.astype(np.int64)) + 2**21 >> 22).clip(0, 255)
    out = (np.einsum("ph,hwc->pwc", down, rows) + 2**21 >> 22).clip(0, 255)
    return out[:, ::-1] if flip else out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(9, 300), (20, 150), (1, 130), (64, 64), (120, 15)]))
def test_pixels_are_those_of_two_rounded_passes_first_across_then_down(seed, most):
    rng = np.random.default_rng(seed)
    width, height = int(rng.integers(1, most[0] + 1)), int(rng.integers(1, most[1] + 1))
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    box, flip, size = any_box(rng, width, height), bool(rng.random() < 0.5), int(rng.choice(SIZES[:5]))
    expected, plain = reference(pixels, box, flip, size), np.zeros((size, size, 3), np.uint8)
    decode.crop(pixels, box, flip, size, plain)
    assert np.array_equal(plain, expected)
    assert np.array_equal(from_pixels(pixels, box, flip, size), expected)


def from_pixels(pixels, box, flip, size):
    out = np.zeros((1, size, size, 3), np.uint8)
    sizes = np.array([pixels.shape[1::-1]], np.int32)
    boxes, flips = np.array([box], np.float64), np.array([flip])
    assert native.crop_pixels(pixels, np.zeros(1, np.int64), sizes, boxes, flips, size, out, 1) == []
    return out[0]


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
        for i, _ in natively(sources, boxes, flips, 32, found, threads=threads):
            found[i] = expected[i]
        assert np.array_equal(found, expected)
    found[:] = 0
    with ThreadPoolExecutor(3) as pool:
        crop.crop_batch(files(*sources), samples, boxes, flips, 32, found, pool)
    assert np.array_equal(found, expected)


# --- where bytes come from -----------------------------------------------------------------------------------------


@pytest.fixture
def container(tmp_path):
    """(path, offsets, lengths, contents): two JPEGs and a PPM in one file, with other bytes around them."""
    rng = np.random.default_rng(8)
    contents = [jpeg(rng, 90, 70), jpeg(rng, 30, 200, progressive=True), ppm(rng, 50, 40)]
    path, offsets, whole = tmp_path / "shard", [], b"some header"
    for data in contents:
        offsets.append(len(whole))
        whole += data + b"padding"
    path.write_bytes(whole)
    return path, offsets, [len(data) for data in contents], contents


def ppm(rng, width, height, header=b"P6\n%d %d\n255\n"):
    return header % (width, height) + rng.integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()


def test_ranges_of_paths_open_files_and_memory_give_the_same_pixels(container):
    path, offsets, lengths, contents = container
    expected, found = np.zeros((2, 3, 16, 16, 3), np.uint8)
    boxes, flips = [(3, 4, 28, 37)] * 3, [True] * 3
    for i, data in enumerate(contents):
        decode.crop(data, boxes[i], flips[i], 16, expected[i])
    with open(path, "rb") as file:
        data = path.read_bytes()
        number = file.fileno()
        for source in (str(path), number, np.int64(number), data, memoryview(data), np.frombuffer(data, np.uint8)):
            found[:] = 0
            assert natively([source] * 3, boxes, flips, 16, found, offsets, lengths, threads=2) == []
            assert np.array_equal(found, expected)
        assert file.read(4) == b"some"  # still open, and where it was


def test_what_cannot_be_read_is_a_reason(container, tmp_path):
    path, offsets, lengths, _ = container
    size = path.stat().st_size
    os.mkfifo(tmp_path / "pipe")
    closed = os.open(path, os.O_RDONLY)
    os.close(closed)
    out = np.zeros((1, 8, 8, 3), np.uint8)

    def why(source, offset=offsets[0], length=lengths[0]):
        return dict(natively([source], [(0, 0, 8, 8)], [False], 8, out, [offset], [length]))[0]

    assert why(str(tmp_path / "absent")) == "cannot be opened"
    assert why(str(tmp_path)) == "not a file"
    assert why(str(tmp_path / "pipe")) == "not a file"
    assert why(-1) == why(closed) == "its size is unknown"
    assert why(str(path), 0, 1000) == "its size has changed"
    assert why(str(path), 5, size) == why(str(path), size + 1, -1) == why(str(path), -1, 5) == "the file ends before it"
    assert why(bytes(5), 3, 4) == "the memory ends before it"
    with pytest.raises(ValueError, match="null"):
        why("a\0b")


def test_a_file_that_changed_is_read_anew_by_the_plain_twin(tmp_path, monkeypatch):
    rng, path = np.random.default_rng(9), tmp_path / "photo.jpg"
    path.write_bytes(jpeg(rng, 60, 50))
    index = files_index([path])
    monkeypatch.setattr(Index, "sources", lambda *_: ([str(path)], np.zeros(1, np.int64), np.array([10], np.int64)))
    out, expected = np.zeros((2, 1, 16, 16, 3), np.uint8)
    box = np.array([[0.0, 0, 20, 20]])
    crop.crop_batch(index, np.array([0]), box, np.array([False]), 16, out)
    decode.crop(path.read_bytes(), box[0], False, 16, expected[0])
    assert np.array_equal(out, expected)


# --- pixels in PPM files and in memory -----------------------------------------------------------------------------


HEADERS = [b"P6 %d %d 255 ", b"P6\n# made by hand\n%d\t%d # 3 4\r255\n", b"P6#\n0%d\n#\n# 9\n%d\n0255\r"]


@pytest.mark.parametrize("header", [b"P6\n%d %d\n255\n", *HEADERS])
def test_ppm_files_are_exact_whatever_their_header(header, tmp_path):
    rng = np.random.default_rng(10)
    for _ in range(20):
        width, height = int(rng.integers(1, 90)), int(rng.integers(1, 90))
        data, box = ppm(rng, width, height, header), any_box(rng, width, height)
        ours, plain = both(data, box, True, 32)
        assert ours is not None
        assert np.array_equal(ours, plain)
        path = tmp_path / "picture.ppm"
        path.write_bytes(data)
        ours[:] = 0
        assert natively([str(path)], [box], [True], 32, ours[None]) == []  # reads some rows alone
        assert np.array_equal(ours, plain)
        with path.open("rb") as file:
            assert decode.read_header(file) == decode.Header(width, height, 1)


@pytest.mark.parametrize(
    "header",
    [b"P6 %d %d 65535 ", b"P6 %d %d 255", b"P5 %d %d 255 ", b"P6%d %d 255 ", b"P6 -%d %d 255 ", b"P6 %d #%d 255 ",
     b"P6 %d000000000 %d 255 ", b"P6 0 %d%d 255 ", b"P6 %d %d 255 x", b"P6 " + b" " * 1024 + b"%d %d 255 "],
)  # fmt: skip
def test_other_ppm_headers_are_refused_by_both(header):
    data = ppm(np.random.default_rng(0), 9, 9, header)
    assert reason(data)
    assert "cannot read photo 0.jpg" in refused(data)


def test_a_ppm_of_any_other_length_is_refused():
    data = ppm(np.random.default_rng(0), 20, 20)
    for bad in (data[:-1], data + b"\n", data[:12]):
        assert reason(bad)
        assert "cannot read" in refused(bad)
    assert reason(b"P6 99999 99999 255\n" + bytes(100)) == "too many pixels"


def test_arrays_are_cropped_natively_with_the_plain_twins_pixels(monkeypatch):
    rng = np.random.default_rng(11)
    images = rng.integers(0, 256, (20, 30, 41, 3), dtype=np.uint8)
    index = Index(np.zeros(20, np.int32), np.tile(np.array([41, 30], np.int32), (20, 1)), images=images)
    samples = rng.integers(0, 20, 50)
    boxes = np.array([any_box(rng, 41, 30) for _ in samples])
    boxes[7] = (-3, 2, 20, 40)  # reflected: left to the plain twin
    flips, found = rng.random(50) < 0.5, np.zeros((2, 50, 24, 24, 3), np.uint8)
    crop.crop_batch(index, samples, boxes, flips, 24, found[0])
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    crop.crop_batch(index, samples, boxes, flips, 24, found[1])
    assert np.array_equal(*found)


def test_no_pixel_outside_of_the_memory_is_read_or_asked_for():
    pixels, out = np.arange(5 * 4 * 3, dtype=np.uint8), np.zeros((1, 8, 8, 3), np.uint8)

    def left(offset, size, box=(0, 0, 1, 1)):
        numbers = np.array([offset], np.int64), np.array([size], np.int32), np.array([box], np.float64)
        return native.crop_pixels(pixels, *numbers, np.array([False]), 8, out, 1)

    assert left(0, (5, 4), (0, 0, 5, 4)) == []
    for wrong in ((1, (5, 4)), (-1, (2, 2)), (0, (2**30, 2**30)), (0, (0, 4)), (0, (5, -1)), (61, (1, 1))):
        assert left(*wrong) == [(0, "the memory ends before it")]
    assert left(0, (5, 4), (0, 0, 6, 4)) == [(0, "the box leaves the picture")]


# --- restart tiles -------------------------------------------------------------------------------------------------


def table_of(data):
    """(where the first marker of the table begins, where it ends, its numbers)."""
    name, numbers, value, shift = b"podscale tiles\0", [], 0, 0
    start = end = data.index(b"\xff\xef")
    while data[end : end + 2] == b"\xff\xef":
        (size,) = struct.unpack_from(">H", data, end + 2)
        assert data[end + 4 : end + 4 + len(name)] == name
        for byte in data[end + 4 + len(name) : end + 2 + size]:
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                numbers.append(value)
                value = shift = 0
        end += 2 + size
    return start, end, numbers


def with_table(data, numbers):
    start, end, _ = table_of(data)
    stream = b"".join(varint(number) for number in numbers)
    marker = b"podscale tiles\0" + stream
    return data[:start] + b"\xff\xef" + struct.pack(">H", 2 + len(marker)) + marker + data[end:]


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


@pytest.mark.parametrize("seed", range(6))
def test_a_tiled_file_has_the_originals_pixels_in_any_crop_and_in_any_decoder(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        data, width, height = any_jpeg(rng)
        tiled = native.tile(data, 2**28)
        assert np.array_equal(decode.decode(tiled), decode.decode(data))
        for _ in range(6):
            box, flip, size = any_box(rng, width, height), bool(rng.random() < 0.5), int(rng.choice(SIZES))
            ours, plain = both(tiled, box, flip, size)
            assert ours is not None
            assert np.array_equal(ours, plain), (width, height, box, flip, size)


@pytest.mark.parametrize("factors", [0x12, 0x41, 0x14, 0x22, 0x21])
def test_tiles_of_rare_chroma_sampling_are_exact(factors):
    rng = np.random.default_rng(factors)
    blocks = (factors >> 4) * (factors & 15)
    data = jpeg(rng, 768, 16 * 8, subsampling={2: 1, 4: 2}[blocks], quality=90)
    across, down = 8 * (factors >> 4), 8 * (factors & 15)
    mcus = 768 // 16 * (16 * 8 // (8 if blocks == 2 else 16))
    data = resampled(data, factors, 48 * across - 3, mcus // 48 * down - 3)
    tiled = native.tile(data, 2**28)
    for _ in range(40):
        box = any_box(rng, 48 * across - 3, mcus // 48 * down - 3)
        ours, plain = both(tiled, box, bool(rng.random() < 0.5), int(rng.choice(SIZES)))
        assert np.array_equal(ours, plain)
        decode.crop(data, box, False, 32, original := np.zeros((32, 32, 3), np.uint8))
        assert np.array_equal(both(tiled, box, False, 32)[0], original)


@pytest.mark.parametrize(
    ("width", "gray", "interval"), [(480, False, 6), (500, False, 8), (400, False, 5), (368, True, 2), (592, False, 1)]
)
def test_the_restart_interval_divides_a_row_and_is_near_six(width, gray, interval):
    options = {} if gray else {"subsampling": 2}
    tiled = native.tile(jpeg(np.random.default_rng(0), width, 32, gray, **options), 2**28)
    columns = -(-width // (8 if gray else 16))
    numbers = table_of(tiled)[2]
    assert numbers[0] == interval
    assert len(numbers) - 1 == columns // interval * (4 if gray else 2)


def test_tiling_keeps_markers_and_tiling_again_changes_nothing():
    rng = np.random.default_rng(0)
    options = {"exif": exif(6), "icc_profile": bytes(70000), "comment": b"words", "dpi": (300, 300)}
    data = jpeg(rng, 200, 100, progressive=True, **options)
    tiled = native.tile(data, 2**28)
    before, after = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(tiled))
    for key in ("exif", "icc_profile", "comment", "dpi", "jfif_version"):
        assert after.info[key] == before.info[key]
    assert "progression" in before.info
    assert "progression" not in after.info
    assert native.tile(tiled, 2**28) == tiled


def test_a_table_may_take_several_markers():
    data = jpeg(np.random.default_rng(0), 8 * 67, 8 * 1000, gray=True, quality=5)  # 67 is prime: tiles of one block
    tiled = native.tile(data, 2**28)
    start, end, numbers = table_of(tiled)
    assert end - start > 65536
    assert len(numbers) == 67 * 1000 + 1
    ours, plain = both(tiled, (100, 3000, 300, 3200), False, 32)
    assert np.array_equal(ours, plain)


def test_inks_can_be_tiled_and_what_cannot_be_is_refused_with_a_reason():
    rng, file = np.random.default_rng(0), io.BytesIO()
    picture(rng, 90, 70).convert("CMYK").save(file, "JPEG")
    assert np.array_equal(decode.decode(native.tile(file.getvalue(), 2**28)), decode.decode(file.getvalue()))
    data = jpeg(rng, 90, 70)
    for bad, why in [
        (b"", "truncated"),
        (b"junk", "Not a JPEG"),
        (data[:-2], "truncated"),
        (data[: len(data) // 2], "truncated"),
        (data.replace(b"\xff\xc0", b"\xff\xc9"), "arithmetic"),
        (data.replace(struct.pack(">HH", 70, 90), struct.pack(">HH", 65000, 65000)), "too many pixels"),
    ]:
        with pytest.raises(ValueError, match=why):
            native.tile(bad, 2**28)


def test_a_wrong_table_of_tiles_changes_no_pixel():
    rng = np.random.default_rng(12)
    tiled = native.tile(jpeg(rng, 480, 200, subsampling=2), 2**28)
    numbers = table_of(tiled)[2]
    shifted = [*numbers[:5], numbers[5] + 3, numbers[6] - 3, *numbers[7:]]
    wrong = [numbers[:-1], [*numbers, 5], shifted, [numbers[0] * 2, *numbers[1:]], [], [6, 2**34], [6, 0, 0], [0] * 200]
    for table in [numbers, *wrong]:
        ours, plain = both(with_table(tiled, table), (200, 80, 300, 150), True, 32)
        assert ours is not None
        assert np.array_equal(ours, plain)


def test_tiles_outside_of_the_crop_are_not_looked_into():
    tiled = native.tile(jpeg(np.random.default_rng(14), 480, 200, subsampling=2), 2**28)
    lengths = table_of(tiled)[2][1:]
    last = len(tiled) - 2 - lengths[-1]
    damaged = tiled[:last] + b"\xff\xc0" + tiled[last + 2 :]
    ours, found = np.zeros((2, 1, 16, 16, 3), np.uint8)
    assert natively([tiled], [(200, 20, 300, 100)], [False], 16, ours) == []
    assert natively([damaged], [(200, 20, 300, 100)], [False], 16, found) == []
    assert np.array_equal(found, ours)
    assert natively([damaged], [(400, 20, 480, 200)], [False], 16, found)


def test_damage_in_a_tile_that_a_crop_needs_is_judged_as_by_the_plain_twin(monkeypatch):
    rng = np.random.default_rng(13)
    tiled = native.tile(jpeg(rng, 240, 120, subsampling=2), 2**28)
    start = tiled.index(b"\xff\xda")
    for _ in range(300):
        damaged = bytearray(tiled)
        damaged[rng.integers(start, len(tiled))] ^= 1 << rng.integers(8)
        box, results = (0, 0, 240, 120), []
        for forced in ("native", "plain"):
            monkeypatch.setenv("PODSCALE_DECODER", forced)
            try:
                results.append(cropped(bytes(damaged), box).tobytes())
            except UserError as error:
                results.append(str(error))
        assert results[0] == results[1]


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


def test_a_file_of_very_many_scans_is_left_and_not_tiled():
    gray = jpeg(np.random.default_rng(16), 64, 64, gray=True)
    frame, scan = gray.index(b"\xff\xc0"), gray.index(b"\xff\xda")
    colour = b"\xff\xc0\0\x11" + gray[frame + 4 : frame + 9] + b"\3\1\x11\0\2\x11\0\3\x11\0"
    head, coded = gray[:frame] + colour + gray[frame + 13 : scan], gray[scan + 10 : -2]

    def scans(channels):  # each by itself, of the same gray
        return b"".join(b"\xff\xda\0\x08\1%c\0\0\x3f\0" % channel + coded for channel in channels)

    apart = head + scans([1, 2, 3]) + gray[-2:]
    assert reason(apart) is None
    assert np.array_equal(decode.decode(native.tile(apart, 2**28)), decode.decode(apart))
    many = head + scans([1, 2, 3] * 40) + gray[-2:]
    assert reason(many) == "too many scans"
    with pytest.raises(ValueError, match="too many scans"):
        native.tile(many, 2**28)


def test_a_file_cut_off_below_the_crop_is_refused():
    data = jpeg(np.random.default_rng(3), 200, 200, quality=90)
    assert "truncated" in refused(data[: len(data) * 9 // 10], (0, 0, 20, 20))


def test_a_picture_does_not_borrow_the_tables_of_the_one_before():
    whole = jpeg(np.random.default_rng(15), 64, 64)
    start = whole.index(b"\xff\xdb")
    (size,) = struct.unpack_from(">H", whole, start + 2)
    lacking = whole[:start] + whole[start + 2 + size :]
    out = np.zeros((4, 8, 8, 3), np.uint8)
    left = natively([whole, lacking, whole, lacking], [(0, 0, 64, 64)] * 4, [False] * 4, 8, out)
    assert [i for i, _ in left] == [1, 3]


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
    monkeypatch.setattr(decode, "native", None)
    assert decode.decoder().startswith("plain (the native decoder was not built")
    assert np.array_equal(cropped(data, (3, 4, 40, 35)), expected)


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setattr(crop, "_crop_natively", None)
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    assert decode.decoder() == "plain (PODSCALE_DECODER asks for it)"
    cropped(jpeg(np.random.default_rng(7), 50, 40), (3, 4, 40, 35))
    monkeypatch.setenv("PODSCALE_DECODER", "fast")
    with pytest.raises(UserError, match="PODSCALE_DECODER"):
        decode.decoder()


def test_stages_are_the_time_of_each_part_of_the_work(tmp_path):
    rng = np.random.default_rng(0)
    contents = {"jpeg": jpeg(rng, 400, 300), "ppm": ppm(rng, 400, 300)}
    box, flip, start, length = (
        np.array([[10.0, 10, 300, 290]]),
        np.array([True]),
        np.zeros(1, np.int64),
        -np.ones(1, np.int64),
    )
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        read, entropy, transform, resize = native.stages([str(tmp_path / name)], start, length, box, flip, 64, 2**28)
        assert read > 0
        assert resize > 0
        assert (entropy > 0) == (name == "jpeg")
        assert transform >= 0
    assert (
        native.stages([b"junk", b"P6"], *np.zeros((2, 2), np.int64), np.zeros((2, 4)), np.zeros(2, bool), 8, 9)[3] == 0
    )
    with pytest.raises(ValueError, match="out of range"):
        native.stages([], start[:0], length[:0], box[:0], flip[:0], 0, 2**28)


def test_wrong_arguments_are_refused():
    zeros, boxes, flips, out = (
        np.zeros(1, np.int64),
        np.zeros((1, 4)),
        np.zeros(1, bool),
        np.zeros((1, 8, 8, 3), np.uint8),
    )
    good = ([b"x"], zeros, zeros, boxes, flips, 8, out, 1, 2**28)
    assert native.crop(*good)
    wrong = [(1, zeros[:0]), (2, zeros[:0]), (3, np.zeros(3)), (4, np.zeros(2, bool)), (5, 9), (5, 0), (6, out[:0])]
    for place, value in [*wrong, (7, 0), (7, 10**6)]:
        with pytest.raises(ValueError, match=r"must be|out of range"):
            native.crop(*good[:place], value, *good[place + 1 :])
    for place, value in [(0, (b"x",)), (0, [None]), (0, [1.5]), (6, bytes(192))]:
        with pytest.raises(TypeError):
            native.crop(*good[:place], value, *good[place + 1 :])
    assert native.crop([], zeros[:0], zeros[:0], boxes[:0], flips[:0], 8, out[:0], 1, 2**28) == []
