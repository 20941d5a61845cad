"""The native decoder under AddressSanitizer and UndefinedBehaviorSanitizer, on thousands of damaged pictures.

Builds `native/decoder/fuzz.c` with gcc or clang three times, with the sums as this processor does them best, without
AVX-512, and in plain C, which must agree on every pixel.

    python tests/faults/native_asan.py [10000]
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from data.test_native import any_jpeg, exif, jpeg, native, oddities, ppm, resampled
from faults import fuzz
from PIL import ImageFile

NATIVE = Path(__file__).parents[2] / "native" / "decoder"
SOURCES = sorted(str(path) for path in NATIVE.glob("*.c") if path.name != "module.c")
FLAGS = "-std=c11 -g -O1 -Wall -Wextra -ffp-contract=off -fno-omit-frame-pointer".split()
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

DAMAGED = 160  # files of the fuzzer's; the driver takes 256 in all


def seeds(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    made = [any_jpeg(rng, (120, 90))[0] for _ in range(40)]
    made += [resampled(jpeg(rng, 64, 64, subsampling=2), factors, 64, 64) for factors in (0x41, 0x14)]
    made += [jpeg(rng, 60, 50, exif=exif(orientation)) for orientation in (1, 6)]
    made += [native.tile(any_jpeg(rng, most)[0], 2**28) for most in ((120, 90), (300, 150)) for _ in range(20)]
    made += [oddities()["inks"][0], native.tile(oddities()["inks"][0], 2**28)]
    made += [ppm(rng, 40, 30), ppm(rng, 90, 7, b"P6 # pixels\n%d %d 255\t")]
    draw = random.Random(0)  # what tests/faults/fuzz.py tries, beside what the driver does to all of these
    whole = fuzz.TARGETS["picture"][1]()
    made += [harmed for _ in range(DAMAGED) if (harmed := fuzz.harmed(whole, draw))]
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
        for name, extra in (("as built", []), ("AVX2", ["-DNO_VNNI"]), ("plain C", ["-DPLAIN_SUMS"])):
            driver = str(Path(folder) / "fuzz")
            compiler = os.environ.get("CC", "cc")
            command = [compiler, *FLAGS, *SANITIZERS, *extra, *SOURCES, "-o", driver, "-ljpeg", "-lm", "-pthread"]
            subprocess.run(command, check=True)
            done = subprocess.run([driver, count, *files], check=True, stdout=subprocess.PIPE, text=True, timeout=1200)
            found.append(done.stdout)
            print(f"{name}: {done.stdout}", end="", flush=True)
    if len(set(found)) > 1:
        sys.exit("the builds disagree")


if __name__ == "__main__":
    main()
