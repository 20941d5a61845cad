"""The report page and the comparison: from run folders in every state, and in a real browser."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import tarfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support.browser import BINARY, Browser

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.pod import Pod, named_pod
from podscale.report import compare, history, mistakes, page
from podscale.runs.folder import Run
from podscale.training.reporters.background import Background

EVIL = '<script>document.documentElement.dataset.error = "ran"</script><img src=x onerror="alert(1)">&amp;'
in_browser = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed to open the page with")


# --- run folders -----------------------------------------------------------------------------------------------------


def train_line(step, **values):
    rest = {"loss": 2.5 / step, "accuracy": 1 - 1 / step, "learning_rate": 0.01 * step, "images_per_s": 1280.0}
    spent = {"input wait": 0.01, "train": 0.09} | ({"evaluate": 0.2} if step % 112 == 0 else {})
    return {"event": "train", "step": step, "grad_norm": 1.0, "spent": spent} | rest | values


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
    "goodput": 0.8,
    "step": {
        "predicted_s": 0.05,
        "measured_s": 0.1,
        "differs_most": "devices",
        "predicted_parts_s": {"devices": 0.045, "input wait": 0.005},
        "measured_parts_s": {"devices": 0.09, "input wait": 0.01},
    },
}
ENVIRONMENT = {
    "environment": {"system": "Linux-6", "processor": "EPYC", "cores": 2, "memory_bytes": 2**34}
    | {"accelerators": "4 x cpu", "settings": {"XLA_FLAGS": "--fast"}, "source": "0123456789abcdef"},
    "versions": {"podscale": "0.1.0", "jax": "0.10.2"},
    "data_digest": "00c0ffee",
}
TEN = tuple(map(str, range(10)))


def make_run(folder, lines=(), summary=None, recipe=None, pod=None, summation="torus", classes=TEN):
    recipe = recipe or recipes.load_recipe("digits")
    plan = plans.make_plan(recipe, pod or Pod("cpu", 2, 2), plans.Counts(1437, 360, 10), Options(summation=summation))
    run = Run.create(folder, recipe, plan.to_dict() | ENVIRONMENT, tuple(classes))
    if lines:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return run


def answered(run, wrong=3):
    """Leaves in the run what an evaluation of the digits would, with so many taken for the next digit."""
    index = open_index(run.recipe.data).val
    answers = np.stack([index.labels, np.linspace(0.5, 0.99, len(index)), np.linspace(0.5, 0.99, len(index))], axis=1)
    answers[:wrong, 0] = (index.labels[:wrong] + 1) % 10
    answers[:wrong, 2] = 0.1
    mistakes.write_mistakes(run, 337, answers.astype(np.float32), index, 10)


@pytest.fixture
def finished(tmp_path):
    run = make_run(tmp_path / "run", finished_lines(), SUMMARY)
    answered(run)
    return run


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
    return page.write_report(run).read_text()


# --- what the page says ----------------------------------------------------------------------------------------------


def test_finished_run_tells_accuracy_time_and_rate(finished):
    read = Reader(written(finished))
    for words in ("digits", "92.50%", "95.00%", "0.57", "34.0 s from the first batch", "4,321", "Step 337 of 337"):
        assert words in read.words
    for words in ("37.5 s of wall time", "30.0 s", "80.0%", "tiles of 1x2 chips", "trust = 0.02"):
        assert words in read.words
    for words in ("goodput", "90.00 ms", "45.00 ms", "2.00", "0123456789abcdef", "--fast", "00c0ffee", "jax 0.10.2"):
        assert words in read.words
    assert read.data["spent"]["train"] == [90.0] * 337
    assert read.data["spent"]["evaluate"][110:113] == [0.0, 200.0, 0.0]
    assert read.data["val"] == {"step": [112, 225, 337], "loss": [0.3] * 3, "accuracy": [0.7, 0.95, 0.925]}


def test_page_is_written_whole_or_not_at_all(finished):
    path = page.write_report(finished)
    assert path == finished.folder / "report.html"
    assert not list(finished.folder.glob("*.part"))


def test_page_needs_nothing_from_outside(finished):
    text = written(finished)
    for tag, attributes in Reader(text).elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert not {"href", "action", "style"} & attributes.keys()
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/")
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|@import|url\(|sendBeacon|eval\(", text)
    assert "default-src 'none'" in text
    assert text.isascii()


def test_names_cannot_smuggle_in_elements(tmp_path):
    recipe = recipes.override_recipe(dataclasses.replace(recipes.load_recipe("digits"), name=EVIL), {"data.path": f"/data/{EVIL}"})
    run = make_run(tmp_path / "x<b>y", finished_lines(), SUMMARY, recipe, classes=(EVIL, "Käfer", *TEN[2:]))
    answered(run)
    found = json.loads((run.folder / "findings.json").read_text())
    found["wrong"][0]["name"], found["wrong"][0]["picture"] = EVIL, 'http://there" onerror="alert(1)'
    (run.folder / "findings.json").write_text(json.dumps(found))
    run.get_bad_images_path(0).write_text(f"cannot read {EVIL}\n")
    plan = json.loads((run.folder / "plan.json").read_text())
    plan["summation"], plan["pod"]["kind"] = "</script>" + EVIL, EVIL
    (run.folder / "plan.json").write_text(json.dumps(plan))
    other = make_run(tmp_path / "honest", finished_lines(), SUMMARY)
    answered(other)
    honest, read = Reader(written(other)), Reader(written(run))
    for tag, fewer in (("script", 0), ("img", 1), ("b", 2)):  # a picture has no address; three phases there, one here
        assert len(read.all(tag)) == len(honest.all(tag)) - fewer
    assert read.data["pod"]["summation"] == "</script>" + EVIL
    assert EVIL in read.words
    assert "Käfer" in read.words
    assert "x<b>y" in read.words


@pytest.mark.parametrize("lines", [(), (start_line(0),), (start_line(0), train_line(1), train_line(2))])
def test_unfinished_run_has_a_page(tmp_path, lines):
    read = Reader(written(make_run(tmp_path / "run", lines)))
    assert "not evaluated yet" in read.words
    assert "Known after the first checkpoint." in read.words
    assert "Known after the first evaluation." in read.words
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
    assert "over 2 sessions" in read.words


def test_steps_done_again_count_as_they_came_out_last(tmp_path):
    lines = [start_line(0), train_line(1), train_line(2, loss=9.0), start_line(1), train_line(2, loss=1.5)]
    read = Reader(written(make_run(tmp_path / "run", lines)))
    assert read.data["train"]["step"] == [1, 2]
    assert read.data["train"]["loss"] == [2.5, 1.5]


def test_summary_of_an_earlier_session_is_not_taken_for_this_one(tmp_path):
    lines = [*finished_lines(), start_line(337), train_line(338)]
    read = Reader(written(make_run(tmp_path / "run", lines, SUMMARY)))
    assert "Known after the first checkpoint." in read.words
    assert "4,321" not in read.words


def test_what_is_not_a_number_leaves_a_gap(tmp_path):
    lines = [start_line(0), train_line(1), train_line(2, loss=float("nan")), train_line(3, loss=float("inf"))]
    read = Reader(written(make_run(tmp_path / "run", lines)))
    assert read.data["train"]["loss"] == [2.5, None, None]
    assert "not a number" in read.words


def test_long_runs_are_averaged_down(tmp_path):
    read = Reader(written(make_run(tmp_path / "run", [start_line(0), *map(train_line, range(1, 5001))])))
    assert len(read.data["train"]["step"]) == history.MAX_POINTS
    assert read.data["train"]["step"][:2] == [3, 8]
    assert "the mean of 5 steps" in read.words


def paper_run(folder, summation="torus"):
    return make_run(folder, recipe=recipes.load_recipe("resnet50-imagenet-32k"), pod=named_pod("v3:32x32"), summation=summation)


def test_large_pods_are_drawn_as_an_excerpt_and_say_so(tmp_path):
    read = Reader(written(paper_run(tmp_path / "run")))
    assert "excerpt of 8 x 8" in read.words
    assert "takes 124 hops" in read.words
    assert "would take 2,046" in read.words


# --- what an evaluation shows ----------------------------------------------------------------------------------------


def test_findings_count_every_example_and_order_the_pictures_by_certainty():
    labels = np.array([0, 0, 1, 1, 2, 2], np.int32)
    answers = np.array(
        [[0, 0.9, 0.9], [1, 0.6, 0.3], [1, 0.7, 0.7], [1, 0.8, 0.8], [0, 0.95, 0.01], [-1, 0.5, 0.5]], np.float32
    )
    found = mistakes.summarize_mistakes(7, answers, labels, 3)
    assert (found["examples"], found["correct"]) == ([2, 2, 2], [1, 2, 0])
    assert sorted(found["confused"]) == [[0, 1, 1], [2, 0, 1]]  # what could not be read is mistaken for nothing
    assert [example["sample"] for example in found["wrong"]] == [4, 1]
    assert [example["sample"] for example in found["certain"]] == [0, 3, 2]


def test_mistakes_are_told_by_class_by_pair_and_by_picture(finished):
    text = written(finished)
    read, val = Reader(text), open_index(finished.recipe.data).val
    assert len(read.all("img")) == 3 + 12
    first = val.labels[0]
    assert f"{first + 1} 50.3%, but it is {first} (10.0%)" in read.words
    cells = [cell for cell in read.all("td") if "wrong" in cell.get("class", "")]
    assert len(cells) == len({int(label) for label in val.labels[:3]})
    of_class = np.bincount(val.labels, minlength=10)[first]
    wrong = int((val.labels[:3] == first).sum())
    assert f"{of_class - wrong} of {of_class}" in read.words


def test_bad_pictures_are_listed_once(finished):
    finished.get_bad_images_path(0).write_text("cannot read a.jpg\n")
    finished.get_bad_images_path(3).write_text("cannot read b.jpg\ncannot read a.jpg\n")
    read = Reader(written(finished))
    assert "2 could not be read" in read.words
    assert read.words.count("cannot read a.jpg") == 1


def test_many_classes_show_those_that_are_mistaken_most(tmp_path):
    names = tuple(f"class {i}" for i in range(100))
    run = make_run(tmp_path / "run", finished_lines(), SUMMARY, classes=names)
    labels = np.repeat(np.arange(100, dtype=np.int32), 2)
    found = {"step": 337, "examples": [2] * 100, "correct": [2] * 99 + [0], "confused": [[99, 42, 2]]}
    (run.folder / "findings.json").write_text(json.dumps(found | {"wrong": [], "certain": []}))
    read = Reader(written(run))
    assert "Of 100 classes, those that are mistaken most." in read.words
    assert len([cell for cell in read.all("td") if "wrong" in cell.get("class", "")]) == 1
    assert len(labels) == 200


def test_a_page_that_is_being_written_lets_the_next_one_wait():
    import threading

    done, go, desk = [], threading.Event(), Background()
    desk.submit(lambda: (go.wait(10), done.append(1)))
    desk.submit(lambda: done.append(2))
    desk.submit(lambda: done.append(3))
    go.set()
    desk.close()
    assert done == [1, 3]


def test_what_goes_wrong_with_a_page_is_told_by_the_next():
    desk = Background()
    desk.submit(lambda: Path("/nowhere/at/all").write_text("x"))
    with pytest.raises(FileNotFoundError):
        desk.wait()
    desk.close()


# --- comparisons -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    other = recipes.override_recipe(recipes.load_recipe("digits"), {"schedule.peak": 2.0})
    lines = [line | ({"loss": 1.0} if line["event"] == "train" else {}) for line in finished_lines()]
    return [
        make_run(tmp_path / "one", finished_lines(), SUMMARY),
        make_run(tmp_path / "other", lines, SUMMARY | {"images_per_s": 99.0}, other, pod=Pod("cpu", 1, 2)),
    ]


def test_comparison_tells_results_and_differences(pair, tmp_path):
    path = compare.write_comparison(pair, tmp_path / "both.html")
    read = Reader(path.read_text())
    assert [run["name"] for run in read.data["runs"]] == ["one", "other"]
    for words in ("4,321", "99", "schedule.peak", "1.0", "2.0", "pod.shape", "2x2", "1x2"):
        assert words in read.words
    assert "optimizer.trust" not in read.words


def test_comparison_of_one_recipe_says_so(pair, tmp_path):
    again = make_run(tmp_path / "again", finished_lines(), SUMMARY)
    text = compare.render_comparison([pair[0], again])
    assert "The recipes are the same." in text
    assert "The plans are the same." in text


def test_comparison_tells_runs_of_the_same_name_apart(tmp_path):
    runs = [make_run(tmp_path / place / "run", finished_lines(), SUMMARY) for place in ("a", "b")]
    assert [run["name"] for run in Reader(compare.render_comparison(runs)).data["runs"]] == [str(run.folder) for run in runs]


def test_comparison_refuses_one_run_and_a_folder_that_is_not_there(pair, tmp_path):
    with pytest.raises(UserError, match="2 to 24 runs"):
        compare.render_comparison(pair[:1])
    with pytest.raises(UserError, match="choose another file"):
        compare.write_comparison(pair, tmp_path / "nowhere" / "both.html")


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


def opened(browser, run, **wishes):
    return browser.open(page.write_report(run).resolve().as_uri(), **wishes)


def points(tab, kind):
    """How many points the curves of one kind have."""
    return [d.count("L") for d in tab.all(f'path[class="{kind}"]', "d")]


@in_browser
def test_browser_draws_curves_and_pod(browser, finished):
    with opened(browser, finished) as tab:
        assert tab.problems == []
        assert points(tab, "train") == [336, 336]  # loss and accuracy
        assert points(tab, "val") == [2, 2]
        assert points(tab, "rate") == [336]
        assert tab.count("#plot-spent path.area") == 2
        assert tab.count("#torus rect.chip") == 4
        assert tab.text("#play") == "Pause"
        assert tab.value("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
        assert tab.count(".images img") == 15


@in_browser
def test_browser_says_what_it_misses(browser, tmp_path):
    """The check for problems does see one."""
    path = tmp_path / "broken.html"
    path.write_text("<html data-drawn='yes'><script>console.error('no'); undefinedName;</script></html>")
    with browser.open(path.as_uri()) as tab:
        assert len(tab.problems) == 2


@in_browser
@pytest.mark.parametrize(
    "lines", [(), (start_line(0), train_line(1)), (start_line(0), train_line(1, loss=float("nan")))]
)
def test_browser_opens_unfinished_runs(browser, tmp_path, lines):
    with opened(browser, make_run(tmp_path / "run", lines)) as tab:
        assert tab.problems == []


@in_browser
@pytest.mark.parametrize(
    ("summation", "shape"),
    [*((s, "3x4") for s in ("torus", "torus4", "ring", "xla")), *(("torus", s) for s in ("1x1", "1x4", "4x1"))],
)
def test_browser_shows_every_summation_to_its_end(browser, tmp_path, summation, shape):
    rows, cols = map(int, shape.split("x"))
    recipe = recipes.override_recipe(recipes.load_recipe("digits"), {"batch.size": 192, "batch.span": 16})
    run = make_run(tmp_path / "run", recipe=recipe, pod=Pod("cpu", rows, cols), summation=summation)
    with opened(browser, run) as tab:
        tab.value(
            "(() => { const h = byId('hop'); for (let i = 0; i <= +h.max; i++)"
            " { h.value = i; h.dispatchEvent(new Event('input')); } })()"
        )
        chips = rows * cols
        assert tab.count("rect.chip") == tab.count("rect.content.done") == chips
        assert tab.count("path.link") == chips * ((rows > 1) + (cols > 1))
        assert ("Done" in tab.text("#hop-text")) == (chips > 1)
        assert tab.problems == []


@in_browser
def test_browser_tells_each_hop_in_words(browser, finished):
    with opened(browser, finished, still=True) as tab:
        assert "only the gradient of its own images" in tab.text("#hop-text")
        tab.value("(() => { const h = byId('hop'); h.value = 1; h.dispatchEvent(new Event('input')); })()")
        assert (
            tab.text("#hop-text") == "A chip now holds 50 % of the gradient, with the work of 2 of 4 chips added up in it."
        )


@in_browser
def test_browser_runs_nothing_that_a_name_smuggles_in(browser, tmp_path):
    recipe = dataclasses.replace(recipes.load_recipe("digits"), name=EVIL)
    run = make_run(tmp_path / "run", finished_lines(), SUMMARY, recipe, classes=(EVIL, *TEN[1:]))
    answered(run)
    with opened(browser, run) as tab:
        assert tab.problems == []


@in_browser
def test_browser_obeys_the_wish_for_less_motion(browser, finished):
    with opened(browser, finished, still=True) as tab:
        assert tab.text("#play") == "Play"
        tab.click("#play")
        assert tab.text("#play") == "Pause"


@in_browser
def test_browser_answers_to_slider_switches_and_pointer(browser, finished):
    with opened(browser, finished) as tab:
        assert tab.count("path.raw.train") == 2
        before = tab.all("#plot-loss path.val", "d")
        tab.value("(() => { const s = byId('smoothing'); s.value = 0; s.dispatchEvent(new Event('input')); })()")
        assert tab.count("path.raw.train") == 0
        tab.click("#log-loss")
        assert tab.all("#plot-loss path.val", "d") != before
        tab.click("#all-time")
        assert tab.count("#plot-spent path.area") == 3
        tab.hover("#plot-accuracy svg", 0.99)
        said = tab.text("#plot-accuracy .tip")
        assert said == "step 337, epoch 30.0\ntraining 99.70 %\nvalidation 92.50 % at step 337"
        tab.hover("#plot-spent svg", 0.5)
        assert "train 90 ms" in tab.text("#plot-spent .tip")
        assert tab.value("document.querySelector('#plot-accuracy .tip').hidden")
        assert tab.problems == []


@in_browser
@pytest.mark.parametrize("width", [360, 1100])
def test_browser_never_scrolls_sideways(browser, finished, pair, tmp_path, width):
    both = compare.write_comparison(pair, tmp_path / "both.html")
    for path in (page.write_report(finished), both):
        with browser.open(path.resolve().as_uri(), width=width) as tab:
            assert tab.value("document.documentElement.scrollWidth <= innerWidth")


@in_browser
def test_browser_draws_a_comparison_and_hides_runs(browser, pair, tmp_path):
    path = compare.write_comparison(pair, tmp_path / "both.html")
    with browser.open(path.as_uri()) as tab:
        assert tab.problems == []
        assert points(tab, "s0") == [336, 2, 2, 336]
        tab.hover("#plot-loss svg", 0.99)
        assert tab.text("#plot-loss .tip") == "step 337, epoch 30.0\none 0.007418\nother 1"
        tab.click("#run-0")
        assert points(tab, "s0") == []
        assert points(tab, "s1") == [336, 2, 2, 336]


# --- for everyone ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """axe-core's source: the file that PODSCALE_AXE names, or as npm has it."""
    if named_file := os.environ.get("PODSCALE_AXE"):
        return Path(named_file).read_text()
    if shutil.which("npm") is None:
        pytest.skip("axe-core is not here: there is no npm to fetch it with, and PODSCALE_AXE names no file")
    folder = tmp_path_factory.mktemp("axe")
    try:
        subprocess.run(["npm", "pack", "axe-core@4"], cwd=folder, capture_output=True, timeout=60, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"axe-core could not be fetched: {error}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as opened:
        return opened.extractfile("package/axe.min.js").read().decode()


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_violation(browser, axe, finished, pair, tmp_path, dark):
    finished.get_bad_images_path(0).write_text("cannot read a.jpg\n")
    for path in (page.write_report(finished), compare.write_comparison(pair, tmp_path / "both.html")):
        with browser.open(path.resolve().as_uri(), dark=dark, still=True) as tab:
            tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            tab.value(axe + "; 0")
            found = tab.value("axe.run().then((r) => r.violations.map((v) => [v.impact, v.id, v.nodes[0].html]))")
            assert not [violation for violation in found if violation[0] in ("serious", "critical")], found


@in_browser
def test_axe_does_find_violations(browser, axe, tmp_path):
    (tmp_path / "poor.html").write_text(
        "<html data-drawn='yes'><img src='data:,'><p style='color:#eee'>faint</p></html>"
    )
    with browser.open((tmp_path / "poor.html").as_uri()) as tab:
        tab.value(axe + "; 0")
        assert "image-alt" in tab.value("axe.run().then((r) => r.violations.map((v) => v.id))")
