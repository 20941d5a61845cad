"""The progress line: what it shows where there is little space."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from podscale.runs.events import Event
from podscale.runs.ledger import PhaseTimer
from podscale.training.reporters.progress import Bar, Lines, ProgressReporter

TEXT = "step 207/345  loss 0.478  val 81.43%  124 images/s  epoch 24.0  train accuracy 96.9%  input wait 0%"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_of_any_width_shows_bar_time_left_and_step(width):
    console = Console(width=width, force_terminal=True, file=io.StringIO(), color_system=None)
    bar = Bar(console, total=345, done=0)
    for step in (100, 207):
        bar.update(step, TEXT)
        bar._bar.refresh()
    bar.close()
    (line,) = console.file.getvalue().rpartition("\x1b[2K")[2].splitlines()[:1]
    assert len(line) <= width
    assert line.startswith("━━━━━━")
    assert re.search(r"\d:\d\d:\d\d left  step 207/345  loss 0.478", line)


def test_a_log_says_how_much_time_is_left_in_hours_minutes_and_seconds():
    console = Console(width=200, file=io.StringIO())
    Lines(console, total=345, done=0).update(207, TEXT)
    assert re.fullmatch(re.escape(TEXT) + r"  \d+:\d\d:\d\d left\n", console.file.getvalue())


def test_the_bar_shows_an_evaluation_at_once():
    console = Console(width=200, force_terminal=True, file=io.StringIO(), color_system=None)
    ledger = PhaseTimer()
    with ledger.measure("input wait"):
        show = ProgressReporter(SimpleNamespace(steps=40), ledger, console, start=0)
    show(Event("start", 0, 0.0, {}))
    show(Event("train", 20, 1.0, {"loss": 0.5, "images_per_s": 9.0, "accuracy": 0.5}, {"ends_call": True}))
    show(Event("eval", 20, 1.0, {"accuracy": 0.75, "examples": 360, "run_s": 2.0}))
    show.close()
    assert "step 20/40  loss 0.500  val 75.00%  9 images/s" in console.file.getvalue()
