"""The native decoder. Every function releases Python's global lock, and arrays are contiguous. Functions on batches
return what they reject as (number, reason), for the reference implementation to decode or to refuse."""

from typing_extensions import Buffer

def crop(
    sources: list[str | int | Buffer],
    offsets: Buffer,
    lengths: Buffer,
    boxes: Buffer,
    flips: Buffer,
    size: int,
    out: Buffer,
    threads: int,
    max_bytes: int,
    /,
) -> list[tuple[int, str]]:
    """Crop JPEG and PPM images into out, uint8 [n, size, size, 3].

    Image i is lengths[i] bytes (int64; -1: all that follow) from offsets[i] (int64) of sources[i]: a path, the
    descriptor of an open file (which stays open), or bytes in memory. boxes are float64 [n, 4], flips bool [n].
    """

def crop_pixels(
    source: Buffer,
    offsets: Buffer,
    sizes: Buffer,
    boxes: Buffer,
    flips: Buffer,
    size: int,
    out: Buffer,
    threads: int,
    /,
) -> list[tuple[int, str]]:
    """Crop images given as pixels: image i is packed RGB from byte offsets[i] of source on, sizes int32 [n, 2]."""

def time_stages(
    sources: list[str | int | Buffer],
    offsets: Buffer,
    lengths: Buffer,
    boxes: Buffer,
    flips: Buffer,
    size: int,
    max_bytes: int,
    /,
) -> tuple[float, float, float, float]:
    """Return the seconds that `crop` spends, in one thread, on reading, entropy decoding (and headers), transform, and
    resize.

    Entropy decoding is done once more, alone, to be timed; the transform (inverse DCT, upsampling, color) is the
    remaining time.
    """

def decode(data: Buffer, max_bytes: int, /) -> tuple[int, int, bytes]:
    """Return width, height and pixels [height, width, 3] of a whole JPEG.

    Raises:
        ValueError: the file is left to the reference implementation; the message is the reason.
    """

def advise(sources: list[str | int | Buffer], offsets: Buffer, lengths: Buffer, /) -> None:
    """Ask the kernel to read these images' files ahead of time."""

def tile(data: Buffer, max_bytes: int, /) -> bytes:
    """Return a JPEG of the same pixels and markers in one baseline scan, in tiles of which `crop` decodes only some.

    Raises:
        ValueError: the file cannot be transcoded without loss; the message is the reason.
    """
