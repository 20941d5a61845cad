"""Ten passes over a data set need no more memory, threads or open files than two."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from support import writers

IMAGES = 320
PROGRAM = """
import gc, json, os, resource, sys, threading
import jax
import numpy as np
from podscale.training import setup
from podscale import pod
from podscale import recipe as recipes
from podscale.data import loader
from podscale.config.options import Options

path, kind = sys.argv[1:]
changes = {"model.name": "resnet8", "model.stem": "small", "model.width": 8, "data.image_size": 96, "data.path": path}
changes |= {"batch.size": 32, "batch.span": 32, "train.epochs": 10}
recipe = recipes.override_recipe(recipes.load_recipe("finetune"), changes)
options = Options(cache=kind, steps_per_call=1)
prepared = setup.cache_images(setup.prepare(recipe, pod.find_pod(), options))
assert setup.describe_input(prepared)["cache"] == {"train": kind, "val": kind}


def measure_usage():
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("podscale-")]
    return {"bytes": pages * resource.getpagesize(), "files": len(os.listdir("/proc/self/fd")), "threads": len(threads)}


after, calls = [], prepared.plan.calls()
with setup.load_train_batches(prepared, calls) as batches:
    for call, batch in zip(calls, batches, strict=True):
        batch.images.block_until_ready()
        if call.stop % 10 == 0:
            sharding = pod.make_batch_sharding(prepared.mesh)
            with loader.load_eval_batches(prepared.data.val, recipe, sharding, 32) as eval_batches:
                assert sum(part.count for part in eval_batches) == 30
            after.append(measure_usage())
print(json.dumps({"after": after, "left": measure_usage()}))
"""
# Memory varies with the allocator's arenas and with the number of batches that are ready at the time of measurement, at
# most three of 0.9 MB each; between -1.7 and +2.2 MB was observed. A leak would be larger: in the eight passes between
# the two measurements 71 MB of batches are made, and more than 20 MB of files are read.
MARGIN = 5 << 20


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("flat"), np.random.default_rng(0)
    for split, count in (("train", IMAGES), ("val", 30)):
        for i in range(count):
            folder = root / split / writers.CLASSES[i % 3]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (96, 128, 3), np.uint8)).save(folder / f"{i}.jpg", quality=90)
    assert 8 * sum(path.stat().st_size for path in (root / "train").rglob("*.jpg")) > 4 * MARGIN
    return root


@pytest.mark.heavy
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        ("native", "none"),
        ("native", "decoded"),
        pytest.param("native", "encoded", marks=pytest.mark.slow),
        *(pytest.param("plain", kind, marks=pytest.mark.slow) for kind in ("none", "encoded", "decoded")),
    ],
)
def test_ten_passes_need_no_more_memory_than_two(photos, decoder, kind):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(photos), kind],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PODSCALE_DECODER": decoder},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    usage = json.loads(done.stdout)
    second, tenth = usage["after"][1], usage["after"][9]
    assert len(usage["after"]) == 10
    assert tenth["bytes"] - second["bytes"] < MARGIN, usage
    assert tenth["files"] <= second["files"]
    assert tenth["threads"] <= second["threads"]
    assert usage["left"]["threads"] == 0
