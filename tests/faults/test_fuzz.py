"""Damaged files of every kind that is read are refused or harmless, in bounded memory and time."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import fuzz

FUZZ = Path(fuzz.__file__)


def run_fuzzer(cases, timeout_s):
    process = subprocess.run(
        [sys.executable, str(FUZZ), "--cases", str(cases)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [line.partition(":")[0] for line in process.stdout.splitlines()]


def test_thousands_of_damaged_files_are_refused_or_harmless():
    assert run_fuzzer(2000, 600) == list(fuzz.TARGETS)


@pytest.mark.slow
def test_a_hundred_thousand_damaged_files_are_refused_or_harmless():
    assert run_fuzzer(100_000, 7200) == list(fuzz.TARGETS)


def test_the_fuzzer_changes_nearly_every_seed_and_is_deterministic():
    seeds = [bytes(range(200)), b"abc" * 50]
    first = [fuzz.damage_seed(seeds, random.Random(n)) for n in range(200)]
    assert first == [fuzz.damage_seed(seeds, random.Random(n)) for n in range(200)]
    assert sum(data not in seeds for data in first) > 190
    assert len(set(first)) > 190


def test_the_fuzzer_reports_other_exceptions_and_timeouts(monkeypatch, tmp_path):
    """An exception other than `UserError`, and a case that does not end, are failures."""

    def read_broken(data):
        if not data:
            while True:
                pass
        raise KeyError("oops")

    monkeypatch.setattr(fuzz.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setitem(fuzz.TARGETS, "broken", (read_broken, lambda: [b"x"], 1))
    with pytest.raises(fuzz.TargetError, match="broken: KeyError: 'oops'"):
        fuzz.run_case("broken", b"abc")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"abc"]
    monkeypatch.setattr(fuzz, "MAX_S", 0.3)
    before = signal.signal(signal.SIGPROF, fuzz._raise_timeout)
    try:
        with pytest.raises(fuzz.TargetError, match="of work, or"):
            fuzz.run_case("broken", b"")
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
def test_very_deep_or_long_recipes_are_refused(text):
    with pytest.raises(fuzz.UserError):
        fuzz.recipes.parse_recipe(text)
