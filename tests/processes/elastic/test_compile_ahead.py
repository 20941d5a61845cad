"""What an elastic launch compiles ahead: for which sizes of the pod, once each, and never in the way of the run."""

import json
import os
import time

import pytest

from podscale.processes.elastic.compile_ahead import Precompiler, is_cache_enabled, list_sizes_ahead

TIMEOUT_S = 300


@pytest.mark.parametrize(
    ("processes", "sizes", "limits", "ahead"),
    [
        (4, [1, 2, 4, 8], (1, 4), [4, 2, 1]),
        (4, [1, 2, 4, 8], (2, 4), [4, 2]),
        (5, [1, 2, 3, 4, 5], (1, 4), [4, 3, 2]),  # with a spare, the first loss changes nothing
        (64, [8, 16, 32, 64], (1, 64), [64, 32]),
        (2, [], (1, 2), []),  # not yet known
    ],
)
def test_the_sizes_after_the_next_three_losses_are_compiled(processes, sizes, limits, ahead):
    assert list_sizes_ahead(processes, sizes, *limits) == ahead


@pytest.mark.parametrize(("value", "is_enabled"), [("false", False), ("0", False), ("true", True), ("", True)])
def test_without_a_cache_nothing_is_compiled_ahead(value, is_enabled, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", value)
    assert is_cache_enabled() == is_enabled


@pytest.fixture
def make_precompiler(tmp_path, monkeypatch):
    """Make one, whose temporary folders are in `tmp_path`."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    made = []

    def make(*command, is_enabled=True):
        made.append(Precompiler(["train", *command], tmp_path, is_enabled=is_enabled))
        return made[-1]

    yield make
    for each in made:
        each.close()


def list_started(tmp_path):
    """Return the processes that were started for a size."""
    lines = [line for path in tmp_path.glob("tmp/*/elastic.jsonl") for line in path.read_text().splitlines()]
    return [event["pid"] for event in map(json.loads, lines) if event["event"] == "start"]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_nothing_is_started_for_sizes_that_train_or_where_it_is_of_no_use(tmp_path, make_precompiler):
    trained, disabled = make_precompiler(), make_precompiler(is_enabled=False)
    trained.note_training(2)
    assert trained.advance([2]) is None
    assert disabled.advance([1]) is None
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.heavy
def test_a_size_that_cannot_train_is_tried_once_and_leaves_nothing(tmp_path, make_precompiler):
    compiling, deadline = make_precompiler("no-such-recipe"), time.monotonic() + TIMEOUT_S
    while (result := compiling.advance([1])) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (result["size"], result["status"]) == (1, 2)
    assert "no-such-recipe" in (tmp_path / "compile-ahead.log").read_text()
    assert compiling.advance([1]) is None
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.heavy
def test_a_size_that_is_about_to_train_is_left_to_the_processes_that_train(tmp_path, make_precompiler):
    compiling, deadline = make_precompiler("digits"), time.monotonic() + TIMEOUT_S
    assert compiling.advance([1]) is None
    while not (started := list_started(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    compiling.give_way(2)
    assert is_alive(started[0])
    compiling.give_way(1)
    while is_alive(started[0]):  # until it is reaped
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list((tmp_path / "tmp").iterdir()) == []
