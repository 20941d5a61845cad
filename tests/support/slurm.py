"""A Slurm cluster for tests: one node, this machine, with daemons that live as long as a `with` block."""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "sinfo")
UP_S, DOWN_S = 40, 10
CONFIG = """
ClusterName=podscale
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=600
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def explain_missing():
    """Return why Slurm cannot run here; empty if it can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=_extend_path())]
    if absent:
        return f"needs Debian's slurmctld, slurmd and munge: there is no {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "only root may start Slurm's daemons"


def _extend_path():
    return os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin"


def _find_free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Slurm:
    """The running cluster; `run` runs its commands."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command, timeout_s=30, check=True, environment=None):
        done = subprocess.run(
            list(map(str, command)),
            env=(os.environ | {"PATH": _extend_path()} if environment is None else environment) | self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.read_logs()}"
        return done.stdout

    def submit(self, *command, environment):
        """Submit a batch job; return its number."""
        return int(re.search(r"\d+", self.run("sbatch", *command, environment=environment))[0])

    def show_job(self, number):
        """Return what the controller knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait(self, number, timeout_s):
        """Wait for a job, and return the state in which it ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self.show_job(number)["JobState"]
            if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                return state
            time.sleep(0.3)
        self.run("scancel", "-s", "KILL", number, check=False)
        raise AssertionError(f"job {number} did not end: {self.show_job(number)}{self.read_logs()}")

    def read_logs(self):
        return "".join(
            f"\n--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        )


@contextmanager
def start_slurm(folder):
    """Start munge, slurmctld and slurmd within seconds; stop them afterwards in any case."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    controller_port, node_port = _find_free_ports(2)
    config = CONFIG.format(
        host=socket.gethostname().partition(".")[0],
        user=getpass.getuser(),
        folder=folder,
        controller_port=controller_port,
        node_port=node_port,
        cpus=os.cpu_count(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
    )
    (folder / "slurm.conf").write_text(config)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    cluster, daemons = Slurm(folder), []
    environment = os.environ | {"PATH": _extend_path()} | cluster.environment
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    commands = [munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-c"]]
    try:
        for command in commands:
            output = (folder / f"{command[0]}.out").open("w")
            daemons.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            output.close()
            if command is munged:
                _wait_until((folder / "munge.socket").exists, "munged")
        _wait_until(lambda: "idle" in cluster.run("sinfo", "-h", "-o", "%t", check=False), "Slurm", cluster)
        yield cluster
    finally:
        cluster.run("scancel", "-s", "KILL", "-u", getpass.getuser(), check=False)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(DOWN_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _wait_until(is_ready, name, cluster=None):
    deadline = time.monotonic() + UP_S
    while not is_ready():
        assert time.monotonic() < deadline, f"{name} does not start{cluster.read_logs() if cluster else ''}"
        time.sleep(0.2)
