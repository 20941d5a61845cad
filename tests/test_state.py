"""No module holds state that changes: constants are immutable, and what programs may add to is a `Registry`."""

import ast
import dataclasses
import importlib
from collections import deque
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from test_layers import MODULES

from podscale.config.registry import Registry

ROOT = Path(__file__).parents[1] / "src"
MUTABLE = (dict, list, set, bytearray, deque, WeakSet, WeakKeyDictionary, WeakValueDictionary)
# JAX has one runtime in a process, so there is one process group, which joins and leaves with it; and one start of the
# process, whose clock runs from the first import on. Working copies of runs in buckets are the process's own, too: each
# is made once, found again by its folder, and removed when the process ends. And so are the loaders that are still open
# then, whose threads must end before the devices' runtime does.
GLOBALS = {
    "processes.group": {"_rank_and_size", "_store", "_monitor", "_handshake", "_exchanges"},
    "processes.heartbeat": {"_heartbeat"},
    "processes.elastic.membership": {"_membership"},
}
OBJECTS = {"runs.startup": {"clock"}, "runs.bucket": {"_buckets"}, "data.prefetch": {"_open_batches"}}
# Results of pure functions, kept because they are asked for often.
CACHED = {"data.order": {"_make_aspect_tables"}, "forecast.chips": {"_load_chips"}}
CACHED |= {"training.cpu_options": {"_is_known"}}  # a fact about the installed compiler
CACHED |= {"forecast.compute": {"_load_curve"}, "forecast.network": {"_list_message_spans", "_list_swing_stages"}}


def is_changeable(value):
    """Return whether a value is a container, or an object of ours, that can be changed."""
    if isinstance(value, MUTABLE):
        return True
    ours = type(value).__module__.startswith("podscale.") and not isinstance(value, type | tuple | Registry)
    is_frozen = dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen
    return ours and not is_frozen


def list_constants(path):
    """Return the names that a module assigns at its top level."""
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name)) if target else ()


def test_constants_are_immutable():
    names = {}
    for name, path in MODULES.items():
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(f"podscale.{name}" if name != "__init__" else "podscale")
        changeable = {constant for constant in list_constants(path) if is_changeable(getattr(module, constant, None))}
        if changeable - {"__all__"}:
            names[name] = changeable - {"__all__"}
    assert names == OBJECTS


def test_functions_assign_no_global_names_but_those_of_the_process_group():
    names = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Global):
                names.setdefault(name, set()).update(node.names)
    assert names == GLOBALS


def test_only_pure_functions_are_cached():
    names = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(d) for d in node.decorator_list):
                names.setdefault(name, set()).add(node.name)
    assert names == CACHED
