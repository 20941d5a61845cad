"""The report page: from run folders in every state, and drawn by a real browser."""

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.options import Options
from podscale.pod import Pod, named
from podscale.report import page
from podscale.run import Run

EVIL = '<script>document.documentElement.dataset.error = "ran"</script><img src=x onerror="alert(1)">&amp;'
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed to open the page with")


# --- run folders -----------------------------------------------------------------------------------------------------


def train_line(step, **values):
    rest = {"loss": 2.5 / step, "accuracy": 1 - 1 / step, "learning_rate": 0.01 * step, "images_per_s": 1280.0}
    return {"event": "train", "step": step, "grad_norm": 1.0} | rest | values


def eval_line(step, seconds, accuracy):
    found = {"accuracy": accuracy, "accuracy_top5": 1.0, "loss": 0.3, "examples": 360, "seconds": seconds}
    return {"event": "eval", "step": step} | found


def start_line(step):
    return {"event": "start", "step": step, "devices": 4, "kind": "cpu"}


def finished_lines():
    lines = [start_line(0), *map(train_line, range(1, 338))]
    lines += [eval_line(step, step / 10, accuracy) for step, accuracy in ((112, 0.7), (225, 0.95), (337, 0.925))]
    return [*sorted(lines, key=lambda line: line["step"]), {"event": "end", "step": 337, "seconds": 34.0}]


SUMMARY = {
    "run": "somewhere",
    "recipe": "digits",
    "steps": 337,
    "accuracy": 0.925,
    "best_accuracy": 0.95,
    "images_per_s": 4321.0,
    "train_s": 34.0,
    "compile_s": 3.0,
    "seconds": {"start": 1.0, "compile": 3.0, "train": 30.0, "checkpoint": 3.5, "other": 0.0},
}


def make_run(folder, lines=(), summary=None, recipe=None, pod=None, summation="torus", classes=("0", "1")):
    recipe = recipe or recipes.load("digits")
    plan = plans.make(recipe, pod or Pod("cpu", 2, 2), plans.Counts(1437, 360, 10), Options(summation=summation))
    run = Run.create(folder, recipe, plan.to_dict(), tuple(classes))
    if lines:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return run


@pytest.fixture
def finished(tmp_path):
    return make_run(tmp_path / "run", finished_lines(), SUMMARY)


class Reader(HTMLParser):
    """The elements of a page, its text, and the JSON that it carries."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self.data = [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag == "script" and attributes.get("id") == "data" and self.data is None:
            self.data = json.loads(data)
        elif tag not in ("script", "style"):
            self.words += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def written(run):
    return page.write(run).read_text()


# --- what the page says ----------------------------------------------------------------------------------------------


def test_finished_run_tells_accuracy_time_and_rate(finished):
    read = Reader(written(finished))
    for words in ("digits", "92.50%", "95.00%", "0.57", "34.0 s from the first batch", "4,321", "Step 337 of 337"):
        assert words in read.words
    for words in ("37.5 s of wall time", "30.0 s", "80.0%", "tiles of 1x2 chips", "trust = 0.02"):
        assert words in read.words
    assert read.data["val"] == {"step": [112, 225, 337], "loss": [0.3] * 3, "accuracy": [0.7, 0.95, 0.925]}


def test_page_is_written_whole_or_not_at_all(finished):
    path = page.write(finished)
    assert path == finished.folder / "report.html"
    assert not list(finished.folder.glob("*.part"))


def test_page_needs_nothing_from_outside(finished):
    text = written(finished)
    for tag, attributes in Reader(text).elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "action", "style"} & attributes.keys()
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|@import|url\(|sendBeacon|eval\(", text)
    assert "default-src 'none'" in text
    assert text.isascii()


def test_names_cannot_smuggle_in_elements(tmp_path):
    recipe = recipes.override(dataclasses.replace(recipes.load("digits"), name=EVIL), {"data.path": f"/data/{EVIL}"})
    run = make_run(tmp_path / "x<b>y", finished_lines(), SUMMARY, recipe, classes=(EVIL, "Käfer"))
    plan = json.loads((run.folder / "plan.json").read_text())
    plan["summation"], plan["pod"]["kind"] = "</script>" + EVIL, EVIL
    (run.folder / "plan.json").write_text(json.dumps(plan))
    honest, read = Reader(written(make_run(tmp_path / "honest", finished_lines(), SUMMARY))), Reader(written(run))
    for tag in ("script", "img", "b"):
        assert len(read.all(tag)) == len(honest.all(tag)) - (2 if tag == "b" else 0)  # three phases there, one here
    assert read.data["pod"]["summation"] == "</script>" + EVIL
    assert EVIL in read.words
    assert "Käfer" in read.words
    assert "x<b>y" in read.words


@pytest.mark.parametrize("lines", [(), (start_line(0),), (start_line(0), train_line(1), train_line(2))])
def test_unfinished_run_has_a_page(tmp_path, lines):
    read = Reader(written(make_run(tmp_path / "run", lines)))
    assert "not evaluated yet" in read.words
    assert "Known when the run is at its end." in read.words
    assert read.data["train"]["step"] == [line["step"] for line in lines if line["event"] == "train"]


def test_time_of_an_unfinished_run_counts_the_steps_after_the_last_evaluation(tmp_path):
    lines = [start_line(0), train_line(1), eval_line(1, 5.0, 0.5), train_line(2), train_line(3)]
    assert "5.2 s from the first batch" in Reader(written(make_run(tmp_path / "run", lines))).words  # 128 / 1280 a step


def test_resumed_run_adds_its_sessions_and_marks_where_it_resumed(tmp_path):
    lines = finished_lines()
    at = next(i for i, line in enumerate(lines) if line["event"] == "eval") + 1
    read = Reader(written(make_run(tmp_path / "run", [*lines[:at], start_line(112), *lines[at:]], SUMMARY)))
    assert read.data["resumes"] == [112]
    assert "45.2 s from the first batch, in 2 sessions" in read.words  # 11.2 before and 34 after
    assert "the last of 2 sessions" in read.words


def test_steps_done_again_count_as_they_came_out_last(tmp_path):
    lines = [start_line(0), train_line(1), train_line(2, loss=9.0), start_line(1), train_line(2, loss=1.5)]
    read = Reader(written(make_run(tmp_path / "run", lines)))
    assert read.data["train"]["step"] == [1, 2]
    assert read.data["train"]["loss"] == [2.5, 1.5]


def test_summary_of_an_earlier_session_is_not_taken_for_this_one(tmp_path):
    lines = [*finished_lines(), start_line(337), train_line(338)]
    read = Reader(written(make_run(tmp_path / "run", lines, SUMMARY)))
    assert "Known when the run is at its end." in read.words
    assert "4,321" not in read.words


def test_what_is_not_a_number_leaves_a_gap(tmp_path):
    lines = [start_line(0), train_line(1), train_line(2, loss=float("nan")), train_line(3, loss=float("inf"))]
    read = Reader(written(make_run(tmp_path / "run", lines)))
    assert read.data["train"]["loss"] == [2.5, None, None]
    assert "not a number" in read.words


def test_long_runs_are_averaged_down(tmp_path):
    read = Reader(written(make_run(tmp_path / "run", [start_line(0), *map(train_line, range(1, 5001))])))
    assert len(read.data["train"]["step"]) == page.POINTS
    assert read.data["train"]["step"][:2] == [3, 8]
    assert "the mean of 5 steps" in read.words


def paper_run(folder, summation="torus"):
    return make_run(folder, recipe=recipes.load("resnet50-imagenet-32k"), pod=named("v3:32x32"), summation=summation)


def test_large_pods_are_drawn_as_an_excerpt_and_say_so(tmp_path):
    read = Reader(written(paper_run(tmp_path / "run")))
    assert "excerpt of 8 x 8" in read.words
    assert "takes 124 hops" in read.words
    assert "would take 2,046" in read.words


# --- in a browser ----------------------------------------------------------------------------------------------------


def opened(run, folder, *flags):
    """The page's elements after its script has run for three seconds."""
    quiet = "--no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-gpu"
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [BROWSER, "--headless=new", "--no-sandbox", *quiet.split(), profile, *flags, "--virtual-time-budget=3000"]
    address = page.write(run).resolve().as_uri()
    done = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=60, check=True)
    read = Reader(done.stdout)
    (html,) = read.all("html")
    assert "data-error" not in html, html
    assert html.get("data-drawn") == "yes"
    return read


def curves(read, kind):
    return [p["d"] for p in read.all("path") if p.get("class") == kind]


@in_browser
def test_browser_draws_curves_and_pod(finished, tmp_path):
    read = opened(finished, tmp_path)
    assert [d.count("L") for d in curves(read, "train")] == [336, 336]  # loss and accuracy
    assert [d.count("L") for d in curves(read, "val")] == [2, 2]
    assert [d.count("L") for d in curves(read, "rate")] == [336]
    assert len([r for r in read.all("rect") if r.get("class") == "chip"]) == 4
    assert "Pause" in read.words


@in_browser
@pytest.mark.parametrize(
    "lines", [(), (start_line(0), train_line(1)), (start_line(0), train_line(1, loss=float("nan")))]
)
def test_browser_opens_unfinished_runs(tmp_path, lines):
    opened(make_run(tmp_path / "run", lines), tmp_path)


@in_browser
@pytest.mark.parametrize(
    ("summation", "shape"),
    [*((s, "3x4") for s in ("torus", "torus4", "ring", "xla")), *(("torus", s) for s in ("1x1", "1x4", "4x1"))],
)
def test_browser_shows_every_summation_to_its_end(tmp_path, monkeypatch, summation, shape):
    rows, cols = map(int, shape.split("x"))
    recipe = recipes.override(recipes.load("digits"), {"batch.size": 192, "batch.span": 16})
    acted(
        monkeypatch,
        "const h = byId('hop');for (let i = 0; i <= +h.max; i++) { h.value = i; h.dispatchEvent(new Event('input')); }",
    )
    read = opened(make_run(tmp_path / "run", recipe=recipe, pod=Pod("cpu", rows, cols), summation=summation), tmp_path)
    chips = rows * cols
    assert len([r for r in read.all("rect") if r.get("class") == "chip"]) == chips
    assert len([r for r in read.all("rect") if r.get("class") == "held done"]) == chips
    assert len([p for p in read.all("path") if "link" in p.get("class", "")]) == chips * ((rows > 1) + (cols > 1))


@in_browser
def test_browser_runs_nothing_that_a_name_smuggles_in(tmp_path):
    recipe = dataclasses.replace(recipes.load("digits"), name=EVIL)
    opened(make_run(tmp_path / "run", finished_lines(), SUMMARY, recipe, classes=(EVIL,)), tmp_path)


@in_browser
def test_browser_obeys_the_wish_for_less_motion(finished, tmp_path):
    assert "Pause" not in opened(finished, tmp_path, "--force-prefers-reduced-motion").words


def acted(monkeypatch, script):
    """Has the page's script do something at its end, as a person would."""
    part = page._part
    monkeypatch.setattr(page, "_part", lambda name: part(name) + (script if name == "page.js" else ""))


@in_browser
def test_browser_answers_to_slider_switch_and_pointer(finished, tmp_path, monkeypatch):
    plain = opened(finished, tmp_path)
    acted(
        monkeypatch,
        "byId('smoothing').value = 0; byId('smoothing').dispatchEvent(new Event('input')); byId('log-loss').click();"
        "const p = document.querySelector('#plot-accuracy svg'), b = p.getBoundingClientRect();"
        "p.dispatchEvent(new PointerEvent('pointermove', { clientX: b.right - 14, clientY: b.top + 50 }));",
    )
    read = opened(finished, tmp_path)
    assert not curves(read, "raw train")
    assert len(curves(plain, "raw train")) == 2
    assert curves(read, "val")[0] != curves(plain, "val")[0]  # loss, now on a log scale
    assert "step 337, epoch 30.0\ntraining 99.70 %\nvalidation 92.50 % at step 337" in read.words
