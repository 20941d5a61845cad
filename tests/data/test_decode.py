"""Each kind of image against pixels made by hand, each kind of damage, and crops against plain NumPy."""

import contextlib
import io
import os
import re
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageOps

from podscale.data import randaugment
from podscale.data.crop import crop_batch
from podscale.data.decode import crop_image, decode_image, read_header
from podscale.data.index.dataset import index_files
from podscale.errors import UserError

DATA = Path(os.environ.get("PODSCALE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def encode(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_png(depth, color_type, values, *chunks, size=None):
    """Return a PNG written byte by byte: values [height, width, channels], with extra chunks before the pixels."""

    def make_chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    width, height = size or values.shape[1::-1]
    rows = b"".join(b"\0" + row.astype(">u2" if depth == 16 else "u1").tobytes() for row in values)
    parts = [make_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0))]
    parts += [make_chunk(name, data) for name, data in chunks]
    return b"".join([b"\x89PNG\r\n\x1a\n", *parts, make_chunk(b"IDAT", zlib.compress(rows)), make_chunk(b"IEND", b"")])


def make_noise(*shape, top=256, seed=0):
    return np.random.default_rng(seed).integers(0, top, shape)


@pytest.fixture
def photo():
    """Smooth, so that JPEG changes it only a little."""
    y, x = np.mgrid[0:48, 0:64]
    return np.stack([x * 3, y * 4, 255 - x * 2 - y], axis=2).astype(np.uint8)


# --- kinds of images -----------------------------------------------------------------------------------------------


def test_rgb_pixels_are_unchanged(photo):
    assert np.array_equal(decode_image(encode(Image.fromarray(photo), "PNG")), photo)
    assert np.array_equal(decode_image(encode(Image.fromarray(photo), "WEBP", lossless=True)), photo)
    jpeg = decode_image(encode(Image.fromarray(photo), "JPEG", quality=95, subsampling=0))
    assert np.abs(jpeg.astype(int) - photo).max() < 8


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_gray_gives_three_equal_channels(kind, photo):
    pixels = decode_image(encode(Image.fromarray(photo[..., 0]), kind, **({"quality": 95} if kind == "JPEG" else {})))
    assert pixels.shape == (48, 64, 3)
    assert np.array_equal(pixels[..., 0], pixels[..., 1])
    assert np.array_equal(pixels[..., 0], pixels[..., 2])
    assert np.abs(pixels[..., 0].astype(int) - photo[..., 0]).max() < 4


def test_one_bit_becomes_black_and_white():
    bits = make_noise(5, 9, top=2).astype(bool)
    assert np.array_equal(decode_image(encode(Image.fromarray(bits), "PNG"))[..., 1], bits * 255)


def test_palettes_are_looked_up():
    image = Image.new("P", (2, 1))
    image.putpalette([1, 2, 3, 200, 100, 50])
    image.putdata([1, 0])
    assert decode_image(encode(image, "PNG")).tolist() == [[[200, 100, 50], [1, 2, 3]]]


def test_cmyk_jpegs_become_rgb():
    cmyk = Image.new("CMYK", (16, 16), (255, 0, 0, 0))  # full cyan; Pillow writes it inverted, as Adobe does
    pixels = decode_image(encode(cmyk, "JPEG", quality=100))
    assert np.abs(pixels.astype(int) - (0, 255, 255)).max() <= 3


@pytest.mark.parametrize(("color_type", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_the_upper_eight_of_sixteen_bits_are_used(color_type, channels):
    values = make_noise(6, 5, channels, top=65536)
    if channels in (2, 4):
        values[..., -1] = 65535  # opaque
    expected = (values[..., :3] if channels > 2 else values[..., [0, 0, 0]]) >> 8
    assert np.array_equal(decode_image(make_png(16, color_type, values)), expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_is_composited_over_white(kind):
    layer = make_noise(7, 6, 4).astype(np.uint8)
    layer[0, :, 3], layer[1, :, 3] = 0, 255
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    pixels = decode_image(encode(Image.fromarray(layer), kind, **options))
    alpha = layer[..., 3:] / 255
    assert np.abs(pixels - (layer[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1
    assert np.all(pixels[0] == 255)
    assert np.array_equal(pixels[1], layer[1, :, :3])


def test_gray_with_alpha_is_composited_over_white():
    pixels = decode_image(make_png(8, 4, np.array([[[100, 255], [100, 0], [0, 51]]])))
    assert pixels[0].tolist() == [[100] * 3, [255] * 3, [204] * 3]


def test_transparent_palette_entries_and_colors_become_white():
    palette = (b"PLTE", bytes([9, 8, 7, 1, 2, 3]))
    assert decode_image(make_png(8, 3, np.array([[[0], [1]]]), palette, (b"tRNS", b"\0"))).tolist() == [
        [[255] * 3, [1, 2, 3]]
    ]
    gray = make_png(8, 0, np.array([[[7], [8]]]), (b"tRNS", struct.pack(">H", 7)))
    assert decode_image(gray).tolist() == [[[255] * 3, [8] * 3]]
    deep = make_png(16, 0, np.array([[[7000], [7001]]]), (b"tRNS", struct.pack(">H", 7000)))
    assert decode_image(deep).tolist() == [[[255] * 3, [27] * 3]]
    rgb = make_png(
        16, 2, np.array([[[7000, 300, 65535], [7000, 900, 0]]]), (b"tRNS", struct.pack(">HHH", 7000, 300, 65535))
    )
    assert decode_image(rgb).tolist() == [[[255] * 3, [27, 3, 0]]]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animations_give_their_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
    assert np.all(decode_image(data) == (255, 0, 0))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(photo, orientation, order):
    exif = (
        b"Exif\0\0"
        + {"<": b"II", ">": b"MM"}[order]
        + struct.pack(order + "HIHHHIHHI", 42, 8, 1, 274, 3, 1, orientation, 0, 0)
    )
    data = encode(Image.fromarray(photo), "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(decode_image(data), expected)
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
def test_damaged_exif_counts_as_upright_without_warnings(photo, exif):
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encode(Image.fromarray(photo), kind, exif=exif)
        assert decode_image(data).shape == photo.shape


# --- unreadable files ----------------------------------------------------------------------------------------------


def get_refusal(data):
    with pytest.raises(UserError) as error:
        decode_image(data, "pets/cat.jpg")
    sentence = str(error.value)
    assert sentence.startswith("cannot read pets/cat.jpg: ")
    assert sentence.endswith("; replace or remove it")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_truncated_image_is_refused(kind, share):
    data = encode(Image.fromarray(make_noise(90, 90, 3).astype(np.uint8)), kind)
    get_refusal(data[: int(len(data) * share)])


def test_other_formats_and_empty_files_are_refused(photo):
    assert "neither JPEG, PNG, WebP nor PPM" in get_refusal(encode(Image.fromarray(photo), "BMP"))
    assert "the file is empty" in get_refusal(b"")


@pytest.mark.parametrize("size", [(2**20, 2**20), (2**14 + 1, 2**14)])
def test_a_header_of_too_many_pixels_is_refused_before_they_are_allocated(size):
    claim = rf"its {size[0]}x{size[1]} pixels take \d+ MiB to decode, more than the 1024 of data.max_image_mib"
    assert re.search(claim, get_refusal(make_png(8, 2, make_noise(1, 1, 3), size=size)))
    canvas = b"".join((side - 1).to_bytes(3, "little") for side in size)
    assert re.search(claim, get_refusal(b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + canvas))


def test_a_header_of_no_pixels_is_refused():
    get_refusal(make_png(8, 2, make_noise(1, 1, 3), size=(0, 5)))


def test_the_largest_jpeg_header_is_refused(photo):
    data = encode(Image.fromarray(photo), "JPEG")
    at = data.index(b"\xff\xc0") + 5
    assert "its 65535x65535 pixels take 49151 MiB to decode" in get_refusal(data[:at] + b"\xff" * 4 + data[at + 4 :])


def test_random_damage_gives_pixels_or_a_user_error():
    for kind in ("JPEG", "PNG", "WEBP"):
        whole = encode(Image.fromarray(make_noise(20, 20, 3).astype(np.uint8)), kind)
        for seed in range(150):
            data = bytearray(whole)
            for at in make_noise(4, top=len(data), seed=seed):
                data[at] = (data[at] + 1 + seed) % 256
            with contextlib.suppress(UserError):
                assert decode_image(bytes(data)).dtype == np.uint8


# --- crops ---------------------------------------------------------------------------------------------------------


def crop_to_array(source, box, size, flip=False):
    out = np.zeros((size, size, 3), np.uint8)
    crop_image(source, box, flip, size, out)
    return out


def test_a_box_of_the_size_of_the_result_is_copied(photo):
    window = photo[7:39, 20:52]
    assert np.array_equal(crop_to_array(photo, (20, 7, 52, 39), 32), window)
    assert np.array_equal(crop_to_array(photo, (20, 7, 52, 39), 32, flip=True), window[:, ::-1])
    assert np.array_equal(crop_to_array(encode(Image.fromarray(photo), "PNG"), (20, 7, 52, 39), 32), window)


def test_shrinking_is_antialiased():
    checkerboard = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, axis=2)
    assert (
        np.abs(crop_to_array(checkerboard, (0, 0, 64, 64), 8).astype(int) - 127).max() <= 2
    )  # without antialiasing: 0 or 255


def test_a_smooth_image_is_resized_linearly(photo):
    pixels = crop_to_array(photo, (8.5, 4.25, 40.5, 36.25), 16)
    centers = np.arange(16) * 2 + 1 - 0.5
    assert np.abs(pixels[5, :, 0] - 3 * (8.5 + centers))[1:-1].max() <= 1
    assert np.abs(pixels[:, 5, 1] - 4 * (4.25 + centers))[1:-1].max() <= 1


@pytest.mark.parametrize("box", [(-3, -2, 29, 30), (36, 20, 68, 52), (-5, 20, 27, 52), (-80, -60, -48, -28)])
def test_outside_of_the_image_is_its_reflection(photo, box):
    wide = np.pad(photo, ((96, 96), (96, 96), (0, 0)), mode="reflect")
    expected = wide[box[1] + 96 : box[3] + 96, box[0] + 96 : box[2] + 96]
    assert np.array_equal(crop_to_array(photo, box, 32), expected)
    half = crop_to_array(photo, (box[0] + 0.5, box[1], box[2] + 0.5, box[3]), 32)  # a box between pixels
    assert np.abs(half.astype(int) - expected).max() <= 4


def test_an_image_of_one_pixel_can_be_padded():
    assert np.all(crop_to_array(np.full((1, 1, 3), 9, np.uint8), (-2, -2, 3, 3), 5) == 9)


@pytest.mark.parametrize("side", [8, 6])
def test_the_copying_path_equals_the_reference_implementation(side):
    images = make_noise(40, 8, 9, 3).astype(np.uint8)
    index = SimpleNamespace(images=images, name=str)
    samples = make_noise(3000, top=40)
    corners = make_noise(3000, 2, top=12, seed=1) - 4
    boxes = np.concatenate([corners, corners + side], axis=1).astype(float)
    flips = make_noise(3000, top=2, seed=2).astype(bool)
    out = np.zeros((3000, side, side, 3), np.uint8)
    crop_batch(index, samples, boxes, flips, out)
    for i in range(0, 3000, 7):
        assert np.array_equal(out[i], crop_to_array(images[samples[i]], boxes[i], side, flips[i]))


def test_the_error_of_a_batch_names_the_file_that_cannot_be_read(photo, tmp_path):
    paths = [tmp_path / "good.png", tmp_path / "bad.png"]
    for path in paths:
        path.write_bytes(encode(Image.fromarray(photo), "PNG"))
    index = index_files(paths)
    paths[1].write_bytes(b"junk".ljust(paths[1].stat().st_size))
    boxes, out = np.tile([0.0, 0, 8, 8], (2, 1)), np.zeros((2, 8, 8, 3), np.uint8)
    with pytest.raises(UserError, match=f"cannot read {paths[1]}: it is neither"):
        crop_batch(index, np.arange(2), boxes, np.zeros(2, bool), out)


def test_photos_have_the_pixels_of_pillow():
    for path in sorted((DATA / "photos").rglob("*.JPEG"))[:12]:
        expected = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
        assert np.array_equal(decode_image(path.read_bytes(), str(path)), expected)


# --- RandAugment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", randaugment.OPERATIONS)
def test_operations_preserve_the_shape_and_change_nothing_at_strength_zero(name):
    pixels = make_noise(48, 64, 3, top=200).astype(np.uint8) + np.uint8(20)
    operation, image = randaugment.OPERATIONS[name], Image.fromarray(pixels)
    for sign in (1, -1):
        assert operation(image, 1.0, sign).size == image.size
        assert np.any(np.asarray(operation(image, 0.9, sign)) != pixels) == (name != "identity")
        if name not in ("autocontrast", "equalize"):
            assert np.array_equal(np.asarray(operation(image, 0.0, sign)), pixels)


def test_operations_do_what_their_names_say(photo):
    image = Image.fromarray(photo)

    def apply(name, strength, sign=1):
        return np.asarray(randaugment.OPERATIONS[name](image, strength, sign)).astype(int)

    assert np.array_equal(apply("translate_x", 1.0)[:, :35], photo[:, 29:])  # 150/331 of 64
    assert np.array_equal(apply("posterize", 1.0), photo & 0xF0)
    assert np.array_equal(apply("solarize", 0.5), np.where(photo < 128, photo, 255 - photo.astype(int)))
    assert np.abs(apply("brightness", 0.5, -1) - photo * 0.55).max() <= 1


def test_operations_depend_on_seed_pass_and_sample_and_are_uniform(photo):
    names = [name for sample in range(3000) for name, _ in randaugment.draw_operations(2, 5, 1, sample)]
    counts = np.array([names.count(name) for name in randaugment.OPERATIONS])
    assert np.abs(counts - 6000 / 14).max() < 90
    signs = [sign for sample in range(1000) for _, sign in randaugment.draw_operations(2, 5, 1, sample)]
    assert abs(np.mean(signs)) < 0.08
    batch = np.stack([photo] * 40)
    randaugment.augment_batch(batch, 2, 9.0, 5, np.ones(40, int), np.arange(40))
    for sample in (0, 17, 39):
        assert np.array_equal(batch[sample], randaugment.augment_image(photo, 2, 9.0, 5, 1, sample))
    assert len({image.tobytes() for image in batch}) > 20
