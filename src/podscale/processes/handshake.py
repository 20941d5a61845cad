"""Handshake of a run's processes: they show the job's token, and compare what must be the same.

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
import platform
import secrets
import socket
from collections.abc import Callable, Sequence

from podscale.errors import UserError
from podscale.processes.heartbeat import CollectiveFailedError
from podscale.processes.host import find_version
from podscale.processes.job_secret import SECRET
from podscale.processes.key_value_store import KeyValueStore

CHALLENGE, VALUES, VERDICT = "podscale/challenge", "podscale/values", "podscale/verdict"  # keys of the store
TIMEOUT_S = 300.0  # in which all processes must have come this far; JAX's runtime notices sooner that one is dead
MAX_TEXT = 4096  # of a value that a process shows
PACKAGES = ("podscale", "jax", "jaxlib")


def make_token(secret: str, challenge: str, process: int, processes: int) -> str:
    """Return what a process shows; empty where there is no secret."""
    text = f"podscale {challenge} {process} of {processes}".encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest() if secret else ""


def list_versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python} | {name: find_version(name) or "of a checkout" for name in PACKAGES}


class Handshake:
    """Checks that a run's processes make of each other; all make the same calls in the same order.

    Args:
        store: what the processes share.
        process: this process's number.
        processes: how many there are.
    """

    def __init__(self, store: KeyValueStore, process: int, processes: int) -> None:
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
                if not _is_same(value["token"], make_own_token(number)):
                    return (
                        f"process {number} on {value['host']} did not show the token of this job; a stranger took its "
                        f"number, or {SECRET} is not the same for all processes"
                    )
            return ""

        main = self._exchange({"token": make_own_token(self._process)}, find_stranger)
        if not _is_same(main["token"], make_own_token(0)):
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
                    if other[name] != main[name]:
                        return (
                            f"process {number} on {other['host']} has {name} {other[name] or 'unknown'}, but process 0 "
                            f"on {main['host']} has {main[name]}; {advice}"
                        )
            return ""

        self._exchange(values, find_difference)

    def _exchange(self, values: dict[str, str], find_problem: Callable[[list[dict[str, str]]], str]) -> dict[str, str]:
        """Publish this process's values, let the main process look for a problem, and return the main's values."""
        self._rounds += 1
        key, verdict = f"{VALUES}/{self._rounds}", f"{VERDICT}/{self._rounds}"
        self._store.set_new(f"{key}/{self._process}", json.dumps(values | {"host": socket.gethostname()}))
        texts = self._read_all(key) if self._process == 0 else [self._read(f"{key}/0")]
        published = [_parse(text, ("host", *values)) for text in texts]
        if self._process == 0:
            self._store.set_new(verdict, find_problem(published))
        if problem := self._read(verdict):
            raise UserError(problem)
        return published[0]

    def _read_all(self, prefix: str) -> list[str]:
        values = self._store.await_values(prefix, range(self._processes), TIMEOUT_S)
        for number in range(self._processes):
            if number not in values:
                raise CollectiveFailedError(f"process {number} did not reach {prefix} within {TIMEOUT_S:.0f} s")
        return [values[number] for number in range(self._processes)]

    def _read(self, key: str) -> str:
        value = self._store.await_value(key, TIMEOUT_S)
        if value is None:
            raise CollectiveFailedError(f"another process did not reach {key} within {TIMEOUT_S:.0f} s")
        return value


def _is_same(shown: str, expected: str) -> bool:
    """Compare two tokens in a time that does not depend on where they differ."""
    return hmac.compare_digest(shown.encode(errors="replace"), expected.encode())


def _parse(text: str, names: Sequence[str]) -> dict[str, str]:
    """Return what a process has published; it may be a stranger, and have published anything.

    >>> _parse('{"host": "n1\\\\u001b[2J", "token": 1}', ("host", "token"))
    {'host': 'n1?[2J', 'token': ''}
    >>> _parse("nonsense", ("token",))
    {'token': ''}
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    values = values if isinstance(values, dict) else {}
    texts = {name: values[name] if isinstance(values.get(name), str) else "" for name in names}
    return {name: "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT]) for name, text in texts.items()}
