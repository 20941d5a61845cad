"""Memory that batches are made in: aligned, pinned once, reused only after its transfer, freed."""

import mmap
import threading

import jax
import numpy as np
import pytest

from podscale.data import loader, prefetch
from podscale.data.index.dataset import Index
from podscale.data.staging import Staging
from podscale.recipe import Recipe, override_recipe

SHAPE = (2, 5, 8, 8, 3)
SIZE = int(np.prod(SHAPE))


class Client:
    """Stands for the runtime of a GPU; records which memory is pinned."""

    def __init__(self):
        self.pinned, self.calls = {}, 0

    def dma_map(self, address, size):
        assert address not in self.pinned
        self.pinned[address] = size
        self.calls += 1

    def dma_unmap(self, address):
        del self.pinned[address]


class Device:
    def __init__(self, platform="gpu"):
        self.platform, self.client = platform, Client()


class Transfer:
    """An array in transfer: it gets its values only when the transfer completes, as with a copy engine."""

    def __init__(self, memory):
        self.memory, self.values, self.waited = memory, None, False

    def complete(self):
        if self.values is None:
            self.values = self.memory.copy()

    def is_ready(self):
        return self.values is not None

    def block_until_ready(self):
        self.waited = not self.is_ready()
        self.complete()
        return self


def get_address(memory):
    return memory.__array_interface__["data"][0]


def transfer(staging, number):
    memory = staging.take(SHAPE)
    memory[:] = number
    array = Transfer(memory)
    staging.reuse_after(memory, array)
    return array


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 1, 3), (3, 224, 224, 3)])
def test_memory_is_page_aligned(platform, shape):
    staging = Staging(Device(platform))
    memory = staging.take(shape)
    assert (memory.shape, memory.dtype) == (shape, np.uint8)
    assert get_address(memory) % mmap.PAGESIZE == 0
    assert memory.flags.writeable
    assert memory.flags.c_contiguous


# Which of the transfers so far are complete when the next batch is started.
PACES = {
    "at once": lambda sent: sent,
    "never by themselves": lambda sent: [],
    "one batch late": lambda sent: sent[:-1],
    "now and then": lambda sent: sent if len(sent) % 7 == 0 else [],
}


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_memory_is_reused_only_after_its_transfer(platform, pace):
    device = Device(platform)
    staging, sent, addresses = Staging(device), [], set()
    for number in range(50):
        sent.append(transfer(staging, number))
        addresses.add(get_address(sent[-1].memory))
        for array in PACES[pace](sent):
            array.complete()
    staging.close()
    for number, array in enumerate(sent):
        assert np.all(array.values == number)  # close has waited for the last transfers
    assert len(addresses) <= 2
    assert device.client.calls == (len(addresses) if platform == "gpu" else 0)
    assert not device.client.pinned


@pytest.mark.parametrize("pace", PACES)
def test_two_batches_in_progress_and_one_in_transfer_need_three_buffers(pace):
    device = Device()
    staging, sent, addresses = Staging(device), [], set()
    buffers = [staging.take(SHAPE), staging.take(SHAPE)]
    for number in range(50):
        memory = buffers.pop(0)
        memory[:] = number
        sent.append(Transfer(memory))
        staging.reuse_after(memory, sent[-1])
        addresses.add(get_address(memory))
        for array in PACES[pace](sent):
            array.complete()
        buffers.append(staging.take(SHAPE))
    staging.close()
    for number, array in enumerate(sent):
        assert np.all(array.values == number)
    assert len(addresses) <= 3
    assert device.client.calls <= 3
    assert not device.client.pinned


def test_staging_waits_for_a_transfer_only_if_two_are_in_progress():
    staging, sent = Staging(Device()), []
    for number in range(3):
        sent.append(transfer(staging, number))
    assert [array.waited for array in sent] == [True, False, False]


def test_pinned_memory_has_the_size_of_the_buffers():
    device = Device()
    staging = Staging(device)
    first, second = staging.take(SHAPE), staging.take((7, 3))
    assert device.client.pinned == {get_address(first): SIZE, get_address(second): 21}
    staging.close()
    staging.close()
    assert not device.client.pinned


def test_memory_that_was_never_transferred_is_freed_too():
    device = Device()
    staging = Staging(device)
    staging.take(SHAPE)  # an image was bad, and the batch was never made
    staging.close()
    assert not device.client.pinned


def test_shapes_of_the_same_size_share_memory_and_others_do_not():
    staging = Staging(Device())
    addresses = {}
    for shape in ((4, 6), (6, 4), (5, 5), (4, 6), (6, 4), (5, 5)):
        memory = staging.take(shape)
        array = Transfer(memory)
        array.complete()
        staging.reuse_after(memory, array)
        addresses.setdefault(memory.size, set()).add(get_address(memory))
    assert [len(distinct) for distinct in addresses.values()] == [1, 1]


def test_a_failed_transfer_does_not_leave_memory_pinned():
    class FailedTransfer(Transfer):
        def block_until_ready(self):
            raise RuntimeError("the device is gone")

    device = Device()
    staging = Staging(device)
    memory = staging.take(SHAPE)
    staging.reuse_after(memory, FailedTransfer(memory))
    with pytest.raises(RuntimeError, match="the device is gone"):
        staging.close()
    assert not device.client.pinned


# --- use by the loader ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index():
    images = np.random.default_rng(0).integers(0, 256, (120, 8, 8, 3), dtype=np.uint8)
    return Index(np.arange(120, dtype=np.int32), np.full((120, 2), 8, np.int32), images=images)


def load_batches(index):
    """Return batches of twelve images, on two devices."""
    recipe = override_recipe(Recipe(), {"data.image_size": 8})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    return loader.load_eval_batches(index, recipe, sharding, 6)


@pytest.mark.parametrize("kept", [1, 3])
def test_on_a_cpu_memory_is_reused_once_no_array_refers_to_it(kept):
    """Arrays keep their values, and so does what was computed from them and views of them."""
    device = jax.devices()[0]
    staging, arrays, addresses = Staging(device), [], set()
    for number in range(50):
        memory = staging.take((1, 4, 64, 64, 3))
        addresses.add(get_address(memory))
        memory[:] = number
        array = jax.device_put(memory[0], device)
        arrays.append((number, array, np.asarray(array)[1:, ::2]))
        del memory, array
        arrays = arrays[-kept:]
        for value, array, view in arrays:
            assert np.all(np.asarray(array) == value)
            assert np.all(view == value)
            del array, view
    assert len(addresses) <= kept + 2
    staging.close()
    assert all(np.all(view == value) for value, _, view in arrays)


def test_on_a_cpu_batches_that_are_kept_keep_their_values(index):
    """They may share the memory that the loader wrote to."""
    with load_batches(index) as batches:
        results = list(batches)
    assert len(results) == 10
    for number, batch in enumerate(results):
        np.testing.assert_array_equal(np.asarray(batch.images), index.images[12 * number : 12 * (number + 1)])


def test_the_loader_pins_few_batches_and_unpins_them(index, monkeypatch):
    """With devices that claim to be GPUs, and copies that the CPU's arrays do not make."""
    device, instances = Device(), []

    class WatchedStaging(Staging):
        def __init__(self, _):
            super().__init__(device)
            instances.append(self)

        def reuse_after(self, memory, array):
            super().reuse_after(memory, array)
            assert threading.current_thread().name.startswith("podscale-batch")

    device_put = jax.device_put
    monkeypatch.setattr(prefetch, "Staging", WatchedStaging)
    monkeypatch.setattr(prefetch.jax, "device_put", lambda memory, target: device_put(np.array(memory), target))
    with load_batches(index) as batches:
        for number, batch in enumerate(batches):
            np.testing.assert_array_equal(np.asarray(batch.images), index.images[12 * number : 12 * (number + 1)])
    assert len(instances) == 1
    assert 1 <= device.client.calls <= 3  # two in progress, one in transfer
    assert not device.client.pinned
