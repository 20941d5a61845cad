"""The pod is found in a thread while modules are imported."""

import threading

import pytest

from podscale import pod
from podscale.cli.arguments import join_processes, start_in_thread
from podscale.cli.parser import parse_arguments
from podscale.errors import UserError


def test_a_function_in_a_thread_runs_before_its_result_is_asked_for():
    is_called = threading.Event()
    start_in_thread(is_called.set)
    assert is_called.wait(timeout=60)


@pytest.mark.parametrize("in_thread", [True, False])
def test_the_pod_is_the_same_whether_a_thread_finds_it(in_thread):
    arguments = parse_arguments(["train", "digits", "--pod.virtual", "2x2"])
    assert join_processes(arguments, in_thread=in_thread)() == pod.find_pod(virtual="2x2")


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_pod_that_cannot_be_found_is_reported_where_it_is_asked_for(in_thread):
    find_pod = join_processes(parse_arguments(["train", "digits", "--pod.virtual", "2y2"]), in_thread=in_thread)
    with pytest.raises(UserError, match="ROWSxCOLUMNS"):
        find_pod()
