"""What processes share: reading what all have published takes a number of requests that hardly grows with them."""

from collections import Counter

import pytest
from support.key_values import LocalClient

from podscale.processes.exchange import Exchange
from podscale.processes.handshake import VALUES, VERDICT, Handshake
from podscale.processes.key_value_store import KeyValueStore


class CountingClient(LocalClient):
    """Counts requests; a wait for a key sets those of the processes `late`, as if they came meanwhile."""

    def __init__(self):
        super().__init__()
        self.requests, self.late = Counter(), {}

    def key_value_dir_get(self, prefix):
        self.requests["all"] += 1
        return super().key_value_dir_get(prefix)

    def blocking_key_value_get(self, key, timeout_ms):
        self.requests["one"] += 1
        self.values |= {late: self.late.pop(late) for late in list(self.late)[: len(self.late) // 2 + 1]}
        return super().blocking_key_value_get(key, timeout_ms)


@pytest.mark.parametrize("processes", [2, 16, 4096])
def test_what_all_have_published_is_read_by_one_request(processes):
    client = CountingClient()
    exchange = Exchange(KeyValueStore(client), 0, processes, 1)
    for process in range(1, processes):
        Exchange(KeyValueStore(client), process, processes, 1).report(f"from {process}")
    assert exchange.collect(60.0) == [f"from {process}" for process in range(1, processes)]
    assert client.requests == {"all": 1}


@pytest.mark.parametrize("processes", [2, 16, 4096])
def test_processes_that_come_late_cost_few_more_requests(processes):
    client = CountingClient()
    client.late = {f"p/{process}": "x" for process in range(processes)}
    assert KeyValueStore(client).await_values("p", range(processes), 60.0) == dict.fromkeys(range(processes), "x")
    assert client.requests["all"] <= processes.bit_length() + 1
    assert client.requests["one"] <= 2 * processes.bit_length()


def test_what_does_not_come_in_time_is_left_out():
    client = LocalClient()
    client.values = {"p/0": "a", "p/2": "c", "p/decision": "", "p/7": "of nobody", "q/1": ""}
    assert KeyValueStore(client).await_values("p", range(3), 0.01) == {0: "a", 2: "c"}


@pytest.mark.parametrize("processes", [1, 2, 16, 4096])
def test_the_main_process_checks_all_others_by_as_many_requests_as_one(processes):
    client, values = CountingClient(), {"jax": "1"}
    for process in range(1, processes):
        client.values[f"{VALUES}/1/{process}"] = '{"host": "n", "jax": "1"}'
    Handshake(KeyValueStore(client), 0, processes).check_same(values, "")
    assert client.requests == {"all": 1, "one": 1}  # the other one is its own verdict
    assert client.values[f"{VERDICT}/1"] == ""
