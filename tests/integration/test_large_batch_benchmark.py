"""`benchmarks/large_batch.py` chooses what was best on held-out images, for each optimizer and batch."""

import json
from pathlib import Path

import pytest
from support.benchmarks import load_benchmark

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
    return load_benchmark("large_batch")


def test_the_best_setting_of_each_optimizer_and_batch_is_trained_on_all_images(large_batch, tmp_path):
    study = grid.load_study(PEAKS)
    results = {case.name: {"mean": 0.7 if case.name in BEST.values() else 0.6} for case in study.cases}
    results["Muon, 512: peak 0.8, head 0.06, biases 0.8"]["mean"] = None  # it diverged
    file = tmp_path / "batch.toml"
    file.write_text(large_batch.make_batch_study(PEAKS, study, results))
    by_batch = {(case.values["case"], case.values["batch.size"]): case.recipe for case in grid.load_study(file).cases}
    assert len(by_batch) == 16
    recipes = {case.name: case.recipe.override({"data.hold_out": 0.0}) for case in study.cases}
    for (optimizer, size), name in BEST.items():
        assert by_batch[large_batch.NAMES[optimizer], size] == recipes[name]
    assert by_batch["Muon", 512] == recipes["Muon, 512: peak 1.6, head 0.06, biases 0.8"]
    scaled = recipes[BEST["lars", 256]].override({"optimizer.form": "scaled"})
    assert by_batch["LARS, scaled momentum", 256] == scaled


@pytest.mark.parametrize(
    ("message", "changes"),
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
def test_a_study_without_a_valid_choice_is_refused(large_batch, tmp_path, message, changes):
    text = PEAKS.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1 if "grid" in new else -1)
    file = tmp_path / "peaks.toml"
    file.write_text(text)
    with pytest.raises(SystemExit, match=message):
        large_batch.load_settings(file)


def test_only_diverged_trainings_may_lack_a_result(large_batch, tmp_path):
    def explain_unfinished(*runs):
        (tmp_path / "study.json").write_text(
            json.dumps({"cases": [{"case": str(i), "runs": r} for i, r in enumerate(runs)]})
        )
        return large_batch.explain_unfinished_study(tmp_path)

    assert large_batch.explain_unfinished_study(tmp_path) == "its processes ended before"
    done, failed = {"run": "one", "accuracy": 0.5}, {"run": "two", "error": "no images"}
    assert explain_unfinished([done], []) == "its processes ended before"
    assert explain_unfinished([done], [failed]) == "no images"
    (tmp_path / "two" / "diverged").mkdir(parents=True)
    assert not explain_unfinished([done], [failed])


def test_the_largest_batch_within_a_loss_is_found(large_batch):
    row = {64: {"mean": 0.78}, 256: {"mean": 0.776}, 512: {"mean": 0.778}, 1024: {"mean": None}}
    assert large_batch.find_largest_batch(row, 0.78, 0.3) == "512"
    assert large_batch.find_largest_batch(row, 0.78, 0.1) == "64"
    assert large_batch.find_largest_batch(row, 0.8, 0.3) == "none"
