"""Training crops straight from a bucket: nginx on one core, the loader on the other, beside the same data on disk.

    python benchmarks/bucket.py PHOTOS [--images 12000] [--latency-ms 0 30] [--peers PYTHON [--same-decoder]]

The claim: at least 90 % of the rate from disk on the first pass and 98 % on the second, and ahead of WebDataset,
LitData and MosaicML Streaming (`bucket_peers.py`), which PYTHON must have; a peer that does not run is left out with
a line.

PHOTOS is a folder with JPEGs of natural size anywhere below it; they are repeated, each time with another comment,
until there are as many as asked for, in tars of 1,000. Each case is a process of its own, pinned to core 0; nginx is
pinned to core 1, and waits before every answer (libnginx-mod-http-echo) where latency is asked for. A case reads two
passes of the training order as crops of 224 x 224: the first with empty caches, the second with what the first has
left on disk. Printed are images per second of wall time, and milliseconds of this process's CPU time per image, which
other programs on the machine disturb less. A machine's own speed changes from minute to minute, so the disk is measured
before and after each case, and the case is compared with the mean of both. While a case runs, memory for it is held
ready (`hold_memory`), since a virtual machine's memory is slow when it is first used. The index is made
beforehand, and so are the files that a peer reads instead of tars; `bucket_index.py` times the index.
"""

import argparse
import functools
import io
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from bucket_peers import BATCH, PASSES, SIZE, Clock

LOADER_CORE, SERVER_CORE = 0, 1
PER_SHARD = 1000
SCRATCH_BYTES, SPARE_BYTES, HEAP_BYTES = 2**24, 2**27, 2**31
PEERS_FILE = Path(__file__).with_name("bucket_peers.py")
PEER_NAMES = MappingProxyType({"webdataset": "WebDataset", "litdata": "LitData", "mds": "MosaicML Streaming"})
Result = dict[str, float]
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


def list_photos(photos: Path) -> list[Path]:
    """Return the JPEGs in a folder and below it."""
    paths = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise SystemExit(f"{photos} holds no JPEGs; name a folder that does")
    return paths


def write_tars(photos: Path, root: Path, images: int) -> None:
    """Write tars of training images, each with a comment of its own, and one small tar to validate on."""
    contents = itertools.cycle([path.read_bytes() for path in list_photos(photos)])
    for shard in range(-(-images // PER_SHARD)):
        with tarfile.open(root / f"train-{shard:05}.tar", "w") as tar:
            for i in range(min(PER_SHARD, images - shard * PER_SHARD)):
                add_image(tar, f"{i % 2}/{shard:05}-{i:05}.jpg", next(contents))
    with tarfile.open(root / "val-00000.tar", "w") as tar:
        for i in range(10):
            add_image(tar, f"{i % 2}/{i}.jpg", next(contents))


def add_image(tar: tarfile.TarFile, name: str, jpeg: bytes) -> None:
    """Add a JPEG to a tar, with its name as a comment after the first marker: no two members have the same bytes."""
    comment = b"\xff\xfe" + (2 + len(name)).to_bytes(2, "big") + name.encode()
    member = tarfile.TarInfo(name)
    member.size = len(jpeg) + len(comment)
    tar.addfile(member, io.BytesIO(jpeg[:2] + comment + jpeg[2:]))


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
                if process.poll() is not None:
                    raise SystemExit(
                        "nginx has ended; it needs its module for latency: apt install libnginx-mod-http-echo"
                    )
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                    break
                except urllib.error.HTTPError:
                    break  # it answers
                except OSError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


# --- one case, in a process of its own -------------------------------------------------------------------------------


def measure_podscale(path: str, passes: int) -> list[Result]:
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


def run_podscale(path: str, cache: Path) -> list[Result]:
    """Measure Podscale's loader in a new process on the loader's core."""
    return run_pinned([sys.executable, __file__, "--measure", path], {"XDG_CACHE_HOME": str(cache)})


def run_peer(kind: str, arguments: argparse.Namespace, address: str, cache: Path) -> list[Result]:
    """Measure a peer in its own interpreter on the loader's core."""
    command = [arguments.peers, str(PEERS_FILE), "read", kind, address, str(cache)]
    return run_pinned([*command, *find_decoder()] if arguments.same_decoder else command, {})


def find_decoder() -> list[str]:
    """Return the option with which a peer decodes as Podscale does."""
    from podscale.data import _native

    return ["--decoder", str(_native.__file__)]


def run_pinned(command: list[str], environment: dict[str, str]) -> list[Result]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    command = ["taskset", "-c", str(LOADER_CORE), *command]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("[{")))


# --- all -------------------------------------------------------------------------------------------------------------


def prepare(arguments: argparse.Namespace, root: Path) -> None:
    """Write the data, and what the peers read, unless it is there."""
    tars = root / "tars"
    if not (tars / "shards.json").exists():
        tars.mkdir(parents=True, exist_ok=True)
        write_tars(arguments.photos, tars, arguments.images)
        store_index(tars)
        shards = sorted(path.name for path in tars.glob("train-*.tar"))
        (tars / "shards.json").write_text(json.dumps({"shards": shards}))
    if arguments.peers:
        for kind in ("litdata", "mds"):
            folder = root / "peers" / kind
            if not folder.exists():
                command = [arguments.peers, str(PEERS_FILE), "write", kind, str(tars), str(folder)]
                if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
                    shutil.rmtree(folder, ignore_errors=True)  # it is left out for lack of data


@contextmanager
def hold_memory(root: Path) -> Iterator[None]:
    """Hold memory, as a file in the page cache, and give back as much as is used: what a case uses is at hand.

    A virtual machine may have to ask its host for memory that it uses for the first time, or again after some seconds:
    a GB then takes 1.0 instead of 0.15 s of CPU time to write, more than to fetch it.
    """
    path, size = root / "scratch", sum(path.stat().st_size for path in (root / "tars").glob("*.tar")) + HEAP_BYTES
    with path.open("wb") as file:
        for _ in range(-(-size // SCRATCH_BYTES)):
            file.write(bytes(SCRATCH_BYTES))
    free, given, is_over = read_free_bytes(), 0, threading.Event()

    def give_back() -> None:
        nonlocal given
        while not is_over.wait(0.01):
            used = free + given - read_free_bytes()
            if used + SPARE_BYTES > given:
                given = min(used + SPARE_BYTES, size)
                os.truncate(path, size - given)

    thread = threading.Thread(target=give_back)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        path.unlink()


def read_free_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().partition("MemFree:")[2].split()[0]) * 1024


def show(name: str, results: list[Result], base: list[Result]) -> None:
    for number, (result, local) in enumerate(zip(results, base, strict=True), 1):
        ratio, cpu = result["images_per_s"] / local["images_per_s"], local["cpu_ms"] / result["cpu_ms"]
        print(
            f"{name:28} pass {number}: {result['images_per_s']:7.1f} images/s ({ratio:6.1%} of disk), "
            f"{result['cpu_ms']:6.3f} ms CPU an image ({cpu:6.1%})",
            flush=True,
        )


def average(first: list[Result], second: list[Result]) -> list[Result]:
    """Return the mean figures of each pass of two runs."""
    return [{name: (a[name] + b[name]) / 2 for name in a} for a, b in zip(first, second, strict=True)]


def show_medians(cases: dict[str, list[tuple[list[Result], list[Result]]]]) -> None:
    """Print the median of each case's figures, and of its ratios to the disk, with their range."""
    for name, runs in cases.items():
        for number in range(len(runs[0][0])):
            passes = [(result[number], base[number]) for result, base in runs]
            rates = sorted(result["images_per_s"] / base["images_per_s"] for result, base in passes)
            cpu = sorted(base["cpu_ms"] / result["cpu_ms"] for result, base in passes)
            speed, ms = (statistics.median(result[key] for result, _ in passes) for key in ("images_per_s", "cpu_ms"))
            print(
                f"{name:28} pass {number + 1}: {speed:7.1f} images/s ({statistics.median(rates):6.1%} of disk, "
                f"{rates[0]:.1%} to {rates[-1]:.1%}), {ms:6.3f} ms CPU an image ({statistics.median(cpu):6.1%}, "
                f"{cpu[0]:.1%} to {cpu[-1]:.1%})"
            )


def measure_all(arguments: argparse.Namespace, root: Path) -> None:
    """Measure each latency with Podscale and each peer, as often as asked for, and the disk before and after each."""
    cases: dict[str, list[tuple[list[Result], list[Result]]]] = {}

    def measure(name: str, run: Callable[[Path], list[Result]]) -> list[Result]:
        shutil.rmtree(root / "cache", ignore_errors=True)
        try:
            with hold_memory(root):
                return run(root / "cache")
        except (subprocess.CalledProcessError, StopIteration) as error:
            print(f"{name}: left out, it failed: {error}", flush=True)
            return []

    def measure_disk() -> list[Result]:
        result = measure("disk", functools.partial(run_podscale, str(root / "tars")))
        show("disk", result, result)
        return result

    before = measure_disk()
    for latency in arguments.latency_ms * arguments.repeats:
        with serve(root, latency) as address:
            runs = {f"Podscale, {latency} ms": functools.partial(run_podscale, f"{address}/tars")}
            for kind, name in PEER_NAMES.items() if arguments.peers else ():
                runs[f"{name}, {latency} ms"] = functools.partial(run_peer, kind, arguments, address)
            for name, run in runs.items():
                result, after = measure(name, run), measure_disk()
                if result:
                    cases.setdefault(name, []).append((result, average(before, after)))
                    show(name, *cases[name][-1])
                before = after
    print(f"medians of {arguments.repeats} runs:")
    show_medians(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, nargs="?")
    parser.add_argument("--images", type=int, default=12_000)
    parser.add_argument("--latency-ms", type=int, nargs="*", default=[0, 30])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder for the data, which is kept; default: a temporary one")
    parser.add_argument("--peers", default="", metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--same-decoder", action="store_true", help="peers decode by Podscale's native decoder")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_podscale(arguments.measure, PASSES)))
        return
    os.sched_setaffinity(0, {SERVER_CORE})
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        root = arguments.data or Path(folder)
        prepare(arguments, root)
        if not arguments.peers:
            print("peers: left out; name an interpreter that has them (--peers PYTHON)")
        measure_all(arguments, root)


if __name__ == "__main__":
    main()
