"""Limits of an image: memory and scans are bounded before anything is allocated, alike by both decoders."""

import io
import re
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image
from support.jpegs import crop_natively, make_jpeg, make_many_scans, make_ppm

from podscale.data import decode, limits
from podscale.data.decode import TooLargeError, decode_image, native, read_header
from podscale.data.index.dataset import index_files
from podscale.data.tools.check import check_data_set
from podscale.data.tools.prepare import Settings, prepare_data_set
from podscale.errors import UserError
from podscale.recipe import Data, load_recipe

SIDE = 768  # of images whose memory is measured
needs_native = pytest.mark.skipif(native is None, reason="the native decoder is not built")


def encode(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_photo(side=SIDE):
    coarse = np.random.default_rng(0).integers(0, 256, (side // 16, side // 16, 4), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR)


def list_kinds():
    """Return images of every kind that takes another amount of memory: (name, bytes, bytes per pixel)."""
    rgba = make_photo()
    rgb, gray = rgba.convert("RGB"), rgba.convert("L")
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    yield "JPEG", encode(rgb, "JPEG"), 12
    yield "progressive JPEG", encode(rgb, "JPEG", progressive=True, subsampling=0), 12
    yield "gray JPEG", encode(gray, "JPEG"), 12
    yield "CMYK JPEG", encode(rgb.convert("CMYK"), "JPEG"), 12
    yield "PNG", encode(rgb, "PNG", compress_level=1), 12
    yield "gray PNG of 16 bits", encode(deep, "PNG", compress_level=1), 12
    yield "PNG with a palette", encode(rgb.quantize(16), "PNG", compress_level=1), 12
    yield "transparent PNG", encode(rgba, "PNG", compress_level=1), 16
    yield "gray transparent PNG", encode(rgba.convert("LA"), "PNG", compress_level=1), 16
    yield "PNG with a transparent color", encode(rgb.quantize(16), "PNG", compress_level=1, transparency=3), 16
    yield "WebP", encode(rgb, "WEBP", quality=50, method=0), 28
    yield "lossless WebP", encode(rgb, "WEBP", lossless=True, method=0), 28
    yield "transparent WebP", encode(rgba, "WEBP", quality=50, method=0), 28


def test_an_image_is_refused_by_its_header_below_its_memory_and_decoded_at_it():
    for name, data, bytes_per_pixel in list_kinds():
        enough = bytes_per_pixel * SIDE**2
        assert read_header(io.BytesIO(data), name, enough).width == SIDE
        for refuse in (
            lambda data, limit: read_header(io.BytesIO(data), "it", limit),
            lambda d, m: decode_image(d, "it", m),
        ):
            with pytest.raises(TooLargeError, match=f"its {SIDE}x{SIDE} pixels take {-(-enough // 2**20)} MiB"):
                refuse(data, enough - 1)
        assert np.array_equal(decode_image(data, name, enough), decode_image(data))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says how much memory was used")
@pytest.mark.parametrize("decoder", ["native", "plain"])
def test_decoding_takes_no_more_memory_than_stated(decoder, monkeypatch):
    monkeypatch.setenv("PODSCALE_DECODER", "plain" if native is None else decoder)
    for name, data, bytes_per_pixel in list_kinds():
        decode_image(data)  # loads the codec
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = read_memory("VmRSS")
        decode_image(data)
        taken = read_memory("VmHWM") - before - 2 * len(data)
        assert taken <= bytes_per_pixel * SIDE**2 + 2**21, name


def read_memory(key):
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@needs_native
def test_both_decoders_have_the_same_limit_of_memory():
    rng = np.random.default_rng(0)
    for data in (make_jpeg(rng, 70, 50), make_jpeg(rng, 70, 50, gray=True, progressive=True), make_ppm(rng, 70, 50)):
        enough, out = 12 * 70 * 50, np.zeros((1, 8, 8, 3), np.uint8)
        crop = [(0, 0, 8, 8)], [False], 8, out
        assert crop_natively([data], *crop, max_bytes=enough) == []
        assert crop_natively([data], *crop, max_bytes=enough - 1) == [(0, "too much memory")]
        if data.startswith(b"\xff\xd8"):
            assert native.tile(data, enough)
            with pytest.raises(ValueError, match="too much memory"):
                native.tile(data, enough - 1)


@pytest.mark.parametrize(("width", "height"), [(100, 80), (2048, 1024)])
def test_both_decoders_have_the_same_limit_of_scans(width, height, monkeypatch):
    most = max(limits.FREE_SCANS, limits.MAX_SCAN_PIXELS // max(width * height, limits.MIN_SCAN_PIXELS))
    allowed, refused = make_many_scans(width, height, most), make_many_scans(width, height, most + 1)
    assert limits.count_scans(allowed, most) == most
    for decoder in ("native", "plain"):
        monkeypatch.setenv("PODSCALE_DECODER", "plain" if native is None else decoder)
        assert np.all(decode_image(allowed) == 128)
        with pytest.raises(TooLargeError, match=f"more than {most} scans, too many for its {width}x{height} pixels"):
            decode_image(refused)
    if native is not None:
        assert native.decode(allowed, 2**30)[:2] == (width, height)
        with pytest.raises(ValueError, match="too many scans"):
            native.decode(refused, 2**30)


def test_as_many_scans_as_encoders_write_are_always_allowed(monkeypatch):
    monkeypatch.setattr(limits, "MAX_SCAN_PIXELS", 1)
    data = make_jpeg(np.random.default_rng(0), 64, 48, progressive=True)
    limits.check_scans(data, 64, 48)
    assert limits.count_scans(data, 100) == 10


def test_only_scans_of_the_image_itself_are_counted():
    """A thumbnail in EXIF, random bytes of a comment and a second image behind the end are none."""
    data = make_jpeg(np.random.default_rng(0), 64, 48)
    comment = b"\xff\xfe\x01\x02" + b"\xff\xda" * 128
    assert limits.count_scans(data[:2] + comment * 50 + data[2:] + data * 50, 100) == 1
    assert limits.count_scans(b"\xff\xd8" + b"\xff\xda", 100) == 1
    assert limits.count_scans(b"", 100) == 0


def test_pillows_own_limit_is_reported_as_a_limit():
    """WebP is the one format for which Pillow applies it by itself."""
    canvas = (2**14 - 2).to_bytes(3, "little") * 2
    data = b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + canvas
    with pytest.raises(TooLargeError, match="16383x16383 pixels take 7168 MiB"):
        decode_image(data)
    if int(PIL.__version__.split(".")[0]) >= 13:  # earlier versions only say that they cannot decode it
        with pytest.raises(TooLargeError, match="exceeds limit"):
            decode_image(data, "it", 2**40)


@pytest.mark.parametrize("kind", [b"VP8 ", b"VP8L", b"VP8X", b"ABCD"])
def test_a_damaged_webp_header_is_refused(kind):
    for length in (0, 4, 30):
        with pytest.raises(UserError):
            decode_image(b"RIFF\x16\0\0\0WEBP" + kind + bytes(length))


# --- where the limit applies -----------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    root, rng = tmp_path / "photos", np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (root / split / name).mkdir(parents=True)
            for i in range(2):
                (root / split / name / f"{i}.jpg").write_bytes(make_jpeg(rng, 320, 300))
    return root


def test_the_recipe_has_the_limit(photos, tmp_path):
    path = photos / "train" / "ant" / "0.jpg"
    assert index_files([path], 2**21).max_image_bytes == 2**21
    with pytest.raises(TooLargeError, match=r"0\.jpg: its 320x300 pixels take 2 MiB to decode, more than the 1 of"):
        index_files([path], Data(max_image_mib=1).max_image_bytes)
    assert load_recipe("digits").override({"data.max_image_mib": 2**20}).data.max_image_bytes == 2**40
    for value in (0, 2**20 + 1):
        with pytest.raises(UserError, match=r"data\.max_image_mib must be at"):
            load_recipe("digits").override({"data.max_image_mib": value})


def test_the_default_limit_leaves_a_recipes_digest_as_it_was():
    recipe = load_recipe("digits")
    assert recipe.digest() == "ca44e50f"
    assert recipe.override({"data.max_image_mib": 2048}).digest() != recipe.digest()


def test_check_and_prepare_refuse_images_over_the_limits(photos, tmp_path):
    (photos / "train" / "bee" / "scans.jpg").write_bytes(make_many_scans(2048, 1024, 600))
    result = check_data_set(str(photos), threads=1)
    assert result["counts"] == {"huge": 1}
    assert "more than 512 scans" in result["findings"][0]["why"]
    with pytest.raises(UserError, match=r"scans\.jpg: it has more than 512 scans"):
        prepare_data_set(photos, tmp_path / "prepared", Settings())
    assert check_data_set(str(photos), threads=1, max_image_bytes=2**20)["counts"] == {"huge": 9}
    with pytest.raises(UserError, match=r"more than the 1 of data\.max_image_mib"):
        prepare_data_set(photos, tmp_path / "other", Settings(), max_image_mib=1)


def test_a_hostile_jpeg_is_a_bad_image_of_a_crop(photos):
    from podscale.data.crop import crop_batch

    path = photos / "train" / "bee" / "scans.jpg"
    path.write_bytes(make_many_scans(2048, 1024, 600))
    index, bad = index_files([photos / "train" / "ant" / "0.jpg", path]), []
    out = np.zeros((2, 8, 8, 3), np.uint8)
    crop_batch(index, np.arange(2), np.array([[0, 0, 8, 8.0]] * 2), np.zeros(2, bool), out, bad=bad)
    assert [position for position, _ in bad] == [1]
    assert "more than 512 scans" in bad[0][1]
    assert decode.select_decoder() == "plain" or out[0].any()
