"""Build the source archive, and wheels for Linux on x86-64 and aarch64 that bring their own libjpeg-turbo.

    python packaging/build_wheels.py [--out dist] [--architectures x86_64 aarch64] [--twice]

Needs Python 3.11 with venv and headers (not Debian's, whose headers are of one architecture), git, tar, and Debian's
`apt-get` and `dpkg-deb`; root is not needed. Nothing of this machine's compiler or C library gets into a wheel: Zig's C
compiler, a package on PyPI, links against glibc 2.17, and libjpeg-turbo is Debian's build, found by the names of its
packages. In the x86-64 wheel it is a shared library that auditwheel puts inside; in the aarch64 wheel, which is
cross-built, it is linked in. One wheel serves every Python from 3.11 on.

The same commit gives the same bytes: tools are pinned (`requirements.txt`), all times are the commit's, and no path of
the machine is recorded. `--twice` builds in two different folders and compares. Only what is committed is built.
"""

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GLIBC = "2.17"
EXTENSIONS = ("podscale/data/_native.abi3.so", "podscale/processes/_abort.abi3.so")


class Target(NamedTuple):
    """An architecture: Debian's name of it, the packages that are taken from there, and the library that is linked."""

    debian: str
    packages: tuple[str, ...]
    library: str


TARGETS = {
    # libgcc has what asks a processor for its instructions, which Zig's own library lacks.
    "x86_64": Target("amd64", ("libjpeg62-turbo", "libjpeg62-turbo-dev", "libgcc-12-dev"), "libjpeg.so"),
    "aarch64": Target("arm64", ("libjpeg62-turbo-dev",), "libjpeg.a"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--architectures", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--twice", action="store_true", help="build again elsewhere, and compare the bytes")
    arguments = parser.parse_args()
    check_headers(Path(sysconfig.get_path("include")))
    cache = ROOT / "build" / "packaging"
    tools = install_tools(cache / "tools")
    roots = {name: fetch_packages(cache / name, TARGETS[name]) for name in arguments.architectures}
    commit = read_commit()  # once: a commit that is made meanwhile belongs to no build
    digests = build_all(commit, arguments.out, tools, roots)
    print("\n".join(f"{digest}  {name}" for name, digest in digests.items()))
    if arguments.twice:
        with tempfile.TemporaryDirectory(prefix="podscale-again-") as folder:
            again = build_all(commit, Path(folder) / "dist", tools, roots)
        if again != digests:
            sys.exit(f"the second build differs: {[name for name in digests if again.get(name) != digests[name]]}")
        print("the second build has the same bytes")


def run(*command: str | Path, **options: object) -> str:
    """Run a command, and return what it prints; its errors are printed, and end this program."""
    result = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
    )
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}")
    return str(result.stdout)


# --- what a build needs ----------------------------------------------------------------------------------------------


def check_headers(folder: Path) -> None:
    """Refuse a Python without its headers, or, as Debian's, with headers that lead to those of one architecture."""
    header, other = folder / "pyconfig.h", "use another Python 3.11, for example pyenv's: make PYTHON=PATH wheels"
    if not header.exists():
        sys.exit(f"{folder} has no headers of Python; {other}")
    if "-linux-gnu/python" in header.read_text():
        sys.exit(f"{header} includes a header of its own for each architecture, which Zig does not find; {other}")


def install_tools(folder: Path) -> Path:
    """Return the `bin` folder of a virtual environment with the pinned tools."""
    wanted, marker = (HERE / "requirements.txt").read_text(), folder / "installed.txt"
    if not marker.exists() or marker.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--requirement", HERE / "requirements.txt")
        marker.write_text(wanted)
    return folder / "bin"


def fetch_packages(folder: Path, target: Target) -> Path:
    """Return a folder into which a target's Debian packages are unpacked, by an apt of that architecture."""
    root = folder / "root"
    if (folder / "unpacked").exists():
        return root
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "APT::Architecture": target.debian,
        "APT::Architectures": target.debian,
        "APT::Sandbox::User": "",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "Debug::NoLocking": 1,
    }
    apt = ["apt-get", "-qq", *(part for name, value in settings.items() for part in ("-o", f"{name}={value}"))]
    run(*apt, "update")
    run(*apt, "download", *(f"{name}:{target.debian}" for name in target.packages), cwd=folder / "packages")
    for package in sorted((folder / "packages").glob("*.deb")):
        run("dpkg-deb", "-x", package, root)
    (folder / "unpacked").write_text("\n".join(path.name for path in (folder / "packages").iterdir()))
    return root


# --- building --------------------------------------------------------------------------------------------------------


class Commit(NamedTuple):
    """What is built, and its time in seconds since 1970."""

    name: str
    epoch: str


def read_commit() -> Commit:
    """Return the commit that is checked out."""
    return Commit(*run("git", "log", "-1", "--format=%H %ct", cwd=ROOT).split())


def build_all(commit: Commit, out: Path, tools: Path, roots: dict[str, Path]) -> dict[str, str]:
    """Build a commit, in place of what an earlier build has left; return the SHA-256 of each file by its name."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("podscale-*"):
        old.unlink()
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="podscale-build-") as name:
        folder = Path(name)
        files = [build_source(commit, folder / "sdist", tools)]
        files += [build_wheel(commit, folder / name, tools, root, name) for name, root in roots.items()]
        for file in files:
            shutil.copy(file, out)
    return {file.name: hashlib.sha256((out / file.name).read_bytes()).hexdigest() for file in files}


def export_source(commit: Commit, folder: Path) -> Path:
    """Return a folder with what is committed."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit.name], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    unpack = ["tar", "--extract", "--no-same-owner", "--no-same-permissions", "--directory", folder]
    subprocess.run(unpack, input=archive, check=True)
    return folder


def build_source(commit: Commit, folder: Path, tools: Path) -> Path:
    """Return the source archive, packed again with the commit's time and no owner."""
    source, epoch = export_source(commit, folder / "source"), int(commit.epoch)
    program = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    name = run(tools / "python", "-c", program, cwd=source).splitlines()[-1]
    packed = io.BytesIO()
    with tarfile.open(source / name) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old, key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    path = folder / name
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))
    return path


def build_wheel(commit: Commit, folder: Path, tools: Path, root: Path, architecture: str) -> Path:
    """Return the wheel of an architecture, checked by auditwheel."""
    target, source = TARGETS[architecture], export_source(commit, folder / "source")
    triple, raw, final = f"{architecture}-linux-gnu", folder / "raw", folder / "final"
    libraries = folder / "libraries"
    libraries.mkdir()
    (libraries / target.library).symlink_to((root / "usr/lib" / triple / target.library).resolve())
    licenses = source / "licenses"
    licenses.mkdir()
    shutil.copy(root / "usr/share/doc/libjpeg62-turbo-dev/copyright", licenses / "libjpeg-turbo.txt")
    pyproject = source / "pyproject.toml"
    listed = pyproject.read_text().replace('license-files = ["LICENSE"]', 'license-files = ["LICENSE", "licenses/*"]')
    pyproject.write_text(listed)
    compiler = f"{tools / 'python'} -m ziglang cc -target {triple}.{GLIBC}"
    links = [f"-L{libraries}", "-s", *map(str, sorted((root / "usr/lib/gcc" / triple).glob("*/libgcc.a")))]
    environment = os.environ | {
        "SOURCE_DATE_EPOCH": commit.epoch,
        "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"),  # nothing of an earlier build
        "ZIG_LOCAL_CACHE_DIR": str(folder / "zig"),
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared",
        "CFLAGS": f"-g0 -fno-sanitize=undefined -I{root}/usr/include -I{root}/usr/include/{triple}",
        "LDFLAGS": " ".join(links),
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "LD_LIBRARY_PATH": str(root / "usr/lib" / triple),  # where auditwheel finds what it puts inside
    }
    program = f"from setuptools import build_meta; print(build_meta.build_wheel({str(raw)!r}))"
    log = run(tools / "python", "-c", program, cwd=source, env=environment)
    wheel = raw / log.splitlines()[-1]
    check_extensions(wheel, log)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    command = [tools / "python", "-m", "auditwheel", "repair", "--wheel-dir", final, wheel]
    log = run(*command, env=environment | {"PATH": path})
    repaired, tag = next(final.glob("*.whl")), f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    if tag not in repaired.name:
        sys.exit(f"{repaired.name} needs a later system than {tag}\n{log}")
    return repaired


def check_extensions(wheel: Path, log: str) -> None:
    """Refuse a wheel without the native extensions, which are optional for a build from source."""
    names = zipfile.ZipFile(wheel).namelist()
    if missing := [name for name in EXTENSIONS if name not in names]:
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}\n{log}")


if __name__ == "__main__":
    main()
