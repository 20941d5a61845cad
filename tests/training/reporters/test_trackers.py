"""Trackers and callbacks: real libraries in their offline modes, and real trainings."""

import errno
import functools
import importlib.util
import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from support import short_run

import podscale
from podscale import recipe as recipes
from podscale.errors import UserError
from podscale.runs.events import Event
from podscale.runs.folder import Run
from podscale.training.reporters import tensorboard_events, trackers
from podscale.training.reporters.files import JournalReporter, TrackerReporter

EVENTS = [
    Event("start", 0, 0.0, {"devices": 1, "kind": "cpu"}),
    Event("train", 1, 0.1, {"loss": 2.0, "spent": {"train": 0.1}}),
    Event("train", 2, 0.2, {"loss": 1.5, "spent": {"train": 0.1}}),
    Event("eval", 2, 0.2, {"accuracy": 0.5, "examples": 10}),
]


def skip_without(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run", recipes.load_recipe("digits"), {}, ("0", "1"))


def write_events(run, *names):
    for name in trackers.list_trackers(names):
        tracker = trackers.open_tracker(run, name)
        for event in EVENTS:
            tracker.write(event)
        tracker.close()


def test_tensorboard_is_always_written(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_events(run)
    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.5)]
    assert set(events.Tags()["scalars"]) == {"start/devices", "train/loss", "eval/accuracy", "eval/examples"}


def test_event_files_are_byte_for_byte_those_of_tensorboard(tmp_path):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    scalars = {"train/loss": 0.1, "train/größe": float("nan"), "empty": 0.0, "large": -1e300, "long" * 40: 3.0}
    with (tmp_path / "theirs").open("wb") as file:
        writer = RecordWriter(file)
        writer.write(event_pb2.Event(wall_time=1.5, file_version="brain.Event:2").SerializeToString())
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = event_pb2.Event(wall_time=2.5, step=300, summary=summary_pb2.Summary(value=values))
        writer.write(event.SerializeToString())
        writer.flush()
    ours = tensorboard_events.encode_version(1.5) + tensorboard_events.encode_scalars(2.5, 300, scalars)
    assert ours == (tmp_path / "theirs").read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_tensorboard_continues_after_a_full_disk(run, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker, _, second, third = trackers.TensorBoard(run), *EVENTS[:3]
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"))
        with pytest.raises(OSError, match="No space left"):
            tracker.write(second)
    tracker.write(third)
    tracker.close()
    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(2, 1.5)]


@skip_without("wandb")
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_logs_offline(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_events(run, "wandb")
    (log,) = run.folder.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/loss" in log.read_bytes()


@skip_without("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_logs_to_files(run, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    write_events(run, "mlflow")
    write_events(run, "mlflow")  # a resumed run continues as the same run
    (logged,) = mlflow.search_runs(experiment_names=["podscale"], output_format="list")
    assert logged.data.metrics["train/loss"] == 1.5
    assert logged.data.params["batch.size"] == "128"


def test_a_tracker_that_is_not_installed_is_named_in_the_error(run, monkeypatch):
    monkeypatch.setitem(
        trackers.TRACKERS._parts, "absent", lambda _: trackers._import_tracker("no_such_module", "no-such")
    )
    with pytest.raises(UserError, match="no-such is not installed; pip install no-such"):
        trackers.open_tracker(run, "absent")


def test_a_tracker_that_cannot_start_is_reported_in_one_sentence(run, monkeypatch):
    def fail(_):
        raise RuntimeError("no\nkey")

    monkeypatch.setitem(trackers.TRACKERS._parts, "broken", fail)
    with pytest.raises(UserError, match="a tracker could not be started: no key"):
        trackers.open_tracker(run, "broken")


class Disconnected:
    """A tracker whose server is away; every message differs, as those of HTTP clients do."""

    def __init__(self, run):
        self.attempts = 0

    def write(self, event):
        self.attempts += 1
        raise RuntimeError(f"connection {self.attempts} refused")

    def close(self):
        raise RuntimeError("still away")


@pytest.mark.heavy
def test_a_tracker_that_fails_in_any_way_is_named_in_one_warning_and_training_ends_well(tmp_path, monkeypatch):
    recorder, output = Recorder(), io.StringIO()
    monkeypatch.setitem(trackers.TRACKERS._parts, "away", Disconnected)
    monkeypatch.setitem(trackers.TRACKERS._parts, "notes", lambda _: recorder)
    console = Console(file=output, width=200)
    summary = short_run.train(tmp_path / "run", track=["away", "notes"], console=console)
    assert (summary["steps"], summary["accuracy"]) == (23, recorder.events[-2].values["accuracy"])
    assert recorder.closed == 1
    assert output.getvalue().count("tracker away failed:") == 1
    assert "warning: tracker away failed: connection 1 refused; training continues" in output.getvalue()


def test_a_tracker_that_the_disk_refuses_at_the_start_leaves_the_others(run, monkeypatch):
    def refuse(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal, recorder = JournalReporter(run, 0), Recorder()
    monkeypatch.setitem(trackers.TRACKERS._parts, "broken", refuse)
    monkeypatch.setitem(trackers.TRACKERS._parts, "notes", lambda _: recorder)
    reporter = TrackerReporter(run, ["broken", "notes"], journal)
    journal(EVENTS[0])
    with pytest.raises(trackers.TrackerError, match=r"tracker broken failed: .*Input/output error"):
        reporter(EVENTS[0])
    reporter(EVENTS[1])
    reporter.close()
    journal.close()
    assert recorder.events == EVENTS[:2]
    assert list((run.folder / "tensorboard").iterdir())


def test_an_unknown_tracker_is_refused_before_the_run_starts(tmp_path):
    with pytest.raises(UserError, match="did you mean wandb"):
        podscale.train(recipes.load_recipe("digits"), folder=tmp_path / "run", track=["wandbb"])
    assert not (tmp_path / "run").exists()


# --- callbacks -------------------------------------------------------------------------------------------------------


class Recorder:
    """A tracker and a callback that record events."""

    def __init__(self, stop_after=None):
        self.events, self.closed, self.stop_after = [], 0, stop_after

    def write(self, event):
        self.events.append(event)

    def close(self):
        self.closed += 1

    def __call__(self, event):
        self.events.append(event)
        return event.kind == "eval" and event.step == self.stop_after


@pytest.fixture
def train(tmp_path):
    """A function that trains in one folder."""
    recipe = recipes.load_recipe("digits").override({"train.epochs": 4, "train.eval_epochs": 1, "model.width": 4})
    pod, console = podscale.find_pod(virtual="1x1"), Console(quiet=True)
    return functools.partial(podscale.train, recipe, pod=pod, folder=tmp_path / "run", console=console)


@pytest.mark.heavy
def test_a_callback_that_raises_ends_the_run_after_its_report_is_written_and_the_run_resumes(train, tmp_path):
    def fail(event):
        if event.kind == "train" and event.step == 14:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        train(callbacks=[fail])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "running or interrupted when this page was written" in page
    assert "From the evaluation after step 12" in page
    callback = Recorder(stop_after=23)
    assert train(callbacks=[callback])["steps"] == 23
    assert callback.events[0].step == 12


@pytest.mark.heavy
def test_callbacks_and_trackers_get_every_event_and_callbacks_may_stop_the_run(train, tmp_path, monkeypatch):
    tracker, callback = Recorder(), Recorder(stop_after=23)
    monkeypatch.setitem(trackers.TRACKERS._parts, "notes", lambda _: tracker)
    summary = train(callbacks=[callback], track=["notes"])
    assert summary["steps"] == 23
    assert callback.events == tracker.events
    assert (tracker.closed, callback.closed) == (1, 1)
    kinds = [event.kind for event in callback.events]
    assert (kinds[0], kinds[-1], kinds.count("train"), kinds.count("eval")) == ("start", "end", 23, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [(event.kind, event.step) for event in callback.events]
    assert set(callback.events[1].values["spent"]) >= {"train"}
    run = podscale.Run.load(tmp_path / "run")
    assert run.mistakes()["step"] == 23
    assert sum(run.mistakes()["correct"]) == round(summary["accuracy"] * 360)


class Archive(Recorder):
    """A callback that loses plan.json, asks for more kinds of events, and whose own disk refuses one of them."""

    kinds, writes = ("train", "save", "warning", "end"), True

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __call__(self, event):
        super().__call__(event)
        if event.kind == "train":
            (self.folder / "plan.json").unlink(missing_ok=True)
        if event.kind == "save":
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_report_that_cannot_be_rendered_and_a_callback_that_cannot_write_become_warnings(tmp_path):
    callback = Archive(tmp_path / "run")
    assert short_run.train(tmp_path / "run", callbacks=[callback])["steps"] == 23
    kinds = [event.kind for event in callback.events]
    assert (kinds.count("train"), kinds.count("save"), kinds.count("eval"), kinds.count("end")) == (23, 2, 0, 1)
    messages = [event.values["message"] for event in callback.events if event.kind == "warning"]
    assert any("report.html failed: the run in" in message and "has no plan" in message for message in messages)
    assert any("cannot be written: Input/output error; existing" in message for message in messages)
    assert callback.closed == 1


def test_a_callback_that_asks_for_an_unknown_kind_is_refused_before_the_run_starts(tmp_path):
    callback = Recorder()
    callback.kinds = ("evaluation",)
    with pytest.raises(UserError, match="a callback asks for events of kind 'evaluation'"):
        short_run.train(tmp_path / "run", callbacks=[callback])
    assert not (tmp_path / "run").exists()
