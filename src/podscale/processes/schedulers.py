"""Detect the process group that a scheduler or launcher started this process in.

Slurm, Open MPI, Kubernetes and TPU machines each have their own variables for how many processes there are, which one
this is and where the main process can be reached. Here they become one `ProcessInfo`. The user has to give nothing, and
nothing is imported that could touch a device: this only reads.
"""

import os
import re
import socket
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from podscale.errors import UserError

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 61440, 4096  # above the ports that Linux assigns by itself
KUBERNETES_PORT, TPU_PORT = 8476, 8482
GOOGLE_PCI_VENDOR = "0x1ae0"  # the vendor of TPU chips on the PCI bus
METADATA_TIMEOUT_S = 5
NO_GPU = ("", "-1", "NoDevFiles", "none", "void")  # names after which CUDA shows no more GPUs


@dataclass(frozen=True)
class ProcessInfo:
    """One process among those of a run, and where the main process listens."""

    launcher: str
    coordinator: str  # HOST:PORT
    processes: int
    process: int
    local_process: int = 0  # number among the processes on this host
    local_processes: int = 1  # how many there are on this host

    def get_bind_address(self) -> str | None:
        """Return where the main process listens: on loopback if all processes use it; None: on all addresses."""
        host = self.coordinator.rpartition(":")[0]
        return self.coordinator if host in (LOOPBACK, "localhost", "[::1]") else None

    def describe(self) -> str:
        """Return it as a clause of a message."""
        return f"process {self.process} of {self.processes}, according to {self.launcher}"


def make_process_info(coordinator: str, processes: int, process: int) -> ProcessInfo:
    """Return the process that the user describes on the command line.

    Args:
        coordinator: HOST:PORT of the main process.
        processes: how many there are.
        process: this process's number.

    Raises:
        UserError: an argument is not valid.

    >>> make_process_info("10.0.0.7:1234", 2, 1).describe()
    'process 1 of 2, according to the command'
    """
    if processes < 1 or not 0 <= process < processes:
        raise UserError(f"process {process} of {processes} is impossible; give --processes N and --process 0..N-1")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--coordinator takes HOST:PORT, not {coordinator!r}")
    return ProcessInfo("the command", coordinator, processes, process)


def detect_process_info(environment: Mapping[str, str] = os.environ, machine: Path = Path("/")) -> ProcessInfo | None:
    """Return the process as its launcher describes it; None where there is only one process.

    Open MPI comes before Slurm: inside an allocation its processes see Slurm's variables of `mpirun` itself.

    Args:
        environment: variables of this process.
        machine: root of the file system.

    Raises:
        UserError: the launcher's variables are incomplete.
    """
    for detect in (_detect_open_mpi, _detect_slurm, _detect_tpu_workers, _detect_variables):
        info = detect(environment)
        if info:
            return info if info.processes > 1 else None
    return _detect_tpu_machine(environment, machine)


def select_gpus(
    info: ProcessInfo, environment: Mapping[str, str] = os.environ, machine: Path = Path("/")
) -> list[int] | None:
    """Return the GPUs of this process, by number among those that CUDA shows; None: all that it sees.

    A scheduler may have bound GPUs to each of its processes, so that each sees its own; or all processes of a host see
    the same ones, and share them out.

    Args:
        info: this process among the others.
        environment: variables of this process.
        machine: root of the file system.

    Raises:
        UserError: there are more processes on this host than GPUs.
    """
    visible = count_visible_gpus(environment, machine)
    if _are_bound(info, visible, environment, machine):
        return None
    numbers = _parse_numbers(environment.get("SLURM_STEP_GPUS", ""))
    if "CUDA_VISIBLE_DEVICES" in environment or not numbers or max(numbers) >= visible:
        return assign_gpus(info.local_process, info.local_processes, visible)
    share = assign_gpus(info.local_process, info.local_processes, len(numbers))  # other jobs have the other GPUs
    return numbers if share is None else [numbers[i] for i in share]


def _are_bound(info: ProcessInfo, visible: int, environment: Mapping[str, str], machine: Path) -> bool:
    """Return whether the GPUs that this process sees are its own: the others on this host see other ones.

    Slurm sets a variable to the number of GPUs of its step on this node. Without it, a process that sees fewer GPUs
    than there are processes has its own if the machine has enough of them for all.
    """
    if info.local_processes == 1 or not visible:
        return False
    if info.launcher == "Slurm" and (on_node := _read_number(environment, "SLURM_GPUS_ON_NODE")):
        return visible < on_node
    is_named = "CUDA_VISIBLE_DEVICES" in environment
    return is_named and visible < info.local_processes <= _count_gpu_files(machine) // visible


def assign_gpus(local_process: int, local_processes: int, visible: int) -> list[int] | None:
    """Return the GPUs of one of the processes on a host, by number; None: all that it sees.

    >>> assign_gpus(1, 4, 8), assign_gpus(0, 1, 8), assign_gpus(2, 4, 1)
    ([2, 3], None, None)
    """
    if local_processes == 1 or visible <= 1:  # a GPU that a scheduler has selected is for this process alone
        return None
    if visible < local_processes:
        raise UserError(f"{local_processes} processes on one host cannot share {visible} GPUs; start at most {visible}")
    return list(range(local_process * visible // local_processes, (local_process + 1) * visible // local_processes))


def count_visible_gpus(environment: Mapping[str, str] = os.environ, machine: Path = Path("/")) -> int:
    """Return how many NVIDIA GPUs this process may use; 0 where it is to use CPUs."""
    if environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return 0
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return _count_gpu_files(machine)
    valid = takewhile(lambda name: name not in NO_GPU, (name.strip() for name in names.split(",")))
    return len(list(valid))


def _count_gpu_files(machine: Path) -> int:
    return len(list((machine / "dev").glob("nvidia[0-9]*")))


# --- launchers -----------------------------------------------------------------------------------------------------


def _detect_slurm(environment: Mapping[str, str]) -> ProcessInfo | None:
    """Slurm sets variables for each task of `srun`; a batch script itself is not a task."""
    processes = _read_number(environment, "SLURM_STEP_NUM_TASKS")
    if processes is None:
        return None
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    has_one_node = _read_number(environment, "SLURM_STEP_NUM_NODES") == 1
    local_process = _read_number(environment, "SLURM_LOCALID") or 0
    counts = _parse_tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _read_number(environment, "SLURM_NODEID") or 0
    local_processes = counts[node] if node < len(counts) else 1
    host = LOOPBACK if has_one_node else parse_first_host(nodes)
    process = _require_number(environment, "SLURM_PROCID", "Slurm")
    coordinator = f"{host}:{_choose_port(environment, step)}"
    return ProcessInfo("Slurm", coordinator, processes, process, local_process, local_processes)


def _detect_open_mpi(environment: Mapping[str, str]) -> ProcessInfo | None:
    processes = _read_number(environment, "OMPI_COMM_WORLD_SIZE")
    if processes is None:
        return None
    local_processes = _read_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    local_process = _read_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK") or 0
    launcher = environment.get("OMPI_MCA_orte_hnp_uri", "")  # NUMBER;tcp://ADDRESS,ADDRESS:PORT of mpirun, up to 4.x
    job = launcher.partition(".")[0] or environment.get("PMIX_NAMESPACE", "")
    host = LOOPBACK if local_processes == processes else _parse_address(launcher)
    coordinator = environment.get("JAX_COORDINATOR_ADDRESS")
    if not host and not coordinator and processes > 1:
        raise UserError(
            "Open MPI does not say where its first process is; "
            "name a host and a free port by `mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT`"
        )
    process = _require_number(environment, "OMPI_COMM_WORLD_RANK", "Open MPI")
    coordinator = coordinator or f"{host}:{_choose_port(environment, job)}"
    return ProcessInfo("Open MPI", coordinator, processes, process, local_process, local_processes)


def _detect_variables(environment: Mapping[str, str]) -> ProcessInfo | None:
    """JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS; Kubernetes itself provides the last two.

    A pod of an indexed Job, and so of a JobSet, has a number, JOB_COMPLETION_INDEX, and is called NAME-NUMBER by the
    headless service that it belongs to. Kubernetes does not say how many there are: the pod's description must.
    """
    processes = _read_number(environment, "JAX_NUM_PROCESSES")
    if processes is None:
        return None
    in_kubernetes = "JOB_COMPLETION_INDEX" in environment
    process = _read_number(environment, "JAX_PROCESS_ID")
    if process is None and in_kubernetes:
        process = _require_number(environment, "JOB_COMPLETION_INDEX", "Kubernetes")
    coordinator = environment.get("JAX_COORDINATOR_ADDRESS", "")
    if not coordinator and in_kubernetes:
        port = environment.get("JAX_COORDINATOR_PORT", KUBERNETES_PORT)
        coordinator = f"{derive_first_pod(socket.getfqdn())}:{port}"
    if process is None or not coordinator:
        raise UserError("JAX_NUM_PROCESSES is set; set JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS too, or none of them")
    return ProcessInfo("Kubernetes" if in_kubernetes else "the environment", coordinator, processes, process)


def _detect_tpu_workers(environment: Mapping[str, str]) -> ProcessInfo | None:
    """Google's Kubernetes, and newer TPU machines, name the hosts of a slice; several slices name the first one."""
    names = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    hosts = [name.strip().partition(":")[0] for name in names.split(",") if name.strip()]
    slices = _read_number(environment, "MEGASCALE_NUM_SLICES") or 1
    if len(hosts) * slices <= 1:
        return None
    slice_number = _read_number(environment, "MEGASCALE_SLICE_ID") or 0
    process = slice_number * len(hosts) + _require_number(environment, "TPU_WORKER_ID", "the TPU slice")
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0] or hosts[0]
    port = environment.get("JAX_COORDINATOR_PORT", TPU_PORT)
    return ProcessInfo("the TPU slice", f"{first}:{port}", len(hosts) * slices, process)


def _detect_tpu_machine(environment: Mapping[str, str], machine: Path) -> ProcessInfo | None:
    """A TPU virtual machine asks Google's metadata server, and only if it has chips to use."""
    if not _can_use_tpus(environment) or not _has_tpus(machine):
        return None
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    number, endpoints = (_query_metadata(server, key) for key in ("agent-worker-number", "worker-network-endpoints"))
    if not number.isdecimal():
        return None
    hosts = [endpoint.split(":")[-1] for endpoint in endpoints.split(",") if endpoint]  # NAME:ID:ADDRESS, or ADDRESS
    if len(hosts) <= 1:
        return None
    port = environment.get("JAX_COORDINATOR_PORT", TPU_PORT)
    return ProcessInfo("the TPU machine", f"{hosts[0]}:{port}", len(hosts), int(number))


def _can_use_tpus(environment: Mapping[str, str]) -> bool:
    platforms = environment.get("JAX_PLATFORMS", "")
    return "TPU_SKIP_MDS_QUERY" not in environment and (not platforms or "tpu" in platforms.split(","))


def _has_tpus(machine: Path) -> bool:
    vendors = (machine / "sys/bus/pci/devices").glob("*/vendor")
    return any(path.read_text().strip() == GOOGLE_PCI_VENDOR for path in vendors)


def _query_metadata(server: str, key: str) -> str:
    address = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S) as response:
            return str(response.read(1 << 20).decode())
    except (urllib.error.URLError, OSError):
        return ""


# --- parsing their variables ---------------------------------------------------------------------------------------


def parse_first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    >>> parse_first_host("gpu[007-012,015],login"), parse_first_host("a,b"), parse_first_host("rack[1-2]n[03-04]-ib")
    ('gpu007', 'a', 'rack1n03-ib')
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def derive_first_pod(name: str) -> str:
    """Return the name of a job's first Kubernetes pod, given that of any of them.

    >>> derive_first_pod("train-workers-0-3.train.default.svc.cluster.local")
    'train-workers-0-0.train.default.svc.cluster.local'
    """
    host, dot, domain = name.partition(".")
    return f"{host.rpartition('-')[0]}-0{dot}{domain}"


def _parse_tasks_per_node(text: str) -> list[int]:
    """Return tasks of each node, from "2(x3),1"."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]


def _parse_numbers(text: str) -> list[int]:
    """Return the numbers of "0,2-4"; empty if the text has another form."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return []
    ends = [part.partition("-") for part in text.split(",")]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


def _parse_address(launcher: str) -> str:
    match = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", launcher)
    if not match:
        return ""
    return match[1] or f"[{match[2]}]"


def _choose_port(environment: Mapping[str, str], job: str) -> str:
    """Return a port that all processes of a job compute alike, and most likely not those of another job."""
    return environment.get("JAX_COORDINATOR_PORT") or str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def _read_number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _require_number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    number = _read_number(environment, name)
    if number is None:
        raise UserError(f"{launcher} started several processes, but {name} does not say which one this is")
    return number
