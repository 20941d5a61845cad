"""A disk that is full when the summary is written: it is written later, or its absence is an error."""

import errno
import json
import os

import pytest
from support.short_run import OPTIONS

from podscale.cli import main as cli
from podscale.training.reporters import accounts

USER_ERROR = 2
TRAIN = ["train", "digits", *OPTIONS, "--json", "--run"]


@pytest.fixture
def refuse_summary(monkeypatch):
    """A function that lets the disk refuse the summary, so many times; -1: always."""

    def refuse(times):
        write, refusals = accounts.write_atomically, iter(range(times)) if times >= 0 else iter(int, 1)

        def write_or_refuse(path, text):
            if next(refusals, None) is not None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, text)

        monkeypatch.setattr(accounts, "write_atomically", write_or_refuse)
        monkeypatch.setattr(accounts, "RETRY_S", 0.01)
        monkeypatch.setattr(accounts, "SUMMARY_WAIT_S", 60.0 if times >= 0 else 0.05)

    return refuse


@pytest.mark.heavy
def test_a_summary_is_written_once_the_disk_has_space(refuse_summary, tmp_path, capfd):
    refuse_summary(3)
    assert cli.main([*TRAIN, str(tmp_path / "run")]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy"] == printed["accuracy"]


@pytest.mark.heavy
def test_a_run_without_a_summary_ends_with_its_result_and_an_error(refuse_summary, tmp_path, capfd):
    refuse_summary(-1)
    assert cli.main([*TRAIN, str(tmp_path / "run")]) == USER_ERROR
    result, messages = capfd.readouterr()
    assert json.loads(result)["steps"] == 23
    assert "did not accept summary.json for 0 s: No space left on device" in messages
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.heavy
def test_the_same_command_writes_a_summary_that_is_missing(tmp_path, capfd):
    assert cli.main([*TRAIN, str(tmp_path / "run")]) == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert cli.main([*TRAIN, str(tmp_path / "run")]) == 0
    assert "is already finished" in capfd.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 23
