"""Image folders: train/CLASS/FILE and val/CLASS/FILE. A container is a class folder; labels follow the class names.

A folder of class folders alone, CLASS/FILE, is split by rule: every fifth image of a class, by name, validates.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podscale.data.index.containers.container import (
    SPLIT_NAMES,
    ContainerSamples,
    Format,
    Listing,
    compute_digest,
)
from podscale.data.index.containers.entries import (
    Folder,
    describe_entry,
    is_file,
    is_folder,
    list_ahead,
    list_visible,
    stat_folder,
)
from podscale.data.index.containers.sources import BucketContainer
from podscale.data.index.table import SPLITS, Strings
from podscale.errors import UserError
from podscale.storage.bucket_path import BucketPath

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
OTHER_FORMATS = (".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".tif", ".tiff")
CONVERT = "convert them to .jpg or .png"
LAYOUT = "train/CLASS/FILE and val/CLASS/FILE, or CLASS/FILE"
VALIDATION_STRIDE = 5
MAX_NAMES = 5  # of class folders in a message
RESERVED = frozenset({"train", "val", "validation", "test"})  # a folder with one of these is split already
# Both splits of an unsplit folder are in the same class folders; the suffix of a container's path selects the split.
UNSPLIT = MappingProxyType({"train": "/.", "val": "/./."})


def find(root: Folder) -> Listing:
    """List the class folders. A folder's modification time changes when a file is added, removed or renamed.

    Class folders without images are skipped, and listed as such.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; data.path must hold {LAYOUT}")
    folders = _list_folders(root)
    list_ahead(root, folders)
    if not RESERVED & set(folders):
        return _find_unsplit(root, folders)
    for split in SPLITS:
        if split not in folders:
            other = next((name for name in SPLIT_NAMES[split] if name in folders), "")
            raise UserError(
                f"{root} has no folder {split}; " + (f"rename {other}" if other else f"it must hold {LAYOUT}")
            )
    classes = {split: _list_folders(root / split) for split in SPLITS}
    for split in SPLITS:
        list_ahead(root / split, classes[split])
    present = {split: [name for name in classes[split] if _has_images(root / split / name)] for split in SPLITS}
    for split in SPLITS:
        if not present[split]:
            raise _explain_no_classes(root / split, classes[split])
        other = next(name for name in SPLITS if name != split)
        for name in set(classes[split]) & set(present[other]) - set(present[split]):
            empty, full = root / split / name, root / other / name
            others = " ".join(sorted(set(list_other_formats(empty))))
            advice = f"it holds {others} files, which cannot be read; {CONVERT}" if others else "add some to it"
            raise UserError(f"class folder {empty} holds no images, but {full} does; {advice}, or remove both")
    paths = {split: tuple(f"{split}/{name}" for name in present[split]) for split in SPLITS}
    changed = {name: stat_folder(root / name) for split in SPLITS for name in (split, *paths[split])}
    without_images = [f"{split}/{name}" for split in SPLITS for name in classes[split] if name not in present[split]]
    return _make_listing(root, paths, changed, {split: str(root / split) for split in SPLITS}, without_images)


def _find_unsplit(root: Folder, folders: list[str]) -> Listing:
    classes = [name for name in folders if _has_images(root / name)]
    if not classes:
        raise _explain_no_classes(root, folders)
    paths = {split: tuple(name + UNSPLIT[split] for name in classes) for split in SPLITS}
    changed = {name: stat_folder(root / name) for name in classes}
    without_images = [name for name in folders if name not in classes]
    return _make_listing(root, paths, changed, dict.fromkeys(SPLITS, str(root)), without_images)


def _make_listing(
    root: Folder,
    paths: dict[str, tuple[str, ...]],
    changed: dict[str, Any],
    descriptions: dict[str, str],
    without_images: list[str],
) -> Listing:
    fingerprint = compute_digest([paths, changed])
    newest_ns = max(state if isinstance(state, int) else 0 for state in changed.values())
    return Listing(root, paths, descriptions, fingerprint, fingerprint, newest_ns, skipped=tuple(without_images))


def _explain_no_classes(root: Folder, folders: list[str]) -> UserError:
    """Return an error that names what is wrong with a folder in which no class has an image."""
    example = f"such as {root / 'cats' / '1.jpg'}"
    images = sum(entry.name.lower().endswith(EXTENSIONS) for entry in list_visible(root))
    if images:
        count = "an image" if images == 1 else f"{images:,} images"
        return UserError(f"{root} holds {count} but no class folders; move each into a folder of its class, {example}")
    if not list_visible(root):
        return UserError(
            f"the folder {root} is empty; put the images of each class into a folder of their own, {example}"
        )
    for name in folders:
        if any(_has_images(root / name / inner) for inner in _list_folders(root / name)):
            return UserError(f"{root} holds no class folders with images, but {root / name} does; use that path")
    if folders:
        others = sorted({extension for name in folders for extension in list_other_formats(root / name)})
        if others:
            return UserError(f"the images of {root} are {' '.join(others)} files, which cannot be read; {CONVERT}")
        names = ", ".join(folders[:MAX_NAMES])
        return UserError(f"no class folder of {root} holds an image ({' '.join(EXTENSIONS)}): {names}")
    return UserError(f"{root} holds no class folders with images; it must hold {LAYOUT}")


def find_unsplit_classes(root: Folder) -> list[str]:
    """Return the classes of a folder without splits; empty unless two or more of its folders hold images."""
    folders = _list_folders(root)
    classes = [name for name in folders if _has_images(root / name)]
    return classes if len(classes) > 1 and not RESERVED & set(folders) else []


def _list_folders(root: Folder) -> list[str]:
    return sorted(entry.name for entry in list_visible(root) if is_folder(entry))


def _has_images(folder: Folder) -> bool:
    """Return whether there is an image; stops at the first."""
    if isinstance(folder, BucketPath):
        return any(entry.name.lower().endswith(EXTENSIONS) for entry in list_visible(folder))
    try:
        with os.scandir(folder) as entries:
            return any(not e.name.startswith(".") and e.name.lower().endswith(EXTENSIONS) for e in entries)
    except OSError as error:
        raise UserError(f"cannot list the folder {folder}: {error.strerror}; check its permissions") from error


def list_other_formats(folder: Folder) -> list[str]:
    """Return the extension of each file of an image format that cannot be read."""
    names = (entry.name.lower() for entry in list_visible(folder))
    return [extension for name in names if (extension := os.path.splitext(name)[1]) in OTHER_FORMATS]


def describe_skipped_class(folder: Folder) -> str:
    """Return a sentence about a class folder without images that can be read."""
    kinds = " ".join(sorted(set(list_other_formats(folder))))
    if kinds:
        return f"class folder {folder} holds only {kinds} files, which cannot be read, and is skipped; {CONVERT}"
    return f"class folder {folder} holds no images ({' '.join(EXTENSIONS)}) and is skipped; add some or remove it"


def describe_other_formats(where: str, counts: Mapping[str, int]) -> str:
    """Return a sentence about files of other image formats, by extension.

    >>> describe_other_formats("class folder photos/cat", {".heic": 2, ".gif": 1})
    '3 files of class folder photos/cat cannot be read and are ignored (.gif .heic); convert them to .jpg or .png'
    """
    total = sum(counts.values())
    count = "1 file" if total == 1 else f"{total:,} files"
    are = "is" if total == 1 else "are"
    return f"{count} of {where} cannot be read and {are} ignored ({' '.join(sorted(counts))}); {CONVERT}"


def scan(container: str | BucketContainer) -> ContainerSamples:
    """List the images of a class folder, sorted by name; their sizes are measured later."""
    path = container if isinstance(container, str) else container.path.key
    split = next((split for split in ("val", "train") if path.endswith(UNSPLIT[split])), "")
    path = os.path.normpath(path)
    folder: Folder = Path(path) if isinstance(container, str) else replace(container.path, key=path)
    entries = [entry for entry in list_visible(folder) if entry.name.lower().endswith(EXTENSIONS)]
    names = sorted(entry.name for entry in entries if is_file(entry))
    others = sorted((entry.path, describe_entry(entry)) for entry in entries if not is_file(entry))
    formats = tuple(list_other_formats(folder))
    if formats:
        others.append((str(folder), describe_other_formats(f"class folder {folder}", Counter(formats))))
    if split and len(names) < 2:
        raise UserError(
            f"class folder {folder} holds {len(names)} image; a class needs two, one to train on and one to validate on"
        )
    if split:
        names = [name for i, name in enumerate(names) if (i % VALIDATION_STRIDE == 0) == (split == "val")]
    if not names:
        kinds = " ".join(EXTENSIONS)
        raise UserError(f"class folder {folder} holds no images ({kinds}); add some or remove it")
    zeros = np.zeros(len(names), np.int64)
    return ContainerSamples(
        zeros,
        zeros if isinstance(folder, Path) else _list_lengths(folder, names),
        zeros,
        Strings.from_names(names),
        class_names=(folder.name,),
        ignored=() if split == "val" else tuple(others),  # once, of a folder that both splits share
        other_formats=() if split == "val" else formats,
    )


def _list_lengths(folder: BucketPath, names: list[str]) -> NDArray[np.int64]:
    sizes = {info.key.rpartition("/")[2]: info.size for info in folder.list().objects}
    return np.array([sizes[name] for name in names], np.int64)


FORMAT = Format(find, scan, packed=False)
