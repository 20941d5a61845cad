"""The wheels: what is in them, for which machine, and that the same commit gives the same bytes."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of ELF
NEEDED = ("apt-get", "dpkg-deb", "git")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Build everything twice; return the folder and what the script printed."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"building wheels needs {' and '.join(missing)}")
    folder = tmp_path_factory.mktemp("dist")
    (folder / "podscale-0.0.1-cp311-abi3-manylinux_2_17_x86_64.whl").touch()  # of an earlier build
    command = [sys.executable, str(ROOT / "packaging" / "build_wheels.py"), "--out", str(folder), "--twice"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout


def open_wheel(folder, architecture):
    (path,) = folder.glob(f"*_{architecture}.whl")
    return zipfile.ZipFile(path)


def read_headers(data):
    """Return an ELF file's machine, and the names of versions of glibc that it needs."""
    assert data[:5] == b"\x7fELF\x02"
    return int.from_bytes(data[18:20], "little"), set(re.findall(rb"GLIBC_([0-9.]+)", data))


@pytest.mark.slow
def test_two_builds_of_a_commit_have_the_same_bytes(build):
    folder, output = build
    assert "the second build has the same bytes" in output
    assert len(list(folder.iterdir())) == 3


@pytest.mark.slow
def test_the_source_archive_builds_a_wheel_with_both_extensions(build, tmp_path):
    (archive,) = build[0].glob("podscale-*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(archive)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("podscale-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for module in ("podscale/data/_native.", "podscale/processes/_abort."):
        assert [name for name in names if name.startswith(module) and name.endswith(".so")]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MACHINES)
def test_extensions_are_for_the_wheels_machine_and_run_on_its_oldest_system(build, architecture):
    wheel = open_wheel(build[0], architecture)
    libraries = [name for name in wheel.namelist() if ".so" in name]
    for name in ("podscale/data/_native.abi3.so", "podscale/processes/_abort.abi3.so"):
        assert name in libraries
    for name in libraries:
        machine, versions = read_headers(wheel.read(name))
        assert machine == MACHINES[architecture]
        assert all(tuple(map(int, version.split(b"."))) <= (2, 17) for version in versions), (name, versions)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MACHINES)
def test_libjpeg_turbo_is_inside_with_its_license(build, architecture):
    wheel = open_wheel(build[0], architecture)
    shared = [name for name in wheel.namelist() if name.startswith("podscale.libs/libjpeg-")]
    code = wheel.read(shared[0]) if shared else wheel.read("podscale/data/_native.abi3.so")
    assert b"libjpeg-turbo version 2." in code
    assert bool(shared) == (architecture == "x86_64")
    (text,) = [name for name in wheel.namelist() if name.endswith("licenses/libjpeg-turbo.txt")]
    assert b"Independent JPEG Group" in wheel.read(text)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MACHINES)
def test_a_wheel_has_every_file_of_the_package_and_no_path_of_this_machine(build, architecture):
    wheel = open_wheel(build[0], architecture)
    listed = subprocess.run(["git", "ls-files", "src/podscale"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = wheel.namelist()
    assert [path for path in listed.stdout.split() if path.removeprefix("src/") not in names] == []
    assert [name for name in names if str(ROOT).encode() in wheel.read(name)] == []


def test_the_job_script_names_the_image_that_the_container_file_makes():
    container = (ROOT / "packaging" / "Containerfile").read_text()
    assert re.findall(r"^FROM \S+ AS (\w+)$", container, re.M) == ["python", "wheel", "cpu", "cuda", "tpu"]
    (image,) = re.findall(r"image: (\S+)", (ROOT / "examples" / "jobset.yaml").read_text())
    assert f"--tag {image} " in container
