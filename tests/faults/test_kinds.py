"""Every kind of fault of the campaign, one at a time, at moments that a campaign draws only now and then."""

import tempfile
from pathlib import Path

import pytest
from faults.chaos import Campaign, small_disk
from support.chaos_faults import KINDS, Fault, is_drawn

CASES = [
    ("kill_one", "saving", 1),
    ("kill_two", "training", 4),
    ("kill_two", "saving", 4),
    ("kill_main", "starting", 4),  # the coordinator, at startup
    ("kill_main", "ending", 4),  # and about when the summary is written
    ("kill_launcher", "saving", 4),
    ("pause_launcher", "training", 4),
    ("fill_disk", "saving", 1),
    ("fill_disk", "saving", 4),
    ("fill_disk", "ending", 4),  # as the last checkpoint is written
    ("restart_on_full_disk", "training", 4),
    ("limit_files", "training", 1),
    ("limit_memory", "training", 1),
    ("replace_file", "training", 1),
    ("copy_checkpoint", "training", 1),
    ("hide_checkpoints", "training", 4),
    ("make_unreadable", "training", 1),
    ("leave_stray_files", "evaluating", 1),
    ("change_surroundings", "training", 4),
    ("cut_links", "training", 4),
    ("join_twice", "training", 4),
    ("damage_programs", "training", 4),
    ("train_twice", "training", 4),
    ("intrude", "training", 4),
    ("stop_one", "training", 4),
]


@pytest.fixture(scope="module")
def campaign():
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as disk:
        yield Campaign(Path(name), disk)


@pytest.mark.slow
@pytest.mark.processes(4)
@pytest.mark.parametrize(("kind", "moment", "processes"), CASES)
def test_a_run_survives_the_fault_bit_for_bit(campaign, kind, moment, processes):
    if not is_drawn(KINDS[kind], processes, campaign.disk is not None):
        pytest.skip("needs root, to mount a small disk, limit memory or drop packets")
    records, problem = campaign.run_trial(processes, [Fault(kind, moment, 0.0, seed=5)])
    assert not problem, problem
    assert records[0]["hit"]
