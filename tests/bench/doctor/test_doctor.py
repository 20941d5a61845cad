"""The doctor: real measurements of this machine, and its verdict."""

import os

import pytest

from podscale.bench.doctor import compatibility, verdict
from podscale.bench.doctor.examine import examine_machine, format_rows
from podscale.errors import UserError
from podscale.pod import find_pod


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    reports = []
    result = examine_machine(find_pod(virtual="2x2"), folder, reports.append)
    assert os.listdir(folder) == []
    assert reports == ["device", "links", "decoding", "disk", "problems"]
    return result


@pytest.mark.heavy
def test_every_part_is_measured(result):
    assert result["devices"]["count"] == 4
    assert set(result["links"]) == {"rows", "columns"}
    rates = [*result["device"].values(), *result["images_per_s"].values()]
    rates += [number for link in result["links"].values() for number in link.values()]
    rates += [result["decoding"][name] for name in ("one_core", "all_cores")]
    rates += list(result["disk"].values())
    assert all(rate > 0 for rate in rates)
    assert set(result["images_per_s"]) == set(verdict.ADVICE) - {"bucket"}


@pytest.mark.heavy
def test_the_verdict_names_the_smallest_rate(result):
    limits = result["images_per_s"]
    assert limits[result["bottleneck"]] == min(limits.values())
    assert result["verdict"].count(". ") == 0


@pytest.mark.heavy
def test_the_result_is_formatted_as_rows(result):
    rows = dict(format_rows(result))
    assert "4 x cpu as 2x2" in rows["devices"]
    assert "us to a neighbour" in rows["links, rows"]
    assert "photos/s by one core" in rows["decoding"]
    assert f"; devices: {verdict.ROOFLINE}" in rows["ResNet-50"]


def test_one_device_has_no_links(tmp_path):
    from podscale.bench.doctor import rates as doctor_rates

    assert doctor_rates.measure_links(find_pod(virtual="1x1")) == {}
    assert set(doctor_rates.measure_links(find_pod(virtual="1x2"))) == {"rows"}


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        examine_machine(find_pod(virtual="1x1"), tmp_path / "nowhere")


LIMITS = {"devices": 7000.0, "decoding": 900.0, "disk": 5000.0, "feeding": 9000.0}


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ("decoding", "is decoding: 9 images/s of ResNet-50 at best, where disk would allow 5,000; run `podscale data"),
        ("devices", "is the devices: 9 images/s"),
        ("disk", "is the disk: 9 images/s"),
        ("links", "is the links: 9 images/s"),
    ],
)
def test_each_bottleneck_has_its_advice(slow, words):
    others = LIMITS | {"decoding": 8000.0} if slow != "decoding" else LIMITS
    sentence = verdict.format_verdict(others | {slow: 9.0}, [])
    assert words in sentence
    assert verdict.ADVICE[slow] in sentence


def make_h200_result(crops_per_s: float, kind: str = "NVIDIA H200"):
    """Return what was measured on a machine with an H200 and 16 cores (docs/gpu.md, docs/results.md)."""
    device = {"matrix_flops_per_s": 712e12, "copy_bytes_per_s": 2870e9, "feed_bytes_per_s": 31.8e9}
    devices = {"count": 1, "platform": "gpu", "kind": kind}
    decoding, disk = {"all_cores": crops_per_s}, {"read_bytes_per_s": 5e9}
    return {"devices": devices, "device": device, "decoding": decoding, "disk": disk, "links": {}}


@pytest.mark.parametrize("crops_per_s", [9_114.0, 10_602.0])
def test_cores_that_decode_faster_than_the_gpu_trains_are_not_blamed(crops_per_s):
    result = make_h200_result(crops_per_s)
    limits = verdict.compute_limits(result)
    assert limits["devices"] == pytest.approx(256 / 37.71e-3, rel=1e-3)  # the measured step that is not fused
    assert verdict.find_bottleneck(limits) == "devices"
    sentence = verdict.format_verdict(limits, [], verdict.describe_device_rate(result))
    assert f"6,789 images/s of ResNet-50 at best, where decoding would allow {crops_per_s:,.0f}" in sentence
    assert "forecast of its step without fused kernels" in sentence


def test_a_device_that_is_slower_than_its_kind_has_its_measured_rate():
    result = make_h200_result(9_114.0)
    result["device"]["copy_bytes_per_s"] /= 10
    assert verdict.compute_limits(result)["devices"] == pytest.approx(2870e8 / 253e6)


def test_the_rate_of_an_unknown_device_is_called_a_roofline():
    result = make_h200_result(20_000.0, kind="NVIDIA B900")
    limits = verdict.compute_limits(result)
    assert limits["devices"] == pytest.approx(2870e9 / 253e6)
    assert "is a roofline" in verdict.format_verdict(limits, [], verdict.describe_device_rate(result))


def test_an_unused_device_comes_first():
    idle = compatibility.find_unused_devices("cpu", lambda path: path == "/dev/nvidia0")
    assert "pip install 'podscale[cuda13]'" in verdict.format_verdict(LIMITS, ["something else", *idle])
    assert compatibility.find_unused_devices("gpu", lambda path: True) == []
    assert "TPU" in compatibility.find_unused_devices("cpu", lambda path: path == "/dev/accel0")[0]


def test_incompatible_versions_are_named():
    versions = {"jax": "0.10.2", "jaxlib": "0.10.1", "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}
    assert compatibility.find_version_conflicts(versions) == [
        "jax is 0.10.2 but jaxlib 0.10.1; install the same version of both"
    ]
    requirements = ["jax>=0.10", "numpy>=2.0", 'onnx>=1.17; extra == "export"', "flax"]
    assert compatibility.find_old_versions(requirements, {"jax": "0.10.2", "numpy": "1.26.4", "onnx": "1.0"}) == [
        "numpy is 1.26.4, but podscale needs 2.0 or newer; pip install --upgrade 'numpy>=2.0'"
    ]
    assert compatibility.find_version_conflicts(compatibility.list_installed()) == []


def test_a_slow_decoder_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PODSCALE_DECODER", "plain")
    assert any("at less than half the rate" in problem for problem in compatibility.find_problems("cpu", tmp_path))
