"""The survey of a data set counts its images, sizes, bytes and extensions."""

from support import writers

from podscale.data.tools.survey import survey_data_set


def test_a_survey_counts_images_sizes_and_extensions(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    writers.backdate(photos)
    calls = []
    summary = survey_data_set(str(photos), progress=lambda *arguments: calls.append(arguments))
    assert calls[-1] == ("images", 20, 20)
    assert not summary["kept"]
    assert (summary["source"], summary["classes"]) == ("folder", ["ant", "bee é", "cat"])
    train = summary["splits"]["train"]
    assert train["images"] == 10
    assert train["bytes"] == sum(path.stat().st_size for path in (photos / "train").rglob("*.*"))
    assert train["sizes"] == {"smallest": [50, 60], "median": [120, 80], "largest": [140, 150]}
    assert train["extensions"] == {".jpg": 5, ".jpeg": 2, ".png": 2, ".webp": 1}
    assert train["images_per_class"] == {"fewest": 3, "most": 4}
    second = survey_data_set(str(photos))
    assert second["kept"]
    assert second["splits"] == summary["splits"]


def test_a_survey_of_samples_without_names(tmp_path):
    summary = survey_data_set(str(writers.write_tfrecord(tmp_path)))
    assert summary["splits"]["val"]["images"] == 6
    assert summary["splits"]["val"]["extensions"] == {}
