"""What `benchmarks/large_batch.py` chooses is what was best on held-out pictures, for each optimizer and batch."""

import json
from pathlib import Path

import pytest
from support.benchmarks import benchmark

from podscale.study import grid

ROOT = Path(__file__).parents[2]
PEAKS = ROOT / "studies" / "imagewoof-peaks.toml"
BEST = {
    ("muon", 64): "Muon, 64: peak 0.2, head 0.02, biases 0.2",
    ("muon", 1024): "Muon, 1024: peak 2.4, head 0.08, biases 1.6",
    ("sgd", 512): "SGD, 512: peak 0.8, head 0.06",
    ("lars", 256): "LARS, 256: peak 8, biases 0.4",
}


@pytest.fixture(scope="module")
def large_batch():
    return benchmark("large_batch")


def test_the_best_of_each_is_trained_on_all_pictures(large_batch, tmp_path):
    tried = grid.load(PEAKS)
    results = {case.name: {"mean": 0.7 if case.name in BEST.values() else 0.6} for case in tried.cases}
    results["Muon, 512: peak 0.8, head 0.06, biases 0.8"]["mean"] = None  # it diverged
    file = tmp_path / "batch.toml"
    file.write_text(large_batch.batches(PEAKS, tried, results))
    chosen = {(case.values["case"], case.values["batch.size"]): case.recipe for case in grid.load(file).cases}
    assert len(chosen) == 16
    recipes = {case.name: case.recipe.override({"data.hold_out": 0.0}) for case in tried.cases}
    for (optimizer, size), name in BEST.items():
        assert chosen[large_batch.NAMES[optimizer], size] == recipes[name]
    assert chosen["Muon", 512] == recipes["Muon, 512: peak 1.6, head 0.06, biases 0.8"]
    scaled = recipes[BEST["lars", 256]].override({"optimizer.form": "scaled"})
    assert chosen["LARS, scaled momentum", 256] == scaled


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (
            "has no setting of SGD for batches of 64",
            {'set.batch.size = 64\nset.optimizer.name = "sgd"': 'set.batch.size = 256\nset.optimizer.name = "sgd"'},
        ),
        ("chooses by the validation set", {"data.hold_out = 0.1\n": ""}),
        ("and no grid", {"[[case]]": "[grid]\ntrain.epochs = [1, 2]\n\n[[case]]"}),
        ("must have a .*case", {PEAKS.read_text().partition("[[case]]")[2]: "", "[[case]]": ""}),
        ("all of one recipe", {"set.batch.size = 64\n": 'set.batch.size = 64\nrecipe = "finetune"\n'}),
    ],
)
def test_what_nothing_can_be_chosen_from_is_refused(large_batch, tmp_path, words, changes):
    text = PEAKS.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1 if "grid" in new else -1)
    file = tmp_path / "peaks.toml"
    file.write_text(text)
    with pytest.raises(SystemExit, match=words):
        large_batch.settings(file)


def test_only_what_diverged_may_lack_a_result(large_batch, tmp_path):
    def why(*runs):
        (tmp_path / "study.json").write_text(
            json.dumps({"cases": [{"case": str(i), "runs": r} for i, r in enumerate(runs)]})
        )
        return large_batch.unfinished(tmp_path)

    assert large_batch.unfinished(tmp_path) == "its processes ended before"
    done, failed = {"run": "one", "accuracy": 0.5}, {"run": "two", "error": "no pictures"}
    assert why([done], []) == "its processes ended before"
    assert why([done], [failed]) == "no pictures"
    (tmp_path / "two" / "diverged").mkdir(parents=True)
    assert not why([done], [failed])


def test_the_largest_batch_that_loses_so_little(large_batch):
    row = {64: {"mean": 0.78}, 256: {"mean": 0.776}, 512: {"mean": 0.778}, 1024: {"mean": None}}
    assert large_batch.largest(row, 0.78, 0.3) == "512"
    assert large_batch.largest(row, 0.78, 0.1) == "64"
    assert large_batch.largest(row, 0.8, 0.3) == "none"
