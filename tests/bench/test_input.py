"""`podscale bench input`: every rate is there, cold and warm, and the verdict follows from them."""

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
    """A folder of 24 JPEGs a split."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split in writers.SPLITS:
        for name in writers.CLASSES:
            (folder / split / name).mkdir(parents=True)
            for i in range(8):
                coarse = rng.integers(0, 256, (6, 8, 3), np.uint8)
                Image.fromarray(coarse).resize((160, 120)).save(folder / split / name / f"{i}.jpg")
    writers.old(folder)
    return folder


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    monkeypatch.setattr(input, "SECONDS", 0.01)
    monkeypatch.setattr(input, "LOADER_SECONDS", 0.01)


def measured(photos, *, changes=None, **asked):
    changes = {"data.path": str(photos), "data.image_size": 32} | (changes or {})
    recipe = recipes.override(recipes.load("resnet50-imagenet-4k"), changes)
    return input.measure(recipe, pod.find(virtual="1x2"), images=24, **asked)


def test_every_stage_crop_and_cache_has_its_rate(photos):
    found = measured(photos, threads=2)
    assert (found["pictures"], found["threads"], found["image_size"]) == (24, 2, 32)
    if decode.decoder() == "native":
        assert [row["stage"] for row in found["stages"]] == STAGES
    assert sum(row["share"] for row in found["stages"] if row["share"] is not None) == pytest.approx(1)
    assert all(row["images_per_s_one"] > 0 and row["images_per_s_all"] > 0 for row in found["stages"])
    rows = {(row["crop"], row["kept"], row["pages"]): row for row in found["crops"]}
    assert set(rows) == {
        (crop, kept, pages)
        for crop in ("train", "eval")
        for kept, pages in [("none", "cold"), ("none", "warm"), ("encoded", "warm"), ("decoded", "warm")]
    }
    for row in rows.values():
        assert row["scaling"] == pytest.approx(row["images_per_s_all"] / (2 * row["images_per_s_one"]))
        assert row["cores_had"] is None or 0 < row["cores_had"] < 1.1
    assert 0 < found["cores_had"] < 1.1
    assert 0 < found["arithmetic_scaling"] < 2
    assert min(found["loader"].values()) > 0
    assert found["hand_over"]["copies"] is False
    assert found["kept"] == "decoded"  # two dozen small pictures fit anywhere
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("changes", [{"data.shrink": 40}, {"augment.crop": "centre"}])
def test_pictures_that_are_shrunk_and_the_plain_twin_have_their_own_stages(photos, changes, monkeypatch):
    if "data.shrink" not in changes:
        monkeypatch.setenv("PODSCALE_DECODER", "plain")
    found = measured(photos, changes=changes)
    assert [row["stage"] for row in found["stages"]] == [
        "read, cold",
        "read",
        "decode",
        "shrink",
        "resize",
        "hand-over",
    ]


def test_a_cache_that_does_not_fit_is_left_out(photos, monkeypatch):
    monkeypatch.setattr(input.cache, "free_bytes", lambda: 0)
    found = measured(photos)
    assert (found["loader"]["encoded"], found["loader"]["decoded"], found["kept"]) == (None, None, "none")
    assert found["images_per_s"] == found["loader"]["none"]


def test_the_kernel_is_told_to_forget_the_very_bytes_of_the_pictures(photos, monkeypatch):
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *what: told.append(what[1:]))
    index = open_index(recipes.Data(source="folder", path=str(photos))).train
    before = len(os.listdir("/proc/self/fd"))
    samples = np.array([3, 1])
    none = np.zeros(0)
    input.Crops(index, samples, none, none, none).drop()
    lengths = index.encoded_bytes()[samples].tolist()
    assert told == [(0, length, os.POSIX_FADV_DONTNEED) for length in lengths]
    assert len(os.listdir("/proc/self/fd")) == before


# --- the verdict ---------------------------------------------------------------------------------------------------


def facts(*, kept="none", loader=2000.0, all_=2100.0, hand_over=1e6, threads=2):
    """What was measured, as far as the verdict asks."""
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
    (facts(), 0, "This machine loads 2,000 images/s from files with 2 threads; resize (80% of the work) limits it; "
     "one GPU that trains on 7,000 images/s needs about 7 cores like these."),
    (facts(), 1500, "This machine can feed 1,500 images/s: it loads 2,000 images/s from files with 2 threads; "
     "resize (80% of the work) limits it."),
    (facts(threads=1), 3000, "This machine cannot feed 3,000 images/s: it loads 2,000 images/s from files with 1 "
     "thread; resize (80% of the work) limits it; 3,000 images/s need about 2 cores like these."),
    (facts(kept="decoded"), 2000, "This machine can feed 2,000 images/s: it loads 2,000 images/s from pixels kept in "
     "memory with 2 threads (1,500 in the first pass); the resize limits it."),
    (facts(hand_over=2100.0), 9000, "This machine cannot feed 9,000 images/s: it loads 2,000 images/s from files with "
     "2 threads; hand-over to the device limits it; 9,000 images/s are more than a device takes over."),
    (facts(all_=4000.0), 100, "This machine can feed 100 images/s: it loads 2,000 images/s from files with 2 threads; "
     "what the loader does besides decoding limits it."),
]  # fmt: skip


@pytest.mark.parametrize(("found", "feed", "sentence"), VERDICTS)
def test_the_verdict_is_one_sentence(found, feed, sentence):
    judged = input_table.judge(found, feed)
    assert judged["verdict"] == sentence
    assert judged["feeds"] == (None if not feed else " can feed " in sentence)


def test_people_are_told_that_other_work_disturbs(photos):
    found, text = measured(photos), io.StringIO()
    for had, said in ((0.5, True), (0.99, False)):
        input_table.show(found | {"cores_had": had}, Console(file=text, width=200))
        assert ("had 50% of the cores: other work runs on this machine" in text.getvalue()) == said
        text.truncate(0)


def test_on_gpus_both_ways_to_hand_over_are_told():
    found = {"copies": True, "device": "NVIDIA H200", "batch_bytes": 38535168, "bytes_per_s": 40.9e9}
    said = "hand-over: 40.9 GB/s to NVIDIA H200 in batches of 38.5 MB"
    assert input_table._hand_over(found | {"bytes_per_s_unpinned": None}) == said
    assert input_table._hand_over(found | {"bytes_per_s_unpinned": 5.2e9}) == f"{said}, from ordinary memory 5.2 GB/s"


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["--json", ""])
def test_the_command_prints_tables_or_one_object(photos, capfd, kept):
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
    assert main.main([*arguments, *"--feed 9 --pod.virtual 1x2".split(), *kept.split()]) == 0
    shown = capfd.readouterr()
    if kept:
        found = json.loads(shown.out)
        assert (found["feed"], found["feeds"]) == (9, True)
        assert found["verdict"] in shown.err.replace("\n", " ")
    else:
        for words in (
            "entropy decode",
            "training crops from files, cold",
            "the loader from pixels in memory",
            "can feed 9",
        ):
            assert words in shown.out


@pytest.mark.parametrize(
    ("changes", "asked", "sentence"),
    [
        ({}, {"threads": -1}, "--threads must be 1 to 1024, or 0 for one a core, not -1"),
        ({}, {"feed": float("nan")}, "--feed must be a number of images a second, not nan"),
        ({"data.path": ""}, {}, "data.path is empty; name the folder that holds the pictures"),
        ({"data.source": "digits"}, {}, 'data.source "digits" is in memory; `bench input` measures pictures in files'),
    ],
)
def test_refuses(photos, changes, asked, sentence):
    with pytest.raises(UserError) as error:
        measured(photos, changes=changes, **asked)
    assert str(error.value) == sentence


def test_it_measures_at_least_one_picture():
    with pytest.raises(UserError, match="--images must be at least 1, not 0"):
        input.measure(recipes.load("digits"), pod.find(virtual="1x1"), images=0)
