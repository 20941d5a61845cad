"""JPEGs with restart tiles: the original's pixels, from only the tiles that a crop needs."""

import io
import struct

import numpy as np
import pytest
from PIL import Image
from support.jpegs import (
    SIZES,
    change_sampling,
    crop_both_ways,
    crop_file,
    crop_natively,
    draw_box,
    draw_jpeg,
    make_exif,
    make_image,
    make_jpeg,
)

from podscale.data import decode
from podscale.errors import UserError

native = pytest.importorskip("podscale.data._native", reason="built without a C compiler or libjpeg-turbo")


# --- restart tiles -------------------------------------------------------------------------------------------------


def parse_table(data):
    """Return (offset of the table's first marker, offset of its end, its numbers)."""
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


def replace_table(data, numbers):
    start, end, _ = parse_table(data)
    stream = b"".join(encode_varint(number) for number in numbers)
    marker = b"podscale tiles\0" + stream
    return data[:start] + b"\xff\xef" + struct.pack(">H", 2 + len(marker)) + marker + data[end:]


def encode_varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + encode_varint(number >> 7)


@pytest.mark.parametrize("seed", range(6))
def test_a_tiled_file_has_the_pixels_of_the_original_in_any_crop_and_decoder(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        data, width, height = draw_jpeg(rng)
        tiled = native.tile(data, 2**28)
        assert np.array_equal(decode.decode_image(tiled), decode.decode_image(data))
        for _ in range(6):
            box, flip, size = draw_box(rng, width, height), bool(rng.random() < 0.5), int(rng.choice(SIZES))
            pixels, expected = crop_both_ways(tiled, box, flip, size)
            assert pixels is not None
            assert np.array_equal(pixels, expected), (width, height, box, flip, size)


@pytest.mark.parametrize("factors", [0x12, 0x41, 0x14, 0x22, 0x21])
def test_crops_of_tiled_files_with_rare_chroma_sampling_are_exact(factors):
    rng = np.random.default_rng(factors)
    blocks = (factors >> 4) * (factors & 15)
    data = make_jpeg(rng, 768, 16 * 8, subsampling={2: 1, 4: 2}[blocks], quality=90)
    mcu_width, mcu_height = 8 * (factors >> 4), 8 * (factors & 15)
    mcus = 768 // 16 * (16 * 8 // (8 if blocks == 2 else 16))
    data = change_sampling(data, factors, 48 * mcu_width - 3, mcus // 48 * mcu_height - 3)
    tiled = native.tile(data, 2**28)
    for _ in range(40):
        box = draw_box(rng, 48 * mcu_width - 3, mcus // 48 * mcu_height - 3)
        pixels, expected = crop_both_ways(tiled, box, bool(rng.random() < 0.5), int(rng.choice(SIZES)))
        assert np.array_equal(pixels, expected)
        decode.crop_image(data, box, False, 32, original := np.zeros((32, 32, 3), np.uint8))
        assert np.array_equal(crop_both_ways(tiled, box, False, 32)[0], original)


@pytest.mark.parametrize(
    ("width", "gray", "interval"), [(480, False, 6), (500, False, 8), (400, False, 5), (368, True, 2), (592, False, 1)]
)
def test_the_restart_interval_divides_a_row_and_is_near_six(width, gray, interval):
    options = {} if gray else {"subsampling": 2}
    tiled = native.tile(make_jpeg(np.random.default_rng(0), width, 32, gray, **options), 2**28)
    columns = -(-width // (8 if gray else 16))
    numbers = parse_table(tiled)[2]
    assert numbers[0] == interval
    assert len(numbers) - 1 == columns // interval * (4 if gray else 2)


def test_tiling_preserves_markers_and_is_idempotent():
    rng = np.random.default_rng(0)
    options = {"exif": make_exif(6), "icc_profile": bytes(70000), "comment": b"words", "dpi": (300, 300)}
    data = make_jpeg(rng, 200, 100, progressive=True, **options)
    tiled = native.tile(data, 2**28)
    before, after = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(tiled))
    for key in ("exif", "icc_profile", "comment", "dpi", "jfif_version"):
        assert after.info[key] == before.info[key]
    assert "progression" in before.info
    assert "progression" not in after.info
    assert native.tile(tiled, 2**28) == tiled


def test_a_table_may_span_several_markers():
    data = make_jpeg(
        np.random.default_rng(0), 8 * 67, 8 * 1000, gray=True, quality=5
    )  # 67 is prime: tiles of one block
    tiled = native.tile(data, 2**28)
    start, end, numbers = parse_table(tiled)
    assert end - start > 65536
    assert len(numbers) == 67 * 1000 + 1
    pixels, expected = crop_both_ways(tiled, (100, 3000, 300, 3200), False, 32)
    assert np.array_equal(pixels, expected)


def test_cmyk_can_be_tiled_and_other_files_are_refused_with_a_reason():
    rng, file = np.random.default_rng(0), io.BytesIO()
    make_image(rng, 90, 70).convert("CMYK").save(file, "JPEG")
    assert np.array_equal(
        decode.decode_image(native.tile(file.getvalue(), 2**28)), decode.decode_image(file.getvalue())
    )
    data = make_jpeg(rng, 90, 70)
    for bad, reason in [
        (b"", "truncated"),
        (b"junk", "Not a JPEG"),
        (data[:-2], "truncated"),
        (data[: len(data) // 2], "truncated"),
        (data.replace(b"\xff\xc0", b"\xff\xc9"), "arithmetic"),
        (data.replace(struct.pack(">HH", 70, 90), struct.pack(">HH", 65000, 65000)), "too much memory"),
    ]:
        with pytest.raises(ValueError, match=reason):
            native.tile(bad, 2**28)


def test_a_wrong_table_of_tiles_changes_no_pixel():
    rng = np.random.default_rng(12)
    tiled = native.tile(make_jpeg(rng, 480, 200, subsampling=2), 2**28)
    numbers = parse_table(tiled)[2]
    shifted = [*numbers[:5], numbers[5] + 3, numbers[6] - 3, *numbers[7:]]
    wrong = [numbers[:-1], [*numbers, 5], shifted, [numbers[0] * 2, *numbers[1:]], [], [6, 2**34], [6, 0, 0], [0] * 200]
    for table in [numbers, *wrong]:
        pixels, expected = crop_both_ways(replace_table(tiled, table), (200, 80, 300, 150), True, 32)
        assert pixels is not None
        assert np.array_equal(pixels, expected)


def test_tiles_outside_of_the_crop_are_not_decoded():
    tiled = native.tile(make_jpeg(np.random.default_rng(14), 480, 200, subsampling=2), 2**28)
    lengths = parse_table(tiled)[2][1:]
    last = len(tiled) - 2 - lengths[-1]
    damaged = tiled[:last] + b"\xff\xc0" + tiled[last + 2 :]
    expected, pixels = np.zeros((2, 1, 16, 16, 3), np.uint8)
    assert crop_natively([tiled], [(200, 20, 300, 100)], [False], 16, expected) == []
    assert crop_natively([damaged], [(200, 20, 300, 100)], [False], 16, pixels) == []
    assert np.array_equal(pixels, expected)
    assert crop_natively([damaged], [(400, 20, 480, 200)], [False], 16, pixels)


def test_damage_in_a_needed_tile_gives_the_result_of_the_reference_implementation(monkeypatch):
    rng = np.random.default_rng(13)
    tiled = native.tile(make_jpeg(rng, 240, 120, subsampling=2), 2**28)
    start = tiled.index(b"\xff\xda")
    for _ in range(300):
        damaged = bytearray(tiled)
        damaged[rng.integers(start, len(tiled))] ^= 1 << rng.integers(8)
        box, results = (0, 0, 240, 120), []
        for decoder in ("native", "plain"):
            monkeypatch.setenv("PODSCALE_DECODER", decoder)
            try:
                results.append(crop_file(bytes(damaged), box).tobytes())
            except UserError as error:
                results.append(str(error))
        assert results[0] == results[1]
