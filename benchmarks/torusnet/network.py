"""Emulate a torus of hosts on one machine: network namespaces in rows x columns, with wires of a rate and a delay.

Every host is a namespace with an address of its own and a TUN device for each of its four wires; `links.c` carries the
packets. Hosts forward packets for each other, along the row first. Needs root, `ip` and a C compiler. Namespaces are
named after the process that created them and removed when it ends, also after a signal that Python handles; those of a
process that was killed are removed by the next one.

    with Torus(4, 4, Wires(row_mbit=25, column_mbit=25)) as torus:
        torus.run(["hostname", "-I"], timeout_s=10)
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

HERE = Path(__file__).parent
PREFIX = "podscale-net"
MTU = 4000
# A host's process waits most of the time and must not be delayed by other work, so it has a real-time priority, below
# that of the wires; it ends with its parent.
AS_HOST = "chrt --rr 1 setpriv --pdeathsig KILL".split()
# Processes of equal real-time priority take turns, by default every 100 ms. Devices of a process that wait for each
# other then take up to 25 times as long, presumably because one that waits by spinning keeps the core.
TURN, TURN_MS = Path("/proc/sys/kernel/sched_rr_timeslice_ms"), 1
SETTINGS = (
    "net.ipv4.ip_forward=1",
    "net.ipv4.conf.all.rp_filter=0",
    "net.ipv4.conf.default.rp_filter=0",
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_no_metrics_save=1",
)
Host = tuple[int, int]  # row, column


@dataclass(frozen=True)
class Wires:
    """The rates of the wires along rows and along columns, and their common delay."""

    row_mbit: float
    column_mbit: float
    delay_us: float = 2000.0


class Torus:
    """The hosts and wires; a context manager that removes everything on exit."""

    def __init__(self, rows: int, cols: int, wires: Wires) -> None:
        self.rows, self.cols, self.wires = rows, cols, wires
        self.hosts: list[Host] = [(row, col) for row in range(rows) for col in range(cols)]
        self.lateness = ""  # how late packets were, as `links` reports at its end

    def name(self, host: Host) -> str:
        return f"{PREFIX}-{os.getpid()}-{host[0]}-{host[1]}"

    def address(self, host: Host) -> str:
        return f"10.77.{host[0]}.{host[1] + 1}"

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise SystemExit("network namespaces need root")
        remove_stale()
        self._handlers = {number: signal.signal(number, _exit_on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._turn_ms = TURN.read_text()
        try:
            TURN.write_text(f"{TURN_MS}\n")
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _ignore_signals():
            if carrier := getattr(self, "_carrier", None):
                carrier.terminate()
                self.lateness = carrier.communicate(timeout=10)[0].strip()
            for host in self.hosts:
                _remove(self.name(host))
            self._folder.cleanup()
            TURN.write_text(self._turn_ms)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # --- construction ---

    def _build(self) -> None:
        program = Path(self._folder.name) / "links"
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", program, HERE / "links.c"], check=True)
        for host in self.hosts:
            self._add_host(host)
        self._carrier = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        inlet, outlet = self._carrier.stdin, self._carrier.stdout
        inlet.write("".join(f"{wire}\n" for wire in self._list_wires()))
        inlet.close()
        self._carrier.stdin = None  # or `communicate` would close it again
        if outlet.readline() != "ready\n":
            raise SystemExit("the wires did not come up")
        for host in self.hosts:
            self._connect_host(host)

    def _add_host(self, host: Host) -> None:
        name, folder = self.name(host), Path("/etc/netns") / self.name(host)
        subprocess.run(["ip", "netns", "add", name], check=True)
        folder.mkdir(parents=True)
        # Gloo listens on the address of the machine's name.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(host)} {socket.gethostname()}\n")
        _ip(name, ["link set lo up", f"addr add {self.address(host)}/32 dev lo"])
        subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", *SETTINGS], check=True)

    def _list_wires(self) -> Iterator[str]:
        for row, col in self.hosts:
            east, south = (row, (col + 1) % self.cols), ((row + 1) % self.rows, col)
            here, wires = self.name((row, col)), self.wires
            if self.cols > 1:
                yield f"{here} east {self.name(east)} west {wires.row_mbit} {wires.delay_us}"
            if self.rows > 1:
                yield f"{here} south {self.name(south)} north {wires.column_mbit} {wires.delay_us}"

    def _connect_host(self, host: Host) -> None:
        devices = ["east", "west"] * (self.cols > 1) + ["south", "north"] * (self.rows > 1)
        lines = [f"link set {device} mtu {MTU} txqueuelen 20000 up" for device in devices]
        lines += [
            f"route add {self.address(other)}/32 dev {self._choose_device(host, other)} src {self.address(host)}"
            for other in self.hosts
            if other != host
        ]
        _ip(self.name(host), lines)

    def _choose_device(self, host: Host, other: Host) -> str:
        """Return the device for packets to another host: along the row, then along the column, the shorter way."""
        across, down = (other[1] - host[1]) % self.cols, (other[0] - host[0]) % self.rows
        if across:
            return "east" if 2 * across <= self.cols else "west"
        return "south" if 2 * down <= self.rows else "north"

    # --- running ---

    def run(
        self, command: Callable[[int, str], list[str]] | list[str], timeout_s: float, env: dict[str, str] | None = None
    ) -> list[str]:
        """Run a command on every host and return its outputs.

        Args:
            command: the command, or a function from the host's number and the first host's address to it.
            timeout_s: seconds after which it is stopped.
            env: further environment variables.

        Raises:
            SystemExit: a host failed, or the time is over.
        """
        first = self.address(self.hosts[0])
        processes: list[subprocess.Popen[str]] = []
        folder = Path(self._folder.name)
        try:
            for number, host in enumerate(self.hosts):
                host_command = command(number, first) if callable(command) else command
                with (folder / f"{number}.out").open("w") as out, (folder / f"{number}.err").open("w") as err:
                    processes.append(
                        subprocess.Popen(
                            [*AS_HOST, "ip", "netns", "exec", self.name(host), *host_command],
                            stdout=out,
                            stderr=err,
                            text=True,
                            env=os.environ | (env or {}),
                            start_new_session=True,
                        )
                    )
            self._wait(processes, time.monotonic() + timeout_s)
            failed = [number for number, process in enumerate(processes) if process.poll()]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if failed:
            codes = {number: processes[number].returncode for number in failed}
            last = {(folder / f"{number}.err").read_text()[-500:] for number in failed}
            raise SystemExit(f"hosts failed (exit codes {codes}); they say:\n" + "\n".join(sorted(last)))
        return [(folder / f"{number}.out").read_text() for number in range(len(processes))]

    def _wait(self, processes: list[subprocess.Popen[str]], deadline: float) -> None:
        """Wait until all processes have ended, or one has failed, or the time is over."""
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                time.sleep(5)  # the others may print an error too
                return
            if time.monotonic() > deadline:
                raise SystemExit("the hosts took too long")
            time.sleep(0.05)


def measure_idle_share(seconds: float = 2.0) -> float:
    """Return the share of all cores' time that is idle at present."""

    def read_times() -> list[int]:
        return [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]

    before = read_times()
    time.sleep(seconds)
    spent = [b - a for a, b in zip(before, read_times(), strict=True)]
    return (spent[3] + spent[4]) / sum(spent)


def remove_stale() -> None:
    """Remove the namespaces of processes that no longer run."""
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in (line.split()[0] for line in namespaces.splitlines() if line.startswith(f"{PREFIX}-")):
        if not Path("/proc", name.removeprefix(f"{PREFIX}-").split("-")[0]).exists():
            _remove(name)


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _ip(name: str, lines: list[str]) -> None:
    subprocess.run(["ip", "-n", name, "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _ignore_signals() -> Iterator[None]:
    """Ignore signals that would interrupt the cleanup."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
