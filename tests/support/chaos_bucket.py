"""A training whose data and run are in a bucket behind a proxy that fails: its command, its faults, what it must leave.

Processes share nothing but the bucket: each session has a home of its own, which some faults empty, and no disk cache,
so that every pass is fetched. All through a trial every tenth request fails; each drawn fault adds to that.
"""

import functools
import json
import random
import shutil
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from support import chaos_faults, photos
from support.buckets import KEYS, make_bucket, serve_s3, upload_folder
from support.chaos_faults import KILLED, RUNNING, STOPPED, Kind
from support.chaos_training import SHAPES, ChaosTraining, TrialError
from support.faulty_proxy import Fault, FaultyProxy

from podscale.data.tools.prepare import Settings, prepare_data_set
from podscale.storage.open import open_store

BUCKET, STEPS, IMAGES = "chaos", 120, 96
BACKGROUND = 0.1  # share of requests that fail all through a trial
PASSING = {"status": "", "reset": "", "truncate": "", "short": "GET", "slow": "", "lost answer": "PUT", "away": ""}
STATUSES = (429, 500, 503)
EXTRA_REQUESTS = 200  # that a session may make beyond those of an undisturbed run: to take over, restore and clean up


class ChaosStore:
    """A server with a data set, and the proxy before it; one for a campaign."""

    def __init__(self, place: Path) -> None:
        self._stack = ExitStack()
        server = self._stack.enter_context(serve_s3())
        make_bucket(server, BUCKET)
        root = _make_data(place)
        upload_folder(root, server, BUCKET, "data")
        self.root = root
        self.proxy = self._stack.enter_context(CountingProxy(server))
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.proxy.address, "PODSCALE_STORE_RETRY_S": "120"}
        self.direct = {**KEYS, "AWS_ENDPOINT_URL": server}
        self.runs = 0

    def close(self) -> None:
        self._stack.close()


class CountingProxy(FaultyProxy):
    """A proxy that also knows when a checkpoint was last written, and drops no count of requests."""

    saved_at = 0.0

    def take_fault(self, method, path):
        if method == "PUT" and "/checkpoints/" in path:
            self.saved_at = time.monotonic()
        return super().take_fault(method, path)

    def count_hits(self) -> Counter[str]:
        """Return how many requests were made to fail, by kind of fault."""
        hits: Counter[str] = Counter()
        for fault in self._faults:
            hits[fault.kind] += fault.hits
        return hits

    def disturb_always(self, draw: random.Random) -> None:
        """Let a small share of all requests fail, each in one of the ways that pass."""
        for kind, method in PASSING.items():
            chosen = functools.partial(_is_chosen, draw, BACKGROUND / len(PASSING))
            self.inject(Fault(kind, times=-1, method=method, seconds=0.5 if kind == "slow" else 0.0, matches=chosen))


def _is_chosen(draw: random.Random, share: float, *_: object) -> bool:
    return draw.random() < share


def _make_data(place: Path) -> Path:
    for split, count in (("train", IMAGES), ("val", 16)):
        for i in range(count):
            photos.save_image(place / "photos" / split / "abcd"[i % 4] / f"{i}.jpg", i, 40 + i % 9, 60 - i % 9)
    prepare_data_set(place / "photos", place / "tars", Settings(shard_mib=1))
    return place / "tars"


@dataclass
class BucketTraining(ChaosTraining):
    """A run in a bucket. `folder` is the home of its processes; nothing of the run need survive there."""

    store: ChaosStore | None = None
    on_disk: bool = False  # the undisturbed run, with which others are compared
    name: str = ""
    began: float = 0.0
    first_request: int = 0
    last_step, eval_steps = STEPS, (STEPS // 2,)

    def __post_init__(self) -> None:
        self.store.runs += 1
        self.name = f"runs/{self.store.runs}"
        self.start_count()

    def start_count(self) -> None:
        """Count requests from now on."""
        self.first_request, self.began = len(self.store.proxy.requests), time.monotonic()

    @property
    def location(self) -> str:
        return str(self.folder / "run") if self.on_disk else f"s3://{BUCKET}/{self.name}"

    def make_words(self) -> str:
        data = self.store.root if self.on_disk else f"s3://{BUCKET}/data"
        epochs = STEPS * 16 // IMAGES
        return (
            f"train digits --data.source tar --data.path {data} --data.image_size 16 --data.lanes 1 --model.width 8 "
            f"--augment.crop resized --augment.flip true --batch.size 16 --batch.span 8 --train.epochs {epochs} "
            f"--train.eval_epochs {epochs // 2} --json --run {self.location} --pod.virtual {SHAPES[self.processes]} "
            "--plan.save_steps 20 --plan.timeout_s 60 --pod.heartbeat_s 30 --plan.check_steps 20"
        )

    def make_environment(self) -> dict[str, str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        home = str(self.folder)
        return self.store.environment | {
            **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), home),
            "PODSCALE_DISK_CACHE_GIB": "0",
        }

    def read_journal(self) -> str:
        """Return the newest working copy of the journal."""
        try:
            journals = sorted(self.folder.glob("podscale-run-*/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
            return journals[-1].read_text() if journals else ""
        except OSError:
            return ""

    def is_saving(self) -> bool:
        return time.monotonic() - self.store.proxy.saved_at < 0.1

    def count_requests(self) -> int:
        return len(self.store.proxy.requests) - self.first_request

    # --- at the end ---

    def check_requests(self, undisturbed: int, hits: int) -> None:
        """Refuse more requests than a whole run in each session, two for each fault, and signs of life."""
        most = self.count_sessions() * (undisturbed + EXTRA_REQUESTS) + 2 * hits + time.monotonic() - self.began
        if self.count_requests() > most:
            raise TrialError(f"{self.count_requests():,} requests, where {most:,.0f} would be enough")

    def check_bucket(self) -> None:
        """Refuse a bucket that holds anything but the data and what the run needs."""
        store = open_store(f"s3://{BUCKET}")
        current = json.loads(bytes(store.read(f"{self.name}/current.json")))
        needed = {f"checkpoints/{entry['key']}" for entry in current["steps"].values()} | {current["files"]}
        needed |= {f"checkpoints/{key}" for key in current["aside"].values()}
        names = [info.key.removeprefix(f"{self.name}/") for info in store.list(self.name)]
        extra = [name for name in names if name not in ("current.json", "lock.json")]
        extra = [name for name in extra if not any(name.startswith(f"{folder}/") for folder in needed)]
        if extra:
            raise TrialError(f"the bucket holds {len(extra)} objects that nothing needs, such as {extra[0]}")
        for folder in needed:
            if not any(name.startswith(f"{folder}/") for name in names):
                raise TrialError(f"the bucket holds nothing of {folder}")
        files = {path.relative_to(self.store.root).as_posix() for path in self.store.root.rglob("*") if path.is_file()}
        if {info.key.removeprefix("data/") for info in store.list("data")} != files:
            raise TrialError("the data in the bucket has changed")

    def delete_run(self) -> None:
        store = open_store(f"s3://{BUCKET}")
        for info in list(store.list(self.name)):
            store.delete(info.key)


# --- faults of the store ---------------------------------------------------------------------------------------------


def _fail_for_a_while(kind, shortest, longest, **settings):
    def inject(training, draw):
        proxy = training.store.proxy
        status = draw.choice(STATUSES)
        chance = random.Random(draw.randrange(1 << 30))
        fault = Fault(
            kind,
            status=status,
            times=-1,
            method=settings.get("method", ""),
            seconds=settings.get("seconds", 0.0),
            matches=functools.partial(_is_chosen, chance, settings.get("share", 0.3)),
        )
        proxy.inject(fault)
        time.sleep(draw.uniform(shortest, longest))
        proxy.stop(fault)

    return inject


def move_home(training, draw):
    """Kill everything and start again elsewhere: with an empty home, from the bucket alone."""
    chaos_faults.kill_all(training, draw)
    shutil.rmtree(training.folder, ignore_errors=True)
    return 0.0


KINDS = {
    "throttle": Kind(_fail_for_a_while("status", 2, 6)),
    "reset_bodies": Kind(_fail_for_a_while("reset", 2, 6)),
    "truncate_bodies": Kind(_fail_for_a_while("truncate", 2, 6)),
    "shorten_bodies": Kind(_fail_for_a_while("short", 2, 6, method="GET")),
    "delay_first_bytes": Kind(_fail_for_a_while("slow", 2, 6, seconds=3.0, share=0.1)),
    "lose_answers": Kind(_fail_for_a_while("lost answer", 2, 6, method="PUT", share=0.5)),
    "store_away": Kind(_fail_for_a_while("away", 3, 15, share=1.0)),
    "store_away_60_s": Kind(_fail_for_a_while("away", 60, 60, share=1.0), (), ("training",)),
    "move_home": Kind(move_home, (KILLED,)),
    **{
        name: chaos_faults.KINDS[name]
        for name in ("kill_one", "kill_main", "kill_two", "kill_all", "kill_launcher", "terminate", "terminate_one")
    },
    "interrupt": Kind(chaos_faults.interrupt, (*STOPPED, 1), RUNNING),
    "pause_one": chaos_faults.KINDS["pause_one"],
    "pause_all": chaos_faults.KINDS["pause_all"],
}
