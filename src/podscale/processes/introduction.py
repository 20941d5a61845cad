"""Introduce the processes of a run to each other: they show the job's token, and compare what must be the same.

JAX's coordinator accepts every client that names a number which is free. Where the platform gives the processes of a
job a secret, each one shows a token that only they can make, before anything is computed with it: a stranger that took
a number ends the run, by name, instead of taking part in it. The token is made from the secret, a challenge of this
start of the run and the number, so it is of no use to another process, nor later.

Values that must be the same everywhere, such as versions of libraries or the digest of the data, are compared by the
main process. All processes end with the same sentence if they differ.
"""

import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
from collections.abc import Callable, Mapping
from importlib import metadata

from podscale.errors import UserError
from podscale.processes.heartbeat import CollectiveFailedError
from podscale.processes.store import Store

SECRET = "PODSCALE_JOB_SECRET"  # set by `launch` and by the examples for schedulers
OPEN_MPI_SECRET = "OMPI_MCA_orte_precondition_transports"  # a random key of the job, up to 4.x
CHALLENGE, VALUES, VERDICT = "podscale/challenge", "podscale/values", "podscale/verdict"  # keys of the store
TIMEOUT_S = 300.0  # in which all processes must have come this far; JAX's runtime notices sooner that one is dead
PACKAGES = ("podscale", "jax", "jaxlib")


def read_secret(environment: Mapping[str, str] = os.environ) -> str:
    """Return the secret that the processes of this job share; empty if the platform gives none.

    >>> read_secret({"PODSCALE_JOB_SECRET": "a"}), read_secret({})
    ('a', '')
    """
    return environment.get(SECRET) or environment.get(OPEN_MPI_SECRET, "")


def make_token(secret: str, challenge: str, process: int, processes: int) -> str:
    """Return what a process shows; empty where there is no secret."""
    text = f"podscale {challenge} {process} of {processes}".encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest() if secret else ""


def list_versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python} | {name: _get_version(name) for name in PACKAGES}


def _get_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout on the path
        return "of a checkout"


class Introduction:
    """What processes show each other through JAX's key-value store; all make the same calls in the same order.

    Args:
        store: what the processes share.
        process: this process's number.
        processes: how many there are.
    """

    def __init__(self, store: Store, process: int, processes: int) -> None:
        self._store, self._process, self._processes, self._rounds = store, process, processes, 0

    def show_token(self, secret: str) -> None:
        """Show this process's token, and check those of the others.

        Raises:
            UserError: in all processes; one has not shown the token of this job.
        """
        if self._process == 0:
            self._store.set_new(CHALLENGE, secrets.token_hex(32))
        challenge = self._read(CHALLENGE)

        def make_own_token(number: int) -> str:
            return make_token(secret, challenge, number, self._processes)

        def find_stranger(values: list[dict[str, str]]) -> str:
            for number, value in enumerate(values):
                if not hmac.compare_digest(value["token"], make_own_token(number)):
                    return (
                        f"process {number} on {value['host']} did not show the token of this job; a stranger took its "
                        f"number, or {SECRET} is not the same for all processes"
                    )
            return ""

        main = self._exchange({"token": make_own_token(self._process)}, find_stranger)
        if not hmac.compare_digest(main["token"], make_own_token(0)):
            raise UserError(find_stranger([main]))

    def check_same(self, values: dict[str, str], advice: str) -> None:
        """Compare values of all processes with those of the main process.

        Args:
            values: by name, such as {"jax": "0.10.2"}.
            advice: what to do if they differ.

        Raises:
            UserError: in all processes; the message names a process whose value differs, and the value.
        """

        def find_difference(all_values: list[dict[str, str]]) -> str:
            main = all_values[0]
            for number, other in enumerate(all_values):
                for name in values:
                    if other.get(name) != main[name]:
                        return (
                            f"process {number} on {other['host']} has {name} {other.get(name)}, but process 0 on "
                            f"{main['host']} has {main[name]}; {advice}"
                        )
            return ""

        self._exchange(values, find_difference)

    def _exchange(self, values: dict[str, str], find_problem: Callable[[list[dict[str, str]]], str]) -> dict[str, str]:
        """Publish this process's values, let the main process look for a problem, and return the main's values."""
        self._rounds += 1
        key, verdict = f"{VALUES}/{self._rounds}", f"{VERDICT}/{self._rounds}"
        self._store.set_new(f"{key}/{self._process}", json.dumps(values | {"host": socket.gethostname()}))
        numbers = range(self._processes if self._process == 0 else 1)
        published = [json.loads(self._read(f"{key}/{n}")) for n in numbers]
        if self._process == 0:
            self._store.set_new(verdict, find_problem(published))
        if problem := self._read(verdict):
            raise UserError(problem)
        return published[0]

    def _read(self, key: str) -> str:
        value = self._store.await_value(key, TIMEOUT_S)
        if value is None:
            raise CollectiveFailedError(f"another process did not reach {key} within {TIMEOUT_S:.0f} s")
        return value
