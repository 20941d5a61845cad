"""Two hosts in network namespaces whose link fails for a while, loses packets, or stays down."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import TIMEOUT_S, make_environment, wait_for_exit, wait_for_step

HEARTBEAT_S, PEER_LOST = 40, 69
SETTINGS = "digits --model.width 8 --train.eval_epochs 1000 --plan.save_steps 20 --json --pod.virtual 1x2".split()
NO_NAMESPACES = "" if os.geteuid() == 0 and shutil.which("ip") else "needs root and Debian's iproute2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes(2),
    pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES),
]


class Hosts:
    """Two namespaces and a link between them; each has a host name that resolves to its own address."""

    def __init__(self, folder):
        self._folder, self.names = folder, [f"podscale-t{os.getpid()}-{number}" for number in range(2)]
        links = [f"pt{os.getpid()}{end}" for end in "ab"]
        run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (name, link) in enumerate(zip(self.names, links, strict=True)):
            run("ip", "netns", "add", name)
            run("ip", "link", "set", link, "netns", name, "name", "wire")
            self.enter(number, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", "wire")
            self.enter(number, "ip", "link", "set", "lo", "up")
            self.enter(number, "ip", "link", "set", "wire", "up")
            place = Path("/etc/netns") / name
            place.mkdir(parents=True)
            (place / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{number + 1} {os.uname().nodename}\n")

    def enter(self, number, *command):
        run("ip", "netns", "exec", self.names[number], *command)

    def start(self, number, *more):
        command = [sys.executable, "-m", "podscale", "train", *SETTINGS, "--run", str(self._folder / "run"), *more]
        command += ["--coordinator", "10.77.0.1:45777", "--processes", "2", "--process", str(number)]
        command += ["--pod.heartbeat_s", str(HEARTBEAT_S), "--plan.timeout_s", "90"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], *command],
            env=make_environment(JAX_ENABLE_X64="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_link(self, state):
        self.enter(0, "ip", "link", "set", "wire", state)

    def remove(self):
        for name in self.names:
            run("ip", "netns", "del", name)
            shutil.rmtree(Path("/etc/netns") / name)


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    made.remove()


def wait_for_checkpoint(path):
    deadline = time.monotonic() + TIMEOUT_S
    while not path.is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.is_dir()


@pytest.mark.parametrize("down_s", [5, 20, 200])
def test_a_link_that_is_down_is_waited_for_or_ends_the_run_with_69(tmp_path, hosts, down_s):
    """Up to the heartbeat's time, packets are sent again and the run goes on; after it, both end, and resume."""
    epochs = ["--train.epochs", "60"]
    started = [hosts.start(number, *epochs) for number in range(2)]
    wait_for_step(tmp_path / "run", 25, started[0])
    wait_for_checkpoint(tmp_path / "run" / "checkpoints" / "20")
    hosts.set_link("down")
    deadline = time.monotonic() + down_s
    while time.monotonic() < deadline and any(process.poll() is None for process in started):
        time.sleep(0.1)
    hosts.set_link("up")
    codes, outputs = wait_for_exit(started)
    if down_s < HEARTBEAT_S and codes == [0, 0]:
        return
    assert all(code in (PEER_LOST, 70) for code in codes), [codes, *(err[-2000:] for _, err in outputs)]
    assert all("podscale: " in err for _, err in outputs)
    codes, outputs = wait_for_exit([hosts.start(number, *epochs) for number in range(2)])
    assert codes == [0, 0], outputs[0][1][-2000:]
    assert "resuming after step" in outputs[0][1]


@pytest.mark.skipif(not shutil.which("iptables"), reason="needs Debian's iptables")
def test_a_link_that_loses_packets_slows_the_run_and_changes_nothing(tmp_path, hosts):
    for number in range(2):
        lose = "-A INPUT -i wire -m statistic --mode random --probability 0.05 -j DROP"
        hosts.enter(number, "iptables", *lose.split())
    started = [hosts.start(number, "--train.epochs", "3") for number in range(2)]
    codes, outputs = wait_for_exit(started)
    assert codes == [0, 0], [err[-2000:] for _, err in outputs]
