"""One host: loads some steps of a recipe and saves what the model receives at which position.

python feeding.py DATA OUT START STOP CACHES [COORDINATOR PROCESSES PROCESS]
"""

import sys
import threading
from dataclasses import replace

import jax
import numpy as np

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data import crop as crops
from podscale.data import loader
from podscale.processes import group
from podscale.training import setup

CHANGES = {"model.name": "resnet8", "model.stem": "small", "model.width": 8, "data.image_size": 8, "data.lanes": 4}
CHANGES |= {"batch.size": 64, "batch.span": 8, "train.epochs": 3, "train.seed": 5}


def main(path, out, start, stop, caches, *process_group):
    jax.config.update("jax_platforms", "cpu")
    if process_group:
        group.join(process_group[0], int(process_group[1]), int(process_group[2]))
    recipe = recipes.override_recipe(recipes.load_recipe("finetune"), CHANGES | {"data.path": path})
    uncached = setup.prepare(recipe, pod.find_pod(), Options(steps_per_call=1))
    arrays = {}
    for kind in caches.split(","):
        plan = replace(uncached.plan, options=replace(uncached.plan.options, cache=kind))
        prepared = setup.cache_images(replace(uncached, plan=plan))
        calls = [call for call in prepared.plan.calls(int(start)) if call.stop <= int(stop)]
        arrays |= {f"{kind}/{name}": value for name, value in record_batches(prepared, calls).items()}
    np.savez(out, **arrays)


def record_batches(prepared, calls):
    """Return [steps, local positions, ...]: positions; samples, boxes and flips as requested; pixels and labels."""
    requests, step = {}, threading.local()
    make, crop_batch = loader._TrainMaker.make, crops.crop_batch

    def record_step(self, steps, *args):
        (step.number,) = steps
        return make(self, steps, *args)

    def record_crops(index, samples, boxes, flips, *args):
        requests[step.number] = samples, boxes, flips
        crop_batch(index, samples, boxes, flips, *args)

    loader._TrainMaker.make, crops.crop_batch = record_step, record_crops
    try:
        with setup.load_train_batches(prepared, calls) as batches:
            arrays = [(get_local_part(batch.images), get_local_part(batch.labels)) for batch in batches]
    finally:
        loader._TrainMaker.make, crops.crop_batch = make, crop_batch
    samples, boxes, flips = (np.stack(values) for values in zip(*(requests[call.start] for call in calls), strict=True))
    pixels, labels = (np.stack(values) for values in zip(*arrays, strict=True))
    blocks = loader.LocalBlocks(pod.make_batch_sharding(prepared.mesh, axis=2), prepared.plan.batch_shape, axis=2)
    positions = np.broadcast_to(loader._compute_positions(prepared.plan, blocks).ravel(), samples.shape)
    cache = prepared.data.train.cache
    return {"positions": positions, "samples": samples, "boxes": boxes, "flips": flips, "pixels": pixels} | {
        "labels": labels,
        "read": np.unique(samples),
        "cached": np.flatnonzero(cache.is_filled) if cache else np.zeros(0, int),
    }


def get_local_part(array):
    """Return this host's part of a batch of one step, in the order of its devices' blocks."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[2].start or 0)
    parts = [np.asarray(shard.data)[0] for shard in shards]  # [micro-batches, images, ...]
    return np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])


if __name__ == "__main__":
    main(*sys.argv[1:])
