from typing_extensions import Buffer

def crop_jpegs(
    sources: list[bytes],
    boxes: Buffer,
    flips: Buffer,
    size: int,
    out: Buffer,
    threads: int,
    max_pixels: int,
    tall_first: bool,
    /,
) -> list[tuple[int, str]]: ...
