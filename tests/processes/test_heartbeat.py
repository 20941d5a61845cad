"""What processes tell each other through JAX's store: a real one, with three clients in one process."""

import json
import subprocess
import sys

from support.processes import free_port

PROGRAM = """
import json, sys, threading, time
from jax._src.lib import _jax
from podscale.processes import heartbeat as peers

address = sys.argv[1]
service = _jax.get_distributed_runtime_service(address, 3)
stores = [_jax.get_distributed_runtime_client(address, number) for number in range(3)]
joining = [threading.Thread(target=store.connect) for store in stores]
[thread.start() for thread in joining], [thread.join() for thread in joining]

told = {}

class Noting(peers.PeerMonitor):
    def _leave(self, found):
        told.setdefault(self._process, found)

zero, one, two = (Noting(store, number, 3, heartbeat_s=5.0) for number, store in enumerate(stores))

def until(ready, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.05)

found, met = {}, []

def meeting(peer, after_s):
    time.sleep(after_s)
    peer.meet()
    met.append(time.monotonic() - began)

began = time.monotonic()
going = [threading.Thread(target=meeting, args=(peer, after)) for peer, after in ((zero, 0), (one, 0), (two, 1.5))]
[thread.start() for thread in going], [thread.join() for thread in going]
found["all wait for the last"] = len(met) == 3 and min(met) >= 1.5
time.sleep(2)
found["all is well"] = zero.end() is None
two.part()
one.complain('the sum failed')
time.sleep(6)  # longer than the silence of one that is gone
found["who has left is not missed"] = zero.end() is None and not told
one._over.set()  # silent, as a dead one is
until(lambda: len(told) == 1)
found["why"] = told[0].why if 0 in told else ""
found["code"] = told[0].code if 0 in told else 0
found["the first word counts"] = one.call_end(2, "something else") == zero.end() == told.get(0)
print(json.dumps(found), flush=True)
import os
os._exit(0)
"""


def test_who_leaves_is_not_missed_and_who_falls_silent_is():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"127.0.0.1:{free_port()}"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    why = found.pop("why")
    assert found == {
        "all wait for the last": True,
        "all is well": True,
        "who has left is not missed": True,
        "code": 69,
        "the first word counts": True,
    }
    assert why.startswith("process 1 on ")
    assert "is gone: no sign of life for" in why
    assert why.endswith("(process 1: the sum failed)")
