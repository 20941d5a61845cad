"""Measure the rates of this machine, each in a few seconds: devices, links between them, decoding, disk.

Every rate is the best of a few tries: other work on the machine can only make a rate look smaller than it is.
"""

import io
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

from podscale.data import crop as crops
from podscale.data.index.dataset import index_files
from podscale.data.order import compute_crop_boxes
from podscale.data.staging import Staging
from podscale.pod import ALL_AXES, COLUMN, ROW, Pod
from podscale.processes.host import count_usable_cores
from podscale.recipe import Augment

TRIES = 3
MATRIX = MappingProxyType({"cpu": 1024})  # rows and columns of the matrices, by platform
LARGE_MATRIX = 8192
COPY_BYTES = MappingProxyType({"cpu": 64 << 20})
LARGE_COPY_BYTES = 1 << 30
FEED_BYTES = MappingProxyType({"cpu": 64 << 20})
LARGE_FEED_BYTES = 256 << 20  # as a call's batches are
MESSAGE_BYTES = MappingProxyType({"cpu": 4 << 20})
LARGE_MESSAGE_BYTES = 64 << 20
HOPS = 8  # in one program, so that its start-up matters little
FILES = 64
IMAGES_PER_CORE = 128  # of a try: a tenth of a second or more, beside which the start of threads does not count
IMAGE_SHAPE = (500, 375)  # pixels, as ImageNet's photos are
DISK_BYTES = 128 << 20


def time_best(work: Callable[[], object], tries: int = TRIES) -> float:
    """Return the seconds of the fastest of several tries, after one that does not count."""
    work()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


# --- devices -------------------------------------------------------------------------------------------------------


def measure_device(pod: Pod) -> dict[str, float]:
    """Measure one device: bytes/s copied in its memory and received from the host, and FLOPs/s of a matrix product."""
    device = next(d for d in pod.devices if d.process_index == jax.process_index())
    kind = device.platform
    with jax.default_device(device):
        numbers = jnp.zeros(COPY_BYTES.get(kind, LARGE_COPY_BYTES) // 4, jnp.float32)
        add = jax.jit(lambda x: x + 1)
        copy = 2 * numbers.nbytes / time_best(lambda: add(numbers).block_until_ready())
        side = MATRIX.get(kind, LARGE_MATRIX)
        matrix = jnp.ones((side, side), jnp.float32 if kind == "cpu" else jnp.bfloat16)
        product = jax.jit(lambda x: x @ x)
        rate = 2 * side**3 / time_best(lambda: product(matrix).block_until_ready())
    return {"copy_bytes_per_s": copy, "feed_bytes_per_s": measure_feeding(device), "matrix_flops_per_s": rate}


def measure_feeding(device: jax.Device) -> float:
    """Measure bytes/s to a device from the memory in which the loader makes batches: pinned, for GPUs."""
    staging = Staging(device)
    try:
        memory = staging.take((FEED_BYTES.get(device.platform, LARGE_FEED_BYTES),))
        memory.fill(1)
        seconds = time_best(lambda: jax.device_put(memory, device, may_alias=False).block_until_ready())
    finally:
        staging.close()
    return memory.nbytes / seconds


def measure_links(pod: Pod) -> dict[str, dict[str, float]]:
    """Measure each axis with more than one device: the latency of a message to a neighbour in seconds, and bytes/s."""
    axes = {"rows": ROW, "columns": COLUMN}
    mesh = pod.mesh((1, 1))
    rates = {}
    for name, axis in axes.items():
        if np.prod([mesh.shape[part] for part in axis]) > 1:
            large = MESSAGE_BYTES.get(pod.devices[0].platform, LARGE_MESSAGE_BYTES)
            latency, seconds = (_time_hop(mesh, axis, size) for size in (4, large))
            rates[name] = {"latency_s": latency, "bytes_per_s": large / max(seconds - latency, 1e-9)}
    return rates


def _time_hop(mesh: jax.sharding.Mesh, axis: tuple[str, ...], size: int) -> float:
    """Return the seconds in which every device sends so many bytes to its neighbour."""
    count = int(np.prod([mesh.shape[part] for part in axis]))
    ring = [(i, (i + 1) % count) for i in range(count)]

    def send(values: jax.Array) -> jax.Array:
        return lax.fori_loop(0, HOPS, lambda _, v: lax.ppermute(v, axis, ring), values)

    call = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=P(ALL_AXES), out_specs=P(ALL_AXES), check_vma=False))
    shape = (mesh.devices.size * max(size // 4, 1),)
    values = jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=NamedSharding(mesh, P(ALL_AXES)))()
    return time_best(lambda: call(values).block_until_ready()) / HOPS


# --- images and disk -----------------------------------------------------------------------------------------------


def measure_decoding(folder: Path, size: int = 224) -> dict[str, float]:
    """Measure photos of usual size, random crops of which are decoded as in training, per second; and their bytes.

    By one core and by all; the same photos again and again, which are in the page cache as they are in a training
    whose data fit the memory.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        data = _make_photo()
        paths = [Path(temporary) / f"{i}.jpg" for i in range(FILES)]
        for path in paths:
            path.write_bytes(data)
        index, cores = index_files(paths), count_usable_cores()

        def measure_crops(threads: int) -> float:
            passes, samples = np.divmod(np.arange(IMAGES_PER_CORE * threads), FILES)
            boxes, flips = compute_crop_boxes(Augment(crop="resized"), 0, passes, samples, index.sizes[samples], size)
            out = np.empty((len(samples), size, size, 3), np.uint8)
            with ThreadPoolExecutor(threads) as pool:
                seconds = time_best(lambda: crops.crop_batch(index, samples, boxes, flips, out, pool))
            return len(samples) / seconds

        rates = {"one_core": measure_crops(1), "all_cores": measure_crops(cores)}
        return rates | {"cores": cores, "image_bytes": len(data)}


def _make_photo() -> bytes:
    """Return a synthetic JPEG that is about as hard to decode as a photo: smooth shapes with some noise."""
    width, height = IMAGE_SHAPE
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / a + c) * np.cos(y / b) for a, b, c in ((40, 60, 0), (13, 29, 1), (7, 5, 2))]
    grain = np.random.default_rng(0).normal(0, 14, (height, width, 3))
    pixels = 128 + 40 * np.stack(waves, axis=2) + grain
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
    return file.getvalue()


def measure_disk(folder: Path) -> dict[str, float]:
    """Measure bytes/s written to a folder and read back, as far as the kernel drops the file from its page cache."""
    data = np.random.default_rng(0).bytes(DISK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".podscale-doctor-") as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start, offset = time.perf_counter(), 0
        while block := os.pread(file.fileno(), 1 << 20, offset):
            offset += len(block)
        read_s = time.perf_counter() - start
    return {"write_bytes_per_s": DISK_BYTES / write_s, "read_bytes_per_s": DISK_BYTES / read_s}
