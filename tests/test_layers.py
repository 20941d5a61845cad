"""The map of the package: a layer imports only from layers above it in the list, and no modules import one another."""

import ast
import graphlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "podscale"
LAYERS = (
    "errors config storage processes recipe pod parallel kernels plan models optim data forecast runs report training "
    "export planner bench study cli"
).split()
NO_LAYER = {"__init__", "__main__", "py", "recipes"}  # the public names, the entry points, and data files


def module_names():
    """Dotted names of all modules, without the package's own."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


MODULES = dict(module_names())


def find_imports(path):
    """The modules of this package that a file imports anywhere in it, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "podscale":
            base = node.module.removeprefix("podscale").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield inner if inner in MODULES else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "podscale":
                    yield alias.name.removeprefix("podscale").removeprefix(".")


def layer_of(module):
    return module.split(".")[0]


def test_every_entry_of_the_package_is_a_layer():
    entries = {path.name.split(".")[0] for path in SOURCE.iterdir() if path.name != "__pycache__"}
    assert entries - NO_LAYER == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_layers_above_it(layer):
    above = LAYERS[: LAYERS.index(layer) + 1]
    wrong = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        if layer_of(module) == layer
        for other in find_imports(path)
        if other and layer_of(other) not in above and layer_of(other) != "recipes"
    ]
    assert not wrong, wrong


def test_no_modules_import_one_another_in_a_circle():
    graph = {module: set(find_imports(path)) - {module, ""} for module, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_only_one_module_and_the_kernel_interpreter_use_private_parts_of_jax():
    users = {module for module, path in MODULES.items() if "jax._src" in path.read_text()}
    assert users == {
        "processes.private_jax",
        "kernels.matmul",
    }  # the latter: the GPU interpreter, for tests without a GPU
