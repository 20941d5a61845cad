"""The examples for schedulers do what they say: their commands parse, and they start again what is worth it."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from podscale.cli import arguments as cli_arguments
from podscale.cli import parser
from podscale.cli.main import main
from podscale.processes import schedulers

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))


def parsed(words):
    """A `podscale` command as the program reads it."""
    assert words[0] == "podscale"
    arguments = parser.parse_arguments(words[1:])
    cli_arguments.read_recipe(arguments)
    return arguments


@pytest.fixture
def machine(tmp_path):
    """Runs a script where some programs are stand-ins that note how they were called and end as told."""

    def run(script, *arguments, programs, **environment):
        for name, code in programs.items():
            program = tmp_path / name
            program.write_text(f'#!/bin/bash\necho "{name} ${{*@Q}}" >> {tmp_path}/calls\nexit {code}\n')
            program.chmod(0o755)
        done = subprocess.run(
            [str(EXAMPLES / script), *arguments],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_opens_with_a_command_that_can_be_called(script):
    assert os.access(script, os.X_OK)
    usage = next(line for line in script.read_text().splitlines() if f"examples/{script.name}" in line)
    assert parsed(["podscale", "train", *shlex.split(usage.partition(script.name)[2])]).recipe


@pytest.mark.parametrize(
    ("code", "again"), [(0, False), (1, False), (2, False), (65, False), (69, True), (75, True), (137, True)]
)
def test_the_slurm_job_goes_back_to_the_queue_after_faults_alone(machine, code, again):
    programs = {"srun": code, "scontrol": 0}
    ended, (start, *rest) = machine("slurm.sh", "digits", "--run", "a b", programs=programs, SLURM_JOB_ID="17")
    assert ended == code
    assert parsed(start[2:]).run == "a b"
    assert rest == ([["scontrol", "requeue", "17"]] if again else [])


def test_the_slurm_job_gives_up_at_last(machine):
    _, calls = machine("slurm.sh", programs={"srun": 69, "scontrol": 0}, SLURM_JOB_ID="1", SLURM_RESTART_COUNT="50")
    assert [call[0] for call in calls] == ["srun"]


@pytest.mark.parametrize(("code", "tries"), [(0, 1), (2, 1), (69, 3), (75, 3)])
def test_mpi_is_started_again_after_faults_alone(machine, code, tries):
    ended, calls = machine("mpi.sh", "digits", programs={"mpirun": code}, MPIRUN="mpirun -n 4", MOST_RESTARTS="2")
    assert ended == code
    assert len(calls) == tries
    assert parsed(calls[0][calls[0].index("podscale") :]).recipe == "digits"


def test_the_tpu_machines_all_run_the_same_command(machine):
    arguments = ["digits", "--data.path", "/mnt/a b", "--run", "/mnt/run"]
    _, (call,) = machine("tpu-vm.sh", *arguments, programs={"gcloud": 0}, TPU="t", ZONE="z")
    assert call[call.index("--worker") + 1] == "all"
    found = parsed(shlex.split(call[call.index("--command") + 1]))
    assert (getattr(found, "data.path"), found.run) == ("/mnt/a b", "/mnt/run")


def test_the_jobset_says_what_its_pods_need_to_know():
    described = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    (replicated,) = described["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    parsed(container["command"])
    told = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(told["JAX_NUM_PROCESSES"]) == job["parallelism"] == job["completions"] > 1
    assert job["completionMode"] == "Indexed"
    assert container["ports"][0]["containerPort"] == schedulers.KUBERNETES_PORT
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [main.USER_ERROR, main.DIVERGED])
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert described["spec"]["failurePolicy"]["maxRestarts"] > 0
