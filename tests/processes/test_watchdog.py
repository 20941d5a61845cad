"""Which process a stuck run waits for."""

import json

from podscale.processes.watchdog import Beats


def make_beat(step, still_s):
    return json.dumps({"step": step, "part": "load, train", "still_s": still_s})


def test_a_process_that_no_longer_beats_is_furthest_behind():
    beats = Beats(timeout_s=8.0)
    for second in range(5, 9):
        beats.update({0: make_beat(12, second), 1: make_beat(13, 1.0), 2: make_beat(12, second)}, now=1000.0 + second)
    assert beats.find_furthest_behind(3) == 1
    assert beats.find_furthest_behind(4) == 3  # it has never given a beat


def test_among_processes_that_beat_the_fewest_updates_count_and_then_the_longest_stillness():
    beats = Beats(timeout_s=8.0)
    for second in range(5, 9):
        beats.update({0: make_beat(12, second), 1: make_beat(11, second), 2: make_beat(12, second + 2)}, now=second)
    assert beats.find_furthest_behind(3) == 1
    beats.update({1: make_beat(12, 1.0)}, now=9.0)
    assert beats.find_furthest_behind(3) == 2
