"""Limits of an image: the memory and the work of decoding it, both known before any pixel is allocated.

The memory is width × height × the bytes per pixel that the reference implementation takes at its peak, beside the
file's own; they depend on the channels and their depth, through the layers that Pillow keeps of each:

    12  gray, palette, RGB and CMYK; 8 or 16 bits
    16  the same with transparency
    28  WebP

It must not exceed the recipe's `data.max_image_mib`. The default of 1024 MiB allows 89 million pixels of an ordinary
photo. The work of a JPEG is its scans × its pixels: each scan of a few bytes is a pass over the whole image.
`native/decoder/limits.h` has the same numbers.
"""

import re

from podscale.errors import UserError
from podscale.recipe import Data

MAX_IMAGE_BYTES = Data().max_image_bytes
BYTES_PER_PIXEL = 12
TRANSPARENT_BYTES_PER_PIXEL = 16
WEBP_BYTES_PER_PIXEL = 28
FREE_SCANS = 16  # never too many: encoders write ten or so
MIN_SCAN_PIXELS = 2**16  # a scan of a small image takes as long as one of this many pixels
MAX_SCAN_PIXELS = 2**30
# A marker with a length, SOI or EOI. Stuffed zeros, fill bytes and restart markers are part of what precedes them.
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")
_SCAN, _END = 0xDA, 0xD9


class TooLargeError(UserError):
    """An image that takes more memory or work to decode than is allowed."""


class LimitError(ValueError):
    """The reason of a `TooLargeError`, which names the image."""


def check_memory(width: int, height: int, bytes_per_pixel: int, max_bytes: int) -> None:
    """Refuse an image whose header asks for too much memory.

    Raises:
        LimitError: the message has the size, the memory and the limit.

    >>> check_memory(9999, 9999, BYTES_PER_PIXEL, max_bytes=2**20)
    Traceback (most recent call last):
    podscale.data.limits.LimitError: its 9999x9999 pixels take 1145 MiB to decode, more than the 1 of data.max_image_mib
    """
    if width < 1 or height < 1:
        raise ValueError(f"its header says {width}x{height} pixels")
    if width * height > max_bytes // bytes_per_pixel:
        mib = -(-width * height * bytes_per_pixel // 2**20)
        limit = f"the {max_bytes // 2**20} of data.max_image_mib"
        raise LimitError(f"its {width}x{height} pixels take {mib} MiB to decode, more than {limit}")


def check_scans(jpeg: bytes, width: int, height: int) -> None:
    """Refuse a JPEG that demands too many passes over its pixels.

    Raises:
        LimitError: the message has the size and the limit.
    """
    most = max(FREE_SCANS, MAX_SCAN_PIXELS // max(width * height, MIN_SCAN_PIXELS))
    if jpeg.count(b"\xff\xda") > most and count_scans(jpeg, most) > most:  # the first count is quick and never too low
        raise LimitError(f"it has more than {most} scans, too many for its {width}x{height} pixels")


def count_scans(jpeg: bytes, most: int) -> int:
    """Return the number of a JPEG's scans up to its end marker; of more than `most`, stop after the next one."""
    scans, at = 0, 2
    while scans <= most and (marker := _MARKER.search(jpeg, at)):
        kind = jpeg[marker.start() + 1]
        if kind == _END:
            break
        scans += kind == _SCAN
        at = marker.end() + max(int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big"), 2)
    return scans
