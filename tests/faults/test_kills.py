"""kill -9 at any moment, also in the middle of saving and deleting: the same command goes on, to the same bits."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from support.disturbed import Training, kill

MOMENTS = ("starting", "training", "saving", "deleting")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nothing happens to, by its length."""
    place, known = tmp_path_factory.mktemp("whole"), {}

    def find(epochs, save_steps):
        if epochs not in known:
            known[epochs] = Training(place / str(epochs), place / "programs", epochs, save_steps)
            process = known[epochs].start()
            assert process.wait() == 0, known[epochs].said.read_text()[-2000:]
        return known[epochs]

    return find


def survived(whole, place, kills, seed):
    """Kills a training again and again, lets it come to its end, and compares; returns what was found at each kill."""
    draw, found = random.Random(seed), []
    for round_ in itertools.count():
        training = dataclasses.replace(whole, folder=place / f"killed{round_}", slow_disk=True)
        _one_training(training, found, kills, draw)
        assert training.updates() == whole.updates()
        for one, other in zip(training.arrays(), whole.arrays(), strict=True):
            np.testing.assert_array_equal(one, other)
        if len(found) == kills:
            return found


def _one_training(training, found, kills, draw):
    """Until it ends by itself, which it may do before all kills were done."""
    first = len(found)
    while True:
        process = training.start()
        late = kill(training, process, draw.choice(MOMENTS), draw) if len(found) < kills else None
        assert late or process.wait() == 0, training.said.read_text()[-2000:]
        if len(found) > first and training.trains():
            found[-1].resumed = training.resumed()
        if late is None:
            return
        found.append(late)


def check(found, save_steps):
    """A session goes on from the newest whole checkpoint; what is lost is an interval, and one more while saving.

    One that is killed before its first update loses nothing more, but may have cleared away what was half saved.
    """
    lost = 0
    for one in found:
        assert one.resumed in (None, one.finished)
        before, lost = lost, one.step - one.finished
        assert lost <= (1 + one.saving) * save_steps or (not one.trained and lost == before), one


@pytest.mark.slow
def test_killed_while_saving_and_while_deleting_a_run_ends_with_the_same_bits(undisturbed, tmp_path):
    found = survived(undisturbed(epochs=4, save_steps=10), tmp_path, kills=3, seed=3)
    check(found, save_steps=10)


@pytest.mark.slow
def test_killed_at_fifty_random_moments_a_run_ends_with_the_same_bits(undisturbed, tmp_path):
    found = survived(undisturbed(epochs=80, save_steps=10), tmp_path, kills=50, seed=0)
    check(found, save_steps=10)
    for moment in MOMENTS:
        lost = [one.step - one.finished for one in found if one.moment == moment]
        print(f"{moment}: {len(lost)} kills, {sum(lost) / len(lost):.1f} updates lost, at most {max(lost)}")
    print(f"{sum(one.saving for one in found)} while saving, {sum(one.deleting for one in found)} while deleting")
