"""`podscale bench input`: every rate is measured, cold and warm, and the verdict follows from them."""

import io
import json
import os

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from support import writers

from podscale import pod
from podscale import recipe as recipes
from podscale.bench import input
from podscale.cli.main import main
from podscale.data import decode
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.report import input_table

STAGES = ["read, cold", "read", "entropy decode", "transform", "resize", "hand-over"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of 24 JPEGs per split."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split in writers.SPLITS:
        for name in writers.CLASSES:
            (folder / split / name).mkdir(parents=True)
            for i in range(8):
                coarse = rng.integers(0, 256, (6, 8, 3), np.uint8)
                Image.fromarray(coarse).resize((160, 120)).save(folder / split / name / f"{i}.jpg")
    writers.backdate(folder)
    return folder


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch):
    monkeypatch.setattr(input, "SECONDS", 0.01)
    monkeypatch.setattr(input, "LOADER_SECONDS", 0.01)


def measure(photos, *, changes=None, **settings):
    changes = {"data.path": str(photos), "data.image_size": 32} | (changes or {})
    recipe = recipes.override_recipe(recipes.load_recipe("resnet50-imagenet-4k"), changes)
    return input.measure_input(recipe, pod.find_pod(virtual="1x2"), images=24, **settings)


@pytest.mark.heavy
def test_every_stage_crop_and_cache_has_a_rate(photos):
    result = measure(photos, threads=2)
    assert (result["images"], result["threads"], result["image_size"]) == (24, 2, 32)
    if decode.select_decoder() == "native":
        assert [row["stage"] for row in result["stages"]] == STAGES
    assert sum(row["share"] for row in result["stages"] if row["share"] is not None) == pytest.approx(1)
    assert all(row["images_per_s_one"] > 0 and row["images_per_s_all"] > 0 for row in result["stages"])
    rows = {(row["crop"], row["kept"], row["pages"]): row for row in result["crops"]}
    assert set(rows) == {
        (crop, kept, pages)
        for crop in ("train", "eval")
        for kept, pages in [("none", "cold"), ("none", "warm"), ("encoded", "warm"), ("decoded", "warm")]
    }
    for row in rows.values():
        assert row["scaling"] == pytest.approx(row["images_per_s_all"] / (2 * row["images_per_s_one"]))
        assert row["cores_had"] is None or 0 < row["cores_had"] < 1.1
    assert 0 < result["cores_had"] < 1.1
    assert 0 < result["arithmetic_scaling"] < 2
    assert min(result["loader"].values()) > 0
    assert result["hand_over"]["copies"] is False
    assert result["kept"] == "decoded"  # two dozen small images fit anywhere
    json.dumps(result, allow_nan=False)


@pytest.mark.heavy
@pytest.mark.parametrize("changes", [{"data.shrink": 40}, {"augment.crop": "centre"}])
def test_shrunk_images_and_the_reference_decoder_have_their_own_stages(photos, changes, monkeypatch):
    if "data.shrink" not in changes:
        monkeypatch.setenv("PODSCALE_DECODER", "plain")
    result = measure(photos, changes=changes)
    assert [row["stage"] for row in result["stages"]] == [
        "read, cold",
        "read",
        "decode",
        "shrink",
        "resize",
        "hand-over",
    ]


def test_a_cache_that_does_not_fit_is_not_measured(photos, monkeypatch):
    monkeypatch.setattr(input.cache, "measure_free_memory", lambda: 0)
    result = measure(photos)
    assert (result["loader"]["encoded"], result["loader"]["decoded"], result["kept"]) == (None, None, "none")
    assert result["images_per_s"] == result["loader"]["none"]


def test_the_kernel_is_asked_to_drop_exactly_the_bytes_of_the_images(photos, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: calls.append(arguments[1:]))
    index = open_index(recipes.Data(source="folder", path=str(photos))).train
    before = len(os.listdir("/proc/self/fd"))
    samples = np.array([3, 1])
    empty = np.zeros(0)
    input.Crops(index, samples, empty, empty, empty).evict()
    lengths = index.count_encoded_bytes()[samples].tolist()
    assert calls == [(0, length, os.POSIX_FADV_DONTNEED) for length in lengths]
    assert len(os.listdir("/proc/self/fd")) == before


# --- the verdict ---------------------------------------------------------------------------------------------------


def make_result(*, kept="none", loader=2000.0, all_=2100.0, hand_over=1e6, threads=2):
    """Return the measurements that the verdict depends on."""
    crop = {"crop": "train", "kept": kept, "pages": "warm", "images_per_s_all": all_}
    stages = [
        {"stage": "read, cold", "share": None},
        {"stage": "read", "share": 0.2},
        {"stage": "resize", "share": 0.8},
    ]
    rates = {"none": 1500.0} | {kept: loader}
    return {
        "threads": threads,
        "kept": kept,
        "stages": stages,
        "crops": [crop],
        "loader": rates,
        "hand_over": {"images_per_s": hand_over},
    }


VERDICTS = [
    (make_result(), 0,
     "This machine loads 2,000 images/s from files with 2 threads; resize (80% of the work) limits it; one"
     " GPU that trains on 7,000 images/s needs about 7 cores like these."),
    (make_result(), 1500,
     "This machine can feed 1,500 images/s: it loads 2,000 images/s from files with 2 threads; resize (80%"
     " of the work) limits it."),
    (make_result(threads=1), 3000,
     "This machine cannot feed 3,000 images/s: it loads 2,000 images/s from files with 1 thread; resize "
     "(80% of the work) limits it; 3,000 images/s need about 2 cores like these."),
    (make_result(kept="decoded"), 2000,
     "This machine can feed 2,000 images/s: it loads 2,000 images/s from pixels kept in memory with 2 "
     "threads (1,500 in the first pass); the resize limits it."),
    (make_result(hand_over=2100.0), 9000,
     "This machine cannot feed 9,000 images/s: it loads 2,000 images/s from files with 2 threads; hand-"
     "over to the device limits it; 9,000 images/s exceed what can be transferred to a device."),
    (make_result(all_=4000.0), 100,
     "This machine can feed 100 images/s: it loads 2,000 images/s from files with 2 threads; what the "
     "loader does besides decoding limits it."),
]  # fmt: skip


@pytest.mark.parametrize(("result", "feed", "sentence"), VERDICTS)
def test_the_verdict_is_one_sentence(result, feed, sentence):
    judged = input_table.judge_input(result, feed)
    assert judged["verdict"] == sentence
    assert judged["feeds"] == (None if not feed else " can feed " in sentence)


@pytest.mark.heavy
def test_other_work_on_the_machine_is_reported(photos):
    result, text = measure(photos), io.StringIO()
    for share, reported in ((0.5, True), (0.99, False)):
        input_table.show_input(result | {"cores_had": share}, Console(file=text, width=200))
        assert ("had 50% of the cores: the machine is busy with other work" in text.getvalue()) == reported
        text.truncate(0)


def test_both_transfer_rates_of_gpus_are_reported():
    result = {"copies": True, "device": "NVIDIA H200", "batch_bytes": 38535168, "bytes_per_s": 40.9e9}
    text = "hand-over: 40.9 GB/s to NVIDIA H200 in batches of 38.5 MB"
    assert input_table._describe_hand_over(result | {"bytes_per_s_unpinned": None}) == text
    assert (
        input_table._describe_hand_over(result | {"bytes_per_s_unpinned": 5.2e9})
        == f"{text}, from ordinary memory 5.2 GB/s"
    )


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("option", ["--json", ""])
def test_the_command_prints_tables_or_one_object(photos, capfd, option):
    arguments = [
        "bench",
        "input",
        "--data.path",
        str(photos),
        "--data.image_size",
        "32",
        "--images",
        "16",
        "--feed",
        "9",
    ]
    assert main([*arguments, *"--feed 9 --pod.virtual 1x2".split(), *option.split()]) == 0
    shown = capfd.readouterr()
    if option:
        result = json.loads(shown.out)
        assert (result["feed"], result["feeds"]) == (9, True)
        assert "can feed 9" in result["verdict"]
        assert not shown.err
    else:
        for words in (
            "entropy decode",
            "training crops from files, cold",
            "the loader from pixels in memory",
            "can feed 9",
        ):
            assert words in shown.out


@pytest.mark.parametrize(
    ("changes", "settings", "sentence"),
    [
        ({}, {"threads": -1}, "--threads must be 1 to 1024, or 0 for one per core, not -1"),
        ({}, {"feed": float("nan")}, "--feed must be a number of images per second, not nan"),
        ({"data.path": ""}, {}, "data.path is empty; name the folder that holds the images"),
        ({"data.source": "digits"}, {}, 'data.source "digits" is in memory; `bench input` measures images in files'),
    ],
)
def test_impossible_measurements_are_refused(photos, changes, settings, sentence):
    with pytest.raises(UserError) as error:
        measure(photos, changes=changes, **settings)
    assert str(error.value) == sentence


def test_at_least_one_image_is_required():
    with pytest.raises(UserError, match="--images must be at least 1, not 0"):
        input.measure_input(recipes.load_recipe("digits"), pod.find_pod(virtual="1x1"), images=0)
