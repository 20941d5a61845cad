"""The sequence of (sample, crop, flip) that the model sees, on one, two and four hosts, and after a resume."""

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
from podscale.data.order import Order, compute_crop_boxes

PROGRAM = Path(__file__).parents[1] / "support" / "feeding.py"
BATCH, LANES, SEED, PER_CLASS = 64, 4, 5, 1001
START, RESUMED, STOP = 28, 31, 35  # a pass over a lane of 500 or 501 ends in step 31
CACHES = ("none", "encoded", "decoded")
ARRAYS = ("samples", "boxes", "flips", "pixels", "labels")
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


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def feed_hosts(data, out, hosts, start=START, caches=CACHES):
    """Return what this many real processes feed their devices: each one's arrays, and all in the order of positions."""
    process_group = [f"127.0.0.1:{find_free_port()}", str(hosts)] if hosts > 1 else []
    files = [out / f"{hosts}-{start}-{i}.npz" for i in range(hosts)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(data), str(file), str(start), str(STOP), ",".join(caches)]
            + ([*process_group, str(i)] if process_group else []),
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, file in enumerate(files)
    ]
    errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * hosts, errors[0][-2000:]
    parts = [dict(np.load(file)) for file in files]
    return parts, {kind: order_by_position([select_arrays(part, kind) for part in parts]) for kind in caches}


def select_arrays(part, kind):
    return {name: part[f"{kind}/{name}"] for name in ("positions", *ARRAYS)}


def order_by_position(parts):
    joined = {name: np.concatenate([part[name] for part in parts], axis=1) for name in ("positions", *ARRAYS)}
    order = np.argsort(joined["positions"][0])
    assert joined["positions"][0][order].tolist() == list(range(BATCH))
    return {name: joined[name][:, order] for name in ARRAYS}


def assert_equal(actual, expected):
    for name in ARRAYS:
        np.testing.assert_array_equal(actual[name], expected[name], name)


@pytest.fixture(scope="module")
def one_host(data, tmp_path_factory):
    return feed_hosts(data, tmp_path_factory.mktemp("one"), 1)[1]


def test_one_host_gets_the_samples_of_the_order_with_any_cache(data, one_host):
    index = open_index(recipes.Data(source="folder", path=str(data))).train
    recipe = recipes.load_recipe("finetune")
    order = Order(len(index), LANES, BATCH, SEED)
    samples, passes = order.get_samples(np.arange(START, STOP)[:, None], np.arange(BATCH))
    assert {0, 1} == set(passes.ravel().tolist())
    for row, lane_passes, boxes, flips in zip(
        samples, passes, one_host["none"]["boxes"], one_host["none"]["flips"], strict=True
    ):
        expected = compute_crop_boxes(recipe.augment, SEED, lane_passes, row, index.sizes[row], 8, fraction=0.875)
        np.testing.assert_array_equal(boxes, expected[0])
        np.testing.assert_array_equal(flips, expected[1])
    np.testing.assert_array_equal(one_host["none"]["samples"], samples)
    np.testing.assert_array_equal(one_host["none"]["labels"], index.labels[samples])
    for kind in CACHES[1:]:
        assert_equal(one_host[kind], one_host["none"])


@pytest.mark.processes(2)
@pytest.mark.processes(4)
@pytest.mark.parametrize("hosts", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_any_number_of_hosts_gets_the_same_batches_and_each_reads_only_its_lanes(data, one_host, tmp_path, hosts):
    parts, batches = feed_hosts(data, tmp_path, hosts)
    for kind in CACHES:
        assert_equal(batches[kind], one_host[kind])
    for part in parts:
        for kind in CACHES:
            assert len(np.unique(part[f"{kind}/read"] % LANES)) == LANES // hosts
        for kind in CACHES[1:]:
            np.testing.assert_array_equal(part[f"{kind}/cached"], part[f"{kind}/read"])


@pytest.mark.processes(2)
@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_batches_after_a_resume_in_mid_epoch_are_those_of_an_uninterrupted_run(data, one_host, tmp_path, hosts):
    _, batches = feed_hosts(data, tmp_path, hosts, start=RESUMED, caches=("none", "decoded"))
    for kind in ("none", "decoded"):
        assert_equal(batches[kind], {name: one_host["none"][name][RESUMED - START :] for name in ARRAYS})
