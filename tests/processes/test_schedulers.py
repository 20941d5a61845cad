"""Process groups are detected from the variables of real launchers."""

import http.server
import socket
import threading

import pytest

from podscale.errors import UserError
from podscale.processes import schedulers

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1412694016.0;tcp://192.0.2.2,10.0.0.1:42999;tcp6://[fd00::2]:53959",
}


def get_host(info):
    return info.coordinator.rpartition(":")[0]


def get_port(info):
    return int(info.coordinator.rpartition(":")[2])


def test_without_a_launcher_there_is_one_process(tmp_path):
    assert schedulers.detect_process_info({}, tmp_path) is None


def test_slurm_tasks_connect_to_the_first_host():
    info = schedulers.detect_process_info(SLURM)
    assert (info.processes, info.process, info.local_process, info.local_processes, get_host(info)) == (
        6,
        3,
        1,
        2,
        "gpu07",
    )
    assert info.get_bind_address() is None
    assert (
        schedulers.detect_process_info(SLURM | {"SLURM_PROCID": "5", "SLURM_NODEID": "2"}).coordinator
        == info.coordinator
    )
    assert schedulers.detect_process_info(SLURM | {"SLURM_STEP_ID": "1"}).coordinator != info.coordinator
    assert 61440 <= get_port(info) < 65536


def test_on_one_node_only_loopback_is_used():
    info = schedulers.detect_process_info(SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "6"})
    assert (get_host(info), info.local_processes, info.get_bind_address()) == ("127.0.0.1", 1, info.coordinator)
    alone = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert get_host(schedulers.detect_process_info(alone)) == "127.0.0.1"


def test_one_task_is_one_process():
    assert schedulers.detect_process_info(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert schedulers.detect_process_info(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_a_batch_script_is_not_a_task(tmp_path):
    assert (
        schedulers.detect_process_info({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, tmp_path)
        is None
    )


def test_open_mpi_takes_precedence_over_slurm():
    info = schedulers.detect_process_info(SLURM | OPEN_MPI)
    assert (info.launcher, info.processes, info.process, get_host(info)) == ("Open MPI", 4, 2, "192.0.2.2")


def test_newer_open_mpi_needs_the_address_of_the_first_process():
    newer = {k: v for k, v in OPEN_MPI.items() if "uri" not in k} | {"PMIX_NAMESPACE": "prterun-a-1@1"}
    with pytest.raises(UserError, match="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT"):
        schedulers.detect_process_info(newer)
    assert schedulers.detect_process_info(newer | {"JAX_COORDINATOR_ADDRESS": "a:1"}).coordinator == "a:1"
    assert get_host(schedulers.detect_process_info(newer | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})) == "127.0.0.1"


def test_the_port_can_be_set():
    for environment in (SLURM, OPEN_MPI):
        assert get_port(schedulers.detect_process_info(environment | {"JAX_COORDINATOR_PORT": "1234"})) == 1234


def test_a_pod_of_an_indexed_job_derives_the_name_of_the_first(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "digits-workers-0-3.digits.default.svc.cluster.local")
    info = schedulers.detect_process_info({"JOB_COMPLETION_INDEX": "3", "JAX_NUM_PROCESSES": "4"})
    assert (info.launcher, info.process, info.processes) == ("Kubernetes", 3, 4)
    assert get_host(info) == "digits-workers-0-0.digits.default.svc.cluster.local"


def test_an_indexed_job_of_separate_trainings_is_not_a_process_group(tmp_path):
    assert schedulers.detect_process_info({"JOB_COMPLETION_INDEX": "3"}, tmp_path) is None


def test_jax_variables_must_be_set_together():
    three = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "a:1"}
    assert schedulers.detect_process_info(three).describe() == "process 1 of 2, according to the environment"
    for name in ("JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"):
        with pytest.raises(UserError, match="or none of them"):
            schedulers.detect_process_info({k: v for k, v in three.items() if k != name})


def test_hosts_of_a_tpu_slice_are_detected():
    four = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "2"}
    info = schedulers.detect_process_info(four)
    assert (info.coordinator, info.processes, info.process) == ("t0:8482", 4, 2)
    second = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "first:8080"}
    info = schedulers.detect_process_info(four | second)
    assert (info.coordinator, info.processes, info.process) == ("first:8482", 8, 6)


@pytest.fixture
def metadata():
    """A server that answers a TPU machine as Google's metadata server does."""
    attributes = {"agent-worker-number": "1", "worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2"}

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = attributes.get(self.path.rpartition("/")[2])
            is_valid = value is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if is_valid else 404)
            self.end_headers()
            self.wfile.write(value.encode() if is_valid else b"")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}, attributes
    server.shutdown()
    server.server_close()


def add_chip(machine, vendor="0x1ae0"):
    folder = machine / "sys/bus/pci/devices/0000:00:04.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    return machine


def test_a_tpu_machine_queries_the_metadata_server(metadata, tmp_path):
    environment, attributes = metadata
    machine = add_chip(tmp_path)
    info = schedulers.detect_process_info(environment, machine)
    assert (info.coordinator, info.processes, info.process) == ("10.0.0.1:8482", 2, 1)
    attributes["worker-network-endpoints"] = "10.0.0.1,10.0.0.2,10.0.0.3"
    assert schedulers.detect_process_info(environment, machine).processes == 3
    attributes["worker-network-endpoints"] = "10.0.0.1"
    assert schedulers.detect_process_info(environment, machine) is None
    assert schedulers.detect_process_info(environment | {"JAX_PLATFORMS": "cpu"}, machine) is None
    attributes.clear()
    assert schedulers.detect_process_info(environment, machine) is None


def test_a_machine_without_tpus_queries_nothing(metadata, tmp_path):
    environment, _ = metadata
    assert schedulers.detect_process_info(environment, add_chip(tmp_path, vendor="0x8086")) is None


def test_a_missing_process_number_is_refused():
    with pytest.raises(UserError, match="SLURM_PROCID"):
        schedulers.detect_process_info({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"})


@pytest.mark.parametrize("coordinator", ["localhost:1", "127.0.0.1:80", "[::1]:9"])
def test_a_coordinator_on_loopback_listens_only_there(coordinator):
    assert schedulers.make_process_info(coordinator, 2, 0).get_bind_address() == coordinator


@pytest.mark.parametrize("coordinator", ["localhost", ":1", "a:b", "a:"])
def test_an_invalid_coordinator_is_refused(coordinator):
    with pytest.raises(UserError, match="HOST:PORT"):
        schedulers.make_process_info(coordinator, 2, 0)


def test_gpus_are_divided_among_local_processes():
    assert [schedulers.assign_gpus(i, 3, 8) for i in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert schedulers.assign_gpus(3, 4, 1) is None  # the one that the scheduler gave to this task
    with pytest.raises(UserError, match="cannot share 2 GPUs"):
        schedulers.assign_gpus(0, 4, 2)


def test_gpus_are_counted(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert schedulers.count_visible_gpus({}, tmp_path) == 2
    assert schedulers.count_visible_gpus({"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == 1
    assert schedulers.count_visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert schedulers.count_visible_gpus({"JAX_PLATFORMS": "cpu"}, tmp_path) == 0


@pytest.fixture
def node(tmp_path):
    """The file system of a node with eight GPUs."""
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    return tmp_path


def select_on_node(environment, node, gpus=None):
    """Return the GPUs of a process on such a node, of which a scheduler may have named some to it."""
    environment = environment | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus is not None else {})
    return schedulers.select_gpus(schedulers.detect_process_info(environment), environment, node)


ALL_GPUS = "0,1,2,3,4,5,6,7"
ONE_TASK = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_LOCALID": "0"}
TASK_PER_GPU = {"SLURM_STEP_NUM_TASKS": "24", "SLURM_STEP_TASKS_PER_NODE": "8(x3)", "SLURM_LOCALID": "5"}
RANK_PER_GPU = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "5",
}


@pytest.mark.parametrize("gpus", [ALL_GPUS, "2,3", None])
def test_one_process_on_a_node_has_all_gpus_that_it_sees(node, gpus):
    assert select_on_node(SLURM | ONE_TASK, node, gpus) is None
    alone = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert select_on_node(alone, node, gpus) is None


@pytest.mark.parametrize("gpus", [ALL_GPUS, None])
def test_processes_that_see_all_gpus_of_a_node_share_them_out(node, gpus):
    slurm = SLURM | {"SLURM_GPUS_ON_NODE": "8"}
    assert select_on_node(slurm | TASK_PER_GPU, node, gpus) == [5]
    assert select_on_node(slurm, node, gpus) == [4, 5, 6, 7]  # the second of two
    assert select_on_node(OPEN_MPI | RANK_PER_GPU, node, gpus) == [5]
    assert select_on_node(OPEN_MPI, node, gpus) == [0, 1, 2, 3]


def test_a_process_keeps_the_gpus_that_a_scheduler_has_bound_to_it(node):
    """Slurm numbers what a task may use from 0 where it confines tasks, and as on the node where it does not."""
    slurm = SLURM | {"SLURM_GPUS_ON_NODE": "8"}
    for gpus in ("0", "5"):
        assert select_on_node(slurm | TASK_PER_GPU, node, gpus) is None
        assert select_on_node(OPEN_MPI | RANK_PER_GPU, node, gpus) is None
    for gpus in ("0,1,2,3", "4,5,6,7"):  # --gpus-per-task 4
        assert select_on_node(slurm, node, gpus) is None
    four = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert select_on_node(OPEN_MPI | four, node, "2,3") is None  # by a script around each rank


def test_gpus_of_a_step_that_no_variable_hides_are_taken_by_their_numbers_on_the_node(node):
    """Another job has the first four."""
    step = SLURM | {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "4,5,6-7"}
    assert select_on_node(step, node) == [6, 7]
    assert select_on_node(step | ONE_TASK, node) == [4, 5, 6, 7]
    assert select_on_node(step | {"SLURM_STEP_GPUS": "gpu:4"}, node) == [4, 5, 6, 7]  # not understood: as all see all


def test_processes_on_cpus_select_no_gpus(node):
    assert select_on_node(SLURM | {"JAX_PLATFORMS": "cpu"}, node, ALL_GPUS) is None
    for nothing in ("", "NoDevFiles", "-1"):
        assert select_on_node(SLURM, node, nothing) is None


def test_more_processes_than_gpus_are_refused(node):
    with pytest.raises(UserError, match="8 processes on one host cannot share 4 GPUs"):
        select_on_node(SLURM | TASK_PER_GPU | {"SLURM_GPUS_ON_NODE": "4"}, node, "0,1,2,3")
