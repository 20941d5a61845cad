"""Recipes: every preset loads, published settings are kept, and every mistake gets a message that names its field."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import tomllib
import typing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podscale import recipe as recipes
from podscale.errors import UserError
from podscale.recipe import SECTIONS, Recipe, list_presets, load_recipe, override_recipe, parse_recipe

FIELDS = {
    f"{s}.{f.name}": typing.get_type_hints(kind)[f.name]
    for s, kind in SECTIONS.items()
    for f in dataclasses.fields(kind)
}
FLOATS = [field for field, kind in FIELDS.items() if kind is float or typing.get_args(kind)[:1] == (float,)]


def get_refusal(function, *arguments):
    """Return the one-sentence message that a call is refused with."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    message = str(error.value)
    assert "\n" not in message
    return message


def get_override_refusal(field, value):
    return get_refusal(override_recipe, Recipe(), {field: value})


# --- presets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_survives_writing_and_reading(name):
    recipe = load_recipe(name)
    again = parse_recipe(recipe.to_toml(), name=name)
    assert again == recipe
    assert again.digest() == recipe.digest() == load_recipe(name).digest()
    assert recipes.parse_title(recipe.to_toml()) == recipe.name == name


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_opens_with_a_description_and_its_command(name):
    assert list_presets()[name] == load_recipe(name).doc
    assert len(load_recipe(name).doc.splitlines()[0]) > 20
    assert f"podscale train {name}" in load_recipe(name).doc


def test_presets_differ():
    assert len({load_recipe(name).digest() for name in list_presets()}) == len(list_presets())


# Peak learning rate, warm-up epochs, momentum, weight decay, epochs (none is published for 8192).
PUBLISHED = {
    "4k": (4096, 10, 5, 0.9, 2e-4, 60),
    "8k": (8192, 17, 5, 0.9, 2e-4, None),
    "16k": (16384, 25, 5, 0.9, 2e-4, 64),
    "32k": (32768, 31.2, 25, 0.9, 1e-4, 72),
    "64k": (65536, 24.7, 31, 0.952, 1e-4, 88),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_imagenet_presets_have_the_published_settings(size):
    recipe = load_recipe(f"resnet50-imagenet-{size}")
    o, s = recipe.optimizer, recipe.schedule
    batch, peak, warmup, momentum, decay, epochs = PUBLISHED[size]
    assert (recipe.batch.size, s.peak, s.warmup_epochs, o.momentum, o.weight_decay) == (
        batch,
        peak,
        warmup,
        momentum,
        decay,
    )
    assert recipe.train.epochs == (epochs or recipe.train.epochs)
    assert (o.name, o.form, o.trust, set(o.skip)) == ("lars", "mlperf", 0.001, {"bias", "scale"})
    assert (s.decay, s.power, s.end, s.scale_batch, recipe.augment.label_smoothing) == ("polynomial", 2, 1e-4, 0, 0.1)
    assert 64 <= recipe.batch.span <= 128
    assert (recipe.data.classes, recipe.data.train_samples, recipe.data.val_samples) == (1000, 1_281_167, 50_000)
    assert recipe.data.lanes <= 1_281_167 / 500
    assert (recipe.model.name, recipe.model.precision, recipe.data.image_size) == ("resnet50", "bfloat16", 224)


# Batch, epochs, peak learning rate, warm-up epochs, weight decay, stochastic depth; steps over all epochs.
PUBLISHED_MODERN = {
    "vit-s16-imagenet": ("vit_small", 1024, 90, 1e-3, 8, 0.1, 0.0, 112_603),
    "vit-b16-imagenet": ("vit_base", 1024, 300, 1e-3, 5, 0.05, 0.1, 375_342),
    "convnext-t-imagenet": ("convnext_tiny", 4096, 300, 4e-3, 20, 0.05, 0.1, 93_836),
    "efficientnet-b0-imagenet-4k": ("efficientnet_b0", 4096, 350, 0.016, 5, 1e-5, 0.2, 109_475),
    "efficientnet-b5-imagenet-65k": ("efficientnet_b5", 65536, 350, 0.081, 43, 1e-5, 0.2, 6_843),
    "resnet50-imagenet-fast": ("resnet50", 4096, 16, 1.7, 2, 1e-4, 0.0, 5_005),
}
RULES = {  # optimizer and decay of those that are not by AdamW with cosine decay
    "efficientnet-b0-imagenet-4k": ("rmsprop", "exponential"),
    "efficientnet-b5-imagenet-65k": ("lars", "polynomial"),
    "resnet50-imagenet-fast": ("sgd", "polynomial"),
}


@pytest.mark.parametrize("name", PUBLISHED_MODERN)
def test_presets_of_modern_models_have_the_published_settings(name):
    r = load_recipe(name)
    settings = r.model.name, r.batch.size, r.train.epochs, r.schedule.peak, r.schedule.warmup_epochs
    settings += r.optimizer.weight_decay, r.model.drop_path, r.steps(1_281_167)
    assert settings == PUBLISHED_MODERN[name]
    assert (r.optimizer.name, r.schedule.decay) == RULES.get(name, ("adamw", "cosine"))
    assert r.model.precision == "bfloat16"
    assert (r.data.classes, r.data.train_samples, r.data.val_samples) == (1000, 1_281_167, 50_000)
    assert "Published:" in r.doc
    assert f"podscale train {name} " in r.doc


# --- reading -------------------------------------------------------------------------------------------------------

ALIKE = [
    ("batch.size", "256", 256),
    ("train.seed", "1_000", 1000),
    ("train.epochs", "3", 3),
    ("train.epochs", "1e1", 10.0),
    ("augment.flip", "false", False),
    ("optimizer.name", "sgd", "sgd"),
    ("data.path", "photos", "photos"),
    ("data.path", "12", "12"),
    ("data.mean", "0.1, 0.2, 1", [0.1, 0.2, 1]),
    ("data.mean", "[0.1,0.2,1]", (0.1, 0.2, 1.0)),
    ("optimizer.skip", "bias,scale", ["bias", "scale"]),
    ("optimizer.skip", "['bias', \"scale\"]", ["bias", "scale"]),
    ("schedule.milestones", "[]", []),
    ("schedule.milestones", "30, 60.5", [30, 60.5]),
]


@pytest.mark.parametrize(("field", "text", "value"), ALIKE)
def test_text_and_values_are_read_alike(field, text, value):
    recipe = override_recipe(Recipe(), {field: text})
    assert recipe == override_recipe(Recipe(), {field: value})
    section, name = field.split(".")
    toml = f"[{section}]\n{name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}"
    assert parse_recipe(toml) == recipe
    result, kind = getattr(getattr(recipe, section), name), FIELDS[field]
    assert isinstance(
        result,
        typing.get_origin(kind)
        if typing.get_origin(kind) is tuple
        else type(getattr(getattr(Recipe(), section), name)),
    )


def test_a_recipe_file_gives_name_and_comment(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("# Mine.\n# Second line.\n\n# not this\n[train]\nepochs = 3\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.doc, recipe.train.epochs) == ("mine", "Mine.\nSecond line.", 3.0)


def choose_other(kind, now):
    """Return a valid value of a field's type other than its present one."""
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in typing.get_args(kind) if choice != now)
    if typing.get_origin(kind) is tuple:
        return ["0.5"] * 3
    return {bool: not now, str: "x", int: 2 if now != 2 else 4, float: 0.25 if now != 0.25 else 0.5}[kind]


def test_the_digest_depends_on_every_field_and_on_no_comment():
    recipe = Recipe()
    assert dataclasses.replace(recipe, name="other", doc="comment").digest() == recipe.digest()
    seen = {recipe.digest()}
    for field, kind in FIELDS.items():
        section, name = field.split(".")
        now = getattr(getattr(recipe, section), name)
        valid = {"augment.max_aspect": 2.0, "batch.size": 256, "data.train_sizes": [8, 9], "data.size_epochs": [2]}
        others = {"data.train_sizes": {"data.size_epochs": [1]}, "data.size_epochs": {"data.train_sizes": [8, 9]}}
        value = valid.get(field, choose_other(kind, now))
        seen.add(override_recipe(recipe, {field: value} | others.get(field, {})).digest())
    assert len(seen) == len(FIELDS) + 1


@pytest.mark.parametrize("path", ['with "quotes" and \\', "tab\tline\nend", "ümlaut 图片", "del\x7f", "\u2028"])
def test_any_path_survives_writing_and_reading(path):
    recipe = override_recipe(Recipe(), {"data.path": path})
    assert parse_recipe(recipe.to_toml()) == recipe


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED = [
    ("optimizer.momentm", 0.9, ["section optimizer has no field 'momentm'", "did you mean momentum"]),
    ("batch.zzz", 1, ["'zzz'", "known: size, span"]),
    ("optimiser.name", "sgd", ["no section 'optimiser'", "did you mean optimizer?"]),
    ("zzz.name", "sgd", ["no section 'zzz'", "known: augment, batch"]),
    ("nodot", "sgd", ["no section 'nodot'"]),
    ("batch.size", "many", ["batch.size must be a whole number, not 'many'"]),
    ("batch.size", 1.5, ["batch.size must be a whole number, not 1.5"]),
    ("batch.size", True, ["batch.size must be a whole number"]),
    ("batch.size", "", ["batch.size must be a whole number"]),
    ("train.epochs", "ten", ["train.epochs must be a number, not 'ten'"]),
    ("train.epochs", "true", ["train.epochs must be a number"]),
    ("train.epochs", [1], ["train.epochs must be a number"]),
    ("augment.flip", 1, ["augment.flip must be true or false, not 1"]),
    ("augment.flip", "yes", ["augment.flip must be true or false, not 'yes'"]),
    ("data.path", 3, ["data.path must be text, not 3"]),
    ("data.mean", 3, ["data.mean must be a list, not 3"]),
    ("data.mean", "a,b,c", ["data.mean must be a number, not 'a'"]),
    ("data.mean", [1, 2], ["data.mean needs three numbers"]),
    ("data.std", "1", ["data.std needs three numbers"]),
    ("data.std", [1, 0, 1], ["data.std must be above 0, not 0.0"]),
    ("optimizer.name", "adam", ["optimizer.name cannot be 'adam'", "lars, sgd, adamw"]),
    ("optimizer.name", 3, ["optimizer.name cannot be 3"]),
    ("optimizer.name", ["lars"], ["optimizer.name cannot be ['lars']"]),
    ("batch.size", 0, ["batch.size must be at least 1, not 0"]),
    ("data.image_size", 1_000_000, ["data.image_size must be at most 2**14, not 1000000"]),
    ("batch.span", -4, ["batch.span must be at least 1, not -4"]),
    ("data.lanes", 0, ["data.lanes must be at least 1"]),
    ("train.epochs", 0, ["train.epochs must be above 0"]),
    ("train.seed", -1, ["train.seed must be 0 or more"]),
    ("optimizer.momentum", 1.5, ["optimizer.momentum must be between 0 and 1, not 1.5"]),
    ("augment.magnitude", 31, ["augment.magnitude must be at most 30"]),
    ("augment.max_aspect", 0.5, ["augment.max_aspect must be at least 1"]),
    ("batch.span", 96, ["batch.span 96 does not divide batch.size 128", "nearest that do: 64, 128"]),
    ("batch.span", 256, ["batch.span 256 does not divide batch.size 128", "nearest that do: 128"]),
    ("data.lanes", 3, ["data.lanes 3 does not divide batch.size 128", "nearest that do: 2, 4"]),
]


@pytest.mark.parametrize(("field", "value", "parts"), REFUSED)
def test_a_refusal_names_the_field(field, value, parts):
    message = get_override_refusal(field, value)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_non_finite_numbers_are_refused(field, number):
    text = ", ".join([number] * 3)
    assert field in get_override_refusal(field, text if typing.get_origin(FIELDS[field]) is tuple else number)
    value = [float(number)] * 3 if typing.get_origin(FIELDS[field]) is tuple else float(number)
    assert field in get_override_refusal(field, value)


@pytest.mark.parametrize("field", ["train.epochs", "train.seed"])
@pytest.mark.parametrize("value", [10**400, "1" + "0" * 400, "9" * 5000, "[" * 5000], ids=range(4))
def test_numbers_too_large_for_the_machine_are_refused(field, value):
    assert field in get_override_refusal(field, value)


def test_a_huge_batch_is_refused_quickly():
    program = "from podscale.recipe import *; override_recipe(Recipe(), {'batch.size': 10**12})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)
    assert "UserError" in done.stderr or done.returncode == 0


def test_toml_mistakes_are_refused():
    assert re.search("epochs'? is not in any section", get_refusal(parse_recipe, "epochs = 3"))
    assert "'optimiser'" in get_refusal(parse_recipe, "[optimiser]\nname = 'sgd'")
    assert "optimiser" in get_refusal(parse_recipe, "[optimiser]")
    assert "data has no field 'sub'" in get_refusal(parse_recipe, "[data.sub]\nx = 1")
    assert "is not in any section" in get_refusal(parse_recipe, '"a\\nb" = 1')


@pytest.mark.parametrize(
    "content",
    [
        b"[train",
        b"x = ",
        b"\x00",
        b"\xff\xfe",
        b"[train]\nepochs = " + b"9" * 5000,
        b"a = " + b"[" * 5000,
        b"[train]\n[train]",
    ],
    ids=range(7),
)
def test_a_refusal_names_a_file_that_is_not_toml(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert "bad" in get_refusal(load_recipe, path)


def test_a_refusal_names_a_missing_recipe(tmp_path):
    assert "nowhere.toml" in get_refusal(load_recipe, tmp_path / "nowhere.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "folder.toml" in get_refusal(load_recipe, tmp_path / "folder.toml")
    assert get_refusal(load_recipe, "digit").endswith("did you mean digits?")
    assert "resnet50-imagenet-4k" in get_refusal(load_recipe, "zzz")


# --- random input --------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-(10**6), 10**6) | st.floats()
TEXTS = st.text() | NUMBERS.map(str) | st.lists(NUMBERS, max_size=4).map(lambda v: ", ".join(map(str, v)))
VALUES = TEXTS | NUMBERS | st.booleans() | st.none() | st.lists(NUMBERS | st.text(max_size=5), max_size=4)


def check_read_or_refused(make):
    """Assert that `make` raises only UserError, or gives a recipe that survives writing and reading."""
    try:
        recipe = make()
    except UserError:
        return
    assert parse_recipe(recipe.to_toml(), recipe.name) == recipe
    assert all(math.isfinite(v) for s in recipe.to_dict().values() for v in s.values() if isinstance(v, float))


@pytest.mark.heavy
@settings(deadline=None, max_examples=300)
@given(field=st.sampled_from(sorted(FIELDS)), value=VALUES)
def test_any_value_is_read_or_refused(field, value):
    check_read_or_refused(lambda: override_recipe(Recipe(), {field: value}))


@settings(deadline=None)
@given(st.text())
def test_any_unknown_name_is_refused(name):
    if name not in FIELDS:
        assert "\n" not in get_override_refusal(name, 1)


LINES = st.sampled_from(
    ["[train]", "[data]", "[batch]", "[[data]]", "epochs = 3", "size = 8", "seed = 1", "mean = [1, 2, 3]"]
)
TOML = st.text() | st.lists(LINES | st.text(max_size=8), max_size=6).map("\n".join)


@settings(deadline=None, max_examples=300)
@given(TOML)
@example("'a\\nb' = 1")
@example("#\n#")
def test_any_toml_is_read_or_refused(text):
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # `load_recipe` names the file; see below
    check_read_or_refused(lambda: parse_recipe(text))


@settings(deadline=None)
@given(content=st.binary(max_size=60) | TOML.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_file_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    check_read_or_refused(lambda: load_recipe(path))
