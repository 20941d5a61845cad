"""The native decoder under AddressSanitizer and UndefinedBehaviorSanitizer, on thousands of damaged images.

Builds `native/decoder/fuzz.c` with gcc or clang four times: with the fastest instructions of this processor, without
AVX-512, in plain C, and with libjpeg's own entropy decoder. The four builds must agree on every pixel.

    python tests/faults/native_asan.py [10000]
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of `support` and `faults`, when run as a program

import numpy as np
from faults import fuzz
from support.jpegs import change_sampling, draw_jpeg, make_exif, make_jpeg, make_ppm, make_unusual_images

from podscale.data import _native as native

NATIVE = Path(__file__).parents[2] / "native" / "decoder"
SOURCES = sorted(str(path) for path in NATIVE.glob("*.c") if path.name != "module.c")
FLAGS = "-std=c11 -g -O1 -Wall -Wextra -ffp-contract=off -fno-omit-frame-pointer".split()
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BUILDS = {
    "as built": [],
    "AVX2": ["-DNO_AVX512"],
    "plain C": ["-DNO_AVX2"],
    "entropy decoding by libjpeg": ["-DNO_FAST_ENTROPY"],
}

DAMAGED = 160  # files damaged by tests/faults/fuzz.py; the driver takes 256 in all


def write_seeds(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    seeds = [draw_jpeg(rng, (120, 90))[0] for _ in range(40)]
    seeds += [change_sampling(make_jpeg(rng, 64, 64, subsampling=2), factors, 64, 64) for factors in (0x41, 0x14)]
    seeds += [make_jpeg(rng, 60, 50, exif=make_exif(orientation)) for orientation in (1, 6)]
    seeds += [native.tile(draw_jpeg(rng, size)[0], 2**28) for size in ((120, 90), (300, 150)) for _ in range(20)]
    cmyk = make_unusual_images()["CMYK"][0]
    seeds += [cmyk, native.tile(cmyk, 2**28)]
    seeds += [make_ppm(rng, 40, 30), make_ppm(rng, 90, 7, b"P6 # pixels\n%d %d 255\t")]
    draw = random.Random(0)  # damage as in tests/faults/fuzz.py, besides what the driver does to all of these
    whole = fuzz.TARGETS["image"][1]()
    seeds += [damaged for _ in range(DAMAGED) if (damaged := fuzz.damage_seed(whole, draw))]
    paths = [folder / f"{i}.jpg" for i in range(len(seeds))]
    for path, data in zip(paths, seeds, strict=True):
        path.write_bytes(data)
    return [str(path) for path in paths]


def main() -> None:
    rounds = sys.argv[1] if len(sys.argv) > 1 else "10000"
    results = []
    with tempfile.TemporaryDirectory() as folder:
        seeds = write_seeds(Path(folder))
        for name, extra in BUILDS.items():
            driver = str(Path(folder) / "fuzz")
            compiler = os.environ.get("CC", "cc")
            command = [compiler, *FLAGS, *SANITIZERS, *extra, *SOURCES, "-o", driver, "-ljpeg", "-lm", "-pthread"]
            subprocess.run(command, check=True)
            done = subprocess.run([driver, rounds, *seeds], check=True, stdout=subprocess.PIPE, text=True, timeout=1200)
            results.append(done.stdout)
            print(f"{name}: {done.stdout}", end="", flush=True)
    if len(set(results)) > 1:
        sys.exit("the builds disagree")


if __name__ == "__main__":
    main()
