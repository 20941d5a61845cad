"""Batches on 1 to 8 devices: the same global batch whatever the layout, every example once, no thread left behind."""

import gc
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

from podscale.config.options import Options
from podscale.data.bad_images import BadPictures
from podscale.data.decode import crop
from podscale.data.index.dataset import Index, files_index, open_index
from podscale.data.loader import Batch, Batches, _TrainJob, eval_batches, train_batches
from podscale.data.order import Order, crop_boxes, eval_boxes
from podscale.data.randaugment import apply
from podscale.errors import UserError
from podscale.plan import Counts, make_plan
from podscale.pod import Pod
from podscale.recipe import Recipe, override

SIZE, BATCH, SAMPLES = 6, 32, 1201


@pytest.fixture(scope="module")
def index():
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 7, 6, 3), dtype=np.uint8)
    sizes = np.tile(np.array([6, 7], np.int32), (SAMPLES, 1))
    return Index(np.arange(SAMPLES, dtype=np.int32), sizes, images=images)  # the label tells the sample


@pytest.fixture
def recipe():
    changes = {"data.image_size": SIZE, "data.lanes": 2, "batch.size": BATCH, "batch.span": 8, "train.seed": 3}
    return override(Recipe(), changes | {"augment.crop": "padded", "augment.padding": 2})


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := ours()) and time.monotonic() < deadline:
        left[0].join(0.1)
    assert not ours()


def ours():
    return [thread for thread in threading.enumerate() if thread.name.startswith("podscale-")]


def sharding(devices, axis):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
    return NamedSharding(mesh, P(*[None] * axis, "devices"))


def layout(devices, micro_batches, tile):
    """What is wanted of a plan, worked out by hand."""
    images = BATCH // micro_batches // devices
    return {"micro_batches": micro_batches, "micro_images": images, "tile_devices": tile}


def planned(recipe, samples, wanted, steps_per_call):
    """The plan whose batch-norm span makes the wanted layout, on one row of devices."""
    micro_batches, images, tile = wanted.values()
    devices = BATCH // micro_batches // images
    pod = Pod("cpu", 1, devices, devices=tuple(jax.devices()[:devices]))
    options = Options(micro_batches=micro_batches, steps_per_call=steps_per_call)
    plan = make_plan(override(recipe, {"batch.span": images * tile}), pod, Counts(samples, 1, 10), options)
    assert {name: getattr(plan, name) for name in wanted} == wanted
    assert plan.steps_per_call == steps_per_call
    return plan


def by_position(array, micro_batches, micro_images, tile_devices):
    """[steps, micro-batches, images] back to [steps, positions], tile by tile."""
    steps, rest = array.shape[0], array.shape[3:]
    tiles = array.reshape(steps, micro_batches, -1, tile_devices * micro_images, *rest)
    return np.moveaxis(tiles, 1, 2).reshape(steps, BATCH, *rest)


def reference(index, recipe, steps):
    """The global batch, one picture after the other, with the plain crop."""
    order = Order(len(index), recipe.data.lanes, BATCH, recipe.train.seed)
    samples, passes = order.at(np.array(steps)[:, None], np.arange(BATCH))
    images = np.zeros((*samples.shape, SIZE, SIZE, 3), np.uint8)
    augment, seed = recipe.augment, recipe.train.seed
    for at in np.ndindex(*samples.shape):
        sample, lane_pass = samples[at], passes[at]
        boxes, flips = crop_boxes(augment, seed, [lane_pass], [sample], index.sizes[sample : sample + 1], SIZE)
        source = index.read(sample) if index.images is None else index.images[sample]
        crop(source, boxes[0], flips[0], SIZE, images[at])
        if augment.randaugment:
            images[at] = apply(images[at], augment.randaugment, augment.magnitude, seed, lane_pass, sample)
    return images, index.labels[samples]


LAYOUTS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2), (4, 1, 2), (4, 2, 2), (8, 1, 1), (8, 2, 4), (8, 4, 2), (8, 2, 8)]


@pytest.mark.parametrize(("devices", "micro_batches", "tile"), LAYOUTS)
def test_every_layout_holds_the_same_global_batch(index, recipe, devices, micro_batches, tile):
    shape = layout(devices, micro_batches, tile)
    ranges = [range(0, 3), range(3, 6), range(36, 39)]  # a lane pass ends at step 37.5
    with train_batches(index, planned(recipe, len(index), shape, 3), ranges, sharding(devices, 2)) as batches:
        for steps, batch in zip(ranges, batches, strict=True):
            assert batch.images.shape == (3, micro_batches, BATCH // micro_batches, SIZE, SIZE, 3)
            assert (batch.images.dtype, batch.labels.dtype, batch.count) == (np.uint8, np.int32, 3)
            images, labels = reference(index, recipe, steps)
            np.testing.assert_array_equal(by_position(np.asarray(batch.labels), **shape), labels)
            np.testing.assert_array_equal(by_position(np.asarray(batch.images), **shape), images)


def test_blocks_follow_the_sharding_and_not_the_order_of_devices(index, recipe):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("tile_y", "y", "tile_x"))
    where = NamedSharding(mesh, P(None, None, ("tile_y", "tile_x", "y")))
    shape = layout(8, 2, 2)
    with train_batches(index, planned(recipe, len(index), shape, 1), [range(1)], where) as batches:
        batch = next(batches)
    assert batch.images.sharding == batch.labels.sharding == where
    labels = reference(index, recipe, [0])[1][0]
    np.testing.assert_array_equal(by_position(np.asarray(batch.labels), **shape)[0], labels)
    tile = {shard.device: np.asarray(shard.data)[0] for shard in batch.labels.addressable_shards}
    for tile_y, y, tile_x in np.ndindex(2, 2, 2):
        start = (tile_y * 2 + tile_x) * 8  # a tile of two devices owns 8 positions; micro-batch j takes 4 of them
        expected = labels[start : start + 8].reshape(2, 2, 2)[:, y]
        np.testing.assert_array_equal(tile[mesh.devices[tile_y, y, tile_x]], expected)


def test_devices_that_hold_the_same_block_get_the_same_pictures(index, recipe):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("copies", "devices"))
    where = NamedSharding(mesh, P(None, None, "devices"))
    shape = layout(2, 1, 1)
    with train_batches(index, planned(recipe, len(index), shape, 1), [range(1)], where) as batches:
        labels = next(batches).labels
    assert len(labels.addressable_shards) == 4
    np.testing.assert_array_equal(np.asarray(labels)[:, 0], reference(index, recipe, [0])[1])


def test_steps_past_a_short_range_are_zeros(index, recipe):
    shape = layout(4, 2, 2)
    with train_batches(index, planned(recipe, len(index), shape, 4), [range(5, 7)], sharding(4, 2)) as batches:
        batch = next(batches)
    assert (batch.count, batch.images.shape[0]) == (2, 4)
    images, _ = reference(index, recipe, [5, 6])
    np.testing.assert_array_equal(by_position(np.asarray(batch.images), **shape)[:2], images)
    assert not np.asarray(batch.images)[2:].any()
    assert not np.asarray(batch.labels)[2:].any()


def test_files_and_randaugment_are_position_exact_too(tmp_path, recipe):
    paths = []
    for i, pixels in enumerate(np.random.default_rng(1).integers(0, 256, (20, 30, 40, 3), dtype=np.uint8)):
        paths.append(tmp_path / f"{i}.jpg")
        Image.fromarray(pixels).save(paths[-1])
    index = files_index(paths)
    changed = override(recipe, {"data.lanes": 1, "augment.crop": "resized", "augment.randaugment": 2})
    shape = layout(4, 2, 2)
    with train_batches(index, planned(changed, len(index), shape, 2), [range(2)], sharding(4, 2), threads=3) as batches:
        images = by_position(np.asarray(next(batches).images), **shape)
    np.testing.assert_array_equal(images, reference(index, changed, [0, 1])[0])


def test_digits_load(recipe):
    train = open_index(recipe.data).train
    changed = override(recipe, {"data.image_size": 8})
    with train_batches(train, planned(changed, len(train), layout(2, 1, 1), 1), [range(1)], sharding(2, 2)) as batches:
        assert np.asarray(next(batches).images).max() == 255


def test_the_calls_of_a_plan_load_every_step_once(index, recipe):
    shape = layout(2, 2, 2)
    plan = planned(override(recipe, {"train.epochs": 0.3, "train.eval_epochs": 0.2}), len(index), shape, 4)
    labels = []
    with train_batches(index, plan, plan.calls(), sharding(2, 2)) as batches:
        for batch in batches:
            labels.append(by_position(np.asarray(batch.labels), **shape)[: batch.count])
    assert [len(part) for part in labels] == [4, 4, 4]  # 12 steps, evaluated after 8 and 12
    np.testing.assert_array_equal(np.concatenate(labels), reference(index, recipe, range(12))[1])


def test_a_range_longer_than_a_call_is_no_batch(index, recipe):
    plan = planned(recipe, len(index), layout(1, 1, 1), 4)
    with (
        train_batches(index, plan, [range(5)], sharding(1, 2)) as batches,
        pytest.raises(ValueError, match="do not fit a call"),
    ):
        next(batches)


def test_a_sharding_must_cut_the_images_alone(index, recipe):
    with pytest.raises(ValueError, match="must cut axis 2 alone"):
        train_batches(index, planned(recipe, len(index), layout(1, 2, 1), 1), [], sharding(2, 1))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_sharding_over_other_devices_than_the_plans_is_no_batch(index, recipe, devices):
    plan = planned(recipe, len(index), layout(2, 1, 1), 1)
    with (
        train_batches(index, plan, [range(1)], sharding(devices, 2)) as batches,
        pytest.raises(ValueError, match="do not fit a call"),
    ):
        next(batches)


# --- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 40, 97, 1201])
def test_evaluation_sees_every_example_once_and_in_order(index, recipe, devices, count):
    part = Index(index.labels[:count], index.sizes[:count], images=index.images[:count])
    with eval_batches(part, recipe, sharding(devices, 0), 5) as batches:
        done = list(batches)
    assert len(done) == -(-count // (5 * devices))
    assert sum(batch.count for batch in done) == count
    labels = np.concatenate([np.asarray(batch.labels) for batch in done])
    images = np.concatenate([np.asarray(batch.images) for batch in done])
    assert labels[:count].tolist() == list(range(count))
    assert np.all(labels[count:] == -1)
    assert not images[count:].any()
    left, top, right, bottom = eval_boxes(1.0, part.sizes[:1])[0].astype(int)
    np.testing.assert_array_equal(images[:count], part.images[:, top:bottom, left:right])


# --- threads -------------------------------------------------------------------------------------------------------


def test_an_error_in_the_background_reaches_the_consumer_once(tmp_path, recipe):
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for path in paths:
        Image.new("RGB", (9, 9)).save(path)
    index = files_index(paths)
    paths[5].write_bytes(paths[5].read_bytes()[:45])
    batches = eval_batches(index, recipe, sharding(1, 0), 2)
    assert [next(batches).count, next(batches).count] == [2, 2]
    with pytest.raises(UserError, match=f"cannot read {paths[5]}: "):
        next(batches)
    assert not ours()
    assert list(batches) == []


@pytest.mark.parametrize("kind", ["none", "encoded", "decoded"])
@pytest.mark.parametrize("decoder", ["native", "plain"])
def test_a_broken_picture_ends_the_loader_whatever_is_kept(tmp_path, recipe, monkeypatch, kind, decoder):
    monkeypatch.setenv("PODSCALE_DECODER", decoder)
    paths = [tmp_path / f"{i}.jpg" for i in range(12)]
    for path in paths:
        Image.effect_noise((40, 30), 50).save(path)
    paths[9].write_bytes(paths[9].read_bytes()[:-200])
    index = files_index(paths)
    index = index if kind == "none" else index.cached(kind, np.arange(len(index)))
    with eval_batches(index, recipe, sharding(1, 0), 4) as batches:
        assert [next(batches).count, next(batches).count] == [4, 4]
        with pytest.raises(UserError, match=f"cannot read {paths[9]}: "):
            next(batches)
    assert not ours()
    if kind == "decoded":
        assert index.cache.missing(np.arange(12)).tolist()[0] == 9


def test_an_interrupt_of_the_consumer_ends_the_threads(index, recipe):
    def consume():
        with eval_batches(index, recipe, sharding(1, 0), 8) as batches:
            next(batches)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert not ours()


class Making:
    """Makes batches as a function says, each of which tells its number."""

    device, index = jax.devices()[0], Index(np.zeros(0, np.int32), np.zeros((0, 2), np.int32))
    bad = BadPictures(index, 1, 0.0)

    def __init__(self, work):
        self.work = work

    def ahead(self, job):
        return np.array([], int)

    def make(self, job, pool, staging):
        self.work(job)
        return Batch(None, None, job)


def test_at_most_depth_batches_are_made_ahead():
    made, enough = [], threading.Semaphore(0)

    def work(job):
        made.append(job)
        enough.release()

    with Batches(range(9), Making(work), 1, depth=3) as batches:
        for _ in range(3):
            assert enough.acquire(timeout=10)
        assert not enough.acquire(timeout=0.2)  # full
        next(batches)
        assert enough.acquire(timeout=10)
        assert not enough.acquire(timeout=0.2)
        assert sorted(made) == [0, 1, 2, 3]


def test_the_next_batch_is_begun_before_one_is_done_and_they_come_in_order():
    begun = [threading.Event() for _ in range(9)]

    def work(job):
        begun[job].set()
        if job % 2 == 0:
            assert begun[min(job + 1, 8)].wait(10)  # its last picture takes so long

    with Batches(range(9), Making(work), 1, depth=2) as batches:
        assert [batch.count for batch in batches] == list(range(9))


def test_an_error_comes_after_the_batches_before_it_and_no_other_is_awaited():
    failed = threading.Event()

    def work(job):
        if job == 2:
            assert failed.wait(10)
        if job == 3:
            failed.set()
            raise UserError("no such picture")

    with Batches(range(100), Making(work), 1, depth=2) as batches:
        assert [next(batches).count for _ in range(3)] == [0, 1, 2]
        with pytest.raises(UserError, match="no such picture"):
            next(batches)
        assert not ours()
        assert list(batches) == []


def test_waiting_is_counted(index, recipe):
    with eval_batches(index, recipe, sharding(1, 0), 600) as batches:
        list(batches)
        assert batches.wait_s > 0


def test_closing_early_and_twice_is_fine(index, recipe):
    shape = layout(2, 1, 1)
    plan = planned(recipe, len(index), shape, 1)
    batches = train_batches(index, plan, [range(i, i + 1) for i in range(50)], sharding(2, 2))
    next(batches)
    batches.close()
    batches.close()
    assert not ours()
    assert list(batches) == []


def test_closing_does_not_wait_for_the_whole_batch(tmp_path, recipe):
    begun = threading.Event()

    class Slow(Index):
        def read(self, sample):
            begun.set()
            time.sleep(0.01)
            return super().read(sample)

    path = tmp_path / "a.png"
    Image.new("RGB", (9, 9)).save(path)
    files = files_index([path] * 4000)
    index = Slow(files.labels, files.sizes, files=files.files)
    batches = eval_batches(index, recipe, sharding(1, 0), 4000, threads=2)
    assert begun.wait(10)
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 5  # all of it would take 20


def test_forgetting_the_iterator_ends_its_threads(index, recipe):
    batches = eval_batches(index, recipe, sharding(1, 0), 8)
    next(batches)
    thread = batches._thread
    del batches
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_batches_stay_what_they_were(index, recipe):
    """Nothing handed over is written again, though the CPU's arrays may share memory with NumPy's."""
    shape = layout(1, 1, 1)
    ranges = [range(i, i + 1) for i in range(8)]
    with train_batches(index, planned(recipe, len(index), shape, 1), ranges, sharding(1, 2)) as batches:
        done = list(batches)
    for steps, batch in zip(ranges, done, strict=True):
        np.testing.assert_array_equal(np.asarray(batch.images)[:, 0], reference(index, recipe, steps)[0])


def test_only_this_process_devices_are_loaded(index, recipe, monkeypatch):
    """With half of the devices elsewhere, half of the positions are read."""
    where = sharding(4, 2)
    everywhere = NamedSharding.addressable_devices_indices_map
    here = set(jax.devices()[:2])

    def ours_only(self, shape):
        return {device: place for device, place in everywhere(self, shape).items() if device in here}

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", ours_only)
    seen = {}

    def make(self, steps, pool, staging):
        seen["samples"] = self.ahead(steps)
        raise RuntimeError("enough")

    monkeypatch.setattr(_TrainJob, "make", make)
    plan = planned(recipe, len(index), layout(4, 1, 1), 1)
    with train_batches(index, plan, [range(1)], where) as batches, pytest.raises(RuntimeError, match="enough"):
        next(batches)
    assert seen["samples"].ravel().tolist() == reference(index, recipe, [0])[1][0, :16].tolist()
