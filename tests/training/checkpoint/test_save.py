"""Several processes save together: each writes its part once, all learn how it ended, and nobody waits for ever.

The processes are threads here, with a key-value store of the same behaviour as JAX's; real ones are in tests/faults.
"""

import errno
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.key_values import LocalClient

from podscale.errors import UserError
from podscale.parallel import checksum
from podscale.processes import exchange as exchanges
from podscale.processes.exchange import Exchange
from podscale.processes.heartbeat import CollectiveFailedError
from podscale.processes.key_value_store import KeyValueStore, StoreError
from podscale.storage.lock import FolderLock, FolderReplacedError
from podscale.training.checkpoint import save as saving
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.checkpoint.folder import Attempt, CheckpointFolder

FULL = os.strerror(errno.ENOSPC)


class FailingFolder(CheckpointFolder):
    """A folder in which one operation fails."""

    def __init__(self, folder, name="", error=None):
        super().__init__(folder)
        self._name, self._error = name, error

    def write_part(self, attempt, name, blocks):
        super().write_part(attempt, name, list(blocks)[: 1 if self._name == "write_part" else None])
        if self._name == "write_part":
            raise self._error

    def commit(self, attempt, manifest):
        if self._name == "commit":
            raise self._error
        super().commit(attempt, manifest)


@pytest.fixture
def state():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(300, 200), (7,), (90_000,), (11, 13)]
    arrays = {f"a{i}": jax.random.normal(key, shape) for i, (key, shape) in enumerate(zip(keys, shapes, strict=True))}
    return arrays | {"half": jnp.ones((333,), jnp.bfloat16), "n": jnp.int32(5), "none": jnp.zeros((0, 3))}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def start_saves(stores, state, step=5, keys=None, absent=(), previous=None):
    """Start to save in as many processes as there are stores; `absent` ones do not take part."""
    keys, processes, saves = keys or LocalClient(), len(stores), {}
    for process, store in enumerate(stores):
        exchange = Exchange(KeyValueStore(keys), process, processes, step)
        contents = saving.describe_contents(step, state, 0.5, None, processes)
        pieces = saving.copy_to_host(contents, state, process)
        if process not in absent:
            saves[process] = saving.BackgroundSave(store, Attempt(step, "t"), contents, pieces, exchange)
    for process, save in saves.items():
        save.start(previous[process] if previous else None)
    return saves


def finish(saves):
    """Return how the save ended in each process."""
    reasons = [save.wait() for save in saves.values()]
    for save in saves.values():
        save.join()
    return reasons


@pytest.mark.parametrize("processes", [1, 2, 4, 9])
def test_processes_write_each_byte_once_and_any_number_can_read_it(folder, state, processes):
    assert finish(start_saves([CheckpointFolder(folder)] * processes, state)) == [""] * processes
    files = sorted(path.name for path in (folder / "5").iterdir() if path.suffix == ".bin")
    sizes = [(folder / "5" / name).stat().st_size for name in files]
    assert len(files) == min(processes, sum(sizes) // 2**16)
    assert sum(sizes) == sum(array.nbytes for array in state.values())
    assert max(sizes) - min(sizes) <= 32
    with Checkpoints(folder, read_only=True) as checkpoints:
        restored = checkpoints.restore(5, state)
    for name, array in state.items():
        np.testing.assert_array_equal(restored[name], array)


def test_the_manifest_has_the_checksums_that_devices_compute(folder, state):
    from podscale.training.checkpoint.format import Manifest

    finish(start_saves([CheckpointFolder(folder)] * 3, state))
    manifest = Manifest.from_bytes((folder / "5" / "manifest.json").read_bytes())
    for spec, digest in zip(manifest.arrays, manifest.digests, strict=True):
        assert digest == int(checksum.checksum_arrays([state[spec.name]])[0])


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EMFILE])
def test_if_one_process_cannot_write_all_know_why_and_nothing_is_left(folder, state, victim, number):
    stores = [CheckpointFolder(folder) for _ in range(4)]
    stores[victim] = FailingFolder(folder, "write_part", OSError(number, os.strerror(number)))
    assert finish(start_saves(stores, state)) == [os.strerror(number)] * 4
    assert list(folder.iterdir()) == []


def test_if_the_manifest_cannot_be_written_all_know_why_and_nothing_is_left(folder, state):
    stores = [FailingFolder(folder, "commit", OSError(errno.ENOSPC, FULL)), *[CheckpointFolder(folder)] * 3]
    assert finish(start_saves(stores, state)) == [FULL] * 4
    assert list(folder.iterdir()) == []


def test_a_disk_that_fills_up_for_all_does_not_leave_anyone_waiting(folder, state):
    stores = [FailingFolder(folder, "write_part", OSError(errno.ENOSPC, FULL)) for _ in range(4)]
    assert finish(start_saves(stores, state)) == [FULL] * 4


@pytest.mark.parametrize("victim", [0, 2])
def test_a_bug_in_one_process_is_raised_there_and_does_not_leave_the_others_waiting(folder, state, victim):
    stores = [CheckpointFolder(folder) for _ in range(4)]
    stores[victim] = FailingFolder(folder, "write_part", RuntimeError("a bug"))
    saves = start_saves(stores, state)
    with pytest.raises(RuntimeError, match="a bug"):
        saves.pop(victim).wait()
    assert finish(saves) == ["RuntimeError: a bug"] * 3


def test_a_process_that_never_writes_is_named_after_the_limit(folder, state, monkeypatch):
    monkeypatch.setattr(saving, "TIMEOUT_S", 0.3)
    reasons = finish(start_saves([CheckpointFolder(folder)] * 3, state, absent=[2]))
    assert reasons == ["process 2 has not written its part in 0 s"] * 2
    assert list(folder.iterdir()) == []


def test_without_the_main_process_the_others_do_not_wait_for_ever(folder, state, monkeypatch):
    monkeypatch.setattr(saving, "TIMEOUT_S", 0.2)
    saves = start_saves([CheckpointFolder(folder)] * 3, state, absent=[0])
    for save in saves.values():
        with pytest.raises(CollectiveFailedError, match="process 0 has decided nothing"):
            save.wait()


def test_a_store_that_is_gone_is_a_failure_of_the_group(folder, state, monkeypatch):
    keys = LocalClient()
    monkeypatch.setattr(exchanges, "SLICE_S", 0.05)

    def fail(*_):
        raise StoreError("UNAVAILABLE: failed to connect to all addresses")

    keys.blocking_key_value_get = keys.key_value_dir_get = fail
    for save in start_saves([CheckpointFolder(folder)] * 2, state, keys=keys).values():
        with pytest.raises(CollectiveFailedError, match="UNAVAILABLE"):
            save.wait()


def test_a_folder_that_the_main_process_does_not_share_is_reported(tmp_path, state, monkeypatch):
    from podscale.training.checkpoint import folder as checkpoint_folder

    monkeypatch.setattr(checkpoint_folder, "VISIBLE_S", 0.0)
    folders = [tmp_path / "one", tmp_path / "two"]
    for path in folders:
        path.mkdir()
    reasons = finish(start_saves([CheckpointFolder(path) for path in folders], state))
    assert reasons == ["arrays-1.bin cannot be seen by process 0; the run needs a folder that all processes share"] * 2


def test_messages_do_not_pile_up(folder, state):
    keys, saves = LocalClient(), None
    for step in range(1, 6):
        saves = start_saves([CheckpointFolder(folder)] * 2, state, step, keys, previous=saves)
    assert finish(saves) == ["", ""]
    assert sorted(keys.values) == ["podscale/exchange/5/1", "podscale/exchange/5/decision"]
    assert sorted(os.listdir(folder)) == list("12345")


# --- in one process --------------------------------------------------------------------------------------------------


def test_the_state_may_change_as_soon_as_save_returns(folder):
    """Also where the host sees the devices' own memory, which the next update reuses."""
    state = {"w": jnp.arange(50_000.0)}
    update = jax.jit(lambda w: w * 2, donate_argnums=0)
    with Checkpoints(folder, keep=9) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state)
            state = {"w": update(state["w"])}
        checkpoints.wait()
        for step in range(1, 6):
            np.testing.assert_array_equal(checkpoints.restore(step, state)["w"], np.arange(50_000) * 2.0 ** (step - 1))


def test_the_newest_and_the_best_are_kept(folder):
    accuracies = {1: 0.2, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: None, 7: 0.3}
    with Checkpoints(folder, keep=2) as checkpoints:
        for step, accuracy in accuracies.items():
            checkpoints.save(step, {"n": jnp.int32(step)}, accuracy)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6, 7]
        assert (checkpoints.best(), checkpoints.newest()) == (4, 7)
    assert sorted(os.listdir(folder)) == ["4", "6", "7"]
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert (checkpoints.steps(), checkpoints.best()) == ([4, 6, 7], 4)


def test_an_old_checkpoint_stays_until_a_newer_one_is_complete(folder, monkeypatch):
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, {"n": jnp.int32(1)})
        checkpoints.wait()
        monkeypatch.setattr(CheckpointFolder, "commit", FailingFolder(folder, "commit", OSError(28, FULL)).commit)
        checkpoints.save(2, {"n": jnp.int32(2)})
        with pytest.raises(Exception, match=FULL):
            checkpoints.wait()
        assert (checkpoints.steps(), os.listdir(folder)) == ([1], ["1"])
        assert checkpoints.is_saved(1)
        assert not checkpoints.is_saved(2)


def test_what_killed_processes_left_is_removed_and_foreign_files_stay(folder):
    for name in ("7-ab-1.part", "6.deleted", "5.orbax-checkpoint-tmp", "mine"):
        (folder / name / "inside").mkdir(parents=True)
    Checkpoints(folder, read_only=True)
    assert len(os.listdir(folder)) == 4
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == []
    assert os.listdir(folder) == ["mine"]


def test_a_step_can_be_saved_again(folder):
    with Checkpoints(folder) as checkpoints:
        for value in (1, 2):
            checkpoints.save(5, {"n": jnp.int32(value)})
        checkpoints.wait()
        assert int(checkpoints.restore(5, {"n": jnp.int32(0)})["n"]) == 2
    assert os.listdir(folder) == ["5"]


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"n": jnp.int32(0), "w": jnp.zeros(4)}, r"w has shape \(3,\), wanted \(4,\)"),
        ({"v": jnp.zeros(3)}, r"v is missing, wanted \(3,\)"),
        ({"w": jnp.zeros(3, jnp.bfloat16)}, "w has type float32, wanted bfloat16"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_is_no_damage(folder, like, words):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"n": jnp.int32(1), "w": jnp.zeros(3)})
        checkpoints.wait()
        with pytest.raises(Exception, match=f"^checkpoint 1 does not fit the model of this recipe: {words}"):
            checkpoints.restore(1, like)


def test_only_the_arrays_that_are_asked_for_are_read(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"a": jnp.arange(5.0), "b": jnp.arange(7.0), "c": jnp.arange(9.0)})
        checkpoints.wait()
        data = bytearray((folder / "1" / "arrays-0.bin").read_bytes())
        data[0] ^= 1  # of a
        Path(folder / "1" / "arrays-0.bin").write_bytes(data)
        np.testing.assert_array_equal(checkpoints.restore(1, {"c": jnp.zeros(9)})["c"], np.arange(9.0))
        with pytest.raises(Exception, match="a is not what was saved"):
            checkpoints.restore(1, {"a": jnp.zeros(5)})


def test_the_end_of_a_run_waits_for_its_save(folder, monkeypatch):
    ends, commit, leave = threading.Event(), CheckpointFolder.commit, Checkpoints.__exit__

    def commit_in_the_end(self, attempt, manifest):
        assert ends.wait(60)
        commit(self, attempt, manifest)

    def end(self, *error):
        ends.set()
        leave(self, *error)

    monkeypatch.setattr(CheckpointFolder, "commit", commit_in_the_end)
    monkeypatch.setattr(Checkpoints, "__exit__", end)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"n": jnp.int32(1)})
        assert not checkpoints.is_saved(1)
    assert os.listdir(folder) == ["1"]
    assert (folder.parent / "last-checkpoint.json").exists()


def test_a_run_whose_folder_now_belongs_to_another_one_ends_and_changes_nothing_there(folder, state):
    """The folder was moved away, and the same command started again."""
    run, other_state = folder.parent / "run", state | {"n": jnp.int32(6)}
    first, second = FolderLock(run), FolderLock(run)
    with first, second:
        first.acquire()
        with Checkpoints(run / "checkpoints", keep=1, check_owner=first.check) as ours:
            ours.save(5, state)
            ours.wait()
            run.rename(folder.parent / "moved")
            second.acquire()
            with Checkpoints(run / "checkpoints", keep=1, check_owner=second.check) as theirs:
                theirs.save(5, other_state)
                theirs.wait()
                ours.save(6, state)
                with pytest.raises(FolderReplacedError, match="is now trained by process"):
                    ours.wait()
                ours._join()
                with pytest.raises(UserError, match="is now trained by process"):
                    ours.move_aside(5)
                ours._store.delete(5)
                assert os.listdir(run / "checkpoints") == ["5"]
                assert int(theirs.restore(5, state)["n"]) == 6
