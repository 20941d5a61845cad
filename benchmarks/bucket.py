"""Training crops straight from a bucket: nginx on one core, the loader on the other, beside the same data on disk.

    python benchmarks/bucket.py PHOTOS [--images 12000] [--latency-ms 0 30] [--peers] [--index 1000]

PHOTOS is a folder with JPEGs of natural size anywhere below it; they are repeated until there are as many as asked for,
in tars of 1,000. Each case is a process of its own, pinned to core 0; nginx is pinned to core 1, and waits before every
answer (libnginx-mod-http-echo) where latency is asked for. A case reads two passes of the training order as crops of
224 x 224: the first with empty caches, the second with what the first has left on disk. Printed are images per second
of wall time, and milliseconds of this process's CPU time per image, which other programs on the machine disturb less.

--peers runs WebDataset over the same URLs, which reads the shards in order and shuffles in memory; its images are
decoded and cropped as torchvision does it. --index builds the index of as many tars of 1,000 entries, all the same
file under different names, at each latency, and prints the requests.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

LOADER_CORE, SERVER_CORE = 0, 1
PER_SHARD, SIZE, BATCH = 1000, 224, 128
CONFIG = """
load_module modules/ngx_http_echo_module.so;
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log crit;
events {{ worker_connections 4096; }}
http {{
  access_log off; sendfile on; tcp_nodelay on; tcp_nopush off; keepalive_requests 1000000; open_file_cache max=2000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port} backlog=4096; root {root};
    location / {{ {wait} }}
    location @file {{ }}
  }}
}}
"""


# --- the data --------------------------------------------------------------------------------------------------------


def write_tars(photos: Path, root: Path, images: int) -> None:
    """Write tars of training images, and one small tar to validate on, with the index beside them."""
    paths = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    stream = itertools.cycle(paths)
    for shard in range(-(-images // PER_SHARD)):
        with tarfile.open(root / f"train-{shard:05}.tar", "w") as tar:
            for i in range(min(PER_SHARD, images - shard * PER_SHARD)):
                tar.add(next(stream), f"{i % 2}/{shard:05}-{i:05}.jpg")
    with tarfile.open(root / "val-00000.tar", "w") as tar:
        for i, path in enumerate(paths[:10]):
            tar.add(path, f"{i % 2}/{i}.jpg")


def store_index(root: Path) -> None:
    from podscale.data.index.catalog import store_beside

    store_beside("tar", root)


# --- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def serve(root: Path, latency_ms: int):
    """Run nginx on its core; yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    wait = f"echo_sleep {latency_ms / 1000}; echo_exec @file;" if latency_ms else ""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "nginx.conf")
        config.write_text(CONFIG.format(folder=folder, port=port, root=root, wait=wait))
        os.chmod(folder, 0o755)
        command = ["taskset", "-c", str(SERVER_CORE), "nginx", "-p", "/usr/share/nginx", "-c", str(config)]
        process = subprocess.Popen(command)
        try:
            for _ in range(200):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/val-00000.tar", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


# --- one case, in a process of its own -------------------------------------------------------------------------------


def measure_podscale(path: str, passes: int) -> list[dict[str, float]]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from podscale.config.options import Options
    from podscale.data.index.dataset import open_index
    from podscale.data.loader import load_train_batches
    from podscale.plan import Counts, make_plan
    from podscale.pod import Pod
    from podscale.recipe import Recipe, override_recipe

    changes = {"data.source": "tar", "data.path": path, "data.image_size": SIZE, "data.lanes": 1}
    recipe = override_recipe(Recipe(), changes | {"batch.size": BATCH, "batch.span": BATCH, "augment.crop": "resized"})
    index = open_index(recipe.data).train
    devices = jax.devices()[:1]
    plan = make_plan(
        recipe, Pod("cpu", 1, 1, devices=tuple(devices)), Counts(len(index), 10, 2), Options(steps_per_call=1)
    )
    steps = len(index) // BATCH
    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), P(None, None, "devices"))
    results, ranges = [], [range(step, step + 1) for step in range(passes * steps)]
    with load_train_batches(index, plan, ranges, sharding) as batches:
        for _ in range(passes):
            clock = Clock()
            for _ in range(steps):
                next(batches).images.block_until_ready()
            results.append(clock.read(steps * BATCH))
    return results


def measure_webdataset(path: str, passes: int) -> list[dict[str, float]]:
    import torch
    import webdataset
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    index = json.loads(urllib.request.urlopen(f"{path}/shards.json").read())
    crop = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    data = (
        webdataset.WebDataset([f"{path}/{name}" for name in index["shards"]], shardshuffle=100)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg")
        .map_tuple(crop)
        .batched(BATCH, collation_fn=lambda rows: torch.stack([row[0] for row in rows]))
    )
    results = []
    for _ in range(passes):
        clock, images = Clock(), 0
        for batch in data:
            images += len(batch)
        results.append(clock.read(images))
    return results


class Clock:
    """Wall time, and CPU time of this process and of those that it has started."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._read_cpu()

    def read(self, images: int) -> dict[str, float]:
        wall, cpu = time.perf_counter() - self._wall, self._read_cpu() - self._cpu
        return {"images_per_s": images / wall, "cpu_ms": 1000 * cpu / images}

    @staticmethod
    def _read_cpu() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_index(path: str) -> dict[str, float]:
    from podscale.data.index.bucket_index import open_folder
    from podscale.data.index.catalog import FORMATS, scan_data_set
    from podscale.storage.store import FolderListing, ObjectInfo

    names = json.loads(urllib.request.urlopen(f"{path}/shards.json").read())
    root = open_listed_folder(path, names, open_folder, FolderListing, ObjectInfo)
    clock = Clock()
    tables = scan_data_set("tar", FORMATS["tar"].find(root))
    images = len(tables.train) + len(tables.val)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return clock.read(images) | {"images": images, "peak_gib": peak, "requests": root.store.requests["get"]}


def open_listed_folder(path, names, open_folder, folder_listing, object_info):
    """Return a folder on the server with the listing that a bucket would give: nginx gives none."""
    from podscale.storage.bucket_path import BucketPath
    from podscale.storage.locations import parse_location
    from podscale.storage.open import open_store

    location = parse_location(path)
    root = BucketPath(open_store(location), location)
    objects = [root.store.stat(name) for name in [*names["shards"], "val-00000.tar"]]
    root.listings[""] = folder_listing((), tuple(sorted(objects, key=lambda info: info.key)))
    return root


CASES = {"podscale": measure_podscale, "webdataset": measure_webdataset}


def run_case(kind: str, path: str, cache: Path) -> list[dict[str, float]]:
    """Measure in a new process on the loader's core."""
    command = ["taskset", "-c", str(LOADER_CORE), sys.executable, __file__, "--case", kind, path]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


# --- all -------------------------------------------------------------------------------------------------------------


def show(name: str, results: list[dict[str, float]], base: list[dict[str, float]]) -> None:
    for number, (result, local) in enumerate(zip(results, base, strict=True), 1):
        ratio, cpu = result["images_per_s"] / local["images_per_s"], local["cpu_ms"] / result["cpu_ms"]
        print(
            f"{name:28} pass {number}: {result['images_per_s']:7.1f} images/s ({ratio:5.1%} of disk), "
            f"{result['cpu_ms']:6.3f} ms CPU an image ({cpu:5.1%})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, nargs="?")
    parser.add_argument("--images", type=int, default=12_000)
    parser.add_argument("--latency-ms", type=int, nargs="*", default=[0, 30])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        kind, path = arguments.case
        print(json.dumps(measure_index(path) if kind == "index" else CASES[kind](path, 2)))
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root = Path(folder, "data")
        root.mkdir()
        os.chmod(folder, 0o755)
        write_tars(arguments.photos, root, PER_SHARD if arguments.index else arguments.images)
        if arguments.index:
            for shard in range(1, arguments.index):
                os.link(root / "train-00000.tar", root / f"train-{shard:05}.tar")
        else:
            store_index(root)
        shards = sorted(path.name for path in root.glob("train-*.tar"))
        (root / "shards.json").write_text(json.dumps({"shards": shards}))
        for latency in arguments.latency_ms:
            with serve(root, latency) as address:
                if arguments.index:
                    print(
                        f"index at {latency} ms", json.dumps(run_case("index", address, Path(folder, "i"))), flush=True
                    )
                    continue
                local = run_case("podscale", str(root), Path(folder, f"local-{latency}"))
                show("disk", local, local)
                show(f"bucket, {latency} ms", run_case("podscale", address, Path(folder, f"cache-{latency}")), local)
                if arguments.peers:
                    show(f"WebDataset, {latency} ms", run_case("webdataset", address, Path(folder, "peer")), local)
                shutil.rmtree(Path(folder, f"cache-{latency}"), ignore_errors=True)


if __name__ == "__main__":
    main()
