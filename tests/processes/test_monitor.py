"""One monitor polls all checks, whether the store answers or not."""

import threading

from support.key_values import LocalClient

from podscale.processes.heartbeat import PEER_LOST, Heartbeat
from podscale.processes.key_value_store import KeyValueStore
from podscale.processes.monitor import Monitor

LIMIT_S = 60


class CountingCheck:
    """Asks for an exchange at every poll; `is_enough` is set after ten polls and two exchanges."""

    def __init__(self):
        self.polls, self.exchanges, self.is_enough = 0, 0, threading.Event()

    def poll(self, now):
        self.polls += 1
        if self.polls >= 10 and self.exchanges >= 2:
            self.is_enough.set()
        return True

    def exchange(self, store):
        store.set("count", str(self.exchanges))
        self.exchanges += 1


class SilentClient(LocalClient):
    """The store of a main process that is stopped: nothing that is asked of it ends."""

    def __init__(self):
        super().__init__()
        self.continues = threading.Event()

    def key_value_set(self, key, value, allow_overwrite=False):
        self.continues.wait(LIMIT_S)


def list_threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("podscale-")}


def test_all_checks_share_two_threads_which_end_with_the_monitor():
    monitor, checks = Monitor(KeyValueStore(LocalClient())), [CountingCheck() for _ in range(3)]
    for check in checks:
        monitor.add(check)
    assert all(check.is_enough.wait(LIMIT_S) for check in checks)
    assert list_threads() == {"podscale-monitor", "podscale-store"}
    monitor.stop()
    assert not list_threads()


def test_a_check_is_not_polled_after_its_block():
    monitor, inside, outside = Monitor(KeyValueStore(LocalClient())), CountingCheck(), CountingCheck()
    with monitor.watch(inside):
        assert inside.is_enough.wait(LIMIT_S)
    polls = inside.polls
    monitor.add(outside)
    assert outside.is_enough.wait(LIMIT_S)
    monitor.stop()
    assert inside.polls == polls


def test_a_process_that_is_alone_polls_and_exchanges_nothing():
    monitor, check = Monitor(), CountingCheck()
    check.exchanges = 2
    with monitor.watch(check):
        assert check.is_enough.wait(LIMIT_S)
    monitor.stop()
    assert check.exchanges == 2


def test_checks_are_polled_while_the_store_does_not_answer():
    """So a process notices that process 0, which keeps the store, is stopped."""
    client, exits, has_ended = SilentClient(), [], threading.Event()

    class RecordingHeartbeat(Heartbeat):
        def _exit(self, group_exit):
            exits.append(group_exit)
            has_ended.set()

    monitor = Monitor(KeyValueStore(client))
    monitor.add(RecordingHeartbeat(KeyValueStore(client), 1, 2, heartbeat_s=1.0))
    assert has_ended.wait(LIMIT_S)
    client.continues.set()
    monitor.stop()
    assert exits[0].code == PEER_LOST
    assert exits[0].reason == "process 0, through which all find each other, has not answered for 1 s"


def test_an_exchange_that_fails_is_tried_again():
    class FailingOnce(CountingCheck):
        def exchange(self, store):
            self.exchanges += 1
            if self.exchanges == 1:
                store.set_new("key", "")
                store.set_new("key", "")  # raises
            else:
                super().exchange(store)

    check, monitor = FailingOnce(), Monitor(KeyValueStore(LocalClient()))
    with monitor.watch(check):
        assert check.is_enough.wait(LIMIT_S)
    monitor.stop()


def test_a_check_that_fails_is_reported_once_and_ends_no_other_check(capsys):
    class Failing(CountingCheck):
        def poll(self, now):
            super().poll(now)
            if self.polls % 2:
                raise KeyError("polled")
            return True

        def exchange(self, store):
            super().exchange(store)
            raise OSError("exchanged")

    failing, other, monitor = Failing(), CountingCheck(), Monitor(KeyValueStore(LocalClient()))
    with monitor.watch(failing), monitor.watch(other):
        assert failing.is_enough.wait(LIMIT_S)
        assert other.is_enough.wait(LIMIT_S)
    monitor.stop()
    error = capsys.readouterr().err
    assert error.startswith("podscale: Failing failed, and goes on:\nTraceback")
    assert error.count("Traceback") == 1
