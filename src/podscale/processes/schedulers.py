"""Cluster: who else works on this run, as told by whatever started this process.

Slurm, Open MPI, Kubernetes and TPU machines each tell a process in their own words how many there are, which one it is
and where the first one can be reached. Here their words become one `Place`. Nothing is asked of the user, and nothing
is imported that could touch a device: this is only reading.
"""

import os
import re
import socket
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from podscale.errors import UserError

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 61440, 4096  # above the ports that Linux hands out by itself
KUBERNETES_PORT, TPU_PORT = 8476, 8482
GOOGLE = "0x1ae0"  # the vendor of TPU chips on the PCI bus
METADATA_TIMEOUT_S = 5


@dataclass(frozen=True)
class Place:
    """One process among those of a run, and where the first of them listens."""

    told_by: str
    coordinator: str  # HOST:PORT
    processes: int
    process: int
    local: int = 0  # which of the processes on this host
    here: int = 1  # how many there are on this host

    def bind_address(self) -> str | None:
        """Where the first process listens: on loopback if that is where all are; None: wherever it can be reached."""
        host = self.coordinator.rpartition(":")[0]
        return self.coordinator if host in (LOOPBACK, "localhost", "[::1]") else None

    def told(self) -> str:
        return f"process {self.process} of {self.processes}, told by {self.told_by}"


def by_hand(coordinator: str, processes: int, process: int) -> Place:
    """The place that a user names.

    >>> by_hand("10.0.0.7:1234", 2, 1).told()
    'process 1 of 2, told by the command'
    """
    if processes < 1 or not 0 <= process < processes:
        raise UserError(f"process {process} of {processes} cannot be: give --processes N and --process 0..N-1")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--coordinator takes HOST:PORT, not {coordinator!r}")
    return Place("the command", coordinator, processes, process)


def found(environment: Mapping[str, str] = os.environ, machine: Path = Path("/")) -> Place | None:
    """The place that a launcher tells of; None where there is but one process.

    Open MPI comes before Slurm, because inside an allocation its processes see what Slurm says of `mpirun` itself.
    """
    for look in (_open_mpi, _slurm, _tpu_workers, _variables):
        place = look(environment)
        if place:
            return place if place.processes > 1 else None
    return _tpu_machine(environment, machine)


def gpus_of(local: int, here: int, visible: int) -> list[int] | None:
    """The GPUs of one of the processes on a host, by number; None: all that it sees.

    >>> gpus_of(1, 4, 8), gpus_of(0, 1, 8), gpus_of(2, 4, 1)
    ([2, 3], None, None)
    """
    if here == 1 or visible <= 1:  # one that a scheduler has picked is for this process alone
        return None
    if visible < here:
        raise UserError(f"{here} processes on one host cannot share {visible} GPUs; start at most {visible}")
    return list(range(local * visible // here, (local + 1) * visible // here))


def visible_gpus(environment: Mapping[str, str] = os.environ, machine: Path = Path("/")) -> int:
    """How many NVIDIA GPUs this process may use; 0 where it shall use CPUs."""
    if environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip()])
    return len(list((machine / "dev").glob("nvidia[0-9]*")))


# --- the launchers' words ------------------------------------------------------------------------------------------


def _slurm(environment: Mapping[str, str]) -> Place | None:
    """Slurm tells each task of `srun`; a batch script itself is no task."""
    processes = _number(environment, "SLURM_STEP_NUM_TASKS")
    if processes is None:
        return None
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    alone = _number(environment, "SLURM_STEP_NUM_NODES") == 1
    local = _number(environment, "SLURM_LOCALID") or 0
    counts = _tasks_by_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    number = _number(environment, "SLURM_NODEID") or 0
    here = counts[number] if number < len(counts) else 1
    host = LOOPBACK if alone else first_host(nodes)
    process = _needed(environment, "SLURM_PROCID", "Slurm")
    return Place("Slurm", f"{host}:{_port(environment, step)}", processes, process, local, here)


def _open_mpi(environment: Mapping[str, str]) -> Place | None:
    processes = _number(environment, "OMPI_COMM_WORLD_SIZE")
    if processes is None:
        return None
    here = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    local = _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK") or 0
    launcher = environment.get("OMPI_MCA_orte_hnp_uri", "")  # NUMBER;tcp://ADDRESS,ADDRESS:PORT of mpirun, up to 4.x
    job = launcher.partition(".")[0] or environment.get("PMIX_NAMESPACE", "")
    host = LOOPBACK if here == processes else _address_in(launcher)
    given = environment.get("JAX_COORDINATOR_ADDRESS")
    if not host and not given and processes > 1:
        raise UserError(
            "Open MPI does not tell where its first process is; "
            "name a host and a free port by `mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT`"
        )
    process = _needed(environment, "OMPI_COMM_WORLD_RANK", "Open MPI")
    return Place("Open MPI", given or f"{host}:{_port(environment, job)}", processes, process, local, here)


def _variables(environment: Mapping[str, str]) -> Place | None:
    """JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS; Kubernetes itself tells the last two.

    A pod of an indexed Job, and so of a JobSet, has a number, JOB_COMPLETION_INDEX, and is called NAME-NUMBER by the
    headless service that it belongs to. How many there are it is not told: that is for its description to say.
    """
    processes = _number(environment, "JAX_NUM_PROCESSES")
    if processes is None:
        return None
    inside, process = "JOB_COMPLETION_INDEX" in environment, _number(environment, "JAX_PROCESS_ID")
    if process is None and inside:
        process = _needed(environment, "JOB_COMPLETION_INDEX", "Kubernetes")
    coordinator = environment.get("JAX_COORDINATOR_ADDRESS", "")
    if not coordinator and inside:
        port = environment.get("JAX_COORDINATOR_PORT", KUBERNETES_PORT)
        coordinator = f"{first_pod(socket.getfqdn())}:{port}"
    if process is None or not coordinator:
        raise UserError("JAX_NUM_PROCESSES is set; set JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS too, or none of them")
    return Place("Kubernetes" if inside else "the environment", coordinator, processes, process)


def _tpu_workers(environment: Mapping[str, str]) -> Place | None:
    """Google's Kubernetes, and newer TPU machines, name the hosts of a slice; several slices know of the first one."""
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    hosts = [name.strip().partition(":")[0] for name in names.split(",") if name.strip()]
    slices = _number(environment, "MEGASCALE_NUM_SLICES") or 1
    if len(hosts) * slices <= 1:
        return None
    which = _number(environment, "MEGASCALE_SLICE_ID") or 0
    process = which * len(hosts) + _needed(environment, "TPU_WORKER_ID", "the TPU slice")
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] or hosts[0]
    port = environment.get("JAX_COORDINATOR_PORT", TPU_PORT)
    return Place("the TPU slice", f"{first}:{port}", len(hosts) * slices, process)


def _tpu_machine(environment: Mapping[str, str], machine: Path) -> Place | None:
    """A TPU virtual machine asks Google's metadata server, and only if it has chips to use."""
    if not _may_use_tpus(environment) or not _has_tpus(machine):
        return None
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    number, endpoints = (_metadata(server, key) for key in ("agent-worker-number", "worker-network-endpoints"))
    if not number.isdecimal():
        return None
    hosts = [endpoint.split(":")[-1] for endpoint in endpoints.split(",") if endpoint]  # NAME:ID:ADDRESS, or ADDRESS
    if len(hosts) <= 1:
        return None
    port = environment.get("JAX_COORDINATOR_PORT", TPU_PORT)
    return Place("the TPU machine", f"{hosts[0]}:{port}", len(hosts), int(number))


def _may_use_tpus(environment: Mapping[str, str]) -> bool:
    platforms = environment.get("JAX_PLATFORMS", "")
    return "TPU_SKIP_MDS_QUERY" not in environment and (not platforms or "tpu" in platforms.split(","))


def _has_tpus(machine: Path) -> bool:
    return any(path.read_text().strip() == GOOGLE for path in (machine / "sys/bus/pci/devices").glob("*/vendor"))


def _metadata(server: str, key: str) -> str:
    address = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S) as answer:
            return str(answer.read(1 << 20).decode())
    except (urllib.error.URLError, OSError):
        return ""


# --- parts of their words ------------------------------------------------------------------------------------------


def first_host(nodes: str) -> str:
    """The first of a list of hosts as Slurm writes it.

    >>> first_host("gpu[007-012,015],login"), first_host("a,b"), first_host("rack[1-2]n[03-04]-ib")
    ('gpu007', 'a', 'rack1n03-ib')
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def first_pod(name: str) -> str:
    """The name of a job's first pod, from that of any of them.

    >>> first_pod("train-workers-0-3.train.default.svc.cluster.local")
    'train-workers-0-0.train.default.svc.cluster.local'
    """
    own, dot, domain = name.partition(".")
    return f"{own.rpartition('-')[0]}-0{dot}{domain}"


def _tasks_by_node(text: str) -> list[int]:
    """Tasks of each node, from "2(x3),1"."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]


def _address_in(launcher: str) -> str:
    match = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", launcher)
    if not match:
        return ""
    return match[1] or f"[{match[2]}]"


def _port(environment: Mapping[str, str], job: str) -> str:
    """A port that all processes of a job come to by themselves, and another job's do not, most likely."""
    return environment.get("JAX_COORDINATOR_PORT") or str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _needed(environment: Mapping[str, str], name: str, who: str) -> int:
    number = _number(environment, name)
    if number is None:
        raise UserError(f"{who} started several processes, but {name} does not say which one this is")
    return number
