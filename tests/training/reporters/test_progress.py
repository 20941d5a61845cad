"""The progress line: what it shows where there is little space."""

import io
import re

import pytest
from rich.console import Console

from podscale.training.reporters.progress import Bar, Lines

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
