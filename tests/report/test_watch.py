"""The report on loopback: it follows the run, and answers nobody else."""

import urllib.error
import urllib.request

import pytest

from podscale.errors import UserError
from podscale.recipe import load_recipe
from podscale.report import watch
from podscale.runs.folder import Run


@pytest.fixture
def run(tmp_path):
    plan = {
        "pod": {"kind": "cpu", "rows": 1, "cols": 1, "cores": 1, "hosts": 1, "devices": 1},
        "tile": [1, 1],
        "span": 64,
    }
    plan |= {"counts": {"train": 8, "val": 4, "classes": 2}, "steps": 3, "steps_per_epoch": 1.0, "steps_per_call": 1}
    plan |= {"images_per_device": 8, "micro_batches": 1, "summation": "xla", "payload": "float32", "bucket_bytes": 0}
    plan |= {"lanes_per_host": 1, "bytes_per_device": {"limit": 1}}
    return Run.create(tmp_path / "run", load_recipe("digits"), plan, ("cat", "dog"))


def read(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as response:
        return response.read().decode()


def test_the_report_follows_the_run(run):
    with watch.serve_report(run) as address:
        assert address.startswith("http://127.0.0.1:")
        assert 'src="report.html"' in read(address)
        assert "No step done yet" in read(f"{address}report.html")
        before = read(f"{address}version")
        line = (
            '{"event": "train", "step": 2, "loss": 1.0, "accuracy": 0.5, "learning_rate": 0.1, "images_per_s": 9.0}\n'
        )
        (run.folder / "metrics.jsonl").write_text(line)
        assert read(f"{address}version") != before
        assert "Step 2 of 3" in read(f"{address}report.html")


def test_other_paths_and_other_hosts_get_nothing(run):
    with watch.serve_report(run) as address:
        for path, headers, code in (
            ("recipe.toml", {}, 404),
            ("../x", {}, 404),
            ("", {"Host": "evil.example:80"}, 403),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                read(address + path, **headers)
            assert error.value.code == code
            error.value.close()


def test_a_port_that_cannot_exist_is_one_sentence(run):
    with pytest.raises(UserError, match="--port must be from 0 to 65535, not 99999"), watch.serve_report(run, 99999):
        pass


def test_a_port_in_use_is_one_sentence(run):
    with watch.serve_report(run) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        with (
            pytest.raises(UserError, match=f"cannot serve on port {port}: Address already in use"),
            watch.serve_report(run, port),
        ):
            pass
