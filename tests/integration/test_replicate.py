"""Arrays that two processes both have are placed on all their devices without being sent; differences are detected."""

import json
import subprocess
import sys

import pytest
from support.processes import find_free_port, make_environment

TIMEOUT_S = 240
PROGRAM = """
import json, sys
import numpy as np
from jax.experimental import multihost_utils
from podscale import pod
from podscale.parallel import placement
from podscale.processes import group
from podscale.errors import UserError

coordinator, number = sys.argv[1], int(sys.argv[2])
group.join(coordinator, 2, number)
here = pod.find_pod("1x2", cores=2)
send, sent = multihost_utils.process_allgather, []
def count(arrays, **how):
    sent.append(np.asarray(arrays).nbytes)
    return send(arrays, **how)
multihost_utils.process_allgather = count

tree = {"weights": np.arange(50_000, dtype=np.float32).reshape(100, 500), "step": np.int32(7)}
there = placement.replicate(tree, here.mesh())
copies = [np.asarray(shard.data) for shard in there["weights"].addressable_shards]
same = all(np.array_equal(copy, tree["weights"]) for copy in copies)
try:
    placement.replicate({"weights": np.float32([1, 2 + 1e-6 * number])}, here.mesh())
    refused = ""
except UserError as error:
    refused = str(error)
devices = len(there["weights"].sharding.device_set)
print(json.dumps({"devices": devices, "copies": len(copies), "same": same, "step": int(there["step"]),
                  "sent": sum(sent), "refused": refused}))
group.leave()
"""


@pytest.mark.processes(2)
def test_arrays_of_two_processes_are_compared_by_checksum():
    coordinator = f"127.0.0.1:{find_free_port()}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": make_environment(), "text": True}
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM, coordinator, str(i)], **pipes) for i in range(2)]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs[0][1][-2000:]
    for out, _ in outputs:
        result = json.loads(out.splitlines()[-1])
        assert (result["devices"], result["copies"], result["same"], result["step"]) == (4, 2, True, 7)
        assert 0 < result["sent"] <= 12  # a checksum for each of three arrays, not their 200,000 bytes
        assert result["refused"].startswith("process 1 computed other numbers than the first")
