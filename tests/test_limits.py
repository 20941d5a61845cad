"""The size of the code: short files, functions that fit on a screen, few parameters."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))
MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 50, 7
MAX_ANY_LINES = 150  # lines of code with `Any`, besides imports


def iterate_functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}", node


def count_parameters(function):
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")]) + bool(arguments.kwarg) + bool(arguments.vararg)


def count_code_lines(function):
    """Return the lines of a function without its docstring."""
    first, lines = function.body[0], function.end_lineno - function.lineno + 1
    has_docstring = ast.get_docstring(function) is not None
    return lines - (first.end_lineno - first.lineno + 1 if has_docstring else 0)


def test_files_are_short():
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > MAX_LINES] == []


def test_functions_fit_on_a_screen():
    assert [name for name, node in iterate_functions() if count_code_lines(node) > MAX_FUNCTION_LINES] == []


def test_public_functions_have_few_parameters():
    public = [(name, node) for name, node in iterate_functions() if node.name == "__init__" or node.name[0] != "_"]
    assert [name for name, node in public if count_parameters(node) > MAX_PARAMETERS] == []


def list_any_lines(path):
    """Return the lines that name `Any` in code, not in a text, a comment or an import."""
    names = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name) and node.id == "Any")
    return {f"{path.relative_to(ROOT)}:{name.lineno}" for name in names}


def test_few_lines_have_the_type_any():
    lines = sorted(line for path in FILES for line in list_any_lines(path))
    assert len(lines) <= MAX_ANY_LINES, lines
