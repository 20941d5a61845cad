"""The sequence of (sample, crop, flip) that a recipe's model sees, on one, two and four hosts, and after a resume."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podscale import recipe as recipes
from podscale.data.index.dataset import open_index
from podscale.data.order import Order, crop_boxes

PROGRAM = Path(__file__).parents[1] / "support" / "feeding.py"
BATCH, LANES, SEED, PER_CLASS = 64, 4, 5, 1001
START, RESUMED, STOP = 28, 31, 35  # a pass over a lane of 500 or 501 ends in step 31
KINDS = ("none", "encoded", "decoded")
SEEN = ("samples", "boxes", "flips", "pixels", "labels")
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """2002 JPEGs of 40 sizes and contents."""
    root, rng = tmp_path_factory.mktemp("hosts"), np.random.default_rng(0)
    for i in range(40):
        height, width = rng.integers(9, 24, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(root / f"{i}.jpg")
    for split, count in (("train", PER_CLASS), ("val", 3)):
        for name in ("cats", "dogs"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                os.link(root / f"{(i * 7 + len(name)) % 40}.jpg", root / split / name / f"{i:04}.jpg")
    return root


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fed(data, out, hosts, start=START, kinds=KINDS):
    """What so many real processes feed their devices: by kind of cache and by name, in the order of positions."""
    join = [f"127.0.0.1:{free_port()}", str(hosts)] if hosts > 1 else []
    files = [out / f"{hosts}-{start}-{i}.npz" for i in range(hosts)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(data), str(file), str(start), str(STOP), ",".join(kinds)]
            + ([*join, str(i)] if join else []),
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, file in enumerate(files)
    ]
    errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * hosts, errors[0][-2000:]
    parts = [dict(np.load(file)) for file in files]
    return parts, {kind: by_position([own(part, kind) for part in parts]) for kind in kinds}


def own(part, kind):
    return {name: part[f"{kind}/{name}"] for name in ("positions", *SEEN)}


def by_position(parts):
    joined = {name: np.concatenate([part[name] for part in parts], axis=1) for name in ("positions", *SEEN)}
    order = np.argsort(joined["positions"][0])
    assert joined["positions"][0][order].tolist() == list(range(BATCH))
    return {name: joined[name][:, order] for name in SEEN}


def same(found, expected):
    for name in SEEN:
        np.testing.assert_array_equal(found[name], expected[name], name)


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    return fed(data, tmp_path_factory.mktemp("one"), 1)[1]


def test_one_host_is_fed_what_the_order_says_whatever_it_keeps(data, one):
    index = open_index(recipes.Data(source="folder", path=str(data))).train
    recipe = recipes.load("finetune")
    order = Order(len(index), LANES, BATCH, SEED)
    samples, passes = order.at(np.arange(START, STOP)[:, None], np.arange(BATCH))
    assert {0, 1} == set(passes.ravel().tolist())
    for row, of_pass, boxes, flips in zip(samples, passes, one["none"]["boxes"], one["none"]["flips"], strict=True):
        wanted = crop_boxes(recipe.augment, SEED, of_pass, row, index.sizes[row], 8, fraction=0.875)
        np.testing.assert_array_equal(boxes, wanted[0])
        np.testing.assert_array_equal(flips, wanted[1])
    np.testing.assert_array_equal(one["none"]["samples"], samples)
    np.testing.assert_array_equal(one["none"]["labels"], index.labels[samples])
    for kind in KINDS[1:]:
        same(one[kind], one["none"])


@pytest.mark.processes(2)
@pytest.mark.processes(4)
@pytest.mark.parametrize("hosts", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_any_number_of_hosts_is_fed_the_same_and_each_reads_its_own_lanes(data, one, tmp_path, hosts):
    parts, found = fed(data, tmp_path, hosts)
    for kind in KINDS:
        same(found[kind], one[kind])
    for part in parts:
        for kind in KINDS:
            assert len(np.unique(part[f"{kind}/read"] % LANES)) == LANES // hosts
        for kind in KINDS[1:]:
            np.testing.assert_array_equal(part[f"{kind}/kept"], part[f"{kind}/read"])


@pytest.mark.processes(2)
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_after_a_resume_in_mid_epoch_it_goes_on_as_if_it_had_not_stopped(data, one, tmp_path, hosts):
    _, found = fed(data, tmp_path, hosts, start=RESUMED, kinds=("none", "decoded"))
    for kind in ("none", "decoded"):
        same(found[kind], {name: one["none"][name][RESUMED - START :] for name in SEEN})
