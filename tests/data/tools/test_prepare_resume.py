"""A prepare that is stopped anywhere resumes to the same bytes, whatever the number of threads."""

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
from support.prepared import assert_refused, open_data_set, read_contents

from podscale.data.index import catalog
from podscale.data.tools import prepare
from podscale.data.tools.prepare import Settings
from podscale.data.tools.survey import survey_data_set
from podscale.errors import UserError


def test_shards_have_the_size_of_the_setting(uninterrupted):
    sizes = [path.stat().st_size for path in sorted(uninterrupted.glob("train-*.tar"))]
    assert len(sizes) > 3
    assert all(2**19 < size <= 2**20 + 20 * 512 for size in sizes[:-1])
    assert not list(uninterrupted.glob("*.part"))


@pytest.mark.parametrize("threads", [1, 5])
def test_bytes_do_not_depend_on_threads(many, uninterrupted, tmp_path, threads):
    prepare.prepare_data_set(many, tmp_path / "to", Settings(shard_mib=1), threads=threads)
    assert read_contents(tmp_path / "to") == read_contents(uninterrupted)


KILL_PROGRAM = """
import os, signal, sys
from podscale.data.index import catalog
from podscale.data.tools import prepare, shards, target

def kill_at(owner, name, call):
    original, calls = getattr(owner, name), []
    def count_and_call(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    setattr(owner, name, count_and_call)

owner, name, call, source, folder = sys.argv[1:]
kill_at({"shard": shards.Shard, "target": target.Target, "catalog": catalog}[owner], name, int(call))
prepare.prepare_data_set(source, folder, target.Settings(shard_mib=1), threads=2)
"""


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        ("target", "_save", 1),  # the folder is empty
        ("shard", "add", 1),
        ("shard", "add", 6),  # in the middle of a shard
        ("shard", "finish", 3),
        ("target", "add", 2),  # the shard exists, but is not listed
        ("shard", "add", 22),  # in the other split
        ("catalog", "store_beside", 1),
        ("target", "finish", 1),
    ],
)
def test_killed_anywhere_it_resumes_to_the_same_bytes(many, uninterrupted, tmp_path, owner, name, call):
    command = [sys.executable, "-c", KILL_PROGRAM, owner, name, str(call), str(many), str(tmp_path / "to")]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -9
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "to").glob("*.tar")}
    journal = tmp_path / "to" / "prepare.json"
    listed = (
        [s["name"] for part in json.loads(journal.read_text())["shards"].values() for s in part] if call > 1 else []
    )
    summary = prepare.prepare_data_set(many, tmp_path / "to", Settings(shard_mib=1), threads=2)
    assert not summary["already"]
    assert read_contents(tmp_path / "to") == read_contents(uninterrupted)
    assert all((tmp_path / "to" / shard).stat().st_mtime_ns == before[shard] for shard in listed)  # not written twice


def test_a_partly_prepared_data_set_is_refused(photos, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "store_beside", lambda *_: (_ for _ in ()).throw(UserError("stopped")))
        assert_refused("stopped", photos, tmp_path / "to", Settings())
    for open_partial in (
        open_data_set,
        lambda root: survey_data_set(str(root)),
        lambda root: prepare.prepare_data_set(root, tmp_path / "on", Settings()),
    ):
        with pytest.raises(UserError, match="is only partly prepared; run `podscale data prepare` again"):
            open_partial(tmp_path / "to")
    prepare.prepare_data_set(photos, tmp_path / "to", Settings())
    assert len(open_data_set(tmp_path / "to").train) == 10


def test_interrupted_it_says_how_to_resume(many, tmp_path):
    program = KILL_PROGRAM.replace("SIGKILL", "SIGINT").rpartition("prepare.prepare_data_set(")[0]
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which may be ignored where tests run
    program += (
        "from podscale.cli.main import main; sys.exit(main(['data', 'prepare', source, folder, '--shard-mib', '1']))"
    )
    command = [sys.executable, "-c", program, "shard", "add", "6", str(many), str(tmp_path / "to")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 130
    message = "podscale: interrupted; the same command resumes after the last complete shard"
    assert done.stderr.strip() == message
    assert (tmp_path / "to" / "train-00000.tar").exists()
    assert not list((tmp_path / "to").glob("*.part"))


def test_a_complete_folder_is_left_unchanged(many, uninterrupted, tmp_path, monkeypatch):
    shutil.copytree(uninterrupted, tmp_path / "to")
    first = prepare.prepare_data_set(many, uninterrupted, Settings(shard_mib=1))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "to").iterdir()}
    monkeypatch.setattr(prepare, "encode_sample", lambda *_: pytest.fail("worked"))
    second = prepare.prepare_data_set(many, tmp_path / "to", Settings(shard_mib=1))
    assert second["already"]
    assert {k: v for k, v in second.items() if k not in ("seconds", "prepared")} == {
        k: v for k, v in first.items() if k not in ("seconds", "prepared")
    }
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "to").iterdir()} == before


@pytest.mark.parametrize("victim", ["train-00001.tar", ".podscale-index"])
def test_a_file_lost_afterwards_is_written_again(many, uninterrupted, tmp_path, victim):
    shutil.copytree(uninterrupted, tmp_path / "to")
    (tmp_path / "to" / victim).unlink()
    assert not prepare.prepare_data_set(many, tmp_path / "to", Settings(shard_mib=1))["already"]
    assert read_contents(tmp_path / "to") == read_contents(uninterrupted)


def test_threads_stay_close_to_the_consumer(many, tmp_path, monkeypatch):
    """However slow the target's disk is, few images wait for it."""
    encoded, ahead, original = [], [], prepare.encode_sample
    monkeypatch.setattr(
        prepare, "encode_sample", lambda index, i, settings: encoded.append(i) or original(index, i, settings)
    )
    index = open_data_set(many, "folder").train
    target = prepare.Target(tmp_path, Settings())
    for consumed, _ in enumerate(prepare._encode_in_order(index, 0, target, threads=1)):
        ahead.append(len(encoded) - consumed)
    assert max(ahead) <= prepare.QUEUED_PER_THREAD + 1
    encoded.clear()
    monkeypatch.setattr(prepare, "QUEUED_BYTES", 1)
    for consumed, _ in enumerate(prepare._encode_in_order(index, 0, target, threads=4)):
        assert len(encoded) <= consumed + 2


def test_a_full_disk_is_reported_in_one_sentence_and_complete_files_stay(many, uninterrupted, tmp_path):
    program = (
        "import resource; from podscale.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); "
        f"raise SystemExit(main(['data', 'prepare', {str(many)!r}, 'to']))"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "podscale: cannot write to/train-00000.tar: File too large; fix this and run the same command again to continue"
    )
    assert sorted(os.listdir(tmp_path / "to")) == ["classes.txt", "prepare.json"]
