"""The folder that a data set is prepared into, and its settings. Its `prepare.json` lists the complete shards.

A folder has one source and one set of settings that never change; anything else is refused. Only one process at a time
writes into it.
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

from podscale.config.json_types import JsonObject
from podscale.data.index import catalog
from podscale.data.index.table import SPLITS
from podscale.data.tools.shards import Shard, explain_write_errors
from podscale.errors import UserError
from podscale.storage.files import read_text, write_atomically


@dataclass(frozen=True)
class Settings:
    """How images are prepared. By default, JPEGs are tiled without loss."""

    longest: int | None = None  # maximum pixels of the longer side
    quality: int | None = None  # every image is encoded again; None: only those that are shrunk, with QUALITY
    subsampling: str | None = None  # of images that are encoded: 420 (the default) or 444
    raw: bool = False  # store pixels, not encoded
    shard_mib: int = 256

    def __post_init__(self) -> None:
        limits = {"longest": 65_535, "quality": 100, "shard_mib": 2**20}
        for name, most in limits.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise UserError(f"{_format_option(name)} is {value}; it must be from 1 to {most}")
        if self.subsampling not in (None, "420", "444"):
            raise UserError(f"--subsampling is {self.subsampling}; it must be 420 or 444")
        if self.raw and (self.quality is not None or self.subsampling is not None):
            raise UserError("--raw stores pixels, which have neither --quality nor --subsampling; leave one out")
        if self.subsampling is not None and self.quality is None and self.longest is None:
            raise UserError("--subsampling is for what is encoded again; add --quality or --longest")


@dataclass(frozen=True)
class Target:
    """A folder, its source and settings, and its complete shards."""

    folder: Path
    settings: Settings
    source: str = ""  # digest of the source's index; empty before it is known
    finished_shards: dict[str, list[JsonObject]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    finished: bool = False

    @classmethod
    def open(cls, folder: Path, settings: Settings) -> "Target":
        """Return the state of a folder that was prepared before, or of a new one; refuse any other folder."""
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; name a folder to prepare into")
        path = folder / catalog.JOURNAL_FILE
        if not os.path.lexists(path):
            if folder.exists() and any(entry.suffix != ".part" for entry in folder.iterdir()):
                raise UserError(f"{folder} is not empty and holds nothing that was prepared; name another folder")
            return cls(folder, settings)
        try:
            target = cls.parse(folder, read_text(path, catalog.MAX_JOURNAL_BYTES))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; remove it, or name another folder") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError):
            raise UserError(f"{path} is damaged; remove the folder {folder} and prepare it again") from None
        target.check_settings(settings, str(folder))
        return target

    @classmethod
    def parse(cls, folder: Path, text: str) -> "Target":
        """Return the state that a journal describes.

        Raises:
            UserError, ValueError, TypeError, KeyError, AttributeError, RecursionError: it is damaged.
        """
        content = json.loads(text)
        shards = {split: [dict(_check_shard(shard)) for shard in content["shards"][split]] for split in SPLITS}
        settings = Settings(**content["settings"])
        return cls(folder, settings, str(content["source"]), shards, bool(content["finished"]))

    def check_settings(self, settings: Settings, where: str) -> None:
        """Refuse settings other than those that a target was started with.

        Args:
            settings: those of now.
            where: the target, as the user knows it.
        """
        if self.settings != settings:
            differences = ", ".join(_describe_differences(self.settings, settings))
            raise UserError(
                f"{where} was started with other settings ({differences}); repeat those or name another folder"
            )

    def check_source(self, source: str, where: str) -> None:
        """Refuse a source, by its digest, other than the one that a target was started from."""
        if self.source not in ("", source):
            raise UserError(f"{where} was started from other data, or it has changed since; name another folder")

    def start(self, source: str) -> "Target":
        """Return this target for a source, without shards that were lost since; remove shards that are not listed."""
        self.check_source(source, str(self.folder))
        intact = {split: list(takewhile(self._is_intact, self.finished_shards[split])) for split in SPLITS}
        names = {shard["name"] for split in SPLITS for shard in intact[split]}
        for split in SPLITS:
            for path in self.folder.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].tar"):
                if path.name not in names:  # killed before it was listed, or a shard before it is lost
                    path.unlink()
        unchanged = intact == self.finished_shards and (self.folder / catalog.INDEX_FILE).is_file()
        target = replace(self, source=source, finished_shards=intact, finished=self.finished and unchanged)
        if target != self:
            target._save()
        return target

    def add(self, split: str, shard: Shard, methods: Counter[str]) -> None:
        """Record that a shard is complete."""
        entry = {
            "name": shard.path.name,
            "samples": shard.samples,
            "bytes": shard.bytes,
            "how": dict(sorted(methods.items())),
        }
        self.finished_shards[split].append(entry)
        self._save()

    def finish(self) -> "Target":
        """Record that the data set is complete."""
        target = replace(self, finished=True)
        target._save()
        return target

    def count_shards(self, split: str) -> int:
        """Return the number of complete shards."""
        return len(self.finished_shards[split])

    def count_samples(self, split: str) -> int:
        """Return the number of samples in the complete shards."""
        return sum(shard["samples"] for shard in self.finished_shards[split])

    def _is_intact(self, shard: JsonObject) -> bool:
        path = self.folder / shard["name"]
        return path.is_file() and path.stat().st_size == shard["bytes"]

    def _save(self) -> None:
        content = {
            "settings": asdict(self.settings),
            "source": self.source,
            "finished": self.finished,
            "shards": self.finished_shards,
        }
        with explain_write_errors(self.folder / catalog.JOURNAL_FILE):
            write_atomically(self.folder / catalog.JOURNAL_FILE, json.dumps(content, indent=1))


def _check_shard(shard: JsonObject) -> JsonObject:
    """Return a shard's entry in `prepare.json` if it is valid."""
    if not re.fullmatch(r"(train|val)-[0-9]{5}\.tar", shard["name"]):
        raise ValueError("not the name of a shard")
    if not all(type(shard[key]) is int and shard[key] > 0 for key in ("samples", "bytes")):
        raise ValueError("counts that are not positive whole numbers")
    if not all(type(count) is int for count in shard["how"].values()):
        raise ValueError("counts that are not positive whole numbers")
    return shard


def _describe_differences(before: Settings, now: Settings) -> Iterator[str]:
    """Yield each difference as text: "--longest 500, now 400"."""
    for name, value in asdict(before).items():
        new = getattr(now, name)
        if new != value:
            yield f"{_format_option(name)} {_format_value(value)}, now {_format_value(new)}"


def _format_value(value: object) -> str:
    return "not given" if value is None or value is False else "given" if value is True else str(value)


def _format_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_disjoint(source: Path, target: Path) -> None:
    """Refuse a target that is the source, is inside it, or contains it."""
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if here == there:
        raise UserError(f"{target} is the source itself; name another folder to prepare into")
    if here in there.parents or there in here.parents:
        inner, outer = (target, source) if here in there.parents else (source, target)
        raise UserError(f"{inner} is inside {outer}; name a folder to prepare into that is apart from the source")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder if needed, and lock it for this process."""
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
