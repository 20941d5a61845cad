"""TOML of any size and shape is parsed or refused in bounded time."""

import os

import pytest

from podscale import recipe as recipes
from podscale.config.toml import MAX_DOTS, parse_toml
from podscale.errors import UserError
from podscale.study.grid import load_study


def get_refusal(load, path):
    with pytest.raises(UserError) as error:
        load(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("load", [recipes.load_recipe, load_study])
def test_a_huge_file_is_refused_before_it_is_read(load, tmp_path):
    path = tmp_path / "huge.toml"
    path.write_text('[data]\npath = "')
    os.truncate(path, 2**38)  # a file of holes
    assert "it has more than 524,288 bytes" in get_refusal(load, path)


@pytest.mark.parametrize("load", [recipes.load_recipe, load_study])
@pytest.mark.parametrize("text", ["{key} = 1", "[{key}]", "a = {{ {key} = 1 }}"])
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(load, text, tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text("# a comment\n" + text.format(key=".".join(["a"] * 50_000)))
    assert "49,999 dots in line 2; a line may have 200" in get_refusal(load, path)


@pytest.mark.parametrize("load", [recipes.load_recipe, load_study])
def test_a_pipe_is_refused_instead_of_waited_for(load, tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    assert "it is a named pipe, not a regular file" in get_refusal(load, tmp_path / "pipe.toml")


def test_a_key_of_as_many_parts_as_allowed_is_parsed():
    assert list(parse_toml(".".join(["a"] * (MAX_DOTS + 1)) + " = 1", "it")) == ["a"]


def test_a_long_value_on_the_command_line_is_refused_quickly():
    with pytest.raises(UserError, match=r"train\.epochs must be a number"):
        recipes.load_recipe("digits").override({"train.epochs": "{" + ".".join(["a"] * 50_000) + "=1}"})
