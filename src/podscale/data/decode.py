"""Decoding: bytes and a crop box -> pixels, by the native decoder or by the reference implementation.

The reference implementation is Pillow; it defines which pixels are right. The native decoder (`native/decoder`, in C)
reads and decodes only the part of an image that a crop needs and gives the same pixels. It rejects whatever is not an
ordinary, flawless JPEG or PPM, which the reference implementation then decodes; so it does in a package that was
installed without a compiler, and with `PODSCALE_DECODER=plain`.

All other code gets pixels through `crop.crop_batch`. Whatever the file, the result is uint8 RGB:

- JPEG, PNG, WebP and PPM (P6, 8 bits: pixels as they are) are distinguished by their content, not by their name;
  animations give their first frame;
- EXIF orientation is applied first, so sizes and boxes always refer to the upright image;
- grayscale gives three equal channels; palettes are looked up; CMYK and YCCK JPEGs are converted by Pillow, Adobe's
  inverted inks included; color profiles are ignored;
- of 16 bits per channel the upper 8 are kept;
- transparency is composited over white, as on a web page;
- a crop is resized with Pillow's bilinear filter, which widens when it shrinks (antialiasing), first horizontally and
  then vertically. JPEG's scaled decoding, which gives other pixels, is not used. Where a box extends past the border,
  the image is reflected.

An image whose header asks for more memory than `data.max_image_mib` is refused before anything is allocated, and so is
a JPEG of too many scans (`podscale.data.limits`). Any image that cannot be read completely is a `UserError` that names
it.
"""

import io
import os
import re
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from podscale.data.limits import (
    BYTES_PER_PIXEL,
    MAX_IMAGE_BYTES,
    TRANSPARENT_BYTES_PER_PIXEL,
    WEBP_BYTES_PER_PIXEL,
    LimitError,
    TooLargeError,
    check_memory,
    check_scans,
)
from podscale.errors import UserError

native: ModuleType | None


try:
    from podscale.data import _native as native
except ImportError:  # the package was installed where there is no C compiler or no libjpeg-turbo
    native = None


NOT_BUILT = "plain (the native decoder was not built: install gcc and libjpeg-dev, then reinstall Podscale)"
PPM_HEADER_BYTES = 1024  # longer headers are refused
# Pillow warns of flaws that do not affect the pixels. Its own limit on pixels is checked in `Image.open`, which is not
# used here: moving that limit would change a setting of the whole process.
warnings.filterwarnings("ignore", module=r"PIL\.")


def select_decoder() -> str:
    """Return which decoder crops JPEG files here: "native", or "plain (reason)" for the reference implementation.

    Raises:
        UserError: the environment variable PODSCALE_DECODER has an unknown value.
    """
    setting = os.environ.get("PODSCALE_DECODER", "")
    if setting not in ("", "native", "plain"):
        raise UserError(f'PODSCALE_DECODER is "{setting}"; set it to "native" or "plain", or not at all')
    if setting == "plain":
        return "plain (PODSCALE_DECODER asks for it)"
    if native is None:
        return NOT_BUILT
    return "native"


@dataclass(frozen=True)
class Header:
    """What the first bytes say: width and height of the upright image, and EXIF's orientation (1 to 8)."""

    width: int
    height: int
    orientation: int


def read_header(file: IO[bytes], name: str = "the image", max_bytes: int = MAX_IMAGE_BYTES) -> Header:
    """Return size and orientation, without decoding any pixel.

    Raises:
        UserError: the header cannot be read; the message contains `name`.
        TooLargeError: decoding the image would take more than `max_bytes` of memory.
    """
    with _ErrorContext(name):
        start = file.read(PPM_HEADER_BYTES)
        file.seek(0)
        if start.startswith(b"P6"):
            width, height, _ = _parse_ppm_header(start, max_bytes)
            return Header(width, height, 1)
        return _make_header(_open_image(file, max_bytes))


def decode_image(data: bytes, name: str = "the image", max_bytes: int = MAX_IMAGE_BYTES) -> NDArray[np.uint8]:
    """Return the whole image, upright, uint8 [height, width, 3].

    Raises:
        UserError: the image cannot be read; the message contains `name`.
        TooLargeError: decoding it would take more than `max_bytes` of memory, or too many scans.
    """
    if native is not None and select_decoder() == "native":
        try:
            width, height, pixels = native.decode(data, max_bytes)
            return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        except ValueError:
            pass  # left to the reference implementation, which refuses a bad image with a sentence
    with _ErrorContext(name):
        return np.asarray(_decode_with_pillow(data, max_bytes))


def shrink_sizes(sizes: NDArray[np.int32], longest: int) -> NDArray[np.int32]:
    """Return widths and heights [n, 2] with the longer side at most `longest`, if that is not 0.

    >>> shrink_sizes(np.array([[500, 375], [300, 400]], np.int32), 400).tolist()
    [[400, 300], [300, 400]]
    """
    if not longest:
        return sizes
    wide = sizes.astype(np.float64)
    scale = np.minimum(longest / wide.max(axis=1, keepdims=True, initial=1), 1.0)
    return np.maximum(np.floor(wide * scale + 0.5), 1).astype(np.int32)


def shrink_image(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Return the whole image resized to this size, with the filter of all crops; itself if it has that size."""
    if pixels.shape[:2] == (height, width):
        return pixels
    narrowed = Image.fromarray(pixels).resize((width, pixels.shape[0]), Image.Resampling.BILINEAR)
    return np.asarray(narrowed.resize((width, height), Image.Resampling.BILINEAR))


def crop_image(
    source: bytes | NDArray[np.uint8],
    box: Sequence[float],
    flip: bool,
    size: int,
    out: NDArray[np.uint8],
    name: str = "the image",
    max_bytes: int = MAX_IMAGE_BYTES,
) -> None:
    """Crop and resize one image: the reference implementation of all crops.

    Args:
        source: a file's bytes, or decoded pixels, uint8 [height, width, 3].
        box: (left, top, right, bottom) in pixels of the upright image; it may extend past the border.
        flip: whether to flip the result left to right.
        size: side of the result.
        out: receives the pixels, uint8 [size, size, 3].
        name: what an error calls the image.
        max_bytes: memory that decoding may take.

    Raises:
        UserError: the image cannot be read.
    """
    with _ErrorContext(name):
        image = _decode_with_pillow(source, max_bytes) if isinstance(source, bytes) else Image.fromarray(source)
        left, top, right, bottom = (float(edge) for edge in box)
        if left < 0 or top < 0 or right > image.width or bottom > image.height:
            image, left, top = _pad_by_reflection(image, left, top, right, bottom)
            right, bottom = left + float(box[2] - box[0]), top + float(box[3] - box[1])
        edges = (left, top, min(right, image.width), min(bottom, image.height))
        pixels = np.asarray(_resize_box(image, edges, size))
    out[...] = pixels[:, ::-1] if flip else pixels


def tile_jpeg(data: bytes, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
    """Return a JPEG of the same pixels, of which `crop_batch` decodes only the parts it needs.

    Raises:
        ValueError: the file has to stay as it is; the message is the reason.
    """
    if native is None or select_decoder() != "native":
        raise ValueError("there is no native decoder")
    if not data.startswith(b"\xff\xd8"):
        raise ValueError("it is not a JPEG")
    return native.tile(data, max_bytes)


# --- files ---------------------------------------------------------------------------------------------------------


class _ErrorContext:
    """Context manager that turns whatever a decoder raises into one sentence that names the image."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        # A damaged file can make a decoder raise nearly anything; there is no list of what to expect.
        if isinstance(error, Exception) and not isinstance(error, UserError):
            reason = str(error).rstrip(".") or type(error).__name__
            is_limit = isinstance(error, LimitError | Image.DecompressionBombError)  # Pillow has its own for WebP
            error_type = TooLargeError if is_limit else UserError
            raise error_type(f"cannot read {self.name}: {reason}; replace or remove it") from error


class _Jpeg(JpegImageFile):
    def getexif(self) -> Image.Exif:
        """Return nothing: Pillow would parse all of EXIF for a resolution that is not needed, and warn of its flaws."""
        return Image.Exif()


def _open_image(file: IO[bytes], max_bytes: int) -> ImageFile:
    """Open an image of an allowed size, without decoding it. (MPO, several JPEGs in one file, opens as its first.)"""
    start = file.read(30)
    file.seek(0)
    if start.startswith(b"\xff\xd8"):
        image: ImageFile = _Jpeg(file)
    elif start.startswith(b"\x89PNG\r\n\x1a\n"):
        image = PngImageFile(file)
    elif start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        check_memory(*_parse_webp_size(start), WEBP_BYTES_PER_PIXEL, max_bytes)  # opening it allocates memory
        return WebPImageFile(file)
    elif not start:
        raise ValueError("the file is empty")
    else:
        raise ValueError("it is neither JPEG, PNG, WebP nor PPM")
    is_transparent = image.mode.endswith("A") or "transparency" in image.info
    check_memory(*image.size, TRANSPARENT_BYTES_PER_PIXEL if is_transparent else BYTES_PER_PIXEL, max_bytes)
    return image


def _parse_webp_size(start: bytes) -> tuple[int, int]:
    """Return the size of the canvas from a file's first 30 bytes (RFC 9649, section 2)."""
    kind, body = start[12:16], start[20:30]
    if kind == b"VP8X" and len(body) == 10:
        return int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
    if kind == b"VP8 " and len(body) == 10:
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    if kind == b"VP8L" and len(body) >= 5:
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise ValueError("its header is not that of a WebP file")


def _make_header(image: ImageFile) -> Header:
    orientation = _parse_orientation(image.info.get("exif", b""))
    width, height = image.size
    return Header(height, width, orientation) if orientation >= 5 else Header(width, height, orientation)


def _parse_orientation(exif: bytes) -> int:
    """Return tag 274 of EXIF's first directory, or 1 (upright) where it is absent or invalid."""
    tiff = exif.removeprefix(b"Exif\0\0")
    byte_order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if byte_order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(byte_order + "I", tiff, 4)
        (entries,) = struct.unpack_from(byte_order + "H", tiff, directory)
        for entry in range(entries):
            tag, kind, _, value = struct.unpack_from(byte_order + "HHIH", tiff, directory + 2 + 12 * entry)
            if tag == 274 and kind == 3:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


_TRANSPOSES = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)


def _decode_with_pillow(data: bytes, max_bytes: int) -> Image.Image:
    """Return the decoded image, upright, mode RGB."""
    if data.startswith(b"P6"):
        return _decode_ppm(data, max_bytes)
    file = _open_image(io.BytesIO(data), max_bytes)
    if isinstance(file, _Jpeg):
        check_scans(data, *file.size)
    orientation = _make_header(file).orientation
    file.load()
    image = _convert_to_rgb(file)
    return image.transpose(_TRANSPOSES[orientation]) if orientation > 1 else image


_GAP = rb"(?:[ \t\n\v\f\r]|#[^\n\r]*(?=[\n\r]))+"  # white space and comments
_PPM_HEADER = re.compile(rb"P6" + _GAP + rb"([0-9]{1,9})" + _GAP + rb"([0-9]{1,9})" + _GAP + rb"0{0,6}255[ \t\n\v\f\r]")


def _parse_ppm_header(start: bytes, max_bytes: int) -> tuple[int, int, int]:
    """Return width, height, and the offset of the pixels."""
    header = _PPM_HEADER.match(start[:PPM_HEADER_BYTES])
    if header is None:
        raise ValueError("its header is not that of a PPM file of 8 bits per channel")
    width, height = int(header[1]), int(header[2])
    check_memory(width, height, BYTES_PER_PIXEL, max_bytes)
    return width, height, header.end()


def _decode_ppm(data: bytes, max_bytes: int) -> Image.Image:
    width, height, start = _parse_ppm_header(data, max_bytes)
    if len(data) - start != width * height * 3:
        raise ValueError(f"it has {len(data) - start} bytes of pixels, not the {width * height * 3} its header says")
    return Image.fromarray(np.frombuffer(data, np.uint8, offset=start).reshape(height, width, 3))


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit gray; Pillow's own conversion would clip at 255
        return _convert_gray16(np.asarray(image), image.info.get("transparency"))
    if image.mode == "RGB" and "transparency" in image.info:
        transparent = image.info["transparency"]
        if max(transparent) > 255:  # from a 16-bit PNG, whose pixels Pillow has reduced to 8 bits
            image.info["transparency"] = tuple(value >> 8 for value in transparent)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _convert_gray16(values: NDArray, transparent: int | None) -> Image.Image:
    gray = (values >> 8).astype(np.uint8)
    if transparent is not None:
        gray = np.where(values == transparent, np.uint8(255), gray)
    return Image.fromarray(gray).convert("RGB")


# --- pixels --------------------------------------------------------------------------------------------------------


def _resize_box(image: Image.Image, box: tuple[float, float, float, float], size: int) -> Image.Image:
    """Resize the box horizontally and then vertically, in two calls: in one call the order depends on Pillow's release.

    The first pass leaves out the rows that the second does not use; the others keep their position in the image, since
    the last bit of the weights depends on it.
    """
    left, top, right, bottom = box
    reach = max((bottom - top) / size, 1) + 1
    first, end = max(int(top - reach), 0), min(int(bottom + reach) + 1, image.height)
    rows = image.crop((0, first, image.width, end))
    rows = rows.resize((size, end - first), Image.Resampling.BILINEAR, box=(left, 0, right, end - first))
    tall = Image.new("RGB", (size, image.height))
    tall.paste(rows, (0, first))
    return tall.resize((size, size), Image.Resampling.BILINEAR, box=(0, top, size, bottom))


def reflect(positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return positions inside or outside of 0..n-1 folded back into it, without repeating the border pixel.

    >>> reflect(np.arange(-3, 6), 4).tolist()
    [3, 2, 1, 0, 1, 2, 3, 2, 1]
    """
    period = max(2 * n - 2, 1)
    folded = np.abs(positions) % period
    return np.minimum(folded, np.abs(period - folded)) if n > 1 else folded


def _pad_by_reflection(
    image: Image.Image, left: float, top: float, right: float, bottom: float
) -> tuple[Image.Image, float, float]:
    """Return the image continued past its borders as far as the box extends, and the box's corner in it."""
    x0, y0 = min(0, int(np.floor(left))), min(0, int(np.floor(top)))
    x1, y1 = max(image.width, int(np.ceil(right))), max(image.height, int(np.ceil(bottom)))
    rows = reflect(np.arange(y0, y1), image.height)
    columns = reflect(np.arange(x0, x1), image.width)
    return Image.fromarray(np.asarray(image)[rows[:, None], columns]), left - x0, top - y0
