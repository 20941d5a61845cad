"""Rates of this machine, each measured in a few seconds: devices, links between them, decoding, disk.

Every rate is the best of a few tries: what else runs on the machine can only make a rate look smaller than it is.
"""

import io
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

from podscale.data import crop as crops
from podscale.data.index.dataset import files_index
from podscale.data.order import eval_boxes
from podscale.pod import ALL_AXES, COLUMN, ROW, Pod
from podscale.processes.host import usable_cores

TRIES = 3
MATRIX = {"cpu": 1024}  # rows and columns of the matrices, by platform
LARGE_MATRIX = 8192
COPY_BYTES = {"cpu": 64 << 20}
LARGE_COPY_BYTES = 1 << 30
MESSAGE_BYTES = {"cpu": 4 << 20}
LARGE_MESSAGE_BYTES = 64 << 20
HOPS = 8  # in one program, so that starting it weighs little
PICTURES = 64
PICTURE = (500, 375)  # pixels, as ImageNet's photos are
DISK_BYTES = 128 << 20


def best_s(work: Callable[[], Any], tries: int = TRIES) -> float:
    """Seconds of the fastest try, after one that does not count."""
    work()
    found = []
    for _ in range(tries):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


# --- devices -------------------------------------------------------------------------------------------------------


def device(pod: Pod) -> dict[str, float]:
    """Of one device: bytes/s that it copies in its memory and takes from the host, and operations/s of a product."""
    one = next(d for d in pod.devices if d.process_index == jax.process_index())
    kind = one.platform
    with jax.default_device(one):
        numbers = jnp.zeros(COPY_BYTES.get(kind, LARGE_COPY_BYTES) // 4, jnp.float32)
        add = jax.jit(lambda x: x + 1)
        copy = 2 * numbers.nbytes / best_s(lambda: add(numbers).block_until_ready())
        side = MATRIX.get(kind, LARGE_MATRIX)
        matrix = jnp.ones((side, side), jnp.float32 if kind == "cpu" else jnp.bfloat16)
        product = jax.jit(lambda x: x @ x)
        rate = 2 * side**3 / best_s(lambda: product(matrix).block_until_ready())
    there = np.ones(COPY_BYTES["cpu"], np.uint8)
    feed = there.nbytes / best_s(lambda: jax.device_put(there, one, may_alias=False).block_until_ready())
    return {"copy_bytes_per_s": copy, "feed_bytes_per_s": feed, "matrix_flops_per_s": rate}


def links(pod: Pod) -> dict[str, dict[str, float]]:
    """Of each axis with more than one device: seconds that a message of no length takes to a neighbour, and bytes/s."""
    axes = {"rows": ROW, "columns": COLUMN}
    mesh = pod.mesh((1, 1))
    found = {}
    for name, axis in axes.items():
        if np.prod([mesh.shape[part] for part in axis]) > 1:
            large = MESSAGE_BYTES.get(pod.devices[0].platform, LARGE_MESSAGE_BYTES)
            latency, seconds = (_hop_s(mesh, axis, size) for size in (4, large))
            found[name] = {"latency_s": latency, "bytes_per_s": large / max(seconds - latency, 1e-9)}
    return found


def _hop_s(mesh: jax.sharding.Mesh, axis: tuple[str, ...], size: int) -> float:
    """Seconds in which every device passes so many bytes on to its neighbour."""
    count = int(np.prod([mesh.shape[part] for part in axis]))
    ring = [(i, (i + 1) % count) for i in range(count)]

    def passed(values: jax.Array) -> jax.Array:
        return lax.fori_loop(0, HOPS, lambda _, v: lax.ppermute(v, axis, ring), values)

    call = jax.jit(jax.shard_map(passed, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False))
    shape = (mesh.devices.size * max(size // 4, 1),)
    values = jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=NamedSharding(mesh, P(ALL_AXES)))()
    return best_s(lambda: call(values).block_until_ready()) / HOPS


# --- pictures and disk ---------------------------------------------------------------------------------------------


def decoding(folder: Path, size: int = 224) -> dict[str, float]:
    """Photos of usual size decoded and cropped in a second: by one core, and by all; and how long their files are."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        data = _photo()
        paths = [Path(place) / f"{i}.jpg" for i in range(PICTURES)]
        for path in paths:
            path.write_bytes(data)
        index = files_index(paths)
        samples, flips = np.arange(PICTURES), np.zeros(PICTURES, bool)
        boxes, out = eval_boxes(0.875, index.sizes), np.empty((PICTURES, size, size, 3), np.uint8)

        def crop(threads: int) -> float:
            with ThreadPoolExecutor(threads) as pool:
                work = best_s(lambda: crops.crop_batch(index, samples, boxes, flips, size, out, pool))
            return PICTURES / work

        return {
            "one_core": crop(1),
            "all_cores": crop(usable_cores()),
            "cores": usable_cores(),
            "picture_bytes": len(data),
        }


def _photo() -> bytes:
    """A made-up picture that is about as hard to decode as a photo: smooth shapes with some grain."""
    width, height = PICTURE
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / a + c) * np.cos(y / b) for a, b, c in ((40, 60, 0), (13, 29, 1), (7, 5, 2))]
    grain = np.random.default_rng(0).normal(0, 14, (height, width, 3))
    pixels = 128 + 40 * np.stack(waves, axis=2) + grain
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
    return file.getvalue()


def disk(folder: Path) -> dict[str, float]:
    """Bytes/s written to a folder and read from it again, as far as the kernel forgets what it has in memory."""
    data = np.random.default_rng(0).bytes(DISK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".podscale-doctor-") as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, at = time.perf_counter(), 0
        while block := os.pread(file.fileno(), 1 << 20, at):
            at += len(block)
        read = time.perf_counter() - began
    return {"write_bytes_per_s": DISK_BYTES / written, "read_bytes_per_s": DISK_BYTES / read}
