"""Programs whose time of day is not that of the machine."""

import atexit
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_name("shifted_clock.c")
COMPILER = shutil.which("cc") if Path("/proc/self/maps").exists() else None  # the source needs gcc or clang, and Linux
YEAR_S = 365 * 24 * 3600


def shift_clock(seconds: int, rate: float = 1.0) -> dict[str, str]:
    """Return an environment in which the time of day is so many seconds ahead, and runs at so many times its speed."""
    return {"LD_PRELOAD": str(_compile()), "SHIFTED_CLOCK_S": str(seconds), "SHIFTED_CLOCK_RATE": str(rate)}


@cache
def _compile() -> Path:
    folder = TemporaryDirectory(prefix="shifted-clock-")
    atexit.register(folder.cleanup)
    library = Path(folder.name) / "shifted_clock.so"
    flags = ["-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    return library
