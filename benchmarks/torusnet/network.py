"""A torus of network namespaces on one machine: rows x columns of hosts, with wires of a rate and a delay.

Every host is a namespace with an address of its own and a TUN device for each of its four wires; `links.c` carries the
packets. Hosts forward for each other, along the row first. Needs root, `ip` and a C compiler. All that is made has the
name of the process that made it, is removed when that ends, by whatever signal Python hears, and is found and removed
by the next one if it was killed.

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
# A host's process waits most of the time and shall not wait for others' work; it ends with the one that started it.
AS_HOST = "nice -n -15 setpriv --pdeathsig KILL".split()
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
    """What the wires along rows and along columns can do; one delay for all."""

    row_mbit: float
    column_mbit: float
    delay_us: float = 2000.0


class Torus:
    """The hosts and wires; a context manager that leaves nothing behind."""

    def __init__(self, rows: int, cols: int, wires: Wires) -> None:
        self.rows, self.cols, self.wires = rows, cols, wires
        self.hosts: list[Host] = [(row, col) for row in range(rows) for col in range(cols)]
        self.late = ""  # what the wires said of themselves at the end

    def name(self, host: Host) -> str:
        return f"{PREFIX}-{os.getpid()}-{host[0]}-{host[1]}"

    def address(self, host: Host) -> str:
        return f"10.77.{host[0]}.{host[1] + 1}"

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise SystemExit("network namespaces need root")
        remove_forgotten()
        self._before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        try:
            self._lay()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _unheard():
            if carrier := getattr(self, "_carrier", None):
                carrier.terminate()
                self.late = carrier.communicate(timeout=10)[0].strip()
            for host in self.hosts:
                _remove(self.name(host))
            self._folder.cleanup()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    # --- laying ---

    def _lay(self) -> None:
        program = Path(self._folder.name) / "links"
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", program, HERE / "links.c"], check=True)
        for host in self.hosts:
            self._add(host)
        self._carrier = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        inlet, outlet = self._carrier.stdin, self._carrier.stdout
        inlet.write("".join(f"{wire}\n" for wire in self._wires()))
        inlet.close()
        self._carrier.stdin = None  # or `communicate` would close it again
        if outlet.readline() != "ready\n":
            raise SystemExit("the wires did not come up")
        for host in self.hosts:
            self._connect(host)

    def _add(self, host: Host) -> None:
        name, own = self.name(host), Path("/etc/netns") / self.name(host)
        subprocess.run(["ip", "netns", "add", name], check=True)
        own.mkdir(parents=True)
        # Gloo listens on the address of the machine's name.
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(host)} {socket.gethostname()}\n")
        _ip(name, ["link set lo up", f"addr add {self.address(host)}/32 dev lo"])
        subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", *SETTINGS], check=True)

    def _wires(self) -> Iterator[str]:
        for row, col in self.hosts:
            east, south = (row, (col + 1) % self.cols), ((row + 1) % self.rows, col)
            here, wires = self.name((row, col)), self.wires
            if self.cols > 1:
                yield f"{here} east {self.name(east)} west {wires.row_mbit} {wires.delay_us}"
            if self.rows > 1:
                yield f"{here} south {self.name(south)} north {wires.column_mbit} {wires.delay_us}"

    def _connect(self, host: Host) -> None:
        devices = ["east", "west"] * (self.cols > 1) + ["south", "north"] * (self.rows > 1)
        lines = [f"link set {device} mtu {MTU} txqueuelen 20000 up" for device in devices]
        lines += [
            f"route add {self.address(other)}/32 dev {self._towards(host, other)} src {self.address(host)}"
            for other in self.hosts
            if other != host
        ]
        _ip(self.name(host), lines)

    def _towards(self, host: Host, other: Host) -> str:
        """The device by which packets leave: along the row, then along the column, the shorter way round."""
        across, down = (other[1] - host[1]) % self.cols, (other[0] - host[0]) % self.rows
        if across:
            return "east" if 2 * across <= self.cols else "west"
        return "south" if 2 * down <= self.rows else "north"

    # --- running ---

    def run(
        self, command: Callable[[int, str], list[str]] | list[str], timeout_s: float, env: dict[str, str] | None = None
    ) -> list[str]:
        """What the command prints on each host; it may depend on the host's number and the first one's address."""
        first = self.address(self.hosts[0])
        started: list[subprocess.Popen[str]] = []
        folder = Path(self._folder.name)
        try:
            for number, host in enumerate(self.hosts):
                words = command(number, first) if callable(command) else command
                with (folder / f"{number}.out").open("w") as out, (folder / f"{number}.err").open("w") as err:
                    started.append(
                        subprocess.Popen(
                            [*AS_HOST, "ip", "netns", "exec", self.name(host), *words],
                            stdout=out,
                            stderr=err,
                            text=True,
                            env=os.environ | (env or {}),
                            start_new_session=True,
                        )
                    )
            self._wait(started, time.monotonic() + timeout_s)
            failed = [number for number, process in enumerate(started) if process.poll()]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if failed:
            codes = {number: started[number].returncode for number in failed}
            last = {(folder / f"{number}.err").read_text()[-500:] for number in failed}
            raise SystemExit(f"hosts failed (exit codes {codes}); they say:\n" + "\n".join(sorted(last)))
        return [(folder / f"{number}.out").read_text() for number in range(len(started))]

    def _wait(self, started: list[subprocess.Popen[str]], until: float) -> None:
        """Until all have ended, or one has failed, or the time is up."""
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                time.sleep(5)  # the others may have something to say
                return
            if time.monotonic() > until:
                raise SystemExit("the hosts took too long")
            time.sleep(0.05)


def idle_share(seconds: float = 2.0) -> float:
    """The share of all cores' time in which they have nothing to do just now."""

    def times() -> list[int]:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]

    before = times()
    time.sleep(seconds)
    spent = [b - a for a, b in zip(before, times(), strict=True)]
    return (spent[3] + spent[4]) / sum(spent)


def remove_forgotten() -> None:
    """Removes what processes left behind that are no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(f"{PREFIX}-")):
        if not Path("/proc", name.removeprefix(f"{PREFIX}-").split("-")[0]).exists():
            _remove(name)


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _ip(name: str, lines: list[str]) -> None:
    subprocess.run(["ip", "-n", name, "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _unheard() -> Iterator[None]:
    """Without being interrupted again."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
