"""The photos that `benchmarks/finetune.py` trains on."""

from pathlib import Path

from support.benchmarks import load_benchmark


def test_few_training_photos_are_spread_evenly_and_all_validation_photos_are_linked(tmp_path, monkeypatch):
    for split in ("train", "val"):
        for class_name in ("cat", "dog", "owl"):
            (tmp_path / "photos" / split / class_name).mkdir(parents=True)
            for number in range(50):
                (tmp_path / "photos" / split / class_name / f"{number:02}.jpg").write_text(
                    f"{split} {class_name} {number}"
                )
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time all is there
        load_benchmark("finetune").link_photos(Path("photos"), tmp_path / "few", ["cat", "owl"], few=5)
    files = {path.relative_to(tmp_path / "few"): path.read_text() for path in (tmp_path / "few").rglob("*.jpg")}
    assert len(files) == 2 * (5 + 50)
    assert all(text == f"{path.parts[0]} {path.parts[1]} {int(path.stem)}" for path, text in files.items())
    numbers = sorted(int(path.stem) for path in files if path.parts[:2] == ("train", "owl"))
    assert numbers == [0, 10, 20, 30, 40]
