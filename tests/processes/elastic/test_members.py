"""The processes of an elastic run, as its launcher sees them."""

import os
import signal
import socket
import subprocess

import pytest

from podscale.processes.elastic.control import Connection
from podscale.processes.elastic.members import Member


@pytest.fixture
def member():
    here, there = socket.socketpair()
    with here, there, subprocess.Popen(["sleep", "600"]) as process:
        yield Member(0, process, Connection(here))
        process.kill()


def send(member, number, change):
    """Send a signal, and wait until the process has changed."""
    member.process.send_signal(number)
    os.waitid(os.P_PID, member.process.pid, change | os.WNOWAIT)


def test_a_process_that_a_signal_has_stopped_differs_from_one_that_runs_and_one_that_is_dead(member):
    assert not member.is_stopped
    send(member, signal.SIGSTOP, os.WSTOPPED)
    assert member.is_stopped
    send(member, signal.SIGCONT, os.WCONTINUED)
    assert not member.is_stopped
    send(member, signal.SIGSTOP, os.WSTOPPED)
    member.kill()
    os.waitid(os.P_PID, member.process.pid, os.WEXITED | os.WNOWAIT)
    assert not member.is_stopped
