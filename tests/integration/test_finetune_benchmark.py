"""The photos that `benchmarks/finetune.py` learns from."""

from pathlib import Path

from support.benchmarks import benchmark


def test_few_photos_are_spread_over_all_and_every_one_is_kept_for_validation(tmp_path, monkeypatch):
    for part in ("train", "val"):
        for kind in ("cat", "dog", "owl"):
            (tmp_path / "photos" / part / kind).mkdir(parents=True)
            for number in range(50):
                (tmp_path / "photos" / part / kind / f"{number:02}.jpg").write_text(f"{part} {kind} {number}")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time all is there
        benchmark("finetune").linked(Path("photos"), tmp_path / "few", ["cat", "owl"], few=5)
    found = {path.relative_to(tmp_path / "few"): path.read_text() for path in (tmp_path / "few").rglob("*.jpg")}
    assert len(found) == 2 * (5 + 50)
    assert all(text == f"{path.parts[0]} {path.parts[1]} {int(path.stem)}" for path, text in found.items())
    numbers = sorted(int(path.stem) for path in found if path.parts[:2] == ("train", "owl"))
    assert numbers == [0, 10, 20, 30, 40]
