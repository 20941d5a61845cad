"""The documentation is true: its links work, its code runs, its commands parse, its tables equal the code."""

import dataclasses
import doctest
import json
import re
import shlex
import typing
from pathlib import Path

import pytest

from podscale import recipe as recipes
from podscale.cli import arguments as cli_arguments
from podscale.cli import parser
from podscale.config.options import Options, PodOptions
from podscale.recipe import SECTIONS
from podscale.study import grid

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "podscale"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FRAGMENT = "# fragment"  # first line of a Python block that only shows a part of something


def list_blocks(page, language):
    """Return (line, source) of every fenced block of that language."""
    matches = re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [(page.read_text()[: match.start(1)].count("\n") + 1, match[1]) for match in matches]


def format_location(page, line):
    return f"{page.relative_to(ROOT)}:{line}"


def read_prose(page):
    """Return the page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def read_section(page, title):
    """Return the text under a heading, up to the next heading of any level."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", read_prose(page), re.MULTILINE | re.DOTALL)
    assert match, f"{page.name} has no heading {title!r}"
    return match[1]


def read_rows(text):
    """Return the cells of a Markdown table, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# --- links -------------------------------------------------------------------------------------------------------


def list_anchors(page):
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", read_prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_works(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", read_prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        if anchor:
            assert anchor in list_anchors(place), target


def test_every_test_that_the_docs_name_exists():
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    for page in PAGES:
        assert set(re.findall(r"`(test_\w+)`", page.read_text())) <= names, page.name


# --- code --------------------------------------------------------------------------------------------------------

CODE = [(page, line, source) for page in PAGES for line, source in list_blocks(page, "python")]


@pytest.fixture
def isolated(tmp_path, monkeypatch, registries):
    """An empty working directory, and registries that are restored afterwards."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize(
    ("name", "source"),
    [
        pytest.param(format_location(p, n), s, id=format_location(p, n))
        for p, n, s in CODE
        if not s.startswith(FRAGMENT)
    ],
)
def test_every_python_block_runs(name, source):
    if not source.startswith(">>>"):
        exec(compile(source, name, "exec"), {"__name__": "example"})
        return
    example = doctest.DocTestParser().get_doctest(source, {"__name__": "example"}, name, name, 0)
    report = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert not failed, "".join(report)


def test_few_python_blocks_are_fragments():
    assert sum(source.startswith(FRAGMENT) for _, _, source in CODE) <= 2


@pytest.mark.parametrize(
    "source", [pytest.param(s, id=format_location(p, n)) for p in PAGES for n, s in list_blocks(p, "toml")]
)
def test_every_recipe_and_study_in_the_docs_loads(source, tmp_path):
    if source.partition("\n")[2].startswith("recipe = "):
        (tmp_path / "study.toml").write_text(source)
        assert grid.load_study(tmp_path / "study.toml").cases
    else:
        assert recipes.parse_recipe(source).steps(1000) >= 1


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.toml")), ids=lambda path: path.name)
def test_every_study_in_the_tree_loads(path):
    assert grid.load_study(path).cases
    assert f"podscale study studies/{path.name}" in path.read_text()


# --- commands ----------------------------------------------------------------------------------------------------


def list_commands(page):
    """Return every `podscale COMMAND ...`, from shell blocks and from the text."""
    lines = [line for _, source in list_blocks(page, "sh") for line in source.splitlines()]
    return [line for line in lines if line.startswith("podscale ")] + re.findall(
        r"`(podscale [a-z][^`]*)`", read_prose(page)
    )


COMMANDS = [pytest.param(line, id=f"{page.name}: {line}") for page in PAGES for line in list_commands(page)]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_parses(line):
    arguments, unknown = parser.make_parser().parse_known_args(shlex.split(line, comments=True)[1:])
    assert not unknown
    if getattr(arguments, "recipe", None) in recipes.list_presets():
        arguments.imports = []  # code of the reader's own
        cli_arguments.read_recipe(arguments)
        cli_arguments.read_options(arguments)


# --- tables ------------------------------------------------------------------------------------------------------

RECIPES = ROOT / "docs" / "recipes.md"
KINDS = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}


def to_toml(value):
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def describe_values(kind):
    """Return what a field may hold, as the tables describe it."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return {int: "list of whole numbers", float: "list of numbers", str: "list of texts"}[typing.get_args(kind)[0]]
    return KINDS[kind]


@pytest.mark.parametrize(("name", "kind"), [*SECTIONS.items(), ("pod", PodOptions), ("plan", Options)])
def test_the_tables_of_fields_equal_the_dataclasses(name, kind):
    kinds = typing.get_type_hints(kind)
    expected = [
        [f"`{f.name}`", f"`{to_toml(f.default)}`", describe_values(kinds[f.name]), f.metadata["doc"]]
        for f in dataclasses.fields(kind)
    ]
    text = read_section(RECIPES, f"`{name}`")
    assert read_rows(text) == expected
    assert kind.__doc__.splitlines()[0] in text


def test_the_table_of_presets_equals_the_presets():
    expected = {}
    for name in recipes.list_presets():
        r = recipes.load_recipe(name)
        peak = f"{r.schedule.peak:g}" + (f" per {r.schedule.scale_batch}" if r.schedule.scale_batch else "")
        numbers = (r.schedule.warmup_epochs, r.optimizer.momentum, r.optimizer.weight_decay, r.train.epochs)
        cells = [r.model.name, r.batch.size, r.batch.span, r.data.lanes, r.optimizer.name, peak]
        expected[f"`{name}`"] = [*map(str, cells), *(f"{number:g}" for number in numbers)]
    assert {name: cells for name, *cells in read_rows(read_section(RECIPES, "The presets"))} == expected
