"""The native decoder against the reference implementation: the same pixels, bit for bit.

Equality is exact although the two use different releases of libjpeg-turbo: all functions that are used give the same
pixels in each.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jpegs import (
    SIZES,
    MemoryIndex,
    change_sampling,
    crop_both_ways,
    crop_natively,
    draw_box,
    draw_jpeg,
    get_refusal,
    get_rejection,
    make_jpeg,
    make_ppm,
)

from podscale.data import crop, decode
from podscale.data.index.dataset import Index, index_files

native = pytest.importorskip("podscale.data._native", reason="built without a C compiler or libjpeg-turbo")

DATA = Path(os.environ.get("PODSCALE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


# --- pixels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_pixels_equal_those_of_the_reference_implementation(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        data, width, height = draw_jpeg(rng)
        for _ in range(3):
            box, flip, size = draw_box(rng, width, height), bool(rng.random() < 0.5), int(rng.choice(SIZES))
            pixels, expected = crop_both_ways(data, box, flip, size)
            assert pixels is not None
            assert np.array_equal(pixels, expected), (width, height, box, flip, size)


@pytest.mark.parametrize(
    ("subsampling", "factors", "width", "height"),
    [(1, 0x12, 32, 128), (2, 0x41, 128, 32), (2, 0x14, 32, 128), (1, 0x12, 29, 121), (2, 0x41, 121, 29)],
    ids=["4:4:0", "4:1:1", "4:4:1", "4:4:0 odd", "4:1:1 odd"],
)
def test_rare_chroma_sampling_is_exact(subsampling, factors, width, height):
    rng = np.random.default_rng(factors)
    data = change_sampling(make_jpeg(rng, 64, 64, subsampling=subsampling, quality=90), factors, width, height)
    for _ in range(60):
        pixels, expected = crop_both_ways(
            data, draw_box(rng, width, height), bool(rng.random() < 0.5), int(rng.choice(SIZES))
        )
        assert pixels is not None
        assert np.array_equal(pixels, expected)


def compute_weights(inputs, start, end, outputs):
    """Return Pillow's weights of one pass, [outputs, inputs], in units of 2**-22."""
    start, end = np.float32(start), np.float32(end)
    scale = float(end - start) / outputs
    support = max(scale, 1.0)
    weights = np.zeros((outputs, inputs), np.int64)
    for output in range(outputs):
        center = float(start) + (output + 0.5) * scale
        taps = np.arange(max(int(center - support + 0.5), 0), min(int(center + support + 0.5), inputs))
        real = np.maximum(1 - np.abs((taps - center + 0.5) * (1 / support)), 0)
        weights[output, taps] = (0.5 + real / np.cumsum(real)[-1] * 2**22).astype(np.int64)
    return weights


def crop_in_numpy(pixels, box, flip, size):
    """Resize horizontally, round to 8 bits, then resize vertically, in integers of 2**-22."""
    height, width = pixels.shape[:2]
    horizontal, vertical = compute_weights(width, box[0], box[2], size), compute_weights(height, box[1], box[3], size)
    rows = (np.einsum("pw,hwc->hpc", horizontal, pixels.astype(np.int64)) + 2**21 >> 22).clip(0, 255)
    out = (np.einsum("ph,hwc->pwc", vertical, rows) + 2**21 >> 22).clip(0, 255)
    return out[:, ::-1] if flip else out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(9, 300), (20, 150), (1, 130), (64, 64), (120, 15)]))
def test_a_crop_is_two_rounded_passes_first_horizontal_then_vertical(seed, max_size):
    rng = np.random.default_rng(seed)
    width, height = int(rng.integers(1, max_size[0] + 1)), int(rng.integers(1, max_size[1] + 1))
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    box, flip, size = draw_box(rng, width, height), bool(rng.random() < 0.5), int(rng.choice(SIZES[:5]))
    expected, by_pillow = crop_in_numpy(pixels, box, flip, size), np.zeros((size, size, 3), np.uint8)
    decode.crop_image(pixels, box, flip, size, by_pillow)
    assert np.array_equal(by_pillow, expected)
    assert np.array_equal(crop_pixels(pixels, box, flip, size), expected)


@pytest.mark.parametrize("scale", [0.3, 1, 1.9, 2.4, 3.3, 3.5, 4.9, 5, 5.1, 9])
@pytest.mark.parametrize("step", [3, 4], ids=["pixels", "jpeg"])
def test_every_scale_is_exact(scale, step):
    """Each way to arrange weights and inputs for the processor serves a range of scales."""
    rng = np.random.default_rng(int(10 * scale))
    for size in (21, 22, 37, 64):
        side = max(2, round(scale * size))
        pixels = rng.integers(0, 256, (side + 5, side + 3, 3), dtype=np.uint8)
        box, flip = (1.3, 0.6, 1.3 + scale * size, 0.6 + scale * size), bool(size % 2)
        if step == 3:
            expected = crop_in_numpy(pixels, box, flip, size)
            assert np.array_equal(crop_pixels(pixels, box, flip, size), expected), size
        else:
            actual, expected = crop_both_ways(make_jpeg(rng, side + 3, side + 5), box, flip, size)
            assert np.array_equal(actual, expected), size


def crop_pixels(pixels, box, flip, size):
    out = np.zeros((1, size, size, 3), np.uint8)
    sizes = np.array([pixels.shape[1::-1]], np.int32)
    boxes, flips = np.array([box], np.float64), np.array([flip])
    assert native.crop_pixels(pixels, np.zeros(1, np.int64), sizes, boxes, flips, size, out, 1) == []
    return out[0]


def test_pixels_of_photos_equal_those_of_the_reference_implementation():
    paths = sorted((DATA / "photos").rglob("*.JPEG")) + sorted((DATA / "photos").rglob("*.jpg"))
    if not paths:
        pytest.skip("no photos here")
    rng = np.random.default_rng(0)
    for path in paths[:40]:
        data = path.read_bytes()
        with open(path, "rb") as file:
            header = decode.read_header(file)
        pixels, expected = crop_both_ways(data, draw_box(rng, header.width, header.height), True, 224)
        assert pixels is not None
        assert np.array_equal(pixels, expected), path


def test_a_batch_has_the_same_pixels_in_any_number_of_threads():
    rng = np.random.default_rng(1)
    jpegs = [draw_jpeg(rng, (200, 150)) for _ in range(50)]
    sources = [data for data, _, _ in jpegs]
    boxes = np.array([draw_box(rng, width, height) for _, width, height in jpegs])
    flips, samples = rng.random(50) < 0.5, np.arange(50)
    expected, pixels = np.zeros((2, 50, 32, 32, 3), np.uint8)
    for i in samples:
        decode.crop_image(sources[i], boxes[i], bool(flips[i]), 32, expected[i])
    for threads in (1, 2, 7):
        pixels[:] = 0
        for i, _ in crop_natively(sources, boxes, flips, 32, pixels, threads=threads):
            pixels[i] = expected[i]
        assert np.array_equal(pixels, expected)
    pixels[:] = 0
    with ThreadPoolExecutor(3) as pool:
        crop.crop_batch(MemoryIndex(*sources), samples, boxes, flips, pixels, pool)
    assert np.array_equal(pixels, expected)


# --- sources of bytes ----------------------------------------------------------------------------------------------


@pytest.fixture
def container(tmp_path):
    """(path, offsets, lengths, contents): two JPEGs and a PPM in one file, with other bytes around them."""
    rng = np.random.default_rng(8)
    contents = [make_jpeg(rng, 90, 70), make_jpeg(rng, 30, 200, progressive=True), make_ppm(rng, 50, 40)]
    path, offsets, whole = tmp_path / "shard", [], b"some header"
    for data in contents:
        offsets.append(len(whole))
        whole += data + b"padding"
    path.write_bytes(whole)
    return path, offsets, [len(data) for data in contents], contents


def test_ranges_of_paths_open_files_and_memory_give_the_same_pixels(container):
    path, offsets, lengths, contents = container
    expected, pixels = np.zeros((2, 3, 16, 16, 3), np.uint8)
    boxes, flips = [(3, 4, 28, 37)] * 3, [True] * 3
    for i, data in enumerate(contents):
        decode.crop_image(data, boxes[i], flips[i], 16, expected[i])
    with open(path, "rb") as file:
        data = path.read_bytes()
        number = file.fileno()
        for source in (str(path), number, np.int64(number), data, memoryview(data), np.frombuffer(data, np.uint8)):
            pixels[:] = 0
            assert crop_natively([source] * 3, boxes, flips, 16, pixels, offsets, lengths, threads=2) == []
            assert np.array_equal(pixels, expected)
        assert file.read(4) == b"some"  # still open, at the same position


def test_sources_that_cannot_be_read_are_rejected_with_a_reason(container, tmp_path):
    path, offsets, lengths, _ = container
    size = path.stat().st_size
    os.mkfifo(tmp_path / "pipe")
    closed = os.open(path, os.O_RDONLY)
    os.close(closed)
    out = np.zeros((1, 8, 8, 3), np.uint8)

    def reject(source, offset=offsets[0], length=lengths[0]):
        return dict(crop_natively([source], [(0, 0, 8, 8)], [False], 8, out, [offset], [length]))[0]

    assert reject(str(tmp_path / "absent")) == "cannot be opened"
    assert reject(str(tmp_path)) == "not a file"
    assert reject(str(tmp_path / "pipe")) == "not a file"
    assert reject(-1) == reject(closed) == "its size is unknown"
    assert reject(str(path), 0, 1000) == "its size has changed"
    assert (
        reject(str(path), 5, size)
        == reject(str(path), size + 1, -1)
        == reject(str(path), -1, 5)
        == "the file ends before it"
    )
    assert reject(bytes(5), 3, 4) == "the memory ends before it"
    with pytest.raises(ValueError, match="null"):
        reject("a\0b")


def test_the_reference_implementation_reads_a_file_whose_length_has_changed(tmp_path, monkeypatch):
    rng, path = np.random.default_rng(9), tmp_path / "photo.jpg"
    path.write_bytes(make_jpeg(rng, 60, 50))
    index = index_files([path])
    source = [str(path)], np.zeros(1, np.int64), np.array([10], np.int64)
    monkeypatch.setattr(Index, "locate_bytes", lambda *_: source)
    out, expected = np.zeros((2, 1, 16, 16, 3), np.uint8)
    box = np.array([[0.0, 0, 20, 20]])
    crop.crop_batch(index, np.array([0]), box, np.array([False]), out)
    decode.crop_image(path.read_bytes(), box[0], False, 16, expected[0])
    assert np.array_equal(out, expected)


# --- pixels in PPM files and in memory -----------------------------------------------------------------------------


HEADERS = [b"P6 %d %d 255 ", b"P6\n# made by hand\n%d\t%d # 3 4\r255\n", b"P6#\n0%d\n#\n# 9\n%d\n0255\r"]


@pytest.mark.parametrize("header", [b"P6\n%d %d\n255\n", *HEADERS])
def test_pixels_of_ppm_files_are_exact_with_any_valid_header(header, tmp_path):
    rng = np.random.default_rng(10)
    for _ in range(20):
        width, height = int(rng.integers(1, 90)), int(rng.integers(1, 90))
        data, box = make_ppm(rng, width, height, header), draw_box(rng, width, height)
        pixels, expected = crop_both_ways(data, box, True, 32)
        assert pixels is not None
        assert np.array_equal(pixels, expected)
        path = tmp_path / "image.ppm"
        path.write_bytes(data)
        pixels[:] = 0
        assert crop_natively([str(path)], [box], [True], 32, pixels[None]) == []  # reads only some rows
        assert np.array_equal(pixels, expected)
        with path.open("rb") as file:
            assert decode.read_header(file) == decode.Header(width, height, 1)


@pytest.mark.parametrize(
    "header",
    [b"P6 %d %d 65535 ", b"P6 %d %d 255", b"P5 %d %d 255 ", b"P6%d %d 255 ", b"P6 -%d %d 255 ", b"P6 %d #%d 255 ",
     b"P6 %d000000000 %d 255 ", b"P6 0 %d%d 255 ", b"P6 %d %d 255 x", b"P6 " + b" " * 1024 + b"%d %d 255 "],
)  # fmt: skip
def test_both_decoders_refuse_other_ppm_headers(header):
    data = make_ppm(np.random.default_rng(0), 9, 9, header)
    assert get_rejection(data)
    assert "cannot read photo 0.jpg" in get_refusal(data)


def test_a_ppm_of_the_wrong_length_is_refused():
    data = make_ppm(np.random.default_rng(0), 20, 20)
    for bad in (data[:-1], data + b"\n", data[:12]):
        assert get_rejection(bad)
        assert "cannot read" in get_refusal(bad)
    assert get_rejection(b"P6 99999 99999 255\n" + bytes(100)) == "too much memory"


def test_native_crops_of_arrays_equal_the_reference_implementation(monkeypatch):
    rng = np.random.default_rng(11)
    images = rng.integers(0, 256, (20, 30, 41, 3), dtype=np.uint8)
    index = Index(np.zeros(20, np.int32), np.tile(np.array([41, 30], np.int32), (20, 1)), images=images)
    samples = rng.integers(0, 20, 50)
    boxes = np.array([draw_box(rng, 41, 30) for _ in samples])
    boxes[7] = (-3, 2, 20, 40)  # reflected: left to the reference implementation
    flips, pixels = rng.random(50) < 0.5, np.zeros((2, 50, 24, 24, 3), np.uint8)
    crop.crop_batch(index, samples, boxes, flips, pixels[0])
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    crop.crop_batch(index, samples, boxes, flips, pixels[1])
    assert np.array_equal(*pixels)


def test_pixels_outside_of_the_memory_are_rejected():
    pixels, out = np.arange(5 * 4 * 3, dtype=np.uint8), np.zeros((1, 8, 8, 3), np.uint8)

    def crop_at(offset, size, box=(0, 0, 1, 1)):
        numbers = np.array([offset], np.int64), np.array([size], np.int32), np.array([box], np.float64)
        return native.crop_pixels(pixels, *numbers, np.array([False]), 8, out, 1)

    assert crop_at(0, (5, 4), (0, 0, 5, 4)) == []
    for wrong in ((1, (5, 4)), (-1, (2, 2)), (0, (2**30, 2**30)), (0, (0, 4)), (0, (5, -1)), (61, (1, 1))):
        assert crop_at(*wrong) == [(0, "the memory ends before it")]
    assert crop_at(0, (5, 4), (0, 0, 6, 4)) == [(0, "the box leaves the image")]
