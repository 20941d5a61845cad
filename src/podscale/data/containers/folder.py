"""An image folder: train/CLASS/FILE and val/CLASS/FILE. A place is a class folder; labels follow the class names."""

import os
from pathlib import Path

import numpy as np

from podscale.data.containers import Format, Found, Part, digest, state, visible
from podscale.data.table import SPLITS, Strings
from podscale.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
LAYOUT = "train/CLASS/FILE and val/CLASS/FILE"


def find(root: Path) -> Found:
    """The class folders. A folder's modification time changes with every file that comes, goes or is renamed."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; data.path must hold {LAYOUT}")
    if not visible(root):
        raise UserError(f"the folder {root} is empty; it must hold {LAYOUT}")
    for split in SPLITS:
        if not (root / split).is_dir():
            raise UserError(f"{root} has no folder {split}; it must hold {LAYOUT}")
    places: dict[str, tuple[str, ...]] = {}
    changed: dict[str, int] = {}
    for split in SPLITS:
        folders = sorted(entry.name for entry in visible(root / split) if entry.is_dir())
        if not folders:
            raise UserError(f"{root / split} has no class folders; pictures belong in {root / split}/CLASS/FILE")
        places[split] = tuple(f"{split}/{name}" for name in folders)
        changed |= {name: state(root / name)[1] for name in (split, *places[split])}
    fingerprint = digest([places, changed])
    where = {split: str(root / split) for split in SPLITS}
    return Found(root, places, where, fingerprint, fingerprint, max(changed.values()))


def scan(folder: str) -> Part:
    """The pictures of a class, by name; they are measured later."""
    entries = visible(Path(folder))
    names = sorted(entry.name for entry in entries if entry.name.lower().endswith(EXTENSIONS) and entry.is_file())
    if not names:
        kinds = " ".join(EXTENSIONS)
        raise UserError(f"the class folder {folder} holds no pictures ({kinds}); add some or remove it")
    zeros = np.zeros(len(names), np.int64)
    return Part(zeros, zeros, zeros, Strings.of(names), words=(os.path.basename(folder),))


FORMAT = Format(find, scan, packed=False)
