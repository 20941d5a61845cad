"""A part of the randomized fault campaign, with a seed of its own; `make chaos` runs more of it."""

import json
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from faults.chaos import draw_trial, read_results, run_slice, shrink
from support.chaos_faults import KINDS

SCRIPT = Path(__file__).with_name("chaos.py")


@pytest.mark.heavy
@pytest.mark.processes(4)
def test_a_trial_of_four_processes_is_survived(tmp_path):
    """Two killed during a save; a slice of one second is one trial. Many kinds are in test_kinds, one by one; what
    each of them injects is in test_injections."""
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(SCRIPT), "--seed", "121", "--seconds", "1", "--results", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (line,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert (line["processes"], line["problem"]) == (4, "")
    assert [fault["hit"] for fault in line["faults"]] == [True]
    assert "0 not survived" in done.stdout


class FakeCampaign:
    """A campaign whose trials fail if a predicate of their faults says so."""

    disk, kinds, counts = None, KINDS, MappingProxyType({})

    def __init__(self, fails):
        self._fails = fails

    def run_trial(self, processes, faults):
        return [], "failed" if self._fails(faults) else ""


def test_the_campaign_draws_every_kind_of_fault_at_every_moment_on_one_and_four_processes():
    campaign = FakeCampaign(lambda faults: False)
    campaign.disk = Path()
    drawn = {
        (processes, fault.kind, fault.moment)
        for processes, faults in (draw_trial(3, number, campaign) for number in range(4000))
        for fault in faults
    }
    assert drawn == {
        (processes, name, moment)
        for name, kind in KINDS.items()
        for processes in kind.processes
        for moment in kind.moments
        if kind.is_possible
    }


def test_a_slice_starts_where_the_last_one_of_its_seed_ended(tmp_path):
    results, campaign = tmp_path / "results.jsonl", FakeCampaign(lambda faults: False)
    for seed in (1, 2, 1):
        assert run_slice(campaign, seed, 0.02, results)
    trials = [line["trial"] for line in read_results(results) if line["seed"] == 1]
    assert trials == list(range(len(trials)))
    assert len(trials) > 2


def test_a_failing_sequence_is_shrunk_to_the_shortest_that_fails():
    campaign = FakeCampaign(lambda faults: {"b", "d"} <= set(faults))
    assert shrink(campaign, 1, list("abcde")) == (["b", "d"], "failed")
    assert shrink(FakeCampaign(lambda faults: False), 1, ["a"]) == (["a"], "it did not fail again")
