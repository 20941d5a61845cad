"""The example scripts for schedulers work: their commands parse, and they restart after faults only."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from podscale.cli import arguments as cli_arguments
from podscale.cli import main, parser
from podscale.processes import schedulers
from podscale.storage.locations import parse_location

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))


def parse_command(command):
    """Return the arguments of a `podscale` command."""
    assert command[0] == "podscale"
    arguments = parser.parse_arguments(command[1:])
    cli_arguments.read_recipe(arguments)
    return arguments


@pytest.fixture
def machine(tmp_path):
    """A function that runs a script with fake programs, which record their calls and exit with given codes."""

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
def test_every_script_opens_with_a_valid_command(script):
    assert os.access(script, os.X_OK)
    usage = next(line for line in script.read_text().splitlines() if f"examples/{script.name}" in line)
    assert parse_command(["podscale", "train", *shlex.split(usage.partition(script.name)[2])]).recipe


@pytest.mark.parametrize(
    ("code", "requeues"), [(0, False), (1, False), (2, False), (65, False), (69, True), (75, True), (137, True)]
)
def test_the_slurm_job_is_requeued_only_after_faults(machine, code, requeues):
    programs = {"srun": code, "scontrol": 0}
    exit_code, (start, *others) = machine("slurm.sh", "digits", "--run", "a b", programs=programs, SLURM_JOB_ID="17")
    assert exit_code == (code if code < 128 else 69)  # killed: a process is gone
    assert parse_command(start[2:]).run == "a b"
    assert others == ([["scontrol", "requeue", "17"]] if requeues else [])


def test_the_slurm_job_gives_up_after_many_restarts(machine):
    _, calls = machine("slurm.sh", programs={"srun": 69, "scontrol": 0}, SLURM_JOB_ID="1", SLURM_RESTART_COUNT="50")
    assert [call[0] for call in calls] == ["srun"]


@pytest.mark.parametrize(("code", "tries"), [(0, 1), (2, 1), (69, 3), (75, 3), (137, 3)])
def test_mpi_is_restarted_only_after_faults(machine, code, tries):
    exit_code, calls = machine("mpi.sh", "digits", programs={"mpirun": code}, MPIRUN="mpirun -n 4", MOST_RESTARTS="2")
    assert exit_code == (code if code < 128 else 69)
    assert len(calls) == tries
    assert parse_command(calls[0][calls[0].index("podscale") :]).recipe == "digits"


def test_all_tpu_machines_run_the_same_command(machine):
    arguments = ["digits", "--data.path", "/mnt/a b", "--run", "/mnt/run"]
    _, (call,) = machine("tpu-vm.sh", *arguments, programs={"gcloud": 0}, TPU="t", ZONE="z")
    assert call[call.index("--worker") + 1] == "all"
    arguments = parse_command(shlex.split(call[call.index("--command") + 1]))
    assert (getattr(arguments, "data.path"), arguments.run) == ("/mnt/a b", "/mnt/run")


def test_all_tpu_machines_use_the_same_bucket(machine):
    variables = {"TPU": "t", "ZONE": "z", "BUCKET": "gs://my bucket", "NAME": "two"}
    _, (call,) = machine("tpu-bucket.sh", "digits", "--train.epochs", "3", programs={"gcloud": 0}, **variables)
    assert call[call.index("--worker") + 1] == "all"
    arguments = parse_command(shlex.split(call[call.index("--command") + 1]))
    assert (getattr(arguments, "data.path"), arguments.run) == ("gs://my bucket/imagenet", "gs://my bucket/runs/two")
    assert getattr(arguments, "train.epochs") == "3"


def read_jobset(name):
    """Return the JobSet, its job, and the job's container."""
    jobset = yaml.safe_load((EXAMPLES / name).read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return jobset, job, container


@pytest.mark.parametrize("name", ["jobset.yaml", "jobset-bucket.yaml"])
def test_the_jobset_sets_all_variables_that_its_pods_need(name):
    jobset, job, container = read_jobset(name)
    parse_command(container["command"] + container.get("args", []))
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert "PODSCALE_JOB_SECRET" in variables
    assert int(variables["JAX_NUM_PROCESSES"]) == job["parallelism"] == job["completions"] > 1
    assert job["completionMode"] == "Indexed"
    assert container["ports"][0]["containerPort"] == schedulers.KUBERNETES_PORT
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [main.USER_ERROR, main.DIVERGED])
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_the_jobset_of_a_bucket_shares_no_volume():
    _, job, container = read_jobset("jobset-bucket.yaml")
    arguments = parse_command(container["command"] + container["args"])
    assert all(parse_location(url).scheme == "s3" for url in (getattr(arguments, "data.path"), arguments.run))
    template = job["template"]["spec"]
    assert all(set(volume) == {"name", "emptyDir"} for volume in template["volumes"])
    assert template["serviceAccountName"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["XDG_CACHE_HOME"] in {mount["mountPath"] for mount in container["volumeMounts"]}
