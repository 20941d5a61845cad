"""The native decoder. Every function works without Python's lock; arrays are contiguous; what a function leaves undone
it returns as (number, reason), for the plain twin to do or to refuse in words."""

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
    max_pixels: int,
    /,
) -> list[tuple[int, str]]:
    """Crops of JPEG and PPM pictures into out, uint8 [n, size, size, 3].

    Picture i is lengths[i] bytes (int64; -1: all that follow) from offsets[i] (int64) of sources[i]: a path, the
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
    """The same from pixels: picture i is packed RGB from byte offsets[i] of source on, sizes int32 [n, 2]."""

def stages(
    sources: list[str | int | Buffer],
    offsets: Buffer,
    lengths: Buffer,
    boxes: Buffer,
    flips: Buffer,
    size: int,
    max_pixels: int,
    /,
) -> tuple[float, float, float, float]:
    """Seconds that `crop` spends, in one thread, on reading, entropy decoding (and headers), transform, and resize.

    Entropy decoding is done once more, alone, to be timed; the transform (inverse DCT, upsampling, colour) is the rest.
    """

def decode(data: Buffer, max_pixels: int, /) -> tuple[int, int, bytes]:
    """Width, height and pixels [height, width, 3] of a whole JPEG.

    Raises ValueError, with the reason, for what is left to the plain twin.
    """

def advise(sources: list[str | int | Buffer], offsets: Buffer, lengths: Buffer, /) -> None:
    """Has the kernel read these pictures' files ahead of time."""

def tile(data: Buffer, max_pixels: int, /) -> bytes:
    """A JPEG of the same pixels and markers in one baseline scan, in tiles of which `crop` decodes only those it needs.

    Raises ValueError, with the reason, for what cannot be transcoded without loss.
    """
