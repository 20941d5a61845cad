"""The public names of the package: they are recorded with their signatures, documented, and work together.

python tests/test_api.py     # record the public names again, after an intended change
"""

import functools
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

import podscale

RECORD = Path(__file__).with_name("public_api.txt")


# --- signatures ------------------------------------------------------------------------------------------------------


UNION = re.compile(r"Union\[((?:[^\[\]]|\[[^\[\]]*\])*)\]")


def format_signature(function):
    """Return a signature without `self`, without the modules of types, and without the fields of defaults.

    Types are written alike in all versions of Python.
    """
    signature = inspect.signature(function)
    parameters = [parameter for name, parameter in signature.parameters.items() if name not in ("self", "cls")]
    text = str(signature.replace(parameters=parameters))
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)  # modules vary with the versions of libraries
    text = UNION.sub(lambda union: re.sub(r", (?![^\[]*\])", " | ", union[1]), text)
    text = re.sub(r"\*<class '(\w+)'>", r"Unpack[\1]", text)
    return re.sub(r"= (\w+)\([^()]*\)", r"= \1()", text)


def list_class(name, kind):
    """Return a line for a class, and one for each public method and property that podscale defines."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("podscale")]
    has_init = any("__init__" in vars(base) for base in bases)
    lines = [f"{name}{format_signature(kind.__init__) if has_init else ''}"]
    members = {member for base in bases for member in vars(base) if not member.startswith("_")}
    for member in sorted(members):
        value = inspect.getattr_static(kind, member)
        if isinstance(value, property | functools.cached_property):
            lines.append(f"{name}.{member}")
        elif isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            lines.append(f"{name}.{member}{format_signature(getattr(kind, member))}")
    return lines


def list_api():
    """Return the lines of the record: names with signatures, classes with their public methods, aliases."""
    lines = []
    for name in sorted(podscale.__all__):
        value = getattr(podscale, name)
        lines += list_class(name, value) if inspect.isclass(value) else [f"{name}{format_signature(value)}"]
    return lines + [f"{alias} = {name}" for alias, name in sorted(podscale._ALIASES.items())]


def test_public_names_and_signatures_are_those_recorded():
    recorded, present = RECORD.read_text().splitlines(), list_api()
    removed = [f"- {line}" for line in recorded if line not in present]
    added = [f"+ {line}" for line in present if line not in recorded]
    advice = "if this change is intended, record it with `python tests/test_api.py` and name it in CHANGELOG.md"
    assert present == recorded, "\n".join(
        ["the public names differ from tests/public_api.txt:", *removed, *added, advice]
    )


# --- names -----------------------------------------------------------------------------------------------------------


def test_every_public_name_exists_and_they_are_few():
    assert len(podscale.__all__) <= 25
    assert all(getattr(podscale, name) is not None for name in podscale.__all__)
    assert set(podscale.__all__) <= set(dir(podscale))
    with pytest.raises(AttributeError, match="no 'trian'"):
        _ = podscale.trian


def test_aliases_are_the_names_they_stand_for():
    assert all(getattr(podscale, alias) is getattr(podscale, name) for alias, name in podscale._ALIASES.items())


def test_no_public_name_is_the_name_of_a_submodule():
    """Importing a submodule sets its name on the package and would replace the function."""
    submodules = {module.name for module in pkgutil.iter_modules(podscale.__path__)}
    assert len(submodules) > 15
    assert not submodules & {*podscale.__all__, *podscale._ALIASES}
    homes = {name: getattr(podscale, name).__module__.rpartition(".")[2] for name in podscale.__all__}
    assert [name for name, module in homes.items() if name == module] == []


# --- documentation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", podscale.__all__)
def test_every_public_name_is_documented_with_an_example(name):
    """The examples themselves run as doctests."""
    value = getattr(podscale, name)
    text = inspect.getdoc(value)
    assert ">>> " in text
    if inspect.isclass(value):
        return
    signature = inspect.signature(value)
    assert "Args:" in text or not signature.parameters
    assert "Raises:" in text or not signature.parameters
    assert "Returns:" in text or signature.return_annotation is None


# --- use -------------------------------------------------------------------------------------------------------------


def test_importing_the_package_does_not_import_jax():
    program = "import sys, podscale; podscale.load_recipe('digits'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.heavy
def test_the_example_of_the_package_trains(tmp_path):
    recipe = podscale.load_recipe("digits").override({"train.epochs": 1, "model.width": 8})
    summary = podscale.train(
        recipe, pod=podscale.find_pod(virtual="2x2"), folder=tmp_path / "run", console=Console(quiet=True)
    )
    assert summary["steps"] == 12
    run = podscale.Run.load(tmp_path / "run")
    assert run.recipe == recipe
    result = podscale.evaluate(run, podscale.find_pod(virtual="1x2"), podscale.Options(), "newest")
    assert (result["accuracy"], result["examples"]) == (summary["accuracy"], 360)
    guesses = podscale.predict(run, [str(tmp_path / "run" / "sample.png")])[0]["top"]
    assert [len(guesses), sum(g["probability"] for g in guesses) <= 1] == [5, True]
    assert jax.device_count() == 16  # virtual pods share the session's devices


if __name__ == "__main__":
    RECORD.write_text("".join(f"{line}\n" for line in list_api()))
