"""Target: the folder that a data set is prepared in, and how. `prepare.json` there says which shards of it are whole.

A folder has one source and one way of preparing it, for good; whatever else it is asked to hold is refused. Only one
process at a time writes in it.
"""

import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from podscale.data.index import catalog
from podscale.data.index.table import SPLITS
from podscale.data.tools.shards import Shard, writing
from podscale.errors import UserError
from podscale.storage.files import write_atomically


@dataclass(frozen=True)
class Settings:
    """What becomes of the pictures. Without any of it, JPEGs are tiled without loss."""

    longest: int | None = None  # pixels of the longer side at most
    quality: int | None = None  # every picture is encoded again; None: only those that are shrunk, by QUALITY
    subsampling: str | None = None  # of what is encoded: 420 (the default) or 444
    raw: bool = False  # pixels, not encoded
    shard_mib: int = 256

    def __post_init__(self) -> None:
        limits = {"longest": 65_535, "quality": 100, "shard_mib": 2**20}
        for name, most in limits.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise UserError(f"{_option(name)} is {value}; it must be from 1 to {most}")
        if self.subsampling not in (None, "420", "444"):
            raise UserError(f"--subsampling is {self.subsampling}; it must be 420 or 444")
        if self.raw and (self.quality is not None or self.subsampling is not None):
            raise UserError("--raw stores pixels, which have neither --quality nor --subsampling; leave one out")
        if self.subsampling is not None and self.quality is None and self.longest is None:
            raise UserError("--subsampling is for what is encoded again; add --quality or --longest")


@dataclass(frozen=True)
class Target:
    """A folder, what it is prepared from and how, and its shards that are whole."""

    folder: Path
    settings: Settings
    source: str = ""  # the digest of its index; empty before it is known
    whole: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    finished: bool = False

    @classmethod
    def open(cls, folder: Path, settings: Settings) -> "Target":
        """A folder as it was left, or a new one; refuses a folder that holds anything else."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; name a folder to prepare into")
        path = folder / catalog.PREPARED
        if not path.exists():
            if folder.exists() and any(entry.suffix != ".part" for entry in folder.iterdir()):
                raise UserError(f"{folder} is not empty and holds nothing that was prepared; name another folder")
            return cls(folder, settings)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            before = Settings(**content["settings"])
            whole = {split: [dict(_checked(shard)) for shard in content["shards"][split]] for split in SPLITS}
            target = cls(folder, before, str(content["source"]), whole, bool(content["finished"]))
        except (ValueError, TypeError, KeyError, AttributeError, UserError):
            raise UserError(f"{path} is damaged; remove the folder {folder} and prepare it again") from None
        if before != settings:
            told = ", ".join(_differences(before, settings))
            raise UserError(f"{folder} was begun with other settings ({told}); repeat those or name another folder")
        return target

    def begun(self, source: str) -> "Target":
        """The same, of this source, and without the shards that are gone since."""
        if self.source not in ("", source):
            raise UserError(f"{self.folder} was begun from other data, or it has changed since; name another folder")
        kept = {split: list(takewhile(self._is_there, self.whole[split])) for split in SPLITS}
        names = {shard["name"] for split in SPLITS for shard in kept[split]}
        for split in SPLITS:
            for path in self.folder.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].tar"):
                if path.name not in names:  # killed before it was noted down, or what is before it is gone
                    path.unlink()
        same = kept == self.whole and (self.folder / catalog.BESIDE).is_file()
        target = replace(self, source=source, whole=kept, finished=self.finished and same)
        if target != self:
            target._save()
        return target

    def add(self, split: str, shard: Shard, how: Counter[str]) -> None:
        """Notes that a shard is whole."""
        noted = {
            "name": shard.path.name,
            "samples": shard.samples,
            "bytes": shard.bytes,
            "how": dict(sorted(how.items())),
        }
        self.whole[split].append(noted)
        self._save()

    def finish(self) -> "Target":
        """Notes that nothing is left to do."""
        target = replace(self, finished=True)
        target._save()
        return target

    def shards(self, split: str) -> int:
        return len(self.whole[split])

    def samples(self, split: str) -> int:
        """How many samples the whole shards hold."""
        return sum(shard["samples"] for shard in self.whole[split])

    def _is_there(self, shard: dict[str, Any]) -> bool:
        path = self.folder / shard["name"]
        return path.is_file() and path.stat().st_size == shard["bytes"]

    def _save(self) -> None:
        content = {
            "settings": asdict(self.settings),
            "source": self.source,
            "finished": self.finished,
            "shards": self.whole,
        }
        with writing(self.folder / catalog.PREPARED):
            write_atomically(self.folder / catalog.PREPARED, json.dumps(content, indent=1))


def _checked(shard: dict[str, Any]) -> dict[str, Any]:
    """A line about a shard that says what it should."""
    if not re.fullmatch(r"(train|val)-[0-9]{5}\.tar", shard["name"]):
        raise ValueError("no name of a shard")
    if not all(type(shard[key]) is int and shard[key] > 0 for key in ("samples", "bytes")):
        raise ValueError("numbers that count nothing")
    if not all(type(count) is int for count in shard["how"].values()):
        raise ValueError("numbers that count nothing")
    return shard


def _differences(before: Settings, now: Settings) -> Iterator[str]:
    """What differs, in words: "--longest 500, now 400"."""
    for name, value in asdict(before).items():
        new = getattr(now, name)
        if new != value:
            yield f"{_option(name)} {_said(value)}, now {_said(new)}"


def _said(value: Any) -> str:
    return "not given" if value is None or value is False else "given" if value is True else str(value)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_apart(source: Path, target: Path) -> None:
    """Refuses to write where it is read from."""
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if here == there:
        raise UserError(f"{target} is the source itself; name another folder to prepare into")
    if here in there.parents or there in here.parents:
        inner, outer = (target, source) if here in there.parents else (source, target)
        raise UserError(f"{inner} is inside of {outer}; name a folder to prepare into that is apart from the source")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}; name another one") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is preparing {folder}; wait for it, or name another folder") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)
