"""The photos and settings that `benchmarks/finetune.py` and `finetune_published.py` train with."""

from argparse import Namespace
from pathlib import Path

import pytest
from support.benchmarks import FOLDER, load_benchmark

from podscale.study import grid


def write_photos(folder, class_names, numbers):
    for split in ("train", "val"):
        for class_name in class_names:
            (folder / split / class_name).mkdir(parents=True)
            for number in numbers:
                (folder / split / class_name / f"{number:02}.jpg").write_text(f"{split} {class_name} {number}")


def read_photos(folder):
    return {path.relative_to(folder): path.read_text() for path in folder.rglob("*.jpg")}


def test_few_training_photos_are_spread_evenly_and_all_validation_photos_are_linked(tmp_path, monkeypatch):
    write_photos(tmp_path / "photos", ("cat", "dog", "owl"), range(50))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time all is there
        load_benchmark("finetune").link_photos(Path("photos"), tmp_path / "few", ["cat", "owl"], few=5)
    files = read_photos(tmp_path / "few")
    assert len(files) == 2 * (5 + 50)
    assert all(text == f"{path.parts[0]} {path.parts[1]} {int(path.stem)}" for path, text in files.items())
    numbers = sorted(int(path.stem) for path in files if path.parts[:2] == ("train", "owl"))
    assert numbers == [0, 10, 20, 30, 40]


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return load_benchmark("finetune_published")


def test_photos_that_peaks_are_chosen_by_are_neither_trained_on_nor_of_the_validation_set(published, tmp_path):
    write_photos(tmp_path / "photos", ("cat", "dog"), range(20))
    arguments = Namespace(photos=tmp_path / "photos", run=tmp_path / "run")
    folders = published.link_subsets(arguments, "choice", {"3 of each": 3, "all": 0}, held_out=5)
    for name, count in (("3 of each", 3), ("all", 15)):
        files = read_photos(folders[name])
        by_split = {
            split: {text for path, text in files.items() if path.parts[0] == split} for split in ("train", "val")
        }
        assert len(by_split["train"]) == 2 * count
        assert len(by_split["val"]) == 2 * 5
        assert not by_split["train"] & by_split["val"]
        assert all(text.startswith("train ") for text in files.values())


def test_each_case_is_trained_at_its_best_peak_for_each_number_of_photos(published, tmp_path):
    photos = ["10 of each", "all"]
    trials = published.list_trials(list(published.CASES), photos)
    assert {trial.case for trial in trials[:3]} == set(list(published.CASES)[:3])
    best = {"10 of each": 0.001, "all": 0.03}
    results = {trial: [0.9 if trial.peak == best[trial.photos] else 0.5] for trial in trials}
    chosen = published.choose_best(trials, results)
    assert len(chosen) == 2 * len(published.CASES)
    peaks = {trial.photos: trial.peak for trial in chosen if trial.case == "finetune, from weights"}
    assert peaks == best

    study = tmp_path / "final.toml"
    folders = {name: tmp_path / name for name in photos}
    study.write_text(published.format_study(chosen, folders, tmp_path / "weights.pth"))
    by_name = {case.name: case.recipe for case in grid.load_study(study).cases}
    assert list(by_name) == [trial.name for trial in chosen]
    for trial in chosen:
        recipe, case = by_name[trial.name], published.CASES[trial.case]
        assert recipe.schedule.peak == trial.peak
        assert recipe.schedule.head_peak == case.head
        assert recipe.data.path == str(folders[trial.photos])
        assert bool(recipe.model.init) == case.weights
        assert recipe.model.freeze == case.freeze
        assert recipe.optimizer.name == ("muon" if case.recipe == "imagefolder" else "sgd")
