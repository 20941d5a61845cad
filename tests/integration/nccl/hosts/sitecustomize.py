"""Make each process that `podscale launch` starts a host of its own for NCCL: it has the number on its command line."""

import os
from pathlib import Path

_words = Path("/proc/self/cmdline").read_text().split("\0")
if "--process" in _words:
    os.environ["NCCL_HOSTID"] = f"host-{_words[_words.index('--process') + 1]}"
