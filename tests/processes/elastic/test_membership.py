"""A member of an elastic run, against a launcher that the test plays."""

import socket
import threading

import pytest

from podscale.processes.elastic.control import Connection
from podscale.processes.elastic.members import Generation, Member
from podscale.processes.elastic.membership import (
    REGROUP,
    SAVE,
    Assignment,
    GenerationEndedError,
    Membership,
)

ADDRESS = "127.99.1.2"


class Launcher:
    """The launcher's end, which reads the messages of a member that are not its signs of life."""

    def __init__(self):
        here, there = map(Connection, socket.socketpair())
        self._ended = threading.Event()
        self.connection, self.member = here, Membership(there, self._ended.set)
        self._messages = []

    def receive(self):
        while not self._messages:
            self._messages = [message for message in self.connection.receive() if message["kind"] != "beat"]
        return self._messages.pop(0)

    def close(self):
        self.connection.shutdown()
        assert self._ended.wait(10)
        self.connection.close()

    def assign(self, generation=0, snapshot=-1):
        """Let the member wait for a place, give it one, and return it."""
        places = []
        thread = threading.Thread(daemon=True, target=lambda: places.append(self.member.await_assignment(snapshot)))
        thread.start()
        ready = {"kind": "ready", "snapshot": snapshot, "step": 0, "is_connected": False}
        assert self.receive() == ready
        self.connection.send("assign", generation=generation, rank=1, size=2, address="here:1")
        thread.join()
        return places[0]


@pytest.fixture
def make_launcher():
    """Make launchers, whose connections end with the test."""
    launchers = []

    def make():
        launchers.append(Launcher())
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.close()


def run(function, *arguments):
    """Call a function in a thread; return the thread, and a list that gets its result or error."""
    results = []

    def call():
        try:
            results.append(function(*arguments))
        except GenerationEndedError as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, results


def test_a_member_waits_for_its_place_and_reports_the_state_that_it_holds(make_launcher):
    assert make_launcher().assign(generation=3, snapshot=40) == Assignment(3, 1, 2, "here:1")


@pytest.mark.parametrize("purpose", [SAVE, REGROUP])
def test_a_member_that_has_answered_passes_no_call_before_it_knows_where_to_stop(purpose, make_launcher):
    launcher = make_launcher()
    launcher.assign()
    assert launcher.member.find_stop(0) == ""
    assert launcher.member.find_stop(1) == ""
    launcher.connection.send("stop", generation=0)
    assert launcher.receive() == {"kind": "passed", "generation": 0, "calls": 1}
    thread, results = run(launcher.member.find_stop, 2)
    thread.join(0.1)
    assert thread.is_alive()
    launcher.connection.send("stop at", generation=0, call=3, purpose=purpose)
    thread.join()
    assert results == [""]
    assert launcher.member.find_stop(3) == purpose


def test_a_broken_generation_ends_every_wait_and_the_next_one_is_whole(make_launcher):
    launcher = make_launcher()
    launcher.assign()
    thread, results = run(launcher.member.wait_for_peers)
    assert launcher.receive() == {"kind": "barrier", "generation": 0, "number": 1}
    launcher.connection.send("broken", generation=0)
    thread.join()
    assert isinstance(results[0], GenerationEndedError)
    with pytest.raises(GenerationEndedError):
        launcher.member.find_stop(0)
    launcher.assign(generation=1)
    launcher.connection.send("broken", generation=0)  # late news of the generation that it has left
    launcher.connection.send("stop", generation=1)
    assert launcher.receive()["kind"] == "passed"
    assert not launcher.member.is_broken


def test_all_stop_after_the_first_call_that_none_has_passed(make_launcher):
    launchers = [make_launcher(), make_launcher()]
    members = [Member(slot, None, launcher.connection) for slot, launcher in enumerate(launchers)]
    generation = Generation(0, members)
    for launcher, calls in zip(launchers, (4, 6), strict=True):
        launcher.assign()
        for call in range(calls):
            assert launcher.member.find_stop(call) == ""
    generation.request_stop(SAVE)
    answers = [launcher.receive()["calls"] for launcher in launchers]
    assert [generation.note_passed(rank, calls) for rank, calls in enumerate(answers)] == [False, True]
    for launcher, calls in zip(launchers, (4, 6), strict=True):
        stops = [launcher.member.find_stop(call) for call in range(calls, 7)]
        assert stops == [""] * (6 - calls) + [SAVE]


def test_a_barrier_opens_once_all_have_come(make_launcher):
    launchers = [make_launcher(), make_launcher()]
    generation = Generation(0, [Member(slot, None, each.connection) for slot, each in enumerate(launchers)])
    threads = []
    for launcher in launchers:
        launcher.assign()
        threads.append(run(launcher.member.wait_for_peers)[0])
    generation.reach_barrier(0, launchers[0].receive()["number"])
    threads[0].join(0.1)
    assert threads[0].is_alive()
    generation.reach_barrier(1, launchers[1].receive()["number"])
    for thread in threads:
        thread.join()
