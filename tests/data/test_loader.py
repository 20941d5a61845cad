"""Batches on 1 to 8 devices: the same global batch in any layout, every example once, no thread left running."""

import gc
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image
from support.loader_threads import list_loader_threads, no_loader_thread_left  # noqa: F401 (a fixture)

from podscale.config.options import Options
from podscale.data.decode import crop_image
from podscale.data.index.dataset import Index, index_files, open_index
from podscale.data.loader import _TrainMaker, iterate_train_samples, load_eval_batches, load_train_batches
from podscale.data.order import Order, compute_crop_boxes, compute_eval_boxes
from podscale.data.randaugment import augment_image
from podscale.errors import UserError
from podscale.plan import Counts, make_plan
from podscale.pod import Pod
from podscale.recipe import Recipe, override_recipe

SIZE, BATCH, SAMPLES = 6, 32, 1201


@pytest.fixture(scope="module")
def index():
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, 7, 6, 3), dtype=np.uint8)
    sizes = np.tile(np.array([6, 7], np.int32), (SAMPLES, 1))
    return Index(np.arange(SAMPLES, dtype=np.int32), sizes, images=images)  # the label is the sample


@pytest.fixture
def recipe():
    changes = {"data.image_size": SIZE, "data.lanes": 2, "batch.size": BATCH, "batch.span": 8, "train.seed": 3}
    return override_recipe(Recipe(), changes | {"augment.crop": "padded", "augment.padding": 2})


pytestmark = pytest.mark.usefixtures("no_loader_thread_left")


def make_sharding(devices, axis):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
    return NamedSharding(mesh, P(*[None] * axis, "devices"))


def make_layout(devices, micro_batches, tile):
    """Return the expected layout of a plan, computed by hand."""
    images = BATCH // micro_batches // devices
    return {"micro_batches": micro_batches, "micro_images": images, "tile_devices": tile}


def make_test_plan(recipe, samples, expected, steps_per_call):
    """Return the plan whose batch-norm span gives the expected layout, on one row of devices."""
    micro_batches, images, tile = expected.values()
    devices = BATCH // micro_batches // images
    pod = Pod("cpu", 1, devices, devices=tuple(jax.devices()[:devices]))
    options = Options(micro_batches=micro_batches, steps_per_call=steps_per_call)
    plan = make_plan(override_recipe(recipe, {"batch.span": images * tile}), pod, Counts(samples, 1, 10), options)
    assert {name: getattr(plan, name) for name in expected} == expected
    assert plan.steps_per_call == steps_per_call
    return plan


def order_by_position(array, micro_batches, micro_images, tile_devices):
    """Rearrange [steps, micro-batches, images] to [steps, positions], tile by tile."""
    steps, trailing = array.shape[0], array.shape[3:]
    tiles = array.reshape(steps, micro_batches, -1, tile_devices * micro_images, *trailing)
    return np.moveaxis(tiles, 1, 2).reshape(steps, BATCH, *trailing)


def make_reference_batch(index, recipe, steps):
    """Return the global batch, made image by image with the reference implementation of crops."""
    order = Order(len(index), recipe.data.lanes, BATCH, recipe.train.seed)
    samples, passes = order.get_samples(np.array(steps)[:, None], np.arange(BATCH))
    images = np.zeros((*samples.shape, SIZE, SIZE, 3), np.uint8)
    augment, seed = recipe.augment, recipe.train.seed
    for at in np.ndindex(*samples.shape):
        sample, lane_pass = samples[at], passes[at]
        boxes, flips = compute_crop_boxes(augment, seed, [lane_pass], [sample], index.sizes[sample : sample + 1], SIZE)
        source = index.read(sample) if index.images is None else index.images[sample]
        crop_image(source, boxes[0], flips[0], SIZE, images[at])
        if augment.randaugment:
            images[at] = augment_image(images[at], augment.randaugment, augment.magnitude, seed, lane_pass, sample)
    return images, index.labels[samples]


LAYOUTS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2), (4, 1, 2), (4, 2, 2), (8, 1, 1), (8, 2, 4), (8, 4, 2), (8, 2, 8)]


@pytest.mark.parametrize(("devices", "micro_batches", "tile"), LAYOUTS)
def test_every_layout_has_the_same_global_batch(index, recipe, devices, micro_batches, tile):
    shape = make_layout(devices, micro_batches, tile)
    ranges = [range(0, 3), range(3, 6), range(36, 39)]  # a lane pass ends at step 37.5
    with load_train_batches(
        index, make_test_plan(recipe, len(index), shape, 3), ranges, make_sharding(devices, 2)
    ) as batches:
        for steps, batch in zip(ranges, batches, strict=True):
            assert batch.images.shape == (3, micro_batches, BATCH // micro_batches, SIZE, SIZE, 3)
            assert (batch.images.dtype, batch.labels.dtype, batch.count) == (np.uint8, np.int32, 3)
            images, labels = make_reference_batch(index, recipe, steps)
            np.testing.assert_array_equal(order_by_position(np.asarray(batch.labels), **shape), labels)
            np.testing.assert_array_equal(order_by_position(np.asarray(batch.images), **shape), images)


def test_blocks_follow_the_sharding_and_not_the_order_of_devices(index, recipe):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("tile_y", "y", "tile_x"))
    where = NamedSharding(mesh, P(None, None, ("tile_y", "tile_x", "y")))
    shape = make_layout(8, 2, 2)
    with load_train_batches(index, make_test_plan(recipe, len(index), shape, 1), [range(1)], where) as batches:
        batch = next(batches)
    assert batch.images.sharding == batch.labels.sharding == where
    labels = make_reference_batch(index, recipe, [0])[1][0]
    np.testing.assert_array_equal(order_by_position(np.asarray(batch.labels), **shape)[0], labels)
    tile = {shard.device: np.asarray(shard.data)[0] for shard in batch.labels.addressable_shards}
    for tile_y, y, tile_x in np.ndindex(2, 2, 2):
        start = (tile_y * 2 + tile_x) * 8  # a tile of two devices owns 8 positions; micro-batch j takes 4 of them
        expected = labels[start : start + 8].reshape(2, 2, 2)[:, y]
        np.testing.assert_array_equal(tile[mesh.devices[tile_y, y, tile_x]], expected)


def test_devices_with_the_same_block_get_the_same_images(index, recipe):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("copies", "devices"))
    where = NamedSharding(mesh, P(None, None, "devices"))
    shape = make_layout(2, 1, 1)
    with load_train_batches(index, make_test_plan(recipe, len(index), shape, 1), [range(1)], where) as batches:
        labels = next(batches).labels
    assert len(labels.addressable_shards) == 4
    np.testing.assert_array_equal(np.asarray(labels)[:, 0], make_reference_batch(index, recipe, [0])[1])


def test_steps_past_a_short_range_are_zeros(index, recipe):
    shape = make_layout(4, 2, 2)
    with load_train_batches(
        index, make_test_plan(recipe, len(index), shape, 4), [range(5, 7)], make_sharding(4, 2)
    ) as batches:
        batch = next(batches)
    assert (batch.count, batch.images.shape[0]) == (2, 4)
    images, _ = make_reference_batch(index, recipe, [5, 6])
    np.testing.assert_array_equal(order_by_position(np.asarray(batch.images), **shape)[:2], images)
    assert not np.asarray(batch.images)[2:].any()
    assert not np.asarray(batch.labels)[2:].any()


def test_files_and_randaugment_give_the_same_global_batch(tmp_path, recipe):
    paths = []
    for i, pixels in enumerate(np.random.default_rng(1).integers(0, 256, (20, 30, 40, 3), dtype=np.uint8)):
        paths.append(tmp_path / f"{i}.jpg")
        Image.fromarray(pixels).save(paths[-1])
    index = index_files(paths)
    changed = override_recipe(recipe, {"data.lanes": 1, "augment.crop": "resized", "augment.randaugment": 2})
    shape = make_layout(4, 2, 2)
    with load_train_batches(
        index, make_test_plan(changed, len(index), shape, 2), [range(2)], make_sharding(4, 2), threads=3
    ) as batches:
        images = order_by_position(np.asarray(next(batches).images), **shape)
    np.testing.assert_array_equal(images, make_reference_batch(index, changed, [0, 1])[0])


def test_batches_of_digits_are_loaded(recipe):
    train = open_index(recipe.data).train
    changed = override_recipe(recipe, {"data.image_size": 8})
    with load_train_batches(
        train, make_test_plan(changed, len(train), make_layout(2, 1, 1), 1), [range(1)], make_sharding(2, 2)
    ) as batches:
        assert np.asarray(next(batches).images).max() == 255


def test_the_calls_of_a_plan_load_every_step_once(index, recipe):
    shape = make_layout(2, 2, 2)
    plan = make_test_plan(
        override_recipe(recipe, {"train.epochs": 0.3, "train.eval_epochs": 0.2}), len(index), shape, 4
    )
    labels = []
    with load_train_batches(index, plan, plan.calls(), make_sharding(2, 2)) as batches:
        for batch in batches:
            labels.append(order_by_position(np.asarray(batch.labels), **shape)[: batch.count])
    assert [len(part) for part in labels] == [4, 4, 4]  # 12 steps, evaluated after 8 and 12
    np.testing.assert_array_equal(np.concatenate(labels), make_reference_batch(index, recipe, range(12))[1])


def test_a_range_longer_than_a_call_is_refused(index, recipe):
    plan = make_test_plan(recipe, len(index), make_layout(1, 1, 1), 4)
    with (
        load_train_batches(index, plan, [range(5)], make_sharding(1, 2)) as batches,
        pytest.raises(ValueError, match="do not fit a call"),
    ):
        next(batches)


def test_a_sharding_must_partition_the_images_alone(index, recipe):
    with pytest.raises(ValueError, match="must partition axis 2 alone"):
        load_train_batches(index, make_test_plan(recipe, len(index), make_layout(1, 2, 1), 1), [], make_sharding(2, 1))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_sharding_over_other_devices_than_the_plans_is_refused(index, recipe, devices):
    plan = make_test_plan(recipe, len(index), make_layout(2, 1, 1), 1)
    with (
        load_train_batches(index, plan, [range(1)], make_sharding(devices, 2)) as batches,
        pytest.raises(ValueError, match="do not fit a call"),
    ):
        next(batches)


# --- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 40, 97, 1201])
def test_evaluation_sees_every_example_once_and_in_order(index, recipe, devices, count):
    part = Index(index.labels[:count], index.sizes[:count], images=index.images[:count])
    with load_eval_batches(part, recipe, make_sharding(devices, 0), 5) as batches:
        results = list(batches)
    assert len(results) == -(-count // (5 * devices))
    assert sum(batch.count for batch in results) == count
    labels = np.concatenate([np.asarray(batch.labels) for batch in results])
    images = np.concatenate([np.asarray(batch.images) for batch in results])
    assert labels[:count].tolist() == list(range(count))
    assert np.all(labels[count:] == -1)
    assert not images[count:].any()
    left, top, right, bottom = compute_eval_boxes(1.0, part.sizes[:1])[0].astype(int)
    np.testing.assert_array_equal(images[:count], part.images[:, top:bottom, left:right])


# --- threads -------------------------------------------------------------------------------------------------------


def test_an_error_in_the_background_reaches_the_consumer_once(tmp_path, recipe):
    paths = [tmp_path / f"{i}.png" for i in range(6)]
    for path in paths:
        Image.new("RGB", (9, 9)).save(path)
    index = index_files(paths)
    paths[5].write_bytes(paths[5].read_bytes()[:45])
    batches = load_eval_batches(index, recipe.override({"data.bad_share": 0}), make_sharding(1, 0), 2)
    assert [next(batches).count, next(batches).count] == [2, 2]
    with pytest.raises(UserError, match=f"cannot read {paths[5]}: "):
        next(batches)
    assert not list_loader_threads()
    assert list(batches) == []


@pytest.mark.parametrize("kind", ["none", "encoded", "decoded"])
@pytest.mark.parametrize("decoder", ["native", "plain"])
def test_a_bad_image_ends_the_loader_with_any_cache(tmp_path, recipe, monkeypatch, kind, decoder):
    monkeypatch.setenv("PODSCALE_DECODER", decoder)
    paths = [tmp_path / f"{i}.jpg" for i in range(12)]
    for path in paths:
        Image.effect_noise((40, 30), 50).save(path)
    paths[9].write_bytes(paths[9].read_bytes()[:-200])
    index = index_files(paths)
    index = index if kind == "none" else index.with_cache(kind, np.arange(len(index)))
    with load_eval_batches(index, recipe.override({"data.bad_share": 0}), make_sharding(1, 0), 4) as batches:
        assert [next(batches).count, next(batches).count] == [4, 4]
        with pytest.raises(UserError, match=f"cannot read {paths[9]}: "):
            next(batches)
    assert not list_loader_threads()
    if kind == "decoded":
        assert index.cache.find_missing(np.arange(12)).tolist()[0] == 9


def test_an_interrupt_of_the_consumer_ends_the_threads(index, recipe):
    def consume():
        with load_eval_batches(index, recipe, make_sharding(1, 0), 8) as batches:
            next(batches)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert not list_loader_threads()


def test_waiting_time_is_measured(index, recipe):
    with load_eval_batches(index, recipe, make_sharding(1, 0), 600) as batches:
        list(batches)
        assert batches.wait_s > 0


def test_batches_can_be_closed_early_and_twice(index, recipe):
    shape = make_layout(2, 1, 1)
    plan = make_test_plan(recipe, len(index), shape, 1)
    batches = load_train_batches(index, plan, [range(i, i + 1) for i in range(50)], make_sharding(2, 2))
    next(batches)
    batches.close()
    batches.close()
    assert not list_loader_threads()
    assert list(batches) == []


def test_closing_does_not_wait_for_the_whole_batch(tmp_path, recipe):
    started = threading.Event()

    class SlowIndex(Index):
        def read(self, sample):
            started.set()
            time.sleep(0.01)
            return super().read(sample)

    path = tmp_path / "a.png"
    Image.new("RGB", (9, 9)).save(path)
    files = index_files([path] * 4000)
    index = SlowIndex(files.labels, files.sizes, files=files.files)
    batches = load_eval_batches(index, recipe, make_sharding(1, 0), 4000, threads=2)
    assert started.wait(10)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 5  # the whole batch would take 20 s


def test_garbage_collection_of_the_iterator_ends_its_threads(index, recipe):
    batches = load_eval_batches(index, recipe, make_sharding(1, 0), 8)
    next(batches)
    thread = batches._thread
    del batches
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_batches_do_not_change_after_delivery(index, recipe):
    """Their memory is not written again, though the CPU's arrays may share it with NumPy's."""
    shape = make_layout(1, 1, 1)
    ranges = [range(i, i + 1) for i in range(8)]
    with load_train_batches(
        index, make_test_plan(recipe, len(index), shape, 1), ranges, make_sharding(1, 2)
    ) as batches:
        results = list(batches)
    for steps, batch in zip(ranges, results, strict=True):
        np.testing.assert_array_equal(np.asarray(batch.images)[:, 0], make_reference_batch(index, recipe, steps)[0])


@pytest.fixture
def two_local_devices(monkeypatch):
    """Make all devices but the first two belong to another process."""
    map_all_devices = NamedSharding.addressable_devices_indices_map
    local = set(jax.devices()[:2])

    def map_local_devices(self, shape):
        return {device: index for device, index in map_all_devices(self, shape).items() if device in local}

    monkeypatch.setattr(NamedSharding, "addressable_devices_indices_map", map_local_devices)


@pytest.mark.usefixtures("two_local_devices")
@pytest.mark.parametrize("at_once", [1, 100, 10_000])
@pytest.mark.parametrize("devices", [2, 4])
def test_a_process_lists_the_samples_of_its_own_lanes(index, recipe, devices, at_once):
    """It reads them in a pass by its positions: all of two devices, and half, which is one of two lanes, of four."""
    plan = make_test_plan(recipe, len(index), make_layout(devices, 1, 1), 1)
    parts = list(iterate_train_samples(plan, make_sharding(devices, 2), at_once))
    assert max(map(len, parts)) <= max(at_once, recipe.data.lanes)
    order = Order(len(index), recipe.data.lanes, BATCH, recipe.train.seed)
    samples, _ = order.get_samples(np.arange(2 * SAMPLES // BATCH)[:, None], np.arange(2 * BATCH // devices))
    assert np.concatenate(parts).tolist() == sorted(set(samples.ravel().tolist()))


@pytest.mark.usefixtures("two_local_devices")
def test_only_blocks_of_local_devices_are_loaded(index, recipe, monkeypatch):
    """If half of the devices belong to another process, half of the positions are read."""
    where, seen = make_sharding(4, 2), {}

    def make(self, steps, pool, staging):
        seen["samples"] = self.list_samples(steps)
        raise RuntimeError("enough")

    monkeypatch.setattr(_TrainMaker, "make", make)
    plan = make_test_plan(recipe, len(index), make_layout(4, 1, 1), 1)
    with load_train_batches(index, plan, [range(1)], where) as batches, pytest.raises(RuntimeError, match="enough"):
        next(batches)
    assert seen["samples"].ravel().tolist() == make_reference_batch(index, recipe, [0])[1][0, :16].tolist()
