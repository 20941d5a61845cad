"""The native decoder under AddressSanitizer and UndefinedBehaviorSanitizer, on thousands of damaged JPEGs.

Builds `native/fuzz.c` with gcc or clang twice, with the sums in AVX2 and in plain C, which must agree on every pixel.

    python tests/native_asan.py [10000]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import ImageFile
from test_native import any_jpeg, exif, jpeg, resampled

SOURCES = [str(Path(__file__).parents[1] / "native" / name) for name in ("fuzz.c", "jpeg.c", "resize.c")]
FLAGS = "-std=c11 -g -O1 -Wall -Wextra -ffp-contract=off -fno-omit-frame-pointer".split()
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def seeds(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    made = [any_jpeg(rng, (120, 90))[0] for _ in range(40)]
    made += [resampled(jpeg(rng, 64, 64, subsampling=2), factors, 64, 64) for factors in (0x41, 0x14)]
    made += [jpeg(rng, 60, 50, exif=exif(orientation)) for orientation in (1, 6)]
    paths = [folder / f"{i}.jpg" for i in range(len(made))]
    for path, data in zip(paths, made, strict=True):
        path.write_bytes(data)
    return [str(path) for path in paths]


def main() -> None:
    count = sys.argv[1] if len(sys.argv) > 1 else "10000"
    ImageFile.MAXBLOCK = 2**22  # Pillow cannot write some small progressive files without it
    found = []
    with tempfile.TemporaryDirectory() as folder:
        files = seeds(Path(folder))
        for name, extra in (("as built", []), ("plain C", ["-DPLAIN_SUMS"])):
            driver = str(Path(folder) / "fuzz")
            compiler = os.environ.get("CC", "cc")
            command = [compiler, *FLAGS, *SANITIZERS, *extra, *SOURCES, "-o", driver, "-ljpeg", "-lm"]
            subprocess.run(command, check=True)
            done = subprocess.run([driver, count, *files], check=True, stdout=subprocess.PIPE, text=True)
            found.append(done.stdout)
            print(f"{name}: {done.stdout}", end="", flush=True)
    if found[0] != found[1]:
        sys.exit("the two builds disagree")


if __name__ == "__main__":
    main()
