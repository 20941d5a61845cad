"""Claim: nothing grows worse than linearly with the samples of a data set, nor with the hosts on a single host.

Two tables. The first measures, each in a process of its own, what training from 10 thousand, a million and a hundred
million samples costs before its first update: the index, the start, the input order and the first batch. The data sets
are made up: tar shards of 10,000 samples each are links to one shard of 100 photos, and an index names every sample.
The second measures what one host computes of pods of 1 to 4,096 hosts, which need not exist: the plan, the samples of
the host's own positions out of a hundred million, and, on process 0 alone, a look at the signs of life of all, a check
of what all have published at the start, and of what all report of a checkpoint. These three ask JAX's store once each;
what that takes is measured with a store of JAX's own on this machine.

    python benchmarks/growth.py [--samples 10000 1000000 100000000] [--hosts 1 16 256 4096] [--folder DIR]

Every time is given twice: seconds of the processor, in user and kernel mode and of all threads, which other programs
change little; and in brackets seconds of the clock, which are those to wait for on a machine that does nothing else.
A hundred million samples take 6 GB on disk below DIR, and 10 GB of memory, for a few minutes. `--scan` also scans real
shards of 10 and 100 thousand samples.
"""

import argparse
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from podscale import load_recipe, parse_pod, pod
from podscale.data.index import catalog
from podscale.data.index.bucket_index import INDEX_FILE
from podscale.data.index.table import Strings, Table, Tables, save_tables
from podscale.data.order import Order
from podscale.plan import Counts, Plan, make_plan
from podscale.processes import handshake, heartbeat, private_jax, schedulers
from podscale.processes.exchange import Exchange
from podscale.processes.key_value_store import KeyValueStore
from podscale.recipe import Recipe, override_recipe
from podscale.training import setup

PHOTOS = 100  # in the shard that all shards are links to
SHARD = 10_000  # samples
CLASSES = 1000
VALIDATION = 50_000
BATCH = 256
ROUNDS = 5
HUNDRED_MILLION = 10**8
GLOBAL_BATCH = 32_768
UNITS = MappingProxyType({"s": 1.0, "ms": 1e-3, "us": 1e-6})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="*", default=[10**4, 10**6, HUNDRED_MILLION])
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 16, 256, 4096])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(STEPS[arguments.step](arguments.folder, arguments.count)))
        return
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        columns = {f"{count:,}": measure_samples(folder / str(count), count) for count in arguments.samples}
        print_table("samples", columns)
        if arguments.scan:
            print_table("samples", {f"{n:,}": run_step("scan", folder / f"scan{n}", n) for n in (10**4, 10**5)})
        print_table("hosts", {f"{hosts:,}": run_step("host", folder, hosts) for hosts in arguments.hosts})


def measure_samples(folder: Path, count: int) -> dict[str, str]:
    """Return what a data set of so many samples costs, by name; its files are removed again."""
    rows = run_step("index", folder, count) | run_step("start", folder, count) | run_step("order", folder, count)
    for path in folder.iterdir():
        path.unlink()
    return rows


def run_step(step: str, folder: Path, count: int) -> dict[str, str]:
    """Run one step in a process of its own, so that its memory is its own, and return its rows."""
    command = [sys.executable, __file__, "--step", step, "--folder", str(folder), "--count", str(count)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder)}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout
    rows: dict[str, str] = json.loads(output.splitlines()[-1])
    return rows


def print_table(head: str, columns: dict[str, dict[str, str]]) -> None:
    """Print columns of rows as Markdown."""
    print(f"\n| {head} | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for row in next(iter(columns.values()), {}):
        print(f"| {row} | {' | '.join(column[row] for column in columns.values())} |")


# --- made-up data sets -----------------------------------------------------------------------------------------------


def write_shards(folder: Path, counts: dict[str, int]) -> list[tuple[int, int]]:
    """Write a shard of photos and a link to it for every 10,000 samples; return where each photo's bytes lie."""
    from PIL import Image

    folder.mkdir(parents=True)
    first, rng = folder / "photos", np.random.default_rng(0)
    with tarfile.open(first, "w") as file:
        for number in range(PHOTOS):
            image = Image.fromarray(rng.integers(0, 256, (15, 20, 3), np.uint8)).resize(
                (320, 240), Image.Resampling.BICUBIC
            )
            image.save(buffer := io.BytesIO(), "JPEG", quality=90)
            member = tarfile.TarInfo(f"class {number}/{number:06}.jpg")
            member.size = len(buffer.getvalue())
            file.addfile(member, io.BytesIO(buffer.getvalue()))
    with tarfile.open(first) as file:
        places = [(member.offset_data, member.size) for member in file]
    for split, count in counts.items():
        for shard in range(-(-count // SHARD)):
            os.link(first, folder / f"{split}-{shard:06}.tar")
    first.unlink()
    (folder / "classes.txt").write_text("".join(f"class {label}\n" for label in range(CLASSES)))
    return places


def make_table(count: int, paths: tuple[str, ...], places: list[tuple[int, int]]) -> Table:
    """Return a table of so many samples, named by numbers, 10,000 in each shard."""
    numbers = np.arange(count, dtype=np.int64)
    digits = np.empty((count, 12), np.uint8)
    digits[:, 8:] = np.frombuffer(b".jpg", np.uint8)
    for place in range(8):
        digits[:, 7 - place] = ord("0") + numbers // 10**place % 10
    names = Strings(digits.reshape(-1), np.arange(0, 12 * count + 1, 12, dtype=np.int64))
    offsets, lengths = (np.array(column, np.int64)[numbers % PHOTOS] for column in zip(*places, strict=True))
    sizes = np.tile(np.array([320, 240], np.int32), (count, 1))
    files = (numbers // SHARD).astype(np.int32)
    return Table((numbers % CLASSES).astype(np.int32), sizes, files, offsets, lengths, names, paths)


def make_recipe(folder: Path) -> Recipe:
    """Return a recipe of three passes over a data set."""
    values = {"data.source": "tar", "data.path": str(folder), "data.lanes": 1, "data.classes": 0}
    values |= {"batch.size": BATCH, "batch.span": BATCH, "train.epochs": 3, "model.name": "cifarnet"}
    values |= {"data.train_samples": 0, "data.val_samples": 0}
    return override_recipe(load_recipe("cifar10"), values)


# --- what is measured, in processes of their own ---------------------------------------------------------------------


def measure_index(folder: Path, count: int) -> dict[str, str]:
    """Make the data set; measure writing its index."""
    places = write_shards(folder, {"train": count, "val": VALIDATION})
    listing = catalog.FORMATS["tar"].find(folder)
    train, val = (make_table(n, listing.paths[split], places) for split, n in (("train", count), ("val", VALIDATION)))
    tables = Tables("tar", listing.portable_fingerprint, listing.classes, train, val)
    path = folder / INDEX_FILE
    spent = measure_time(lambda: save_tables(path, tables))
    size = path.stat().st_size
    per_sample = size / (count + VALIDATION)
    return {"index: bytes": f"{format_bytes(size)}, {per_sample:.0f} a sample", "index: write": format_time(spent)}


def measure_start(folder: Path, _: int) -> dict[str, str]:
    """Measure opening the index, the start of a training on one device, and its first batch."""
    recipe, device, rows = make_recipe(folder), pod.find_pod(virtual="1x1"), {}
    before = read_memory("RssAnon")

    def note(name: str, spent: Seconds) -> None:
        memory = (
            f"{format_bytes(read_memory('RssAnon') - before)} held, {format_bytes(read_memory('VmHWM') - base)} peak"
        )
        rows[name] = f"{format_time(spent)}; {memory}"

    base, start = read_memory("VmHWM"), Seconds.read()
    splits = setup.open_index(recipe.data)
    note("open and verify the index", start.measure_since())
    start = Seconds.read()
    splits.digest()
    note("digest of the data, which all hosts compare", start.measure_since())
    counts = Counts(len(splits.train), len(splits.val), len(splits.classes))
    program = setup.resolve(recipe, device, counts, data=splits)
    start = Seconds.read()
    setup.cache_images(program)
    note("decide whether the images fit the memory", start.measure_since())
    start = Seconds.read()
    calls = program.plan.calls()
    note("list the calls of 3 epochs", start.measure_since())
    start = Seconds.read()
    with setup.load_train_batches(program, calls) as batches:
        next(batches)
        note(f"first batch of {BATCH}, one lane, and those read ahead", start.measure_since())
        start = Seconds.read()
        for _ in range(ROUNDS):
            next(batches)
        cpu, wall = start.measure_since()
        note("each of the next five", Seconds(cpu / ROUNDS, wall / ROUNDS))
    return rows


def measure_order(_: Path, count: int) -> dict[str, str]:
    """Measure the input order alone: the first step of a pass, and a step in the middle of it."""
    order, before = Order(count, 1, BATCH, seed=0), read_memory("VmHWM")
    start = Seconds.read()
    order.get_samples(0, np.arange(BATCH))
    first, peak = start.measure_since(), read_memory("VmHWM") - before
    step = count // BATCH // 2
    later = measure_time(lambda: order.get_samples(step, np.arange(BATCH)))
    per_sample = f"{1e9 * first.cpu / count:.0f} ns a sample"
    return {
        "order: first step of a pass": f"{format_time(first)}, {per_sample}; {format_bytes(peak)} peak",
        "order: a later step": format_time(later),
    }


def measure_host(_: Path, hosts: int) -> dict[str, str]:
    """Measure what the first host of a pod computes, out of a hundred million samples."""
    values = {"data.lanes": 4096, "batch.size": GLOBAL_BATCH, "batch.span": 64, "train.epochs": 10}
    recipe = override_recipe(load_recipe("resnet50-imagenet-32k"), values)
    recipe = replace(recipe, data=replace(recipe.data, train_samples=0, val_samples=0))
    described = parse_pod(f"h100:{hosts}x8")
    counts = Counts(HUNDRED_MILLION, VALIDATION, CLASSES)
    planning = measure_time(lambda: make_plan(recipe, described, counts))
    plan = make_plan(recipe, described, counts)
    rows = {"devices": f"{described.size:,}", "plan": format_time(planning)}
    rows["rows of the plan"] = format_time(measure_time(plan.rows))
    return rows | measure_host_order(plan, hosts) | measure_signs(hosts) | measure_reports(hosts)


def measure_host_order(plan: Plan, hosts: int) -> dict[str, str]:
    """Measure the order of the positions that the first host's devices have."""
    positions = np.stack([plan.positions(device) for device in range(plan.pod.size // hosts)])
    order = Order(plan.counts.train, plan.recipe.data.lanes, plan.recipe.batch.size, seed=0)
    before = read_memory("VmHWM")
    start = Seconds.read()
    samples, _ = order.get_samples(0, positions)
    first, peak = start.measure_since(), read_memory("VmHWM") - before
    later = measure_time(lambda: order.get_samples(1, positions))
    return {
        "images of a host's batch": f"{samples.size:,}",
        "order of them, first step": f"{format_time(first)}; {format_bytes(peak)} peak",
        "order of them, next step": format_time(later),
    }


class SignStore:
    """A store in which every process has just shown a sign of life."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts

    def set(self, key: str, value: str) -> None:
        """Take this process's sign."""

    def get(self, key: str) -> None:
        """Return no reason to end."""

    def list_by_process(self, prefix: str) -> dict[int, str]:
        """Return a sign of each process, and no trouble."""
        return {n: f"{time.monotonic()} host{n}" for n in range(self.hosts)} if prefix == heartbeat.ALIVE else {}


def measure_signs(hosts: int) -> dict[str, str]:
    """Measure one beat of a process and of process 0, without the network."""
    rows = {}
    for process, name in ((1, "a process's beat"), (0, "process 0's beat")):
        store = SignStore(hosts)
        beats = heartbeat.Heartbeat(store, process, hosts, 60.0)  # type: ignore[arg-type]
        rows[name] = format_time(measure_time(lambda beats=beats, store=store: beats.exchange(store)))
    return rows


class ReportClient:
    """Takes the place of JAX's client: every process has published the same value, wherever it is looked for."""

    def __init__(self, hosts: int, value: str) -> None:
        self.hosts, self.value = hosts, value

    def key_value_set(self, key: str, value: str) -> None:
        """Take what this process publishes."""

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        """Return that there is no problem."""
        return ""

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        """Return what all have published."""
        return [(f"{prefix}/{n}", self.value) for n in range(self.hosts)]


def measure_reports(hosts: int) -> dict[str, str]:
    """Measure what process 0 does with the messages of all at the start and at a checkpoint, and reading them."""
    versions = handshake.list_versions()
    value = json.dumps(versions | {"host": "a-host-with-a-long-name.example.com"})
    store = KeyValueStore(ReportClient(hosts, value))
    checks, reports = handshake.Handshake(store, 0, hosts), Exchange(store, 0, hosts, 1)
    rows = {
        "process 0's check of versions": format_time(measure_time(lambda: checks.check_same(versions, ""))),
        "process 0's collection of reports": format_time(measure_time(lambda: reports.collect(60.0))),
    }
    with socket.socket() as probe:
        probe.bind((schedulers.LOOPBACK, 0))
        address = f"{schedulers.LOOPBACK}:{probe.getsockname()[1]}"
    service = private_jax.start_service(address, 1)
    client = private_jax.make_client(address, 0)
    for number in range(hosts):
        client.key_value_set(f"values/{number}", value)
    spent = measure_time(lambda: KeyValueStore(client).await_values("values", range(hosts), 60.0))
    client.shutdown()
    service.shutdown()
    return rows | {f"request to JAX's store for {len(value)} bytes of each": format_time(spent)}


def measure_scan(folder: Path, count: int) -> dict[str, str]:
    """Measure a scan of real shards."""
    write_shards(folder, {"train": count * SHARD // PHOTOS, "val": SHARD})
    listing, before = catalog.FORMATS["tar"].find(folder), read_memory("VmHWM")
    start = Seconds.read()
    tables = catalog.scan_data_set("tar", listing)
    spent, peak = start.measure_since(), read_memory("VmHWM") - before
    images = len(tables.train) + len(tables.val)
    per_image = f"{1e6 * spent.cpu / images:.0f} us an image"
    return {"scan of tars": f"{format_time(spent)}, {per_image}; {format_bytes(peak)} peak"}


STEPS: MappingProxyType[str, Callable[[Path, int], dict[str, str]]] = MappingProxyType(
    {
        "index": measure_index,
        "start": measure_start,
        "order": measure_order,
        "host": measure_host,
        "scan": measure_scan,
    }
)

# --- clocks and numbers ----------------------------------------------------------------------------------------------


class Seconds(NamedTuple):
    """Seconds of the processor and of the clock."""

    cpu: float
    wall: float

    @classmethod
    def read(cls) -> "Seconds":
        """Return what both say now."""
        return cls(time.process_time(), time.perf_counter())

    def measure_since(self) -> "Seconds":
        """Return the seconds since both said this."""
        now = Seconds.read()
        return Seconds(now.cpu - self.cpu, now.wall - self.wall)


def measure_time(work: Callable[[], object]) -> Seconds:
    """Return the least seconds, of the processor and of the clock, of up to five rounds or two seconds."""
    rounds: list[Seconds] = []
    while not rounds or (len(rounds) < ROUNDS and sum(spent.cpu for spent in rounds) < 2):
        start = Seconds.read()
        work()
        rounds.append(start.measure_since())
    return Seconds(*map(min, zip(*rounds, strict=True)))


def read_memory(field: str) -> int:
    """Return a field of this process's memory, in bytes, as Linux reports it."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(line[1]) << 10 for line in lines if line[0] == f"{field}:")


def format_time(spent: Seconds) -> str:
    """Return both times, that of the clock in brackets."""
    return f"{format_seconds(spent.cpu)} ({format_seconds(spent.wall)})"


def format_seconds(seconds: float) -> str:
    """Return seconds with three digits and a unit."""
    unit = next((unit for unit, size in UNITS.items() if seconds >= size), "us")
    return f"{seconds / UNITS[unit]:.3g} {unit}"


def format_bytes(count: float) -> str:
    """Return bytes in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
