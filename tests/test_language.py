"""The code's language: standard terms, and functions named by verbs in the imperative."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))
C_FILES = sorted((ROOT / "native").rglob("*.[ch]"))

# Words of our own that the field has better ones for, and those to use instead.
PRIVATE_WORDS = {
    "picture": "image",
    "pictures": "images",
    "room": "module, package, disk space",
    "rooms": "modules, packages",
    "told": "logged, reported",
    "teller": "reporter",
    "heed": "handle",
    "heeds": "handles",
    "unfazed": "safe",
    "begun": "started",
    "twin": "reference implementation",
    "whoever": "the process that, the user who",
    "lastwords": "abort message",
    "anew": "again",
    "tell": "report, say",
    "tells": "reports, says",
    "streak": "consecutive updates",
}
# Names of data that say nothing; `one` may stand beside `two` or `many` in tests.
EMPTY_NAMES = {"found", "what", "word", "rest", "told"}
EMPTY_NAMES_IN_SOURCE = EMPTY_NAMES | {"one"}
PARTICIPLES = set(
    "begun broken built chosen done drawn found given gone held kept known laid left lost made met said seen sent "
    "shown spent taken told written".split()
)
NOT_PARTICIPLES = {"embed", "feed", "need", "seed", "speed", "exceed", "proceed", "succeed"}
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")  # names of files, options and keys that keep theirs


def split_words(name):
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def find_private_words(text):
    return [word for word in split_words(text) if word in PRIVATE_WORDS]


def iterate_texts(source, tree):
    """Names that are defined, docstrings and comments, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            yield node.body[0].lineno, QUOTED.sub("", ast.get_docstring(node, clean=False))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], QUOTED.sub("", token.string)


def is_participle(name):
    first = name.strip("_").split("_")[0]
    return first in PARTICIPLES or (first.endswith("ed") and first not in NOT_PARTICIPLES)


def is_data(function):
    """Properties and fixtures stand for data: they may be nouns."""
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return "property" in decorators or "fixture" in decorators


def test_code_uses_standard_terms():
    wrong = []
    for path in FILES:
        source = path.read_text()
        for line, text in iterate_texts(source, ast.parse(source)):
            for term in find_private_words(text):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {term}; better: {PRIVATE_WORDS[term]}")
    assert not wrong, "\n".join(wrong)


def iterate_data_names(tree):
    """Names that are assigned, loop variables and parameters, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def test_names_of_data_say_what_they_hold():
    wrong = []
    for path in FILES:
        empty = EMPTY_NAMES_IN_SOURCE if path.is_relative_to(ROOT / "src") else EMPTY_NAMES
        names = iterate_data_names(ast.parse(path.read_text()))
        wrong += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in names if name in empty]
    assert not wrong, "\n".join(wrong)


def test_no_function_is_named_by_a_participle():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and is_participle(node.name) and not is_data(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_c_code_uses_standard_terms():
    wrong = [f"{path.name}: {word}" for path in C_FILES for word in find_private_words(path.read_text())]
    assert not wrong, "\n".join(wrong)
