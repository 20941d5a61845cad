"""The size of the code: few parameters, functions that fit on a screen, no state in modules but registries."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))
MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_ANY_LINES = 400, 50, 7, 150


def iterate_functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}", node


def count_parameters(function):
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")]) + bool(arguments.kwarg) + bool(arguments.vararg)


def test_files_are_short():
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > MAX_LINES] == []


def test_functions_fit_on_a_screen():
    assert [name for name, node in iterate_functions() if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES] == []


def test_public_functions_have_few_parameters():
    public = [(name, node) for name, node in iterate_functions() if not node.name.startswith("_")]
    assert [name for name, node in public if count_parameters(node) > MAX_PARAMETERS] == []
