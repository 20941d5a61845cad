"""Each kind of picture against pixels made by hand, each kind of damage, and crops against plain NumPy."""

import contextlib
import io
import os
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageOps

from podscale.data import randaugment
from podscale.data.crop import crop_batch
from podscale.data.decode import crop, decode, read_header
from podscale.data.index.dataset import files_index
from podscale.errors import UserError

DATA = Path(os.environ.get("PODSCALE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def saved(picture, kind, **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def png(depth, colour, values, *chunks, size=None):
    """A PNG written byte by byte: values [height, width, channels], colour type, extra chunks before the pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    width, height = size or values.shape[1::-1]
    rows = b"".join(b"\0" + row.astype(">u2" if depth == 16 else "u1").tobytes() for row in values)
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))]
    parts += [chunk(name, data) for name, data in chunks]
    return b"".join([b"\x89PNG\r\n\x1a\n", *parts, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")])


def noise(*shape, top=256, seed=0):
    return np.random.default_rng(seed).integers(0, top, shape)


@pytest.fixture
def photo():
    """Smooth, so that JPEG keeps it nearly as it is."""
    y, x = np.mgrid[0:48, 0:64]
    return np.stack([x * 3, y * 4, 255 - x * 2 - y], axis=2).astype(np.uint8)


# --- kinds of pictures ---------------------------------------------------------------------------------------------


def test_rgb_is_taken_as_it_is(photo):
    assert np.array_equal(decode(saved(Image.fromarray(photo), "PNG")), photo)
    assert np.array_equal(decode(saved(Image.fromarray(photo), "WEBP", lossless=True)), photo)
    jpeg = decode(saved(Image.fromarray(photo), "JPEG", quality=95, subsampling=0))
    assert np.abs(jpeg.astype(int) - photo).max() < 8


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_gray_gives_three_equal_channels(kind, photo):
    pixels = decode(saved(Image.fromarray(photo[..., 0]), kind, **({"quality": 95} if kind == "JPEG" else {})))
    assert pixels.shape == (48, 64, 3)
    assert np.array_equal(pixels[..., 0], pixels[..., 1])
    assert np.array_equal(pixels[..., 0], pixels[..., 2])
    assert np.abs(pixels[..., 0].astype(int) - photo[..., 0]).max() < 4


def test_one_bit_is_black_and_white():
    bits = noise(5, 9, top=2).astype(bool)
    assert np.array_equal(decode(saved(Image.fromarray(bits), "PNG"))[..., 1], bits * 255)


def test_palettes_are_looked_up():
    picture = Image.new("P", (2, 1))
    picture.putpalette([1, 2, 3, 200, 100, 50])
    picture.putdata([1, 0])
    assert decode(saved(picture, "PNG")).tolist() == [[[200, 100, 50], [1, 2, 3]]]


def test_cmyk_jpegs_become_rgb():
    inks = Image.new("CMYK", (16, 16), (255, 0, 0, 0))  # full cyan; Pillow writes it inverted, as Adobe does
    pixels = decode(saved(inks, "JPEG", quality=100))
    assert np.abs(pixels.astype(int) - (0, 255, 255)).max() <= 3


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_sixteen_bits_keep_the_upper_eight(colour, channels):
    values = noise(6, 5, channels, top=65536)
    if channels in (2, 4):
        values[..., -1] = 65535  # opaque
    expected = (values[..., :3] if channels > 2 else values[..., [0, 0, 0]]) >> 8
    assert np.array_equal(decode(png(16, colour, values)), expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_is_composited_over_white(kind):
    layer = noise(7, 6, 4).astype(np.uint8)
    layer[0, :, 3], layer[1, :, 3] = 0, 255
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    pixels = decode(saved(Image.fromarray(layer), kind, **options))
    alpha = layer[..., 3:] / 255
    assert np.abs(pixels - (layer[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1
    assert np.all(pixels[0] == 255)
    assert np.array_equal(pixels[1], layer[1, :, :3])


def test_gray_with_alpha_is_composited_over_white():
    pixels = decode(png(8, 4, np.array([[[100, 255], [100, 0], [0, 51]]])))
    assert pixels[0].tolist() == [[100] * 3, [255] * 3, [204] * 3]


def test_transparent_entries_and_colours_turn_white():
    palette = (b"PLTE", bytes([9, 8, 7, 1, 2, 3]))
    assert decode(png(8, 3, np.array([[[0], [1]]]), palette, (b"tRNS", b"\0"))).tolist() == [[[255] * 3, [1, 2, 3]]]
    gray = png(8, 0, np.array([[[7], [8]]]), (b"tRNS", struct.pack(">H", 7)))
    assert decode(gray).tolist() == [[[255] * 3, [8] * 3]]
    deep = png(16, 0, np.array([[[7000], [7001]]]), (b"tRNS", struct.pack(">H", 7000)))
    assert decode(deep).tolist() == [[[255] * 3, [27] * 3]]
    rgb = png(16, 2, np.array([[[7000, 300, 65535], [7000, 900, 0]]]), (b"tRNS", struct.pack(">HHH", 7000, 300, 65535)))
    assert decode(rgb).tolist() == [[[255] * 3, [27, 3, 0]]]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animations_give_their_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
    assert np.all(decode(data) == (255, 0, 0))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(photo, orientation, order):
    exif = (
        b"Exif\0\0"
        + {"<": b"II", ">": b"MM"}[order]
        + struct.pack(order + "HIHHHIHHI", 42, 8, 1, 274, 3, 1, orientation, 0, 0)
    )
    data = saved(Image.fromarray(photo), "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(decode(data), expected)
    header = read_header(io.BytesIO(data))
    assert (header.height, header.width, header.orientation) == (*expected.shape[:2], orientation)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12",
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\x63\0\0\0",
        b"Exif\0\0II*\0\x08\0\0\0\x09\0" + b"\x1a\x01\x05\0\xff\xff\0\0\xf0\xff\0\0" * 3,
    ],
)
def test_damaged_exif_counts_as_upright_and_warns_of_nothing(photo, exif):
    for kind in ("JPEG", "PNG", "WEBP"):
        data = saved(Image.fromarray(photo), kind, exif=exif)
        assert decode(data).shape == photo.shape


# --- what cannot be read -------------------------------------------------------------------------------------------


def refusal(data):
    with pytest.raises(UserError) as error:
        decode(data, "pets/cat.jpg")
    sentence = str(error.value)
    assert sentence.startswith("cannot read pets/cat.jpg: ")
    assert sentence.endswith("; replace or remove it")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_truncated_picture_is_refused(kind, share):
    data = saved(Image.fromarray(noise(90, 90, 3).astype(np.uint8)), kind)
    refusal(data[: int(len(data) * share)])


def test_other_formats_and_nothing_are_refused(photo):
    assert "neither JPEG, PNG, WebP nor PPM" in refusal(saved(Image.fromarray(photo), "BMP"))
    assert "the file is empty" in refusal(b"")


@pytest.mark.parametrize("size", [(2**20, 2**20), (2**14 + 1, 2**14)])
def test_a_header_of_too_many_pixels_is_refused_before_they_are_allocated(size):
    claim = f"its header says {size[0]}x{size[1]} pixels, more than 268435456"
    assert claim in refusal(png(8, 2, noise(1, 1, 3), size=size))
    canvas = b"".join((side - 1).to_bytes(3, "little") for side in size)
    assert claim in refusal(b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + canvas)


def test_a_header_of_no_pixels_is_refused():
    refusal(png(8, 2, noise(1, 1, 3), size=(0, 5)))


def test_the_largest_jpeg_header_is_refused(photo):
    data = saved(Image.fromarray(photo), "JPEG")
    at = data.index(b"\xff\xc0") + 5
    assert "65535x65535 pixels, more than 268435456" in refusal(data[:at] + b"\xff" * 4 + data[at + 4 :])


def test_random_damage_gives_pixels_or_a_sentence():
    for kind in ("JPEG", "PNG", "WEBP"):
        whole = saved(Image.fromarray(noise(20, 20, 3).astype(np.uint8)), kind)
        for seed in range(150):
            data = bytearray(whole)
            for at in noise(4, top=len(data), seed=seed):
                data[at] = (data[at] + 1 + seed) % 256
            with contextlib.suppress(UserError):
                assert decode(bytes(data)).dtype == np.uint8


# --- crops ---------------------------------------------------------------------------------------------------------


def cropped(source, box, size, flip=False):
    out = np.zeros((size, size, 3), np.uint8)
    crop(source, box, flip, size, out)
    return out


def test_a_box_of_the_right_size_is_copied(photo):
    window = photo[7:39, 20:52]
    assert np.array_equal(cropped(photo, (20, 7, 52, 39), 32), window)
    assert np.array_equal(cropped(photo, (20, 7, 52, 39), 32, flip=True), window[:, ::-1])
    assert np.array_equal(cropped(saved(Image.fromarray(photo), "PNG"), (20, 7, 52, 39), 32), window)


def test_shrinking_averages():
    checks = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, axis=2)
    assert np.abs(cropped(checks, (0, 0, 64, 64), 8).astype(int) - 127).max() <= 2  # without antialiasing: 0 or 255


def test_a_smooth_picture_is_resized_linearly(photo):
    pixels = cropped(photo, (8.5, 4.25, 40.5, 36.25), 16)
    centres = np.arange(16) * 2 + 1 - 0.5
    assert np.abs(pixels[5, :, 0] - 3 * (8.5 + centres))[1:-1].max() <= 1
    assert np.abs(pixels[:, 5, 1] - 4 * (4.25 + centres))[1:-1].max() <= 1


@pytest.mark.parametrize("box", [(-3, -2, 29, 30), (36, 20, 68, 52), (-5, 20, 27, 52), (-80, -60, -48, -28)])
def test_outside_of_the_picture_lies_its_reflection(photo, box):
    wide = np.pad(photo, ((96, 96), (96, 96), (0, 0)), mode="reflect")
    expected = wide[box[1] + 96 : box[3] + 96, box[0] + 96 : box[2] + 96]
    assert np.array_equal(cropped(photo, box, 32), expected)
    half = cropped(photo, (box[0] + 0.5, box[1], box[2] + 0.5, box[3]), 32)  # a box between pixels
    assert np.abs(half.astype(int) - expected).max() <= 4


def test_a_picture_of_one_pixel_can_be_padded():
    assert np.all(cropped(np.full((1, 1, 3), 9, np.uint8), (-2, -2, 3, 3), 5) == 9)


@pytest.mark.parametrize("side", [8, 6])
def test_the_copying_path_equals_the_plain_one(side):
    images = noise(40, 8, 9, 3).astype(np.uint8)
    index = SimpleNamespace(images=images, name=str)
    samples = noise(3000, top=40)
    corners = noise(3000, 2, top=12, seed=1) - 4
    boxes = np.concatenate([corners, corners + side], axis=1).astype(float)
    flips = noise(3000, top=2, seed=2).astype(bool)
    out = np.zeros((3000, side, side, 3), np.uint8)
    crop_batch(index, samples, boxes, flips, side, out)
    for i in range(0, 3000, 7):
        assert np.array_equal(out[i], cropped(images[samples[i]], boxes[i], side, flips[i]))


def test_a_batch_of_files_names_the_one_that_cannot_be_read(photo, tmp_path):
    paths = [tmp_path / "good.png", tmp_path / "bad.png"]
    for path in paths:
        path.write_bytes(saved(Image.fromarray(photo), "PNG"))
    index = files_index(paths)
    paths[1].write_bytes(b"junk".ljust(paths[1].stat().st_size))
    boxes, out = np.tile([0.0, 0, 8, 8], (2, 1)), np.zeros((2, 8, 8, 3), np.uint8)
    with pytest.raises(UserError, match=f"cannot read {paths[1]}: it is neither"):
        crop_batch(index, np.arange(2), boxes, np.zeros(2, bool), 8, out)


def test_photos_decode_as_pillow_decodes_them():
    for path in sorted((DATA / "photos").rglob("*.JPEG"))[:12]:
        expected = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
        assert np.array_equal(decode(path.read_bytes(), str(path)), expected)


# --- RandAugment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", randaugment.OPERATIONS)
def test_operations_keep_the_shape_and_do_nothing_at_strength_zero(name):
    pixels = noise(48, 64, 3, top=200).astype(np.uint8) + np.uint8(20)
    operation, picture = randaugment.OPERATIONS[name], Image.fromarray(pixels)
    for sign in (1, -1):
        assert operation(picture, 1.0, sign).size == picture.size
        assert np.any(np.asarray(operation(picture, 0.9, sign)) != pixels) == (name != "identity")
        if name not in ("autocontrast", "equalize"):
            assert np.array_equal(np.asarray(operation(picture, 0.0, sign)), pixels)


def test_operations_are_those_they_are_named_after(photo):
    picture = Image.fromarray(photo)

    def run(name, strength, sign=1):
        return np.asarray(randaugment.OPERATIONS[name](picture, strength, sign)).astype(int)

    assert np.array_equal(run("translate_x", 1.0)[:, :35], photo[:, 29:])  # 150/331 of 64
    assert np.array_equal(run("posterize", 1.0), photo & 0xF0)
    assert np.array_equal(run("solarize", 0.5), np.where(photo < 128, photo, 255 - photo.astype(int)))
    assert np.abs(run("brightness", 0.5, -1) - photo * 0.55).max() <= 1


def test_draws_follow_from_seed_pass_and_sample_and_are_fair(photo):
    names = [name for sample in range(3000) for name, _ in randaugment.draws(2, 5, 1, sample)]
    counts = np.array([names.count(name) for name in randaugment.OPERATIONS])
    assert np.abs(counts - 6000 / 14).max() < 90
    signs = [sign for sample in range(1000) for _, sign in randaugment.draws(2, 5, 1, sample)]
    assert abs(np.mean(signs)) < 0.08
    batch = np.stack([photo] * 40)
    randaugment.apply_batch(batch, 2, 9.0, 5, np.ones(40, int), np.arange(40))
    for sample in (0, 17, 39):
        assert np.array_equal(batch[sample], randaugment.apply(photo, 2, 9.0, 5, 1, sample))
    assert len({picture.tobytes() for picture in batch}) > 20
