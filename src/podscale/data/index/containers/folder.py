"""Image folders: train/CLASS/FILE and val/CLASS/FILE. A container is a class folder; labels follow the class names.

A folder of class folders alone, CLASS/FILE, is split by rule: every fifth image of a class, by name, validates.
"""

import os
from pathlib import Path

import numpy as np

from podscale.data.index.containers.container import (
    ContainerSamples,
    Format,
    Listing,
    compute_digest,
    describe_entry,
    is_file,
    is_folder,
    list_visible,
    stat_file,
)
from podscale.data.index.table import SPLITS, Strings
from podscale.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
LAYOUT = "train/CLASS/FILE and val/CLASS/FILE, or CLASS/FILE"
VALIDATION_STRIDE = 5
# Both splits of an unsplit folder are in the same class folders; the suffix of a container's path selects the split.
UNSPLIT = {"train": "/.", "val": "/./."}


def find(root: Path) -> Listing:
    """List the class folders. A folder's modification time changes when a file is added, removed or renamed."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; data.path must hold {LAYOUT}")
    if not list_visible(root):
        raise UserError(f"the folder {root} is empty; it must hold {LAYOUT}")
    unsplit = find_unsplit_classes(root)
    if unsplit:
        paths = {split: tuple(name + UNSPLIT[split] for name in unsplit) for split in SPLITS}
        changed = {name: stat_file(root / name)[1] for name in unsplit}
        return _make_listing(root, paths, changed, dict.fromkeys(SPLITS, str(root)))
    if not any((root / split).is_dir() for split in SPLITS):
        raise UserError(f"{root} holds no images of classes; it must hold {LAYOUT}")
    for split in SPLITS:
        if not (root / split).is_dir():
            raise UserError(f"{root} has no folder {split}; it must hold {LAYOUT}")
    paths, changed = {}, {}
    for split in SPLITS:
        folders = sorted(entry.name for entry in list_visible(root / split) if is_folder(entry))
        if not folders:
            raise UserError(f"{root / split} has no class folders; images belong in {root / split}/CLASS/FILE")
        paths[split] = tuple(f"{split}/{name}" for name in folders)
        changed |= {name: stat_file(root / name)[1] for name in (split, *paths[split])}
    return _make_listing(root, paths, changed, {split: str(root / split) for split in SPLITS})


def _make_listing(
    root: Path, paths: dict[str, tuple[str, ...]], changed: dict[str, int], descriptions: dict[str, str]
) -> Listing:
    fingerprint = compute_digest([paths, changed])
    return Listing(root, paths, descriptions, fingerprint, fingerprint, max(changed.values()))


def find_unsplit_classes(root: Path) -> list[str]:
    """Return the class folders of a folder without splits; empty unless there are two or more and all hold images."""
    folders = sorted(entry.name for entry in list_visible(root) if is_folder(entry))
    if len(folders) < 2 or {"train", "val", "validation", "test"} & set(folders):
        return []
    return folders if all(_has_images(root / name) for name in folders) else []


def _has_images(folder: Path) -> bool:
    return any(entry.name.lower().endswith(EXTENSIONS) for entry in list_visible(folder))


def scan(folder: str) -> ContainerSamples:
    """List the images of a class folder, sorted by name; their sizes are measured later."""
    split = next((split for split in ("val", "train") if folder.endswith(UNSPLIT[split])), "")
    folder = os.path.normpath(folder)
    entries = [entry for entry in list_visible(Path(folder)) if entry.name.lower().endswith(EXTENSIONS)]
    names = sorted(entry.name for entry in entries if is_file(entry))
    others = sorted((entry.path, describe_entry(entry)) for entry in entries if not is_file(entry))
    if split and len(names) < 2:
        raise UserError(f"the class folder {folder} holds {len(names)} image; it takes two to train and validate")
    if split:
        names = [name for i, name in enumerate(names) if (i % VALIDATION_STRIDE == 0) == (split == "val")]
    if not names:
        kinds = " ".join(EXTENSIONS)
        raise UserError(f"the class folder {folder} holds no images ({kinds}); add some or remove it")
    zeros = np.zeros(len(names), np.int64)
    return ContainerSamples(
        zeros,
        zeros,
        zeros,
        Strings.from_names(names),
        class_names=(os.path.basename(folder),),
        ignored=() if split == "val" else tuple(others),  # once, of a folder that both splits share
    )


FORMAT = Format(find, scan, packed=False)
