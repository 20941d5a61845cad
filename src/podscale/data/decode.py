"""Decode: bytes and a crop box -> pixels. The native decoder and its plain twin, which fixes what pixels are right.

The plain twin is Pillow. The native decoder (`native/`, in C) reads and decodes only the part of a picture that a crop
needs, gives the same pixels, and leaves whatever is not an ordinary, flawless JPEG or PPM to the twin; so does a
package that was installed without a compiler, and `PODSCALE_DECODER=plain`.

Everything else asks for pixels through `cropping.crop_batch` alone. Whatever the file, the result is uint8 RGB:

- JPEG, PNG, WebP and PPM (P6, 8 bits: pixels as they are) are told apart by their content, not by their name;
  animations give their first frame;
- EXIF orientation is applied first, so sizes and boxes always speak of the upright picture;
- grayscale gives three equal channels; palettes are looked up; CMYK and YCCK JPEGs are converted by Pillow, Adobe's
  inverted inks included; colour profiles are ignored;
- 16 bits a channel keep the upper 8;
- transparency is composited over white, what a photo on a page is seen on;
- a crop is resized with Pillow's bilinear filter, widened when it shrinks (antialiased), first across and then down;
  JPEG's scaled decoding, which gives other pixels, is not used. Outside of the picture a box finds the picture
  reflected at its border.

A header that asks for more than 2**28 pixels is refused before they are allocated, and any picture that cannot be read
whole is a `UserError` that names it.
"""

import io
import os
import re
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from podscale.errors import UserError

native: ModuleType | None


try:
    from podscale.data import _native as native
except ImportError:  # the package was installed where there is no C compiler or no libjpeg-turbo
    native = None


MAX_PIXELS = 2**28
PPM_HEADER_BYTES = 1024  # no header is longer
# Pillow warns of flaws that leave the pixels whole. Its own limits on pixels live in `Image.open`, which is not used
# here: it would change a setting of the whole process to move them.
warnings.filterwarnings("ignore", module=r"PIL\.")


def decoder() -> str:
    """Which decoder crops JPEG files here: "native", or "plain" and why."""
    wanted = os.environ.get("PODSCALE_DECODER", "")
    if wanted not in ("", "native", "plain"):
        raise UserError(f'PODSCALE_DECODER is "{wanted}"; set it to "native" or "plain", or not at all')
    if wanted == "plain":
        return "plain (PODSCALE_DECODER asks for it)"
    if native is None:
        return (
            "plain (the native decoder was not built: install a C compiler and libjpeg-turbo's headers, then podscale)"
        )
    return "native"


class TooLargeError(UserError):
    """A picture whose header asks for more pixels than are ever allocated."""


@dataclass(frozen=True)
class Header:
    """What the first bytes say: width and height after orientation (EXIF's 1 to 8)."""

    width: int
    height: int
    orientation: int


def read_header(file: IO[bytes], name: str = "the picture") -> Header:
    """Size and orientation, without decoding any pixel."""
    with _naming(name):
        start = file.read(PPM_HEADER_BYTES)
        file.seek(0)
        if start.startswith(b"P6"):
            width, height, _ = _ppm_header(start)
            return Header(width, height, 1)
        return _header(_open(file))


def decode(data: bytes, name: str = "the picture") -> NDArray[np.uint8]:
    """The whole picture, upright, uint8 [height, width, 3]."""
    if native is not None and decoder() == "native":
        try:
            width, height, pixels = native.decode(data, MAX_PIXELS)
            return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        except ValueError:
            pass  # left to the plain twin, which may refuse it in words
    with _naming(name):
        return np.asarray(_picture(data))


def shrunk_sizes(sizes: NDArray[np.int32], longest: int) -> NDArray[np.int32]:
    """Widths and heights [n, 2] with the longer side no longer than `longest`, if that is not 0.

    >>> shrunk_sizes(np.array([[500, 375], [300, 400]], np.int32), 400).tolist()
    [[400, 300], [300, 400]]
    """
    if not longest:
        return sizes
    wide = sizes.astype(np.float64)
    scale = np.minimum(longest / wide.max(axis=1, keepdims=True, initial=1), 1.0)
    return np.maximum(np.floor(wide * scale + 0.5), 1).astype(np.int32)


def shrink(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """A whole picture of this size, by the filter of all crops; itself where it has it already."""
    if pixels.shape[:2] == (height, width):
        return pixels
    across = Image.fromarray(pixels).resize((width, pixels.shape[0]), Image.Resampling.BILINEAR)
    return np.asarray(across.resize((width, height), Image.Resampling.BILINEAR))


def crop(
    source: bytes | NDArray[np.uint8],
    box: Sequence[float],
    flip: bool,
    size: int,
    out: NDArray[np.uint8],
    name: str = "the picture",
) -> None:
    """The part `box` (left, top, right, bottom) of `source`, resized to size x size, mirrored if asked, into `out`.

    `source` is a file's bytes or decoded pixels, uint8 [height, width, 3].
    """
    with _naming(name):
        picture = _picture(source) if isinstance(source, bytes) else Image.fromarray(source)
        left, top, right, bottom = (float(edge) for edge in box)
        if left < 0 or top < 0 or right > picture.width or bottom > picture.height:
            picture, left, top = _reflected(picture, left, top, right, bottom)
            right, bottom = left + float(box[2] - box[0]), top + float(box[3] - box[1])
        edges = (left, top, min(right, picture.width), min(bottom, picture.height))
        pixels = np.asarray(_resized(picture, edges, size))
    out[...] = pixels[:, ::-1] if flip else pixels


def tile(data: bytes) -> bytes:
    """A JPEG of the same pixels, of which `crop_batch` decodes only the parts it needs.

    Raises ValueError, with the reason, for what has to stay as it is.
    """
    if native is None or decoder() != "native":
        raise ValueError("there is no native decoder")
    if not data.startswith(b"\xff\xd8"):
        raise ValueError("it is no JPEG")
    return native.tile(data, MAX_PIXELS)


# --- files ---------------------------------------------------------------------------------------------------------


class _naming:  # noqa: N801 (reads as a verb: with _naming(file))
    """Turns whatever a decoder raises into one sentence that names the picture."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        # A damaged file can make a decoder raise nearly anything; there is no list of what to expect.
        if isinstance(error, Exception) and not isinstance(error, UserError):
            why = str(error).rstrip(".") or type(error).__name__
            refusal = TooLargeError if isinstance(error, _TooManyPixelsError) else UserError
            raise refusal(f"cannot read {self.name}: {why}; replace or remove it") from error


class _Jpeg(JpegImageFile):
    def getexif(self) -> Image.Exif:
        """Nothing: Pillow would parse all of EXIF for a resolution that nobody asks for, and warn of its flaws."""
        return Image.Exif()


def _open(file: IO[bytes]) -> ImageFile:
    """An opened, not yet decoded picture of an allowed size. (MPO, several JPEGs in one file, opens as its first.)"""
    start = file.read(30)
    file.seek(0)
    if start.startswith(b"\xff\xd8"):
        picture: ImageFile = _Jpeg(file)
    elif start.startswith(b"\x89PNG\r\n\x1a\n"):
        picture = PngImageFile(file)
    elif start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        if start[12:16] == b"VP8X":  # the only WebP that can claim a huge canvas, and Pillow allocates it to open it
            width, height = (int.from_bytes(start[at : at + 3], "little") + 1 for at in (24, 27))
            _check_size(width, height)
        picture = WebPImageFile(file)
    elif not start:
        raise ValueError("the file is empty")
    else:
        raise ValueError("it is neither JPEG, PNG, WebP nor PPM")
    _check_size(*picture.size)
    return picture


class _TooManyPixelsError(ValueError):
    pass


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ValueError(f"its header says {width}x{height} pixels")
    if width * height > MAX_PIXELS:
        raise _TooManyPixelsError(f"its header says {width}x{height} pixels, more than {MAX_PIXELS}")


def _header(picture: ImageFile) -> Header:
    turn = _orientation(picture.info.get("exif", b""))
    width, height = picture.size
    return Header(height, width, turn) if turn >= 5 else Header(width, height, turn)


def _orientation(exif: bytes) -> int:
    """EXIF's tag 274 of the first directory, 1 (upright) where it is absent or makes no sense."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, at)
        for entry in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, at + 2 + 12 * entry)
            if tag == 274 and kind == 3:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _picture(data: bytes) -> Image.Image:
    """The decoded picture, upright, mode RGB."""
    if data.startswith(b"P6"):
        return _ppm(data)
    opened = _open(io.BytesIO(data))
    turn = _header(opened).orientation
    opened.load()
    picture = _rgb(opened)
    return picture.transpose(_UPRIGHT[turn]) if turn > 1 else picture


_GAP = rb"(?:[ \t\n\v\f\r]|#[^\n\r]*(?=[\n\r]))+"  # white space and comments
_PPM = re.compile(rb"P6" + _GAP + rb"([0-9]{1,9})" + _GAP + rb"([0-9]{1,9})" + _GAP + rb"0{0,6}255[ \t\n\v\f\r]")


def _ppm_header(start: bytes) -> tuple[int, int, int]:
    """Width, height, and where the pixels begin."""
    found = _PPM.match(start[:PPM_HEADER_BYTES])
    if found is None:
        raise ValueError("its header is not that of a PPM file of 8 bits a channel")
    width, height = int(found[1]), int(found[2])
    _check_size(width, height)
    return width, height, found.end()


def _ppm(data: bytes) -> Image.Image:
    width, height, start = _ppm_header(data)
    if len(data) - start != width * height * 3:
        raise ValueError(f"it has {len(data) - start} bytes of pixels, not the {width * height * 3} its header says")
    return Image.fromarray(np.frombuffer(data, np.uint8, offset=start).reshape(height, width, 3))


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits, gray; Pillow's own conversion would clip at 255
        return _gray16(np.asarray(picture), picture.info.get("transparency"))
    if picture.mode == "RGB" and "transparency" in picture.info:
        clear = picture.info["transparency"]
        if max(clear) > 255:  # of a 16-bit PNG, whose pixels have become 8-bit
            picture.info["transparency"] = tuple(value >> 8 for value in clear)
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _gray16(values: NDArray, clear: int | None) -> Image.Image:
    gray = (values >> 8).astype(np.uint8)
    if clear is not None:
        gray = np.where(values == clear, np.uint8(255), gray)
    return Image.fromarray(gray).convert("RGB")


# --- pixels --------------------------------------------------------------------------------------------------------


def _resized(picture: Image.Image, box: tuple[float, float, float, float], size: int) -> Image.Image:
    """The box, across and then down, in two calls: which pass comes first in a single one is up to Pillow's release.

    The first pass leaves out the rows that the second does not look at; the rest keep their places, since weights
    depend on these in their last bit.
    """
    left, top, right, bottom = box
    reach = max((bottom - top) / size, 1) + 1
    first, end = max(int(top - reach), 0), min(int(bottom + reach) + 1, picture.height)
    rows = picture.crop((0, first, picture.width, end))
    rows = rows.resize((size, end - first), Image.Resampling.BILINEAR, box=(left, 0, right, end - first))
    tall = Image.new("RGB", (size, picture.height))
    tall.paste(rows, (0, first))
    return tall.resize((size, size), Image.Resampling.BILINEAR, box=(0, top, size, bottom))


def reflect(places: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Places inside or outside of 0..n-1 folded back into it, the border pixel not repeated.

    >>> reflect(np.arange(-3, 6), 4).tolist()
    [3, 2, 1, 0, 1, 2, 3, 2, 1]
    """
    period = max(2 * n - 2, 1)
    folded = np.abs(places) % period
    return np.minimum(folded, np.abs(period - folded)) if n > 1 else folded


def _reflected(
    picture: Image.Image, left: float, top: float, right: float, bottom: float
) -> tuple[Image.Image, float, float]:
    """A picture continued past its borders as far as the box goes, and the box's corner in it."""
    x0, y0 = min(0, int(np.floor(left))), min(0, int(np.floor(top)))
    x1, y1 = max(picture.width, int(np.ceil(right))), max(picture.height, int(np.ceil(bottom)))
    rows = reflect(np.arange(y0, y1), picture.height)
    columns = reflect(np.arange(x0, x1), picture.width)
    return Image.fromarray(np.asarray(picture)[rows[:, None], columns]), left - x0, top - y0
