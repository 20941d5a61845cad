"""Cache the results of `podscale plan` for pods that are not available.

A result depends only on the recipe, the pod, the options, the code of podscale, and the versions of JAX and libtpu.
Their hash is its file name in the user's cache folder. This module does not import JAX: a cached result needs none.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.config.options import Options
from podscale.processes.host import find_version
from podscale.recipe import Recipe
from podscale.storage.files import to_json, write_atomically
from podscale.storage.user_cache import get_user_cache

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax")


def make_key(recipe: Recipe, pod: str, options: Options, extra: JsonObject) -> str:
    """Return the cache key of a result; `extra` has what else it depends on."""
    parts = [recipe.name, recipe.to_dict(), pod, asdict(options), extra, _list_versions(), _hash_code()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def load_result(key: str) -> JsonObject | None:
    """Return the cached result of this key, or None if there is none or it cannot be read."""
    with suppress(OSError, ValueError):
        result = json.loads(_get_path(key).read_text())
        return result if isinstance(result, dict) else None
    return None


def save_result(key: str, result: JsonObject) -> None:
    """Cache a result; do nothing if the cache folder cannot be written."""
    with suppress(OSError):
        _get_path(key).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_get_path(key), to_json(result))


def is_cacheable(recipe: Recipe) -> bool:
    """Return whether the recipe states all counts, so that a result does not depend on data that may change."""
    return bool(recipe.data.train_samples and recipe.data.val_samples and recipe.data.classes)


def _list_versions() -> dict[str, str]:
    return {name: version for name in PACKAGES if (version := find_version(name))}


def _hash_code() -> str:
    """Return a hash of podscale's sources and data files."""
    root = Path(__file__).parents[1]
    files = sorted(path for kind in ("*.py", "*.toml") for path in root.rglob(kind))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _get_path(key: str) -> Path:
    return get_user_cache("plans") / f"{key}.json"
