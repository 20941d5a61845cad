"""Images for the tests of the decoders: JPEGs of many kinds, PPMs, crop boxes, and crops of files in memory."""

import io
import struct
from unittest import mock

import numpy as np
import pytest
from PIL import Image, ImageFile

from podscale.data import crop, decode
from podscale.data.decode import native
from podscale.data.index.dataset import Index
from podscale.errors import UserError

SIZES = [8, 9, 17, 32, 63, 100, 224]  # of crops


def make_image(rng, width, height):
    """Return an image that is smooth with some noise, like a photo."""
    coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + rng.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8))


def make_jpeg(rng, width, height, gray=False, **options):
    file = io.BytesIO()
    image = make_image(rng, width, height)
    with mock.patch.object(ImageFile, "MAXBLOCK", 2**22):  # Pillow cannot write some small progressive files without it
        (image.convert("L") if gray else image).save(file, "JPEG", **options)
    return file.getvalue()


def draw_jpeg(rng, max_size=(700, 500)):
    """Return a JPEG of one of the many kinds: (bytes, width, height)."""
    width, height = (int(rng.integers(1, side + 1 if rng.random() < 0.7 else 40)) for side in max_size)
    options = {"quality": int(rng.integers(20, 101)), "progressive": bool(rng.random() < 0.3)}
    options["optimize"] = bool(rng.random() < 0.5)
    if rng.random() < 0.3:
        options["restart_marker_blocks"] = int(rng.integers(1, 12))
    gray = bool(rng.random() < 0.2)
    if not gray:
        options["subsampling"] = int(rng.integers(0, 3))
    return make_jpeg(rng, width, height, gray, **options), width, height


def change_sampling(data, factors, width, height):
    """Return a 4:2:x file with the header of other sampling factors and another size, of as many blocks."""
    at = data.index(b"\xff\xc0")
    size = struct.pack(">HH", height, width)
    return data[: at + 5] + size + data[at + 9 : at + 11] + bytes([factors]) + data[at + 12 :]


def make_exif(orientation):
    return b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 274, 3, 1, orientation, 0, 0)


def make_ppm(rng, width, height, header=b"P6\n%d %d\n255\n"):
    return header % (width, height) + rng.integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()


def make_unusual_images():
    """Return images that the native decoder rejects, by kind: (bytes, box)."""
    rng = np.random.default_rng(5)
    ordinary = make_jpeg(rng, 40, 30, quality=80)
    cmyk, transparent = io.BytesIO(), io.BytesIO()
    make_image(rng, 40, 30).convert("CMYK").save(cmyk, "JPEG")
    make_image(rng, 40, 30).convert("RGBA").save(transparent, "PNG")
    return {
        "CMYK": (cmyk.getvalue(), (0, 0, 20, 20)),
        "PNG": (transparent.getvalue(), (0, 0, 20, 20)),
        "rotated": (make_jpeg(rng, 40, 30, exif=make_exif(6)), (0, 0, 30, 40)),
        "box outside": (ordinary, (-5, 3, 50, 20)),
        "warning": (ordinary.replace(b"\xff\xda", b"\0\0\0\xff\xda"), (0, 0, 20, 20)),
    }


def draw_box(rng, width, height):
    if rng.random() < 0.1:
        return (0.0, 0.0, float(width), float(height))
    sides = [np.sort(rng.choice(n + 1, 2, replace=False)).astype(float) for n in (width, height)]
    if rng.random() < 0.1:  # a single pixel
        sides = [np.array([edges[0], edges[0] + 1]) for edges in sides]
    if rng.random() < 0.2:  # fractions of pixels
        sides = [edges + rng.uniform(0, 0.5, 2) * [1, -1] for edges in sides]
    return (sides[0][0], sides[1][0], sides[0][1], sides[1][1])


# --- crops ---------------------------------------------------------------------------------------------------------


def crop_natively(sources, boxes, flips, size, out, offsets=None, lengths=None, threads=1, max_bytes=2**30):
    """Call `native.crop` on whole sources, unless ranges are given."""
    n = len(sources)
    offsets = np.zeros(n, np.int64) if offsets is None else np.array(offsets, np.int64)
    lengths = np.full(n, -1, np.int64) if lengths is None else np.array(lengths, np.int64)
    return native.crop(
        sources, offsets, lengths, np.array(boxes, float), np.array(flips), size, out, threads, max_bytes
    )


def crop_both_ways(data, box, flip, size):
    """Return (pixels of the native decoder or None, pixels of the reference implementation)."""
    pixels, expected = np.zeros((2, 1, size, size, 3), np.uint8)
    rejected = crop_natively([data], [box], [flip], size, pixels)
    decode.crop_image(data, box, flip, size, expected[0])
    return None if rejected else pixels[0], expected[0]


def get_rejection(data, box=(0, 0, 8, 8)):
    """Return the reason why the native decoder rejects a file, or None."""
    out = np.zeros((1, 8, 8, 3), np.uint8)
    rejected = crop_natively([data], [box], [False], 8, out)
    return rejected[0][1] if rejected else None


class MemoryIndex(Index):
    """An index of files that exist in memory alone."""

    def __init__(self, *contents):
        super().__init__(np.zeros(len(contents), np.int32), np.zeros((len(contents), 2), np.int32))
        object.__setattr__(self, "contents", contents)

    def locate_bytes(self, samples):
        n = len(samples)
        return [self.contents[sample] for sample in samples], np.zeros(n, np.int64), np.full(n, -1, np.int64)

    def load_pixels(self, sample):
        return decode.decode_image(self.contents[sample], self.name(sample))

    def name(self, sample):
        return f"photo {sample}.jpg"


def crop_file(data, box, size=16, flip=False):
    """Return the crop of a file that `crop_batch` makes, by whichever decoder."""
    out = np.zeros((1, size, size, 3), np.uint8)
    crop.crop_batch(MemoryIndex(data), np.array([0]), np.array([box], np.float64), np.array([flip]), out)
    return out[0]


def get_refusal(data, box=(0, 0, 8, 8)):
    """Return the sentence with which `crop_batch` refuses a file."""
    with pytest.raises(UserError) as caught:
        crop_file(data, box)
    return str(caught.value)


def make_many_scans(width, height, scans):
    """Return a gray progressive JPEG of zeros: each scan adds a few bytes, and a pass over all blocks."""
    quantization = b"\xff\xdb\0\x43\0" + bytes([1] * 64)
    frame = b"\xff\xc2\0\x0b\x08" + struct.pack(">HH", height, width) + b"\x01\x01\x11\0"
    # DC's only code is category 0. AC's are runs of blocks without coefficients, of every power of two up to 2**14.
    dc_table = b"\xff\xc4\0\x14\0" + bytes([1, *[0] * 15]) + b"\0"
    ac_table = b"\xff\xc4\0\x22\x10" + bytes([0, 0, 0, 15, *[0] * 12]) + bytes(range(0, 0xF0, 0x10))
    blocks = -(-width // 8) * -(-height // 8)
    runs = [14] * (blocks >> 14) + [power for power in range(14) if blocks >> power & 1]
    bits = "".join(format(power, "04b") + "0" * power for power in runs)
    dc_scan = b"\xff\xda\0\x08\x01\x01\0\0\0\0" + bytes(-(-blocks // 8))
    ac_scan = b"\xff\xda\0\x08\x01\x01\0\x01\x3f\0" + _pack_bits(bits)
    return b"\xff\xd8" + quantization + frame + dc_table + ac_table + dc_scan + ac_scan * (scans - 1) + b"\xff\xd9"


def _pack_bits(bits):
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
