"""One host: loads some steps of a recipe and writes down what the model is fed at which position.

python feeding.py DATA OUT START STOP CACHE [COORDINATOR PROCESSES PROCESS]
"""

import sys
import threading

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


def main(path, out, start, stop, kinds, *join):
    jax.config.update("jax_platforms", "cpu")
    if join:
        group.join(join[0], int(join[1]), int(join[2]))
    recipe = recipes.override(recipes.load("finetune"), CHANGES | {"data.path": path})
    bare = setup.prepare(recipe, pod.find(), Options(steps_per_call=1))
    arrays = {}
    for kind in kinds.split(","):
        kept = setup.cached(bare, Options(steps_per_call=1, cache=kind))
        found = fed(kept, [call for call in kept.plan.calls(int(start)) if call.stop <= int(stop)])
        arrays |= {f"{kind}/{name}": value for name, value in found.items()}
    np.savez(out, **arrays)


def fed(found, calls):
    """[steps, own positions, ...]: positions, samples, boxes, flips as they are asked for; pixels and labels as fed."""
    asked, step = {}, threading.local()
    make, crop_batch = loader._TrainJob.make, crops.crop_batch

    def make_one(self, steps, *rest):
        (step.number,) = steps
        return make(self, steps, *rest)

    def crop(index, samples, boxes, flips, *rest):
        asked[step.number] = samples, boxes, flips
        crop_batch(index, samples, boxes, flips, *rest)

    loader._TrainJob.make, crops.crop_batch = make_one, crop
    try:
        with setup.train_batches(found, calls) as batches:
            pieces = [(own(batch.images), own(batch.labels)) for batch in batches]
    finally:
        loader._TrainJob.make, crops.crop_batch = make, crop_batch
    samples, boxes, flips = (np.stack(values) for values in zip(*(asked[call.start] for call in calls), strict=True))
    pixels, labels = (np.stack(values) for values in zip(*pieces, strict=True))
    shards = loader.Blocks(pod.batch_sharding(found.mesh, axis=2), found.plan.batch_shape, axis=2)
    positions = np.broadcast_to(loader._positions(found.plan, shards).ravel(), samples.shape)
    return {"positions": positions, "samples": samples, "boxes": boxes, "flips": flips, "pixels": pixels} | {
        "labels": labels,
        "read": np.unique(samples),
        "kept": np.flatnonzero(found.data.train.cache.filled) if found.data.train.cache else np.zeros(0, int),
    }


def own(array):
    """This host's part of a batch of one step, in the order of its devices' blocks."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[2].start or 0)
    parts = [np.asarray(shard.data)[0] for shard in shards]  # [micro-batches, images, ...]
    return np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])


if __name__ == "__main__":
    main(*sys.argv[1:])
