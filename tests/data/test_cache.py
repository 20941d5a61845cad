"""Pictures kept in memory: never another pixel, filled once, no larger than allowed, and written down."""

import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import orbax.checkpoint as ocp
import pytest
from PIL import Image, ImageOps
from rich.console import Console
from support import writers

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data import cache, crop, decode
from podscale.data.files import Files
from podscale.data.index.dataset import open_index
from podscale.data.order import crop_boxes, eval_boxes
from podscale.processes import group
from podscale.training import setup
from podscale.training.loop import _decoding, train

SIZE = 16
KINDS = ("none", "encoded", "decoded")
WRITERS = {"folder": writers.write_folder, "tar": writers.write_tar}


@pytest.fixture(scope="module", params=WRITERS)
def data(request, tmp_path_factory):
    """JPEGs, upright and not, PNGs and WebPs, of 5 to 40 pixels."""
    root = WRITERS[request.param](tmp_path_factory.mktemp("cache") / request.param)
    writers.old(root)
    return recipes.Data(source=request.param, path=str(root))


@pytest.fixture(params=["native", "plain"])
def decoder(request, monkeypatch):
    if request.param == "native" and decode.decoder() != "native":
        pytest.skip("the native decoder was not built")
    monkeypatch.setenv("PODSCALE_DECODER", request.param)


def kept(index, kind):
    return index if kind == "none" else index.cached(kind, np.arange(len(index)))


def crops(index, samples, *, pool=None):
    """What two kinds of crops make of the samples."""
    out = np.zeros((2, len(samples), SIZE, SIZE, 3), np.uint8)
    sizes = index.sizes[samples]
    trained = crop_boxes(recipes.Augment(), 0, np.zeros(len(samples), int), samples, sizes, SIZE)
    for pixels, (boxes, flips) in zip(
        out, (trained, (eval_boxes(0.875, sizes), np.zeros(len(samples), bool))), strict=True
    ):
        crop.crop_batch(index, samples, boxes, flips, SIZE, pixels, pool)
    return out


def upright(data):
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return picture.convert("RGB")


def reference(index, samples, longest):
    """The same by Pillow, from the writer's own bytes."""
    contents = [content for _, _, content in writers.samples("train")]
    out = np.zeros((2, len(samples), SIZE, SIZE, 3), np.uint8)
    for i, sample in enumerate(samples.tolist()):
        picture = upright(contents[sample])
        if longest and max(picture.size) > longest:
            width, height = (max(1, int(side * longest / max(picture.size) + 0.5)) for side in picture.size)
            picture = picture.resize((width, picture.height), Image.Resampling.BILINEAR)
            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        assert picture.size == tuple(index.sizes[sample])
        one = np.array([sample])
        sizes = np.array([picture.size])
        boxes, flips = crop_boxes(recipes.Augment(), 0, [0], one, sizes, SIZE)
        decode.crop(np.asarray(picture), boxes[0], bool(flips[0]), SIZE, out[0, i])
        decode.crop(np.asarray(picture), eval_boxes(0.875, sizes)[0], False, SIZE, out[1, i])
    return out


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("shrink", [0, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_keeping_pictures_never_changes_a_pixel(data, kind, shrink):
    index = kept(open_index(replace(data, shrink=shrink)).train, kind)
    assert index.shrinks(np.arange(len(index))).any() == bool(shrink)
    samples = np.random.default_rng(0).permutation(len(index))
    expected = reference(index, samples, shrink)
    for _ in range(2):  # what fills the cache, and what comes out of it
        np.testing.assert_array_equal(crops(index, samples), expected)
    for sample in samples.tolist():
        assert index.pixels(sample).shape[:2] == tuple(index.sizes[sample][::-1])


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("shrink", [0, 20])
@pytest.mark.parametrize("kind", ["encoded", "decoded"])
def test_every_picture_is_read_once(data, kind, shrink, monkeypatch):
    index = kept(open_index(replace(data, shrink=shrink)).train, kind)
    read, plainly = [], Files.read
    monkeypatch.setattr(Files, "read", lambda self, sample: read.append(sample) or plainly(self, sample))
    with ThreadPoolExecutor(4) as pool:
        for seed in range(3):
            crops(index, np.random.default_rng(seed).permutation(len(index)), pool=pool)
    assert sorted(read) == list(range(len(index)))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["encoded", "decoded"])
def test_from_the_second_pass_on_no_file_is_needed(tmp_path, kind):
    writers.write_folder(tmp_path / "data")
    index = kept(open_index(recipes.Data(source="folder", path=str(tmp_path / "data"))).train, kind)
    samples = np.arange(len(index))
    first = crops(index, samples)
    shutil.rmtree(tmp_path / "data")
    np.testing.assert_array_equal(crops(index, samples), first)
    crop.advise(index, samples)


def test_places_are_aligned_and_do_not_overlap():
    lengths = np.random.default_rng(0).integers(1, 300, 50)
    samples = np.arange(0, 50, 3)
    held = cache.Cache.of("encoded", lengths, samples)
    assert not np.any(held.places[samples] % cache.ALIGNMENT)
    for sample in samples.tolist():
        held.put(sample, bytes([sample]) * int(lengths[sample]))
    for sample in samples.tolist():
        assert bytes(held.at(sample)) == bytes([sample]) * int(lengths[sample])
    assert held.memory.size == cache.room(lengths[samples]) < lengths[samples].sum() + 64 * len(samples)
    with pytest.raises(ValueError, match="sample 1 has no place in this cache"):
        held.put(1, b"?")


def test_a_picture_of_another_length_fills_nothing():
    held = cache.Cache.of("encoded", np.array([3, 3]), np.arange(2))
    with pytest.raises(ValueError, match="broadcast"):
        held.put(0, b"four")
    assert held.missing(np.arange(2)).tolist() == [0, 1]


# --- what is kept --------------------------------------------------------------------------------------------------

CHOICES = [
    # wanted, limit, passes -> kept, where 100 bytes are encoded and 700 decoded
    ("auto", 700, 2, "decoded"),
    ("auto", 699, 2, "encoded"),
    ("auto", 100, 1.5, "encoded"),
    ("auto", 99, 90, None),
    ("encoded", 1000, 90, "encoded"),
    ("encoded", 99, 90, None),
    ("decoded", 700, 90, "decoded"),
    ("decoded", 699, 90, None),
    ("none", 1000, 90, None),
    *((wanted, 1000, passes, None) for wanted in ("auto", "encoded", "decoded") for passes in (0, 0.5, 1)),
]


@pytest.mark.parametrize(("wanted", "limit", "passes", "expected"), CHOICES)
def test_what_is_kept(wanted, limit, passes, expected):
    assert cache.choose(wanted, 100, 700, limit, passes) == expected


CHANGES = {"model.name": "resnet8", "model.stem": "small", "model.width": 8, "data.image_size": SIZE}
CHANGES |= {"batch.size": 4, "batch.span": 4, "train.epochs": 4, "train.eval_epochs": 2}


@pytest.fixture
def recipe(tmp_path):
    root = writers.write_folder(tmp_path / "data")
    return recipes.override(recipes.load("finetune"), CHANGES | {"data.path": str(root)})


def prepared(recipe):
    return setup.prepare(recipe, pod.find(virtual="1x1"))


def kinds(found):
    return tuple(index.cache and index.cache.kind for index in (found.data.train, found.data.val))


def rooms(index):
    """Bytes that a cache takes, by kind."""
    return {"decoded": cache.room(index.decoded_bytes()), "encoded": cache.room(index.encoded_bytes()), None: 0}


def best(index, limit):
    return next(kind for kind, size in rooms(index).items() if size <= limit)


def test_no_more_is_kept_than_allowed(recipe):
    """Training's pictures come first; validation's get what is left."""
    bare = prepared(recipe)
    train, val = bare.data.train, bare.data.val
    edges = {a + b for a in rooms(train).values() for b in rooms(val).values()} - {0}
    for limit in sorted({edge - 1 for edge in edges} | edges):
        found = setup.cached(bare, Options(cache_gib=limit / 2**30))
        first = best(train, limit)
        assert kinds(found) == (first, best(val, limit - rooms(train)[first]))
        assert setup.input_facts(found)["cache_bytes"] <= limit


@pytest.mark.parametrize("given", [True, False])
def test_processes_of_one_host_share_its_memory(recipe, monkeypatch, given):
    bare = prepared(recipe)
    both = sum(rooms(index)["decoded"] for index in (bare.data.train, bare.data.val))
    monkeypatch.setattr(cache, "free_bytes", lambda: 10 * both if given else 2 * both)
    options = Options(cache_gib=both / 2**30 if given else 0)
    for processes in (1, 2, 3):
        monkeypatch.setattr(group, "count_local_processes", lambda processes=processes: processes)
        found = setup.cached(bare, options)
        assert kinds(found)[0] == best(bare.data.train, both // processes)
        assert setup.input_facts(found)["cache_bytes"] <= both / processes


def test_one_pass_keeps_nothing(recipe):
    bare = prepared(recipes.override(recipe, {"train.epochs": 1, "train.eval_epochs": 1}))
    for wanted in ("auto", "encoded", "decoded"):
        assert kinds(setup.cached(bare, Options(cache=wanted))) == (None, None)
    evaluated_once = prepared(recipes.override(recipe, {"train.eval_epochs": 4}))
    assert kinds(setup.cached(evaluated_once, Options())) == ("decoded", None)


def test_arrays_need_no_cache():
    found = setup.cached(prepared(recipes.load("digits")), Options(cache="decoded"))
    assert kinds(found) == (None, None)
    assert setup.input_facts(found) == {"decoder": "none", "cache": {"train": "none", "val": "none"}, "cache_bytes": 0}


# --- how much memory there is --------------------------------------------------------------------------------------


def machine(root, available_kib, groups, *, cgroup="0::/jobs/17\n"):
    """A root folder of a machine with that much memory and these control groups: (limit, used, files)."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {available_kib} kB\nHugePages: 0\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    return root


def limits(most, used, files=0):
    stat = f"anon 5\ninactive_file {files}\nactive_file 0\n"
    return {"memory.max": f"{most}\n", "memory.current": f"{used}\n", "memory.stat": stat}


V1 = {"memory.limit_in_bytes": "3000\n", "memory.usage_in_bytes": "2900\n"}
V1 |= {"memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 20\n"}
MACHINES = {
    "no group has a limit": ({"jobs/17": {"memory.max": "max\n", "memory.current": "7\n"}}, {}, 8 * 1024),
    "the group's limit": ({"jobs/17": limits(5000, 1000)}, {}, 4000),
    "files that can be dropped": ({"jobs/17": limits(5000, 4900, 2000)}, {}, 2100),
    "a group around it": ({"jobs/17": limits("max", 1), "jobs": limits(3000, 1000)}, {}, 2000),
    "the container's own view": ({"": limits(3000, 1000)}, {}, 2000),
    "the machine has less": ({"jobs/17": limits(10**6, 0)}, {}, 8 * 1024),
    "a group that is full": ({"jobs/17": limits(1000, 1200)}, {}, 0),
    "version 1": ({"memory/slurm/job_1": V1}, {"cgroup": "5:cpu:/x\n4:memory:/slurm/job_1\n"}, 620),
}


@pytest.mark.parametrize("name", MACHINES)
def test_free_memory_is_the_least_that_anyone_allows(tmp_path, name):
    groups, more, expected = MACHINES[name]
    assert cache.free_bytes(machine(tmp_path, 8, groups, **more)) == expected


def test_a_machine_that_says_nothing_is_a_laptop(tmp_path):
    assert cache.free_bytes(tmp_path) == 4 << 30


# --- what is written down ------------------------------------------------------------------------------------------


def test_plan_and_checkpoints_say_how_pixels_were_come_by(recipe, tmp_path):
    text = io.StringIO()
    short = recipes.override(recipe, {"train.epochs": 2, "train.eval_epochs": 1})
    console, options = Console(file=text, width=200), Options(cache="encoded", steps_per_call=1)
    train(short, pod=pod.find(virtual="1x1"), options=options, folder=tmp_path / "run", console=console)
    facts = json.loads((tmp_path / "run" / "plan.json").read_text())["input"]
    assert facts["decoder"] == decode.decoder()
    assert facts["cache"] == {"train": "encoded", "val": "encoded"}
    assert facts["cache_bytes"] > 0
    with ocp.CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        assert manager.metadata(manager.latest_step()).custom_metadata["about"] == facts
    (row,) = (line for line in text.getvalue().splitlines() if line.startswith("decoder"))
    assert row.split(maxsplit=1)[1].strip() == _decoding(facts)[0][1]


def test_people_are_told_what_is_kept(recipe):
    found = {kind: setup.input_facts(setup.cached(prepared(recipe), Options(cache=kind))) for kind in KINDS}
    said = {kind: _decoding(facts) for kind, facts in found.items()}
    assert said["none"] == [("decoder", f"{decode.decoder()}; nothing kept in memory")]
    for kind in ("encoded", "decoded"):
        words = f"{decode.decoder()}; kept in memory: train {kind}, val {kind} (0.00 GiB)"
        assert said[kind] == [("decoder", words)]
