"""Damaged files of every kind that is read: refused in words or harmless, in bounded memory and time."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import fuzz

FUZZ = Path(fuzz.__file__)


def fuzzed(cases, timeout_s):
    done = subprocess.run(
        [sys.executable, str(FUZZ), "--cases", str(cases)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.partition(":")[0] for line in done.stdout.splitlines()]


def test_thousands_of_damaged_files_are_refused_or_harmless():
    assert fuzzed(2000, 600) == list(fuzz.TARGETS)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_files_are_refused_or_harmless():
    assert fuzzed(100_000, 7200) == list(fuzz.TARGETS)


def test_the_fuzzer_damages_nearly_everything_and_the_same_each_time():
    seeds = [bytes(range(200)), b"abc" * 50]
    first = [fuzz.harmed(seeds, random.Random(n)) for n in range(200)]
    assert first == [fuzz.harmed(seeds, random.Random(n)) for n in range(200)]
    assert sum(data not in seeds for data in first) > 190
    assert len(set(first)) > 190


def test_the_fuzzer_finds_what_is_no_refusal(monkeypatch, tmp_path):
    """An exception that is no sentence for the user, and a case that does not end."""

    def broken(data):
        if not data:
            while True:
                pass
        raise KeyError("oops")

    monkeypatch.setattr(fuzz.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setitem(fuzz.TARGETS, "broken", (broken, lambda: [b"x"], 1))
    with pytest.raises(fuzz.FoundError, match="broken: KeyError: 'oops'"):
        fuzz.tried("broken", b"abc")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"abc"]
    monkeypatch.setattr(fuzz, "MOST_S", 0.3)
    before = signal.signal(signal.SIGPROF, fuzz._too_slow)
    try:
        with pytest.raises(fuzz.FoundError, match="of work, or"):
            fuzz.tried("broken", b"")
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(
    "text",
    [
        "[data]\nmean = " + "[" * 5000,
        "x = {" * 3000,
        "a." * 5000 + "b = 1",
        "[data]\nclasses = " + "9" * 6000,
        "[train]\nseed = 0x" + "f" * 5000,
        "[data]\nmean = [0x" + "f" * 5000 + ", 1, 1]",
        "[data]\nsource = 0x" + "f" * 5000,
    ],
)
def test_recipes_of_great_depth_or_length_are_refused(text):
    with pytest.raises(fuzz.UserError):
        fuzz.recipes.parse(text)
