"""Recipe files: presets, the user's own TOML files, and the comments that open them."""

import os
import shlex
from importlib import resources
from pathlib import Path

from podscale.config.json_types import JsonObject
from podscale.config.suggestions import suggest_names
from podscale.config.toml import MAX_TOML_BYTES, parse_toml
from podscale.errors import UserError
from podscale.recipe.recipe import SECTIONS, Recipe, override_recipe, require_section
from podscale.storage.files import read_text


def list_presets() -> dict[str, str]:
    """Return the recipes that come with the package: the comment that opens each file, by name.

    Returns:
        {name: comment}, sorted by name.

    >>> "digits" in list_presets()
    True
    """
    files = (f for f in resources.files("podscale.recipes").iterdir() if f.name.endswith(".toml"))
    return {f.name[:-5]: parse_opening_comment(f.read_text()) for f in sorted(files, key=lambda f: f.name)}


def load_recipe(name: str | Path = "digits") -> Recipe:
    """Return a preset, or the recipe in a TOML file.

    Args:
        name: a name that `list_presets` returns, or a path that ends in .toml.

    Returns:
        The recipe, checked.

    Raises:
        UserError: there is no such preset or file, or it is not a valid recipe.

    >>> load_recipe("digits").model.name
    'resnet8'
    """
    text, stem = _read_text(str(name))
    return parse_recipe(text, name=stem)


def _read_text(name: str) -> tuple[str, str]:
    if name.endswith(".toml"):
        return read_recipe_file(Path(name).expanduser()), Path(name).stem
    if name not in list_presets():
        if os.path.isdir(name):
            command = f"podscale train imagefolder --data.path {shlex.quote(name)}"
            raise UserError(f"{name} is a folder, not a recipe; train on its images with `{command}`")
        raise UserError(f"there is no recipe {name!r}: {suggest_names(name, list_presets())}")
    return resources.files("podscale.recipes").joinpath(f"{name}.toml").read_text(), name


def read_recipe_file(path: Path, kind: str = "recipe") -> str:
    """Return the text of a recipe file.

    Args:
        path: the file.
        kind: what messages call it.

    Raises:
        UserError: the file is missing, unreadable, too large or not UTF-8.
    """
    try:
        return read_text(path, MAX_TOML_BYTES)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UserError(f"there is no {kind} file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read the {kind} file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the {kind} file {path} is not text in UTF-8") from None


def parse_recipe(text: str, name: str = "unnamed") -> Recipe:
    """Return the recipe in a TOML text: tables are named like the sections, keys like their fields.

    Raises:
        UserError: the text is not TOML, or not a valid recipe.
    """
    tables = parse_toml(text, f"recipe {name}")
    changes: JsonObject = {}
    for section, fields in tables.items():
        if not isinstance(fields, dict):
            raise UserError(f"recipe {name}: {section!r} is not in any section; the sections are {', '.join(SECTIONS)}")
        require_section(section)
        changes |= {f"{section}.{key}": value for key, value in fields.items()}
    return override_recipe(Recipe(name=name, doc=parse_opening_comment(text)), changes)


def parse_title(text: str) -> str:
    """Return the name that `to_toml` wrote into a recipe's first line; empty for a file written by hand."""
    first = text.partition("\n")[0]
    return first.removeprefix("# recipe: ") if first.startswith("# recipe: ") else ""


def parse_opening_comment(text: str) -> str:
    """Return the comment that opens a file."""
    text = text.removeprefix(f"# recipe: {parse_title(text)}\n")
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line[1:].strip())
    return "\n".join(lines).strip("\n")
