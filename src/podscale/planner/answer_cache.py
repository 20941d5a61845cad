"""Answers: what `podscale plan` said for a pod that is not here, kept so that asking again costs nothing.

An answer follows from the recipe, the pod, the options, the code of podscale, and the versions of JAX and libtpu alone.
Their hash is its name in the user's cache folder. JAX is not imported here: a kept answer needs none.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from podscale.config.options import Options
from podscale.recipe import Recipe
from podscale.storage.files import to_json, write_atomically

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax")


def key(recipe: Recipe, pod: str, options: Options, compiles: bool) -> str:
    """The name of an answer."""
    parts = [recipe.name, recipe.to_dict(), pod, asdict(options), compiles, _versions(), _code()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def kept(name: str) -> dict[str, Any] | None:
    """The answer of that name, if there is one and it can be read."""
    with suppress(OSError, ValueError):
        found = json.loads(_file(name).read_text())
        return found if isinstance(found, dict) else None
    return None


def keep(name: str, answer: dict[str, Any]) -> None:
    """Keeps an answer; without a cache folder there is none next time."""
    with suppress(OSError):
        _file(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(name), to_json(answer))


def follows_from(recipe: Recipe) -> bool:
    """Whether the recipe says all that an answer needs, so that it does not depend on data that may change."""
    return bool(recipe.data.train_samples and recipe.data.val_samples and recipe.data.classes)


def _versions() -> dict[str, str]:
    return {name: version for name in PACKAGES if (version := _version(name))}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _code() -> str:
    """A hash of podscale's own sources and data files."""
    root = Path(__file__).parents[1]
    files = sorted(path for kind in ("*.py", "*.toml") for path in root.rglob(kind))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _file(name: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return cache / "podscale" / "plans" / f"{name}.json"
