"""Run a Python file or module that the user names with `--import`, such as one that registers a model.

Nothing else is ever imported: a run records where its model was defined, but only `--import` executes it.
"""

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

from podscale.errors import UserError


def import_user_code(names: list[str]) -> None:
    """Import files (NAME.py) and modules (package.module, also from the current folder).

    Raises:
        UserError: there is no such file or module, or it raises; the message names the line.
    """
    for name in names:
        try:
            _import_file(Path(name).expanduser()) if name.endswith(".py") else _import_module(name)
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # user code may raise anything, SystemExit included
            frames = traceback.extract_tb(error.__traceback__)
            line = next((f" in line {f.lineno}" for f in reversed(frames) if f.filename.endswith(name)), "")
            raise UserError(f"--import {name} failed{line}: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"--import {path}: there is no such file; check the path")
    module_name = path.stem
    known = getattr(sys.modules.get(module_name), "__file__", None)
    if known and Path(known).resolve() == path.resolve():
        return
    if module_name in sys.modules:
        raise UserError(f"--import {path}: a module {module_name!r} is already loaded; rename the file")
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"--import {path}: Python cannot import it")
    sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _import_module(name: str) -> None:
    sys.path.insert(0, "")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and not name.startswith(error.name):
            raise
        raise UserError(f"--import {name}: there is no such module; a file must end in .py") from None
    finally:
        sys.path.remove("")
