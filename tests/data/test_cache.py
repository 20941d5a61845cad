"""Cached images: the same pixels, read once, no larger than allowed, and recorded."""

import dataclasses
import io
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
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
from podscale.data.order import compute_crop_boxes, compute_eval_boxes
from podscale.processes import group
from podscale.training import setup
from podscale.training.advice import describe_decoding
from podscale.training.loop import train

SIZE = 16
KINDS = ("none", "encoded", "decoded")
WRITERS = {"folder": writers.write_folder, "tar": writers.write_tar}


@pytest.fixture(scope="module", params=WRITERS)
def data(request, tmp_path_factory):
    """JPEGs, upright and not, PNGs and WebPs, of 5 to 40 pixels."""
    root = WRITERS[request.param](tmp_path_factory.mktemp("cache") / request.param)
    writers.backdate(root)
    return recipes.Data(source=request.param, path=str(root))


@pytest.fixture(params=["native", "plain"])
def decoder(request, monkeypatch):
    if request.param == "native" and decode.select_decoder() != "native":
        pytest.skip("the native decoder was not built")
    monkeypatch.setenv("PODSCALE_DECODER", request.param)


def add_cache(index, kind):
    return index if kind == "none" else index.with_cache(kind, np.arange(len(index)))


def crop_samples(index, samples, *, pool=None):
    """Return a training crop and an evaluation crop of each sample."""
    out = np.zeros((2, len(samples), SIZE, SIZE, 3), np.uint8)
    sizes = index.sizes[samples]
    train_boxes = compute_crop_boxes(recipes.Augment(), 0, np.zeros(len(samples), int), samples, sizes, SIZE)
    eval_boxes = compute_eval_boxes(0.875, sizes), np.zeros(len(samples), bool)
    for pixels, (boxes, flips) in zip(out, (train_boxes, eval_boxes), strict=True):
        crop.crop_batch(index, samples, boxes, flips, pixels, pool)
    return out


def decode_upright(data):
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def crop_with_pillow(index, samples, longest):
    """Return the same crops made by Pillow, from the bytes that were written."""
    contents = [content for _, _, content in writers.make_samples("train")]
    out = np.zeros((2, len(samples), SIZE, SIZE, 3), np.uint8)
    for i, sample in enumerate(samples.tolist()):
        image = decode_upright(contents[sample])
        if longest and max(image.size) > longest:
            width, height = (max(1, int(side * longest / max(image.size) + 0.5)) for side in image.size)
            image = image.resize((width, image.height), Image.Resampling.BILINEAR)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        assert image.size == tuple(index.sizes[sample])
        ids = np.array([sample])
        sizes = np.array([image.size])
        boxes, flips = compute_crop_boxes(recipes.Augment(), 0, [0], ids, sizes, SIZE)
        decode.crop_image(np.asarray(image), boxes[0], bool(flips[0]), SIZE, out[0, i])
        decode.crop_image(np.asarray(image), compute_eval_boxes(0.875, sizes)[0], False, SIZE, out[1, i])
    return out


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("shrink", [0, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_never_changes_a_pixel(data, kind, shrink):
    index = add_cache(open_index(replace(data, shrink=shrink)).train, kind)
    assert index.needs_shrinking(np.arange(len(index))).any() == bool(shrink)
    samples = np.random.default_rng(0).permutation(len(index))
    expected = crop_with_pillow(index, samples, shrink)
    for _ in range(2):  # the first fills the cache, the second reads from it
        np.testing.assert_array_equal(crop_samples(index, samples), expected)
    for sample in samples.tolist():
        assert index.load_pixels(sample).shape[:2] == tuple(index.sizes[sample][::-1])


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("shrink", [0, 20])
@pytest.mark.parametrize("kind", ["encoded", "decoded"])
def test_every_image_is_read_once(data, kind, shrink, monkeypatch):
    index = add_cache(open_index(replace(data, shrink=shrink)).train, kind)
    reads, read = [], Files.read
    monkeypatch.setattr(Files, "read", lambda self, sample: reads.append(sample) or read(self, sample))
    with ThreadPoolExecutor(4) as pool:
        for seed in range(3):
            crop_samples(index, np.random.default_rng(seed).permutation(len(index)), pool=pool)
    assert sorted(reads) == list(range(len(index)))


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["encoded", "decoded"])
def test_files_are_not_needed_after_the_first_pass(tmp_path, kind):
    writers.write_folder(tmp_path / "data")
    index = add_cache(open_index(recipes.Data(source="folder", path=str(tmp_path / "data"))).train, kind)
    samples = np.arange(len(index))
    first = crop_samples(index, samples)
    shutil.rmtree(tmp_path / "data")
    np.testing.assert_array_equal(crop_samples(index, samples), first)
    crop.read_ahead(index, samples)


def test_samples_are_aligned_and_do_not_overlap():
    lengths = np.random.default_rng(0).integers(1, 300, 50)
    samples = np.arange(0, 50, 3)
    images = cache.Cache.allocate("encoded", lengths, samples)
    assert not np.any(images.offsets[samples] % cache.ALIGNMENT)
    for sample in samples.tolist():
        images.put(sample, bytes([sample]) * int(lengths[sample]))
    for sample in samples.tolist():
        assert bytes(images.get(sample)) == bytes([sample]) * int(lengths[sample])
    assert (
        images.memory.size == cache.compute_cache_bytes(lengths[samples]) < lengths[samples].sum() + 64 * len(samples)
    )
    with pytest.raises(ValueError, match="sample 1 has no place in this cache"):
        images.put(1, b"?")


def test_bytes_of_the_wrong_length_are_refused():
    images = cache.Cache.allocate("encoded", np.array([3, 3]), np.arange(2))
    with pytest.raises(ValueError, match="broadcast"):
        images.put(0, b"four")
    assert images.find_missing(np.arange(2)).tolist() == [0, 1]


# --- choice of the cache -------------------------------------------------------------------------------------------

CHOICES = [
    # option, limit, passes -> kind, for 100 encoded and 700 decoded bytes
    ("auto", 700, 2, "decoded"),
    ("auto", 699, 2, "encoded"),
    ("auto", 100, 1.5, "encoded"),
    ("auto", 99, 90, None),
    ("encoded", 1000, 90, "encoded"),
    ("encoded", 99, 90, None),
    ("decoded", 700, 90, "decoded"),
    ("decoded", 699, 90, None),
    ("none", 1000, 90, None),
    *((option, 1000, passes, None) for option in ("auto", "encoded", "decoded") for passes in (0, 0.5, 1)),
]


@pytest.mark.parametrize(("option", "limit", "passes", "expected"), CHOICES)
def test_the_kind_of_cache_fits_the_limit(option, limit, passes, expected):
    assert cache.choose_kind(option, 100, 700, limit, passes) == expected


CHANGES = {"model.name": "resnet8", "model.stem": "small", "model.width": 8, "data.image_size": SIZE}
CHANGES |= {"batch.size": 4, "batch.span": 4, "train.epochs": 4, "train.eval_epochs": 2}
CHANGES |= {"optimizer.name": "sgd"}  # which is compiled sooner than Muon


@pytest.fixture
def recipe(tmp_path):
    root = writers.write_folder(tmp_path / "data")
    return recipes.override_recipe(recipes.load_recipe("imagefolder"), CHANGES | {"data.path": str(root)})


def prepare(recipe):
    return setup.prepare(recipe, pod.find_pod(virtual="1x1"))


def cache_images(program, **options):
    """Return the program with its images cached, by a plan with these options."""
    plan = dataclasses.replace(program.plan, options=dataclasses.replace(program.plan.options, **options))
    return setup.cache_images(dataclasses.replace(program, plan=plan))


def get_kinds(prepared):
    return tuple(index.cache and index.cache.kind for index in (prepared.data.train, prepared.data.val))


def compute_sizes(index):
    """Return the bytes of a cache, by kind."""
    return {
        "decoded": cache.compute_cache_bytes(index.count_decoded_bytes()),
        "encoded": cache.compute_cache_bytes(index.count_encoded_bytes()),
        None: 0,
    }


def choose_best(index, limit):
    return next(kind for kind, size in compute_sizes(index).items() if size <= limit)


@pytest.mark.heavy
def test_caches_stay_within_the_limit(recipe):
    """Training's images come first; validation's get the remaining memory."""
    uncached = prepare(recipe)
    train, val = uncached.data.train, uncached.data.val
    edges = {a + b for a in compute_sizes(train).values() for b in compute_sizes(val).values()} - {0}
    for limit in sorted({edge - 1 for edge in edges} | edges):
        prepared = cache_images(uncached, cache_gib=limit / 2**30)
        first = choose_best(train, limit)
        assert get_kinds(prepared) == (first, choose_best(val, limit - compute_sizes(train)[first]))
        assert setup.describe_input(prepared)["cache_bytes"] <= limit


@pytest.mark.parametrize("has_limit", [True, False])
def test_processes_of_one_host_share_its_memory(recipe, monkeypatch, has_limit):
    uncached = prepare(recipe)
    both = sum(compute_sizes(index)["decoded"] for index in (uncached.data.train, uncached.data.val))
    monkeypatch.setattr(cache, "measure_free_memory", lambda: 10 * both if has_limit else 2 * both)
    limit_gib = both / 2**30 if has_limit else 0
    for processes in (1, 2, 3):
        monkeypatch.setattr(group, "count_local_processes", lambda processes=processes: processes)
        prepared = cache_images(uncached, cache_gib=limit_gib)
        assert get_kinds(prepared)[0] == choose_best(uncached.data.train, both // processes)
        assert setup.describe_input(prepared)["cache_bytes"] <= both / processes


def test_a_single_pass_needs_no_cache(recipe):
    uncached = prepare(recipes.override_recipe(recipe, {"train.epochs": 1, "train.eval_epochs": 1}))
    for option in ("auto", "encoded", "decoded"):
        assert get_kinds(cache_images(uncached, cache=option)) == (None, None)
    evaluated_once = prepare(recipes.override_recipe(recipe, {"train.eval_epochs": 4}))
    assert get_kinds(cache_images(evaluated_once)) == ("decoded", None)


@pytest.mark.heavy
def test_arrays_need_no_cache():
    prepared = cache_images(prepare(recipes.load_recipe("digits")), cache="decoded")
    assert get_kinds(prepared) == (None, None)
    assert setup.describe_input(prepared) == {
        "decoder": "none",
        "cache": {"train": "none", "val": "none"},
        "cache_bytes": 0,
    }


# --- free memory ---------------------------------------------------------------------------------------------------


def write_machine(root, available_kib, groups, *, cgroup="0::/jobs/17\n"):
    """Write the root folder of a machine with this much memory and these control groups."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {available_kib} kB\nHugePages: 0\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    return root


def make_limits(limit, usage, files=0):
    stat = f"anon 5\ninactive_file {files}\nactive_file 0\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}


V1 = {"memory.limit_in_bytes": "3000\n", "memory.usage_in_bytes": "2900\n"}
V1 |= {"memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 20\n"}
MACHINES = {
    "no group has a limit": ({"jobs/17": {"memory.max": "max\n", "memory.current": "7\n"}}, {}, 8 * 1024),
    "the group's limit": ({"jobs/17": make_limits(5000, 1000)}, {}, 4000),
    "files that can be dropped": ({"jobs/17": make_limits(5000, 4900, 2000)}, {}, 2100),
    "a group around it": ({"jobs/17": make_limits("max", 1), "jobs": make_limits(3000, 1000)}, {}, 2000),
    "the container's own view": ({"": make_limits(3000, 1000)}, {}, 2000),
    "the machine has less": ({"jobs/17": make_limits(10**6, 0)}, {}, 8 * 1024),
    "a group that is full": ({"jobs/17": make_limits(1000, 1200)}, {}, 0),
    "version 1": ({"memory/slurm/job_1": V1}, {"cgroup": "5:cpu:/x\n4:memory:/slurm/job_1\n"}, 620),
}


@pytest.mark.parametrize("name", MACHINES)
def test_free_memory_is_the_smallest_limit(tmp_path, name):
    groups, more, expected = MACHINES[name]
    assert cache.measure_free_memory(write_machine(tmp_path, 8, groups, **more)) == expected


def test_free_memory_is_that_of_a_laptop_if_the_machine_does_not_report_it(tmp_path):
    assert cache.measure_free_memory(tmp_path) == 4 << 30


# --- reports -------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_plan_and_checkpoints_record_the_decoder_and_the_cache(recipe, tmp_path):
    text = io.StringIO()
    short = recipes.override_recipe(recipe, {"train.epochs": 2, "train.eval_epochs": 1})
    console, options = Console(file=text, width=200), Options(cache="encoded", steps_per_call=1)
    train(short, pod=pod.find_pod(virtual="1x1"), options=options, folder=tmp_path / "run", console=console)
    facts = json.loads((tmp_path / "run" / "plan.json").read_text())["input"]
    assert facts["decoder"] == decode.select_decoder()
    assert facts["cache"] == {"train": "encoded", "val": "encoded"}
    assert facts["cache_bytes"] > 0
    manifests = list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))
    assert manifests
    assert all(json.loads(path.read_text())["about"] == facts for path in manifests)
    (row,) = (line for line in text.getvalue().splitlines() if line.startswith("decoder"))
    assert row.split(maxsplit=1)[1].strip() == describe_decoding(facts)[0][1]


def test_the_cache_is_reported(recipe):
    inputs = {kind: setup.describe_input(cache_images(prepare(recipe), cache=kind)) for kind in KINDS}
    rows = {kind: describe_decoding(facts) for kind, facts in inputs.items()}
    assert rows["none"] == [("decoder", f"{decode.select_decoder()}; nothing kept in memory")]
    for kind in ("encoded", "decoded"):
        text = f"{decode.select_decoder()}; kept in memory: train {kind}, val {kind} (0.00 GiB)"
        assert rows[kind] == [("decoder", text)]
