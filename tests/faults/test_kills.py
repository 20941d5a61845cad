"""kill -9 at any moment, also while saving and deleting: the same command resumes, bit-identically."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from support.disturbed import Training, kill

MOMENTS = ("starting", "training", "saving", "deleting")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function that returns an undisturbed run of a number of epochs."""
    folder, trainings = tmp_path_factory.mktemp("whole"), {}

    def get_training(epochs, save_steps):
        if epochs not in trainings:
            trainings[epochs] = Training(folder / str(epochs), folder / "programs", epochs, save_steps)
            process = trainings[epochs].start()
            assert process.wait() == 0, trainings[epochs].log.read_text()[-2000:]
        return trainings[epochs]

    return get_training


def train_through_kills(undisturbed_training, folder, kills, seed):
    """Kill a training again and again, let it finish, compare it with the undisturbed one; return a record per kill."""
    draw, kills_done = random.Random(seed), []
    for round_ in itertools.count():
        training = dataclasses.replace(undisturbed_training, folder=folder / f"killed{round_}", slow_disk=True)
        kill_until_the_end(training, kills_done, kills, draw)
        assert training.read_updates() == undisturbed_training.read_updates()
        for ours, theirs in zip(training.read_arrays(), undisturbed_training.read_arrays(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        if len(kills_done) == kills:
            return kills_done


def kill_until_the_end(training, kills_done, kills, draw):
    """Kill and restart a training until it ends by itself, which may be before all kills are done."""
    first = len(kills_done)
    while True:
        process = training.start()
        kill_record = kill(training, process, draw.choice(MOMENTS), draw) if len(kills_done) < kills else None
        assert kill_record or process.wait() == 0, training.log.read_text()[-2000:]
        if len(kills_done) > first and training.has_started_training():
            kills_done[-1].resumed_step = training.find_resumed_step()
        if kill_record is None:
            return
        kills_done.append(kill_record)


def check_lost_updates(kills_done, save_steps):
    """A session resumes from the newest whole checkpoint; at most one interval is lost, and one more during a save.

    A save writes a checkpoint and then deletes the oldest one; until it is over, the next one waits.
    A session that is killed before its first update loses nothing more, but may have removed what was partly saved.
    """
    lost = 0
    for record in kills_done:
        assert record.resumed_step in (None, record.newest_checkpoint)
        before, lost = lost, record.last_step - record.newest_checkpoint
        during_save = record.saving or record.deleting
        assert lost <= (1 + during_save) * save_steps or (not record.trained and lost == before), record


@pytest.mark.slow
def test_a_run_killed_while_saving_and_deleting_ends_bit_identical(undisturbed, tmp_path):
    kills_done = train_through_kills(undisturbed(epochs=4, save_steps=10), tmp_path, kills=3, seed=3)
    check_lost_updates(kills_done, save_steps=10)


@pytest.mark.slow
def test_a_run_killed_at_fifty_random_moments_ends_bit_identical(undisturbed, tmp_path):
    kills_done = train_through_kills(undisturbed(epochs=80, save_steps=10), tmp_path, kills=50, seed=0)
    check_lost_updates(kills_done, save_steps=10)
    for moment in MOMENTS:
        lost = [record.last_step - record.newest_checkpoint for record in kills_done if record.moment == moment]
        print(f"{moment}: {len(lost)} kills, {sum(lost) / len(lost):.1f} updates lost, at most {max(lost)}")
    saving, deleting = (sum(getattr(record, name) for record in kills_done) for name in ("saving", "deleting"))
    print(f"{saving} while saving, {deleting} while deleting")
