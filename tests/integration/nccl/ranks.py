"""Environments of ranks: several NCCL ranks on one GPU, or Gloo on CPUs, and groups of them that run cases."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"
CASE_TIMEOUT_S = {"gpu": 120, "cpu": 900}
# NCCL refuses two ranks on one GPU of a host, so each poses as a host of its own, which it reaches through sockets.
NCCL = {
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # the ranks would disturb each other's timings
}


def has_gpu():
    """Whether this machine has an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None


def make_environment(platform, rank=0, **more):
    """Return the environment of a rank on "gpu" or "cpu"."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")}
    path = os.pathsep.join([str(SOURCE), *filter(None, [environment.get("PYTHONPATH")])])
    machine = NCCL | {"NCCL_HOSTID": f"host-{rank}"} if platform == "gpu" else {"JAX_PLATFORMS": "cpu"}
    return environment | machine | {"PYTHONPATH": path} | more


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RankGroup:
    """Processes of the rank program that have joined each other, and stay for all their cases.

    Args:
        ranks: how many.
        platform: "gpu" or "cpu".
        folder: for what they print.
        port: on loopback, where they find each other.
    """

    def __init__(self, ranks, platform, folder, port):
        self._timeout_s = CASE_TIMEOUT_S[platform]
        self._logs = [folder / f"rank-{rank}-of-{ranks}.log" for rank in range(ranks)]
        self._ranks = [self._start(rank, ranks, platform, port) for rank in range(ranks)]

    def _start(self, rank, ranks, platform, port):
        command = [sys.executable, str(HERE / "rank.py"), f"127.0.0.1:{port}", str(ranks), str(rank)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        with self._logs[rank].open("w") as log:
            return subprocess.Popen(command, env=make_environment(platform, rank), stderr=log, **pipes)

    def read(self):
        """Return the next line of every rank; a rank that has ended, or takes too long, gives its last words."""
        timer = threading.Timer(self._timeout_s, self.kill)
        timer.start()
        lines = [rank.stdout.readline() for rank in self._ranks]
        timer.cancel()
        return [json.loads(line) if line else {"error": self._read_end(number)} for number, line in enumerate(lines)]

    def run(self, message):
        """Return the results of a case, rank by rank."""
        for rank in self._ranks:
            with suppress(OSError):  # it has ended, and `read` says how
                print(json.dumps(message), file=rank.stdin, flush=True)
        return self.read()

    def close(self):
        """End the group; return the exit codes."""
        timer = threading.Timer(30, self.kill)
        timer.start()
        for rank in self._ranks:
            with suppress(OSError):
                rank.stdin.close()
        codes = [rank.wait() for rank in self._ranks]
        timer.cancel()
        return codes

    def kill(self):
        """End the group at once."""
        for rank in self._ranks:
            rank.kill()

    def _read_end(self, number):
        return f"ended with {self._ranks[number].poll()}: {self._logs[number].read_text()[-3000:]}"
