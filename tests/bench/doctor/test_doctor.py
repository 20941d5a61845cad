"""The doctor: real measurements of this machine, and what is made of them."""

import os

import pytest

from podscale.bench.doctor import compatibility, verdict
from podscale.bench.doctor.examine import examine, rows
from podscale.errors import UserError
from podscale.pod import find


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    told = []
    answer = examine(find(virtual="2x2"), folder, told.append)
    assert os.listdir(folder) == []
    assert told == ["device", "links", "decoding", "disk", "problems"]
    return answer


def test_every_part_is_measured(found):
    assert found["devices"]["count"] == 4
    assert set(found["links"]) == {"rows", "columns"}
    rates = [*found["device"].values(), *found["images_per_s"].values()]
    rates += [number for link in found["links"].values() for number in link.values()]
    rates += [found["decoding"][name] for name in ("one_core", "all_cores")]
    rates += list(found["disk"].values())
    assert all(rate > 0 for rate in rates)
    assert set(found["images_per_s"]) == set(verdict.ADVICE)


def test_the_verdict_names_the_smallest_rate(found):
    alone = found["images_per_s"]
    assert alone[found["bottleneck"]] == min(alone.values())
    assert found["verdict"].count(". ") == 0


def test_it_is_told_in_words(found):
    told = dict(rows(found))
    assert "4 x cpu as 2x2" in told["devices"]
    assert "us to a neighbour" in told["links, rows"]
    assert "photos/s by one core" in told["decoding"]


def test_one_device_has_no_links(tmp_path):
    from podscale.bench.doctor import rates as doctor_rates

    assert doctor_rates.links(find(virtual="1x1")) == {}
    assert set(doctor_rates.links(find(virtual="1x2"))) == {"rows"}


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        examine(find(virtual="1x1"), tmp_path / "nowhere")


ALONE = {"devices": 7000.0, "decoding": 900.0, "disk": 5000.0, "feeding": 9000.0}


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ("decoding", "is decoding: 9 images/s of ResNet-50 at best, where disk would allow 5,000; run `podscale data"),
        ("devices", "are the devices: 9 images/s"),
        ("disk", "is the disk: 9 images/s"),
        ("links", "are the links: 9 images/s"),
    ],
)
def test_each_bottleneck_has_its_advice(slow, words):
    others = ALONE | {"decoding": 8000.0} if slow != "decoding" else ALONE
    said = verdict.sentence(others | {slow: 9.0}, [])
    assert words in said
    assert verdict.ADVICE[slow] in said


def test_a_device_that_lies_idle_comes_first():
    idle = compatibility.unused_devices("cpu", lambda path: path == "/dev/nvidia0")
    assert "pip install 'podscale[cuda13]'" in verdict.sentence(ALONE, ["something else", *idle])
    assert compatibility.unused_devices("gpu", lambda path: True) == []
    assert "TPU" in compatibility.unused_devices("cpu", lambda path: path == "/dev/accel0")[0]


def test_versions_that_do_not_fit_are_named():
    versions = {"jax": "0.10.2", "jaxlib": "0.10.1", "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
    assert compatibility.disagreeing_versions(versions) == [
        "jax is 0.10.2 but jaxlib 0.10.1; install the same version of both"
    ]
    requirements = ["jax>=0.10", "numpy>=2.0", 'onnx>=1.17; extra == "export"', "flax"]
    assert compatibility.old_versions(requirements, {"jax": "0.10.2", "numpy": "1.26.4", "onnx": "1.0"}) == [
        "numpy is 1.26.4, but podscale needs 2.0 or newer; pip install --upgrade 'numpy>=2.0'"
    ]
    assert compatibility.disagreeing_versions(compatibility.installed()) == []


def test_a_decoder_that_is_not_native_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    assert any("at less than half the rate" in problem for problem in compatibility.problems("cpu", tmp_path))
