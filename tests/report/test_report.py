"""The report page and the comparison: from run folders in every state, and in a real browser."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support.accessibility import find_serious_violations, load_axe
from support.browser import BINARY, Browser

from podscale import plan as plans
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.pod import Pod, parse_pod
from podscale.report import compare, history, mistakes, page, pod_section
from podscale.runs.folder import Run
from podscale.training.reporters.background import Background

EVIL = '<script>document.documentElement.dataset.error = "ran"</script><img src=x onerror="alert(1)">&amp;'
needs_browser = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed to open the page with")


# --- run folders -----------------------------------------------------------------------------------------------------


def make_train_line(step, **values):
    metrics = {"loss": 2.5 / step, "accuracy": 1 - 1 / step, "learning_rate": 0.01 * step, "images_per_s": 1280.0}
    spent = {"input wait": 0.01, "train": 0.09} | ({"evaluate": 0.2} if step % 112 == 0 else {})
    return {"event": "train", "step": step, "grad_norm": 1.0, "spent": spent} | metrics | values


def make_eval_line(step, seconds, accuracy):
    metrics = {"accuracy": accuracy, "accuracy_top5": 1.0, "loss": 0.3, "examples": 360, "seconds": seconds}
    return {"event": "eval", "step": step} | metrics


def make_start_line(step):
    return {"event": "start", "step": step, "devices": 4, "kind": "cpu"}


def make_finished_lines():
    lines = [make_start_line(0), *map(make_train_line, range(1, 338))]
    lines += [make_eval_line(step, step / 10, accuracy) for step, accuracy in ((112, 0.7), (225, 0.95), (337, 0.925))]
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


def write_mistakes(run, wrong=3):
    """Write the mistakes of an evaluation of the digits, with so many classified as the next digit."""
    index = open_index(run.recipe.data).val
    predictions = np.stack(
        [index.labels, np.linspace(0.5, 0.99, len(index)), np.linspace(0.5, 0.99, len(index))], axis=1
    )
    predictions[:wrong, 0] = (index.labels[:wrong] + 1) % 10
    predictions[:wrong, 2] = 0.1
    mistakes.write_mistakes(run, 337, predictions.astype(np.float32), index, 10)


@pytest.fixture
def finished(tmp_path):
    run = make_run(tmp_path / "run", make_finished_lines(), SUMMARY)
    write_mistakes(run)
    return run


class Reader(HTMLParser):
    """The elements of a page, its text, and its embedded JSON."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.data = [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag == "script" and attributes.get("id") == "data" and self.data is None:
            self.data = json.loads(data)
        elif tag not in ("script", "style"):
            self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def write_page(run):
    return page.write_report(run).read_text()


# --- contents of the page --------------------------------------------------------------------------------------------


def test_page_of_a_finished_run_shows_accuracy_time_and_rate(finished):
    read = Reader(write_page(finished))
    for words in (
        "digits",
        "92.50%",
        "95.00%",
        "0.57",
        "34.0 s of training and evaluation",
        "4,321",
        "Step 337 of 337",
    ):
        assert words in read.text
    assert "Step 337 of 337" in read.text
    for words in ("37.5 s of wall time", "30.0 s", "80.0%", "tiles of 1x2 chips", "trust = 0.02"):
        assert words in read.text
    for words in ("goodput", "90.00 ms", "45.00 ms", "2.00", "0123456789abcdef", "--fast", "00c0ffee", "jax 0.10.2"):
        assert words in read.text
    assert read.data["spent"]["train"] == [90.0] * 337
    assert read.data["spent"]["evaluate"][110:113] == [0.0, 200.0, 0.0]
    assert read.data["val"] == {"step": [112, 225, 337], "loss": [0.3] * 3, "accuracy": [0.7, 0.95, 0.925]}


def test_page_is_written_atomically(finished):
    path = page.write_report(finished)
    assert path == finished.folder / "report.html"
    assert not list(finished.folder.glob("*.part"))


def test_page_is_self_contained(finished):
    text = write_page(finished)
    for tag, attributes in Reader(text).elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert not {"action", "style"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")  # within the page
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/")
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|@import|url\(|sendBeacon|eval\(", text)
    assert "default-src 'none'" in text
    assert text.isascii()


def test_names_cannot_inject_elements(tmp_path):
    recipe = recipes.override_recipe(
        dataclasses.replace(recipes.load_recipe("digits"), name=EVIL), {"data.path": f"/data/{EVIL}"}
    )
    run = make_run(tmp_path / "x<b>y", make_finished_lines(), SUMMARY, recipe, classes=(EVIL, "Käfer", *TEN[2:]))
    write_mistakes(run)
    result = json.loads((run.folder / "findings.json").read_text())
    result["wrong"][0]["name"], result["wrong"][0]["thumbnail"] = EVIL, 'http://there" onerror="alert(1)'
    (run.folder / "findings.json").write_text(json.dumps(result))
    run.get_bad_images_path(0).write_text(f"cannot read {EVIL}\n")
    plan = json.loads((run.folder / "plan.json").read_text())
    plan["summation"], plan["pod"]["kind"] = "</script>" + EVIL, EVIL
    (run.folder / "plan.json").write_text(json.dumps(plan))
    other = make_run(tmp_path / "plain", make_finished_lines(), SUMMARY)
    write_mistakes(other)
    plain, read = Reader(write_page(other)), Reader(write_page(run))
    for tag, fewer in (("script", 0), ("img", 1), ("b", 2)):  # one image has no address; three phases there, one here
        assert len(read.all(tag)) == len(plain.all(tag)) - fewer
    assert read.data["pod"]["summation"] == "</script>" + EVIL
    assert EVIL in read.text
    assert "Käfer" in read.text
    assert "x<b>y" in read.text


def test_a_registered_summation_is_not_described_as_the_compilers():
    plan = {"pod": {"rows": 2, "cols": 4, "cores": 1}, "summation": "gathered"}
    ((_, _, text),) = pod_section.list_phases(plan)
    assert "registered" in text
    assert "compiler" not in text
    ((_, _, text),) = pod_section.list_phases(plan | {"summation": "xla"})
    assert "compiler" in text


@pytest.mark.parametrize(
    "lines", [(), (make_start_line(0),), (make_start_line(0), make_train_line(1), make_train_line(2))]
)
def test_unfinished_run_has_a_page(tmp_path, lines):
    read = Reader(write_page(make_run(tmp_path / "run", lines)))
    assert "not evaluated yet" in read.text
    assert "Known after the first checkpoint." in read.text
    assert "Known after the first evaluation." in read.text
    assert read.data["train"]["step"] == [line["step"] for line in lines if line["event"] == "train"]


def test_time_of_an_unfinished_run_includes_the_steps_after_the_last_evaluation(tmp_path):
    lines = [
        make_start_line(0),
        make_train_line(1),
        make_eval_line(1, 5.0, 0.5),
        make_train_line(2),
        make_train_line(3),
    ]
    assert (
        "5.2 s of training and evaluation" in Reader(write_page(make_run(tmp_path / "run", lines))).text
    )  # 128 / 1280 a step


def test_resumed_run_adds_its_sessions_and_marks_where_it_resumed(tmp_path):
    lines = make_finished_lines()
    at = next(i for i, line in enumerate(lines) if line["event"] == "eval") + 1
    read = Reader(write_page(make_run(tmp_path / "run", [*lines[:at], make_start_line(112), *lines[at:]], SUMMARY)))
    assert read.data["resumes"] == [112]
    assert "45.2 s of training and evaluation, in 2 sessions" in read.text  # 11.2 before and 34 after
    assert "over 2 sessions" in read.text


def test_repeated_steps_count_once_with_their_last_values(tmp_path):
    lines = [
        make_start_line(0),
        make_train_line(1),
        make_train_line(2, loss=9.0),
        make_start_line(1),
        make_train_line(2, loss=1.5),
    ]
    read = Reader(write_page(make_run(tmp_path / "run", lines)))
    assert read.data["train"]["step"] == [1, 2]
    assert read.data["train"]["loss"] == [2.5, 1.5]


def test_summary_of_an_earlier_session_is_not_used(tmp_path):
    lines = [*make_finished_lines(), make_start_line(337), make_train_line(338)]
    read = Reader(write_page(make_run(tmp_path / "run", lines, SUMMARY)))
    assert "Known after the first checkpoint." in read.text
    assert "4,321" not in read.text


def test_non_finite_values_leave_a_gap(tmp_path):
    lines = [
        make_start_line(0),
        make_train_line(1),
        make_train_line(2, loss=float("nan")),
        make_train_line(3, loss=float("inf")),
    ]
    read = Reader(write_page(make_run(tmp_path / "run", lines)))
    assert read.data["train"]["loss"] == [2.5, None, None]
    assert "non-finite" in read.text


def test_curves_of_long_runs_are_averaged(tmp_path):
    read = Reader(write_page(make_run(tmp_path / "run", [make_start_line(0), *map(make_train_line, range(1, 5001))])))
    assert len(read.data["train"]["step"]) == history.MAX_POINTS
    assert read.data["train"]["step"][:2] == [3, 8]
    assert "the mean of 5 steps" in read.text


def make_paper_run(folder, summation="torus"):
    return make_run(
        folder, recipe=recipes.load_recipe("resnet50-imagenet-32k"), pod=parse_pod("v3:32x32"), summation=summation
    )


def test_large_pods_are_drawn_as_an_excerpt_and_say_so(tmp_path):
    read = Reader(write_page(make_paper_run(tmp_path / "run")))
    assert "drawing shows 8 x 8 of them" in read.text
    assert "takes 124 hops" in read.text
    assert "would take 2,046" in read.text


@pytest.mark.parametrize(
    ("summation", "text"),
    [
        ("swing", "takes 20 hops"),
        ("swing_latency", "Every chip exchanges all it has"),
        ("swing_latency:4096,torus", "takes 124 hops"),  # of the large sums
    ],
)
def test_the_page_describes_swing_and_summations_by_size(tmp_path, summation, text):
    read = Reader(write_page(make_paper_run(tmp_path / "run", summation)))
    assert text in read.text
    assert "the compiler chooses" not in read.text


# --- mistakes of an evaluation ---------------------------------------------------------------------------------------


def test_mistakes_count_every_example_and_order_images_by_confidence():
    labels = np.array([0, 0, 1, 1, 2, 2], np.int32)
    predictions = np.array(
        [[0, 0.9, 0.9], [1, 0.6, 0.3], [1, 0.7, 0.7], [1, 0.8, 0.8], [0, 0.95, 0.01], [-1, 0.5, 0.5]], np.float32
    )
    result = mistakes.summarize_mistakes(7, predictions, labels, 3)
    assert (result["examples"], result["correct"]) == ([2, 2, 2], [1, 2, 0])
    assert sorted(result["confused"]) == [[0, 1, 1], [2, 0, 1]]  # an unreadable image is confused with nothing
    assert [example["sample"] for example in result["wrong"]] == [4, 1]
    assert [example["sample"] for example in result["certain"]] == [0, 3, 2]


def test_mistakes_are_shown_by_class_by_pair_and_by_image(finished):
    text = write_page(finished)
    read, val = Reader(text), open_index(finished.recipe.data).val
    of_one_pair = max(np.bincount(val.labels[:3]))
    assert len(read.all("img")) == 3 + 12 + (of_one_pair if of_one_pair > 1 else 0)
    first = val.labels[0]
    assert f"{first + 1} 50.3%, but it is {first} (10.0%)" in read.text
    cells = [cell for cell in read.all("td") if "wrong" in cell.get("class", "")]
    assert len(cells) == len({int(label) for label in val.labels[:3]})
    of_class = np.bincount(val.labels, minlength=10)[first]
    wrong = int((val.labels[:3] == first).sum())
    assert f"{of_class - wrong} of {of_class}" in read.text


def test_images_of_the_most_confused_classes_are_shown_though_others_are_more_wrong(tmp_path):
    run = make_run(tmp_path / "run", make_finished_lines(), SUMMARY)
    index = open_index(run.recipe.data).val
    predictions = np.stack([index.labels, np.full(len(index), 0.5), np.full(len(index), 0.5)], axis=1)
    threes, others = np.flatnonzero(index.labels == 3)[:6], np.flatnonzero((index.labels != 3) & (index.labels != 8))
    predictions[threes, 0], predictions[threes, 1] = 8, 0.3 + 0.01 * np.arange(6)
    for label in (0, 1, 2, 4, 5, 6, 7, 9):  # sixteen mistakes of higher confidence, no two of the same kind
        first, second = others[index.labels[others] == label][:2]
        predictions[first], predictions[second] = (8, 0.9, 0.1), (3, 0.9, 0.1)
    mistakes.write_mistakes(run, 337, predictions.astype(np.float32), index, 10)
    result = run.mistakes()
    assert all(example["label"] != 3 for example in result["wrong"])
    assert [[example["sample"] for example in pair] for pair in result["pairs"]] == [threes[:1:-1].tolist()]
    text = write_page(run)
    read = Reader(text)
    assert "Most confused: 3 as 8 (6 of " in read.text
    assert 'Look at <a href="#most-confused">these images</a> and check their labels.' in text
    assert [heading.get("id") for heading in read.all("h3")].count("most-confused") == 1
    assert len(read.all("img")) == 12 + 12 + 4


def test_bad_images_are_listed_once(finished):
    finished.get_bad_images_path(0).write_text("cannot read a.jpg\n")
    finished.get_bad_images_path(3).write_text("cannot read b.jpg\ncannot read a.jpg\n")
    read = Reader(write_page(finished))
    assert "2 could not be read" in read.text
    assert read.text.count("cannot read a.jpg") == 1


def test_of_many_classes_the_most_confused_are_shown(tmp_path):
    names = tuple(f"class {i}" for i in range(100))
    run = make_run(tmp_path / "run", make_finished_lines(), SUMMARY, classes=names)
    labels = np.repeat(np.arange(100, dtype=np.int32), 2)
    result = {"step": 337, "examples": [2] * 100, "correct": [2] * 99 + [0], "confused": [[99, 42, 2]]}
    (run.folder / "findings.json").write_text(json.dumps(result | {"wrong": [], "certain": []}))
    read = Reader(write_page(run))
    assert "Of 100 classes, the most confused." in read.text
    assert len([cell for cell in read.all("td") if "wrong" in cell.get("class", "")]) == 1
    assert len(labels) == 200


def test_only_the_newest_waiting_page_is_written():
    import threading

    done, go, background = [], threading.Event(), Background()
    background.submit(lambda: (go.wait(10), done.append(1)))
    background.submit(lambda: done.append(2))
    background.submit(lambda: done.append(3))
    go.set()
    background.close()
    assert done == [1, 3]


def test_an_error_of_a_page_is_raised_by_the_next_wait():
    background = Background()
    background.submit(lambda: Path("/nowhere/at/all").write_text("x"))
    with pytest.raises(FileNotFoundError):
        background.wait()
    background.close()


# --- comparisons -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    other = recipes.override_recipe(recipes.load_recipe("digits"), {"schedule.peak": 2.0})
    lines = [line | ({"loss": 1.0} if line["event"] == "train" else {}) for line in make_finished_lines()]
    return [
        make_run(tmp_path / "one", make_finished_lines(), SUMMARY),
        make_run(tmp_path / "other", lines, SUMMARY | {"images_per_s": 99.0}, other, pod=Pod("cpu", 1, 2)),
    ]


def test_comparison_shows_results_and_differences(pair, tmp_path):
    path = compare.write_comparison(pair, tmp_path / "both.html")
    read = Reader(path.read_text())
    assert [run["name"] for run in read.data["runs"]] == ["one", "other"]
    for words in ("4,321", "99", "schedule.peak", "1.0", "2.0", "pod.shape", "2x2", "1x2"):
        assert words in read.text
    assert "optimizer.trust" not in read.text


def test_comparison_of_equal_recipes_says_so(pair, tmp_path):
    again = make_run(tmp_path / "again", make_finished_lines(), SUMMARY)
    text = compare.render_comparison([pair[0], again])
    assert "The recipes are the same." in text
    assert "The plans are the same." in text


def test_comparison_distinguishes_runs_of_the_same_name(tmp_path):
    runs = [make_run(tmp_path / place / "run", make_finished_lines(), SUMMARY) for place in ("a", "b")]
    assert [run["name"] for run in Reader(compare.render_comparison(runs)).data["runs"]] == [
        str(run.folder) for run in runs
    ]


def test_comparison_refuses_one_run_and_a_missing_folder(pair, tmp_path):
    with pytest.raises(UserError, match="2 to 24 runs"):
        compare.render_comparison(pair[:1])
    with pytest.raises(UserError, match="choose another file"):
        compare.write_comparison(pair, tmp_path / "nowhere" / "both.html")


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


def open_page(browser, run, **settings):
    return browser.open(page.write_report(run).resolve().as_uri(), **settings)


def count_points(tab, kind):
    """Return how many points each curve of one kind has."""
    return [d.count("L") for d in tab.list_attributes(f'path[class="{kind}"]', "d")]


@needs_browser
def test_browser_draws_curves_and_pod(browser, finished):
    with open_page(browser, finished) as tab:
        assert tab.problems == []
        assert count_points(tab, "train") == [336, 336]  # loss and accuracy
        assert count_points(tab, "val") == [2, 2]
        assert count_points(tab, "rate") == [336, 336]  # learning rate and gradient norm
        assert tab.count("#plot-spent path.area") == 2
        assert tab.count("#torus rect.chip") == 4
        assert tab.read_text("#play") == "Pause"
        assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
        assert tab.count(".images img") == 17


@needs_browser
def test_browser_reports_errors_of_a_page(browser, tmp_path):
    """Check that `problems` finds an error."""
    path = tmp_path / "broken.html"
    path.write_text("<html data-drawn='yes'><script>console.error('no'); undefinedName;</script></html>")
    with browser.open(path.as_uri()) as tab:
        assert len(tab.problems) == 2


@needs_browser
@pytest.mark.parametrize(
    "lines", [(), (make_start_line(0), make_train_line(1)), (make_start_line(0), make_train_line(1, loss=float("nan")))]
)
def test_browser_opens_unfinished_runs(browser, tmp_path, lines):
    with open_page(browser, make_run(tmp_path / "run", lines)) as tab:
        assert tab.problems == []


@needs_browser
@pytest.mark.parametrize(
    ("summation", "shape"),
    [*((s, "3x4") for s in ("torus", "torus4", "ring", "xla")), *(("torus", s) for s in ("1x1", "1x4", "4x1"))],
)
def test_browser_plays_every_summation_to_its_end(browser, tmp_path, summation, shape):
    rows, cols = map(int, shape.split("x"))
    recipe = recipes.override_recipe(recipes.load_recipe("digits"), {"batch.size": 192, "batch.span": 16})
    run = make_run(tmp_path / "run", recipe=recipe, pod=Pod("cpu", rows, cols), summation=summation)
    with open_page(browser, run) as tab:
        tab.evaluate(
            "(() => { const h = byId('hop'); for (let i = 0; i <= +h.max; i++)"
            " { h.value = i; h.dispatchEvent(new Event('input')); } })()"
        )
        chips = rows * cols
        assert tab.count("rect.chip") == tab.count("rect.content.done") == chips
        assert tab.count("path.link") == chips * ((rows > 1) + (cols > 1))
        assert ("Done" in tab.read_text("#hop-text")) == (chips > 1)
        assert tab.problems == []


@needs_browser
def test_browser_describes_each_hop(browser, finished):
    with open_page(browser, finished, reduced_motion=True) as tab:
        assert "only the gradient of its own images" in tab.read_text("#hop-text")
        tab.evaluate("(() => { const h = byId('hop'); h.value = 1; h.dispatchEvent(new Event('input')); })()")
        assert (
            tab.read_text("#hop-text")
            == "A chip now holds 50 % of the gradient, with the work of 2 of 4 chips added up in it."
        )


@needs_browser
def test_browser_runs_nothing_injected_by_a_name(browser, tmp_path):
    recipe = dataclasses.replace(recipes.load_recipe("digits"), name=EVIL)
    run = make_run(tmp_path / "run", make_finished_lines(), SUMMARY, recipe, classes=(EVIL, *TEN[1:]))
    write_mistakes(run)
    with open_page(browser, run) as tab:
        assert tab.problems == []


@needs_browser
def test_browser_respects_reduced_motion(browser, finished):
    with open_page(browser, finished, reduced_motion=True) as tab:
        assert tab.read_text("#play") == "Play"
        tab.click("#play")
        assert tab.read_text("#play") == "Pause"


@needs_browser
def test_browser_responds_to_slider_switches_and_pointer(browser, finished):
    with open_page(browser, finished) as tab:
        assert tab.count("path.raw.train") == 2
        before = tab.list_attributes("#plot-loss path.val", "d")
        tab.evaluate("(() => { const s = byId('smoothing'); s.value = 0; s.dispatchEvent(new Event('input')); })()")
        assert tab.count("path.raw.train") == 0
        tab.click("#log-loss")
        assert tab.list_attributes("#plot-loss path.val", "d") != before
        tab.click("#all-time")
        assert tab.count("#plot-spent path.area") == 3
        tab.hover("#plot-accuracy svg", 0.99)
        text = tab.read_text("#plot-accuracy .tip")
        assert text == "step 337, epoch 30.0\ntraining 99.70 %\nvalidation 92.50 % at step 337"
        tab.hover("#plot-spent svg", 0.5)
        assert "train 90 ms" in tab.read_text("#plot-spent .tip")
        assert tab.evaluate("document.querySelector('#plot-accuracy .tip').hidden")
        assert tab.problems == []


@needs_browser
@pytest.mark.parametrize("width", [360, 1100])
def test_browser_never_scrolls_sideways(browser, finished, pair, tmp_path, width):
    both = compare.write_comparison(pair, tmp_path / "both.html")
    for path in (page.write_report(finished), both):
        with browser.open(path.resolve().as_uri(), width=width) as tab:
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@needs_browser
def test_browser_draws_a_comparison_and_hides_runs(browser, pair, tmp_path):
    path = compare.write_comparison(pair, tmp_path / "both.html")
    with browser.open(path.as_uri()) as tab:
        assert tab.problems == []
        assert count_points(tab, "s0") == [336, 2, 2, 336]
        tab.hover("#plot-loss svg", 0.99)
        assert tab.read_text("#plot-loss .tip") == "step 337, epoch 30.0\none 0.007418\nother 1"
        tab.click("#run-0")
        assert count_points(tab, "s0") == []
        assert count_points(tab, "s1") == [336, 2, 2, 336]


# --- accessibility ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    return load_axe(tmp_path_factory.mktemp("axe"))


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_violation(browser, axe, finished, pair, tmp_path, dark):
    finished.get_bad_images_path(0).write_text("cannot read a.jpg\n")
    for path in (page.write_report(finished), compare.write_comparison(pair, tmp_path / "both.html")):
        with browser.open(path.resolve().as_uri(), dark=dark, reduced_motion=True) as tab:
            tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            assert find_serious_violations(tab, axe) == []


@pytest.mark.heavy
@needs_browser
def test_axe_does_find_violations(browser, axe, tmp_path):
    (tmp_path / "poor.html").write_text(
        "<html data-drawn='yes'><img src='data:,'><p style='color:#eee'>faint</p></html>"
    )
    with browser.open((tmp_path / "poor.html").as_uri()) as tab:
        assert "image-alt" in {name for _, name, _ in find_serious_violations(tab, axe)}


# --- scores and suggestions ----------------------------------------------------------------------------------------


def test_page_warns_of_a_model_that_does_not_beat_the_baseline_and_says_what_to_do_next(tmp_path):
    lines = [*make_finished_lines()[:-1], make_eval_line(337, 30.0, 0.67)]
    run = make_run(tmp_path / "run", lines, SUMMARY, classes=("cat", "dog", "owl"))
    labels = np.array([0] * 67 + [1] * 23 + [2] * 10, np.int32)
    predictions = np.tile(np.array([[0, 0.99, 0.01]], np.float32), (100, 1))
    result = mistakes.summarize_mistakes(337, predictions, labels, 3) | {"wrong": [], "certain": [], "pairs": []}
    (run.folder / "findings.json").write_text(json.dumps(result))
    text = Reader(write_page(run)).text
    assert "always predicting cat has accuracy 67.00%" in text
    assert "Most confused: dog as cat (23 of 23); owl as cat (10 of 10)." in text
    assert "Classes are imbalanced: judge by balanced accuracy, and add images of owl, or sample all classes" in text
    assert "Probabilities are off by 0.32 on average" in text
    assert "balanced accuracy33.3%" in text.replace(" 33", "33")
    assert "Training loss includes label smoothing 0.1" in text


def test_comparison_shows_recall_by_class_and_has_a_name_of_its_own(pair, tmp_path):
    for number, run in enumerate(pair):
        labels = np.repeat(np.arange(10, dtype=np.int32), 2)
        predictions = np.stack([labels, np.ones(20), np.ones(20)], axis=1).astype(np.float32)
        predictions[:number, 0] = 9
        result = mistakes.summarize_mistakes(337, predictions, labels, 10) | {"wrong": [], "certain": []}
        (run.folder / "findings.json").write_text(json.dumps(result))
    text = Reader(compare.render_comparison(pair)).text
    assert "Recall by class" in text
    assert "50.0%" in text
    assert compare.default_file(pair) == f"comparison-{pair[0].folder.name}-{pair[1].folder.name}.html"
