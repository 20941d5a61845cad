"""Only the abort of JAX's runtime, in a process that has lost its peers, becomes a sentence and an exit code.

`tests/faults/test_lost.py` kills process 0 of two and of four that train; here two processes have only joined.
"""

import signal
import subprocess
import sys

import pytest
from support.processes import find_free_port, make_environment

from podscale.processes import abort_message
from podscale.processes.heartbeat import PEER_LOST

INSTALL = """
import ctypes, os, resource, sys, threading
import jax.numpy
from podscale.processes import abort_message
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if not abort_message.install(1, 2):
    sys.exit("no native extension")
"""
HEAP_CORRUPTION = """
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.free(libc.malloc(64) + 8)  # glibc: free(): invalid pointer
"""
ABORTS = {
    "os.abort": "os.abort()",
    "os.abort in a thread": "thread = threading.Thread(target=os.abort); thread.start(); thread.join()",
    "os.abort in four threads": """
barrier = threading.Barrier(4)
threads = [threading.Thread(target=lambda: (barrier.wait(), os.abort())) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
    "abort in C": "ctypes.CDLL(None).abort()",
    "kill": "os.kill(os.getpid(), 6); threading.Event().wait(30)",
    "heap corruption": HEAP_CORRUPTION,
    "heap corruption in a thread without Python": """
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
bad = ctypes.c_void_p(libc.malloc(64) + 8)
thread = ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.free, ctypes.c_void_p), bad)
libc.pthread_join(thread, None)
""",
}
FATAL_IN_RUNTIME = """
import time
import numpy as np

mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")

def wait(number):
    time.sleep(60 * int(number))
    return number

def add(x):
    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jax.numpy.int32), jax.lax.axis_index("x"))
    return jax.lax.psum(x + late, "x")

places = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
add = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=places[0], out_specs=places[1]))
add(jax.numpy.arange(2.0)).block_until_ready()
"""
TWO_DEVICES = "--xla_force_host_platform_device_count=2 --xla_cpu_collective_call_terminate_timeout_seconds=1"
TWO_DEVICES += " --xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
MEMBER = """
import sys, threading
from podscale.processes import abort_message, group
group.join(sys.argv[1], 2, int(sys.argv[2]))
abort_message.install(*group.get_rank_and_size())
print("joined", flush=True)
threading.Event().wait(120)
"""
LOST_PEER = "gone or cannot be reached"


@pytest.fixture(scope="module", autouse=True)
def _native_extension():
    if not abort_message.install(0, 1):  # installs nothing: one process has no peers
        pytest.skip("needs the native extension")


def run_program(text):
    return subprocess.run(
        [sys.executable, "-c", INSTALL + text], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", ABORTS)
def test_an_abort_that_no_lost_peer_causes_keeps_its_signal(name):
    done = run_program(ABORTS[name])
    # What freeing a bad pointer does depends on the bytes before it: glibc aborts, or crashes while it looks at them.
    signals = (signal.SIGABRT, signal.SIGSEGV) if name.startswith("heap") else (signal.SIGABRT,)
    assert -done.returncode in signals, done.stderr[-2000:]
    assert LOST_PEER not in done.stderr


@pytest.mark.heavy
def test_a_fatal_error_of_the_runtime_in_a_thread_of_its_own_keeps_its_signal():
    """One of two devices does not come to a sum: jaxlib aborts, but no process is lost."""
    done = subprocess.run(
        [sys.executable, "-c", INSTALL + FATAL_IN_RUNTIME],
        env=make_environment(XLA_FLAGS=TWO_DEVICES),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert -done.returncode == signal.SIGABRT, done.stderr[-2000:]
    assert "Termination timeout for" in done.stderr
    assert LOST_PEER not in done.stderr


@pytest.mark.heavy
@pytest.mark.processes(2)
def test_losing_process_0_gives_the_sentence_and_the_exit_code():
    address = f"127.0.0.1:{find_free_port()}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": make_environment()}
    members = [subprocess.Popen([sys.executable, "-c", MEMBER, address, str(i)], **pipes) for i in range(2)]
    try:
        assert [member.stdout.readline() for member in members] == ["joined\n"] * 2
        members[0].kill()
        _, errors = members[1].communicate(timeout=120)
    finally:
        for member in members:
            member.kill()
            member.communicate()
    assert members[1].returncode == PEER_LOST, errors[-2000:]
    assert "podscale: process 1 ends: process 0, through which all find each other, is gone" in errors


@pytest.mark.heavy
@pytest.mark.processes(2)
@pytest.mark.parametrize("number", [0, 1])
def test_a_second_process_with_a_number_that_is_taken_is_the_reason(number):
    """JAX's coordinator ends the run: it has no answer for a client that asks whether a number is taken."""
    address = f"127.0.0.1:{find_free_port()}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": make_environment()}
    members = [subprocess.Popen([sys.executable, "-c", MEMBER, address, str(i)], **pipes) for i in range(2)]
    try:
        assert [member.stdout.readline() for member in members] == ["joined\n"] * 2
        members.append(subprocess.Popen([sys.executable, "-c", MEMBER, address, str(number)], **pipes))
        if number == 0:  # it is refused, because it would listen where the first one does
            _, errors = members[2].communicate(timeout=120)
            assert "another program listens on port" in errors, errors[-2000:]
            assert [member.poll() for member in members[:2]] == [None, None]
            return
        outputs = [member.communicate(timeout=120) for member in members[:2]]
    finally:
        for member in members:
            member.kill()
            member.communicate()
    for member, (_, errors) in zip(members[:2], outputs, strict=True):
        assert member.returncode == PEER_LOST, errors[-2000:]
        assert "a second process has joined with a number of this run that is taken" in errors
        assert "1 unexpectedly tried to connect" in errors
