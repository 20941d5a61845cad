"""Memory that batches are made in: aligned, pinned once, used again only after it has arrived, given back."""

import mmap
import threading

import jax
import numpy as np
import pytest

from podscale.data import loader, prefetch
from podscale.data.index.dataset import Index
from podscale.data.staging import Staging
from podscale.recipe import Recipe, override

SHAPE = (2, 5, 8, 8, 3)
SIZE = int(np.prod(SHAPE))


class Client:
    """The runtime of a GPU: which memory is pinned."""

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


class Arriving:
    """An array on its way: it takes its values only when it arrives, as a copy engine does."""

    def __init__(self, memory):
        self.memory, self.values, self.waited = memory, None, False

    def arrive(self):
        if self.values is None:
            self.values = self.memory.copy()

    def is_ready(self):
        return self.values is not None

    def block_until_ready(self):
        self.waited = not self.is_ready()
        self.arrive()
        return self


def address(memory):
    return memory.__array_interface__["data"][0]


def send(staged, number):
    memory = staged.take(SHAPE)
    memory[:] = number
    array = Arriving(memory)
    staged.sent(memory, array)
    return array


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 1, 3), (3, 224, 224, 3)])
def test_memory_begins_at_a_page(platform, shape):
    staged = Staging(Device(platform))
    memory = staged.take(shape)
    assert (memory.shape, memory.dtype) == (shape, np.uint8)
    assert address(memory) % mmap.PAGESIZE == 0
    assert memory.flags.writeable
    assert memory.flags.c_contiguous


# Which of the arrays sent so far have arrived when the next batch is begun.
PACES = {
    "at once": lambda sent: sent,
    "never by themselves": lambda sent: [],
    "one batch late": lambda sent: sent[:-1],
    "now and then": lambda sent: sent if len(sent) % 7 == 0 else [],
}


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_memory_is_used_again_only_after_it_has_arrived(platform, pace):
    device = Device(platform)
    staged, sent, places = Staging(device), [], set()
    for number in range(50):
        sent.append(send(staged, number))
        places.add(address(sent[-1].memory))
        for array in PACES[pace](sent):
            array.arrive()
    staged.close()
    for number, array in enumerate(sent):
        assert np.all(array.values == number)  # close has waited for the last ones
    assert len(places) <= 2
    assert device.client.calls == (len(places) if platform == "gpu" else 0)
    assert not device.client.pinned


@pytest.mark.parametrize("pace", PACES)
def test_two_batches_in_the_making_and_one_on_its_way_need_three_pieces(pace):
    device = Device()
    staged, sent, places = Staging(device), [], set()
    taken = [staged.take(SHAPE), staged.take(SHAPE)]
    for number in range(50):
        memory = taken.pop(0)
        memory[:] = number
        sent.append(Arriving(memory))
        staged.sent(memory, sent[-1])
        places.add(address(memory))
        for array in PACES[pace](sent):
            array.arrive()
        taken.append(staged.take(SHAPE))
    staged.close()
    for number, array in enumerate(sent):
        assert np.all(array.values == number)
    assert len(places) <= 3
    assert device.client.calls <= 3
    assert not device.client.pinned


def test_what_has_not_arrived_is_only_waited_for_when_two_are_on_their_way():
    staged, sent = Staging(Device()), []
    for number in range(3):
        sent.append(send(staged, number))
    assert [array.waited for array in sent] == [True, False, False]


def test_pinned_memory_is_as_large_as_what_is_taken():
    device = Device()
    staged = Staging(device)
    first, second = staged.take(SHAPE), staged.take((7, 3))
    assert device.client.pinned == {address(first): SIZE, address(second): 21}
    staged.close()
    staged.close()
    assert not device.client.pinned


def test_memory_taken_and_never_sent_is_given_back_too():
    device = Device()
    staged = Staging(device)
    staged.take(SHAPE)  # a picture was broken, and the batch was never made
    staged.close()
    assert not device.client.pinned


def test_shapes_of_one_size_share_memory_and_others_do_not():
    staged = Staging(Device())
    places = {}
    for shape in ((4, 6), (6, 4), (5, 5), (4, 6), (6, 4), (5, 5)):
        memory = staged.take(shape)
        array = Arriving(memory)
        array.arrive()
        staged.sent(memory, array)
        places.setdefault(memory.size, set()).add(address(memory))
    assert [len(found) for found in places.values()] == [1, 1]


def test_a_transfer_that_failed_does_not_keep_memory_pinned():
    class Lost(Arriving):
        def block_until_ready(self):
            raise RuntimeError("the device is gone")

    device = Device()
    staged = Staging(device)
    memory = staged.take(SHAPE)
    staged.sent(memory, Lost(memory))
    with pytest.raises(RuntimeError, match="the device is gone"):
        staged.close()
    assert not device.client.pinned


# --- the loader's use of it ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index():
    images = np.random.default_rng(0).integers(0, 256, (120, 8, 8, 3), dtype=np.uint8)
    return Index(np.arange(120, dtype=np.int32), np.full((120, 2), 8, np.int32), images=images)


def batches(index):
    """Twelve pictures a batch, on two devices."""
    recipe = override(Recipe(), {"data.image_size": 8})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    return loader.eval_batches(index, recipe, sharding, 6)


def test_on_a_cpu_memory_is_never_used_again(index):
    """Arrays keep their values, though they may be the very memory that the loader wrote to."""
    with batches(index) as found:
        kept = list(found)
    assert len(kept) == 10
    for number, batch in enumerate(kept):
        np.testing.assert_array_equal(np.asarray(batch.images), index.images[12 * number : 12 * (number + 1)])


def test_the_loader_pins_few_batches_and_lets_go_of_them(index, monkeypatch):
    """With devices that say they are GPUs, and copies that the CPU's arrays do not make."""
    device, made = Device(), []

    class Watched(Staging):
        def __init__(self, _):
            super().__init__(device)
            made.append(self)

        def sent(self, memory, array):
            super().sent(memory, array)
            assert threading.current_thread().name.startswith("podscale-batch")

    real = jax.device_put
    monkeypatch.setattr(prefetch, "Staging", Watched)
    monkeypatch.setattr(prefetch.jax, "device_put", lambda memory, where: real(np.array(memory), where))
    with batches(index) as found:
        for number, batch in enumerate(found):
            np.testing.assert_array_equal(np.asarray(batch.images), index.images[12 * number : 12 * (number + 1)])
    assert len(made) == 1
    assert 1 <= device.client.calls <= 3  # two in the making, one on its way
    assert not device.client.pinned
