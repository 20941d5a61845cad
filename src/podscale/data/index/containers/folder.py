"""An image folder: train/CLASS/FILE and val/CLASS/FILE. A place is a class folder; labels follow the class names.

A folder of class folders alone, CLASS/FILE, is split by rule: every fifth picture of a class, by name, validates.
"""

import os
from pathlib import Path

import numpy as np

from podscale.data.index.containers.container import Format, Found, Part, digest, state, visible
from podscale.data.index.table import SPLITS, Strings
from podscale.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
LAYOUT = "train/CLASS/FILE and val/CLASS/FILE, or CLASS/FILE"
EVERY = 5
# Both splits of an unsplit folder are in the same class folders; how a place is written says which part is meant.
UNSPLIT = {"train": "/.", "val": "/./."}


def find(root: Path) -> Found:
    """The class folders. A folder's modification time changes with every file that comes, goes or is renamed."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; data.path must hold {LAYOUT}")
    if not visible(root):
        raise UserError(f"the folder {root} is empty; it must hold {LAYOUT}")
    unsplit = unsplit_classes(root)
    if unsplit:
        places = {split: tuple(name + UNSPLIT[split] for name in unsplit) for split in SPLITS}
        changed = {name: state(root / name)[1] for name in unsplit}
        return _found(root, places, changed, dict.fromkeys(SPLITS, str(root)))
    if not any((root / split).is_dir() for split in SPLITS):
        raise UserError(f"{root} holds no pictures of classes; it must hold {LAYOUT}")
    for split in SPLITS:
        if not (root / split).is_dir():
            raise UserError(f"{root} has no folder {split}; it must hold {LAYOUT}")
    places, changed = {}, {}
    for split in SPLITS:
        folders = sorted(entry.name for entry in visible(root / split) if entry.is_dir())
        if not folders:
            raise UserError(f"{root / split} has no class folders; pictures belong in {root / split}/CLASS/FILE")
        places[split] = tuple(f"{split}/{name}" for name in folders)
        changed |= {name: state(root / name)[1] for name in (split, *places[split])}
    return _found(root, places, changed, {split: str(root / split) for split in SPLITS})


def _found(root: Path, places: dict[str, tuple[str, ...]], changed: dict[str, int], where: dict[str, str]) -> Found:
    fingerprint = digest([places, changed])
    return Found(root, places, where, fingerprint, fingerprint, max(changed.values()))


def unsplit_classes(root: Path) -> list[str]:
    """The class folders of a folder that has pictures in every one of them and no splits; none if it is not one."""
    folders = sorted(entry.name for entry in visible(root) if entry.is_dir())
    if len(folders) < 2 or {"train", "val", "validation", "test"} & set(folders):
        return []
    return folders if all(_holds_pictures(root / name) for name in folders) else []


def _holds_pictures(folder: Path) -> bool:
    return any(entry.name.lower().endswith(EXTENSIONS) for entry in visible(folder))


def scan(folder: str) -> Part:
    """The pictures of a class, by name; they are measured later."""
    split = next((split for split in ("val", "train") if folder.endswith(UNSPLIT[split])), "")
    folder = os.path.normpath(folder)
    entries = visible(Path(folder))
    names = sorted(entry.name for entry in entries if entry.name.lower().endswith(EXTENSIONS) and entry.is_file())
    if split and len(names) < 2:
        raise UserError(f"the class folder {folder} holds {len(names)} picture; it takes two to train and validate")
    if split:
        names = [name for i, name in enumerate(names) if (i % EVERY == 0) == (split == "val")]
    if not names:
        kinds = " ".join(EXTENSIONS)
        raise UserError(f"the class folder {folder} holds no pictures ({kinds}); add some or remove it")
    zeros = np.zeros(len(names), np.int64)
    return Part(zeros, zeros, zeros, Strings.of(names), words=(os.path.basename(folder),))


FORMAT = Format(find, scan, packed=False)
