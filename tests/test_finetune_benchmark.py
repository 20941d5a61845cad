"""What `benchmarks/finetune.py` compares: the two recipes as they are, and photos of one half against the other."""

import importlib.util
from pathlib import Path

import pytest

from podscale import recipe as recipes
from podscale.study import grid

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "benchmarks" / "finetune.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_recipes_are_trained_as_they_are(benchmark, tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(benchmark.described(tmp_path / "weights"))
    cases = {case.name: case.recipe.to_dict() for case in grid.load(file).cases}
    for name in ("imagefolder", "finetune"):
        own = recipes.load(name).override({"train.eval_epochs": 20})
        assert cases[f"{name}, from nothing"] == own.to_dict()
        assert cases[f"{name}, from weights"] == own.override({"model.init": str(tmp_path / "weights")}).to_dict()


def test_few_photos_are_spread_over_all_and_every_one_is_kept_for_validation(benchmark, tmp_path, monkeypatch):
    for part in ("train", "val"):
        for kind in ("cat", "dog", "owl"):
            (tmp_path / "photos" / part / kind).mkdir(parents=True)
            for number in range(50):
                (tmp_path / "photos" / part / kind / f"{number:02}.jpg").write_text(f"{part} {kind} {number}")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time all is there
        benchmark.linked(Path("photos"), tmp_path / "few", ["cat", "owl"], few=5)
    found = {path.relative_to(tmp_path / "few"): path.read_text() for path in (tmp_path / "few").rglob("*.jpg")}
    assert len(found) == 2 * (5 + 50)
    assert all(text == f"{path.parts[0]} {path.parts[1]} {int(path.stem)}" for path, text in found.items())
    numbers = sorted(int(path.stem) for path in found if path.parts[:2] == ("train", "owl"))
    assert numbers == [0, 10, 20, 30, 40]
