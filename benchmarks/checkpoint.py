"""Claim: saving blocks the training no longer than Orbax does, and takes less processor time to save and to restore.

The peer is Orbax's CheckpointManager, asynchronous, as Podscale used it before: the same arrays, the same folder. Both
save the same state several times, in turn, with nothing else to do in between but to wait for the files; ours also
computes and verifies the checksum of every array, and flushes its files to the disk, which Orbax does not. Printed are
medians: the time until `save` returns (blocking), until the checkpoint is complete, to restore it, the processor
seconds of both, and the bytes on disk; first the time that importing each takes in a new process.

    python benchmarks/checkpoint.py [--megabytes 300] [--arrays 480] [--repeat 5] [--folder /tmp]
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podscale.training.checkpoint.checkpoints import Checkpoints


def make_state(megabytes: int, arrays: int) -> dict[str, jax.Array]:
    """Return random arrays with the sizes of a ResNet-50's state: most are small, a few hold nearly all bytes."""
    large, small = arrays // 3, arrays - arrays // 3
    values = max(1, (megabytes * 250_000 - small * 256) // large)
    keys = iter(jax.random.split(jax.random.key(0), arrays))
    state = {f"kernel{i}": jax.random.normal(next(keys), (values,)) for i in range(large)}
    return jax.block_until_ready(state | {f"scale{i}": jax.random.normal(next(keys), (256,)) for i in range(small)})


class Ours:
    name = "podscale"
    module = "podscale.training.checkpoint.checkpoints"

    def __init__(self, folder: Path) -> None:
        self._checkpoints = Checkpoints(folder, keep=2)

    def save(self, step: int, state: dict[str, jax.Array]) -> None:
        self._checkpoints.save(step, state, accuracy=0.5)

    def wait(self) -> None:
        self._checkpoints.wait()

    def restore(self, step: int, state: dict[str, jax.Array]) -> Any:
        return self._checkpoints.restore(step, state)

    def close(self) -> None:
        self._checkpoints.__exit__(None, None, None)


class Orbax:
    name = "Orbax"
    module = "orbax.checkpoint"

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        handler = ocp.StandardCheckpointHandler()
        self._ocp, self._manager = ocp, ocp.CheckpointManager(folder, options=options, item_handlers=handler)

    def save(self, step: int, state: dict[str, jax.Array]) -> None:
        self._manager.save(step, args=self._ocp.args.StandardSave(state), metrics={"accuracy": 0.5}, force=True)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self, step: int, state: dict[str, jax.Array]) -> Any:
        like = {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for k, a in state.items()}
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(like))

    def close(self) -> None:
        self._manager.close()


def measure(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return seconds, processor seconds of this process, and the result."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s, result


def measure_one(writer: Any, step: int, state: dict[str, jax.Array]) -> dict[str, float]:
    """Save and restore once; return seconds by name."""
    blocking_s, blocking_cpu_s, _ = measure(lambda: writer.save(step, state))
    waiting_s, waiting_cpu_s, _ = measure(writer.wait)
    reading_s, reading_cpu_s, restored = measure(lambda: jax.block_until_ready(writer.restore(step, state)))
    for name, array in state.items():
        np.testing.assert_array_equal(restored[name], array)
    return {
        "blocking s": blocking_s,
        "complete s": blocking_s + waiting_s,
        "save CPU s": blocking_cpu_s + waiting_cpu_s,
        "restore s": reading_s,
        "restore CPU s": reading_cpu_s,
    }


def measure_import(module: str) -> float:
    """Return the seconds that importing a module takes in a process that has JAX already."""
    code = f"import jax, flax.nnx, time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    times = [float(subprocess.check_output([sys.executable, "-W", "ignore", "-c", code])) for _ in range(3)]
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--arrays", type=int, default=480)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to write to")
    arguments = parser.parse_args()
    state = make_state(arguments.megabytes, arguments.arrays)
    place = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        writers = [kind(place / kind.name) for kind in (Ours, Orbax)]
        rows: dict[str, list[dict[str, float]]] = {writer.name: [] for writer in writers}
        for step in range(1, arguments.repeat + 2):
            for writer in writers:
                rows[writer.name].append(measure_one(writer, step, state))
        for writer in writers:
            writer.close()
        total = sum(array.nbytes for array in state.values())
        print(f"{len(state)} arrays, {total / 1e6:.0f} MB, {jax.devices()[0].device_kind}, {jnp.float32.__name__}")
        for writer in writers:
            medians = {
                name: statistics.median(row[name] for row in rows[writer.name][1:]) for name in rows[writer.name][0]
            }
            newest = max((place / writer.name).iterdir(), key=lambda path: int(path.name))
            files = [path for path in newest.rglob("*") if path.is_file()]
            figures = "  ".join(f"{name} {value:.3f}" for name, value in medians.items())
            size = sum(path.stat().st_size for path in files) / 1e6
            import_s = measure_import(writer.module)
            print(f"{writer.name:9} import s {import_s:.2f}  {figures}  MB {size:.1f} in {len(files)} files")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
