"""The report on loopback: it follows the run, and answers nobody else."""

import json
import urllib.error
import urllib.request

import pytest
from support.browser import BINARY, Browser

from podscale.errors import UserError
from podscale.recipe import load_recipe
from podscale.report import watch
from podscale.runs.bucket import RunBucket, resolve_folder
from podscale.runs.folder import Run
from podscale.storage.locations import parse_location

LINE = '{"event": "train", "step": 2, "loss": 1.0, "accuracy": 0.5, "learning_rate": 0.1, "images_per_s": 9.0}\n'


def make_run(folder):
    plan = {
        "pod": {"kind": "cpu", "rows": 1, "cols": 1, "cores": 1, "hosts": 1, "devices": 1},
        "tile": [1, 1],
        "span": 64,
    }
    plan |= {"counts": {"train": 8, "val": 4, "classes": 2}, "steps": 3, "steps_per_epoch": 1.0, "steps_per_call": 1}
    plan |= {"images_per_device": 8, "micro_batches": 1, "summation": "xla", "payload": "float32", "bucket_bytes": 0}
    plan |= {"lanes_per_host": 1, "bytes_per_device": {"limit": 1}}
    return Run.create(folder, load_recipe("digits"), plan, ("cat", "dog"))


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def read(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as response:
        return response.read().decode()


def test_the_report_follows_the_run(run):
    with watch.serve_report(run) as address:
        assert address.startswith("http://127.0.0.1:")
        assert 'src="report.html"' in read(address)
        assert "No step completed yet" in read(f"{address}report.html")
        before = read(f"{address}version")
        (run.folder / "metrics.jsonl").write_text(LINE)
        assert read(f"{address}version") != before
        assert "Step 2 of 3" in read(f"{address}report.html")


def test_the_report_follows_a_run_in_a_bucket(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(watch, "PULL_S", 0.0)
    location = parse_location(f"s3://{bucket}/run")
    (tmp_path / "run").mkdir()
    owner = RunBucket(location, tmp_path / "run")
    owner.take_over(1)
    make_run(tmp_path / "run")
    owner.push()
    with watch.serve_report(Run.load(resolve_folder(str(location)))) as address:
        assert "No step completed yet" in read(f"{address}report.html")
        before = read(f"{address}version")
        assert read(f"{address}version") == before
        (tmp_path / "run" / "metrics.jsonl").write_text(LINE)
        owner.push()
        assert read(f"{address}version") != before
        assert "Step 2 of 3" in read(f"{address}report.html")


@pytest.mark.heavy
@pytest.mark.skipif(BINARY is None, reason="there is no Chromium")
def test_a_reload_keeps_what_the_reader_has_opened_set_and_scrolled_to(run):
    page = "document.querySelector('iframe').contentDocument"
    state = (
        f"[{page}.querySelector('details').open, {page}.getElementById('log-loss').checked, "
        f"{page}.getElementById('smoothing').value, {page}.getElementById('smoothing-value').textContent, "
        "document.querySelector('iframe').contentWindow.scrollY]"
    )
    with (
        watch.serve_report(run) as address,
        Browser() as browser,
        browser.open(address, height=300, ready=None) as tab,
    ):
        tab.wait_for(f"{page}.readyState === 'complete' && {page}.getElementById('log-loss') !== null")
        tab.evaluate(
            f"{page}.querySelector('details').open = true, {page}.getElementById('log-loss').checked = true, "
            f"{page}.getElementById('smoothing').value = 0.9, "
            f"{page}.getElementById('smoothing').dispatchEvent(new Event('input')), "
            "document.querySelector('iframe').contentWindow.scrollTo(0, 40), 0"
        )
        before = tab.evaluate(state)
        assert before[0:3] == [True, True, "0.9"]
        assert before[4] == 40
        (run.folder / "metrics.jsonl").write_text(LINE)
        tab.evaluate("reload(), 0")
        tab.wait_for(f"{page}.readyState === 'complete' && {page}.body.textContent.includes('Step 2 of 3')")
        tab.wait_for(f"JSON.stringify({state}) === {json.dumps(json.dumps(before, separators=(',', ':')))}")
        assert tab.problems == []


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
