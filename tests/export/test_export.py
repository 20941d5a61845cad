"""A trained run as a file for other programs: each format is read by its own runtime and gives the same results."""

import json
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors
import safetensors.numpy
from models.weights.test_torchvision import randomize
from rich.console import Console

import podscale
from podscale import pod as pods
from podscale import recipe
from podscale.cli.main import main
from podscale.data import loader
from podscale.data.index.dataset import open_index
from podscale.errors import UserError
from podscale.export import inference
from podscale.export.metadata import make_metadata
from podscale.export.onnx import to_onnx
from podscale.models import registry
from podscale.models.weights.names import name_arrays
from podscale.models.weights.torchvision import from_torchvision, load_torchvision, make_state_dict, to_torchvision
from podscale.runs.folder import Run
from podscale.training import loop
from podscale.training import restore as trained_models
from podscale.training.device_input import augment

CHANGES = {"model.width": 8, "train.epochs": 1, "train.eval_epochs": 0.5, "optimizer.average": 0.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    tiny = recipe.load_recipe("digits").override(CHANGES)
    loop.train(tiny, pod=pods.make_pod(jax.devices(), "1x2"), folder=folder, console=Console(quiet=True))
    return Run.load(folder)


@pytest.fixture(scope="module")
def pixels(run):
    return loader.load_eval_images(open_index(run.recipe.data).val, range(7), run.recipe)


@pytest.fixture(scope="module")
def probabilities(run, pixels):
    """Probabilities of the network itself with its averaged weights."""
    logits = jax.jit(inference.load_model(run))(augment.normalize(run.recipe, jnp.asarray(pixels)))
    return np.asarray(jax.nn.softmax(logits))


# --- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_metadata_holds_all_that_another_program_needs(run):
    metadata = make_metadata(run, 12)
    assert metadata["format"] == "podscale"
    metadata_values = {name: json.loads(value) for name, value in metadata.items() if name != "format"}
    assert metadata_values["labels"] == list("0123456789")
    assert (metadata_values["preprocessing"]["image_size"], metadata_values["preprocessing"]["eval_fraction"]) == (
        8,
        1.0,
    )
    assert metadata_values["preprocessing"]["mean"] == list(run.recipe.data.mean)
    assert metadata_values["recipe"]["model"]["width"] == 8
    evals = {line["step"]: line["accuracy"] for line in run.metrics() if line["event"] == "eval"}
    assert (metadata_values["checkpoint"], metadata_values["accuracy"]) == (12, evals[12])
    assert json.loads(make_metadata(run, 11)["accuracy"]) is None


# --- safetensors ---------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_safetensors_hold_every_array_under_its_name(run, tmp_path):
    result = podscale.export_model(run, tmp_path / "model.safetensors", which="newest")
    assert (result["format"], result["checkpoint"]) == ("safetensors", 12)
    assert result["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    arrays = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    trained = trained_models.load_trained(run, "newest")
    expected = name_arrays(trained.params, trained.stats)
    assert arrays.keys() == expected.keys()
    assert {"layers.0.conv.kernel", "layers.0.norm.mean", "layers.4.bias"} <= arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name])
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == make_metadata(run, 12)


# --- StableHLO -----------------------------------------------------------------------------------------------------

READER = """
import json, sys, zipfile
import jax, numpy
from jax import export

with zipfile.ZipFile("model.stablehlo") as file:
    program = export.deserialize(bytearray(file.read("program.jax")))
    notes = json.loads(file.read("metadata.json"))
assert set(program.platforms) == {"cpu", "cuda", "tpu"} and len(notes["labels"]) == 10
numpy.save("out.npy", program.call(numpy.load("in.npy")))
assert not [name for name in sys.modules if name.partition(".")[0] in ("podscale", "flax")]
"""


@pytest.mark.heavy
def test_stablehlo_runs_with_nothing_but_jax(run, pixels, probabilities, tmp_path):
    podscale.export_model(run, tmp_path / "model.stablehlo")
    np.save(tmp_path / "in.npy", pixels)
    subprocess.run([sys.executable, "-c", READER], cwd=tmp_path, check=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), probabilities, rtol=1e-5, atol=1e-6)


@pytest.mark.heavy
def test_stablehlo_takes_any_batch(run, pixels, probabilities, tmp_path):
    from jax import export

    podscale.export_model(run, tmp_path / "model.stablehlo")
    with zipfile.ZipFile(tmp_path / "model.stablehlo") as file:
        program = export.deserialize(bytearray(file.read("program.jax")))
    for count in (1, 3):
        np.testing.assert_allclose(program.call(pixels[:count]), probabilities[:count], rtol=1e-5, atol=1e-6)


# --- ONNX ----------------------------------------------------------------------------------------------------------


def run_onnxruntime(model, images):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(["logits", "probabilities"], {"images": images})


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "stem", "size"),
    [("resnet8", "small", 9), ("resnet18", "conv7", 37), ("resnet50", "space_to_depth", 34)],
)
def test_onnx_gives_the_same_logits(name, stem, size):
    config = recipe.Model(name=name, stem=stem, width=8)
    whole = recipe.Recipe(model=config, data=recipe.Data(image_size=size))
    model = registry.build_model(config, 10, size)
    model.eval()
    from_torchvision(model, randomize(to_torchvision(model)))
    images = np.random.default_rng(1).integers(0, 256, (3, size, size, 3), dtype=np.uint8)
    expected = np.asarray(jax.jit(model)(augment.normalize(whole, jnp.asarray(images))))
    logits, probabilities_onnx = run_onnxruntime(to_onnx(model, whole.data, {}).SerializeToString(), images)
    assert abs(expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(probabilities_onnx, jax.nn.softmax(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.heavy
def test_an_onnx_file_runs_and_describes_itself(run, pixels, probabilities, tmp_path):
    podscale.export_model(run.folder, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    assert model.opset_import[0].version >= 17
    assert {prop.key: prop.value for prop in model.metadata_props} == make_metadata(
        run, json.loads(read_checkpoint_property(model))
    )
    np.testing.assert_allclose(run_onnxruntime(tmp_path / "model.onnx", pixels)[1], probabilities, rtol=1e-4, atol=1e-5)


def read_checkpoint_property(model):
    return next(prop.value for prop in model.metadata_props if prop.key == "checkpoint")


# --- torchvision ---------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_torchvision_layout_makes_a_round_trip(run, tmp_path):
    podscale.export_model(run, tmp_path / "model.safetensors", "torchvision")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert tensors["conv1.weight"].shape == (8, 3, 3, 3)
    assert tensors["layer2.0.downsample.1.num_batches_tracked"].shape == ()
    original, model = inference.load_model(run), registry.build_model(run.recipe.model, 10, 8)
    load_torchvision(model, tmp_path / "model.safetensors")
    before, after = to_torchvision(original), to_torchvision(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_state_dict_has_torchvisions_names():
    model = registry.build_model(recipe.Model(name="resnet50", stem="space_to_depth", width=8), 10, 32)
    tensors = make_state_dict(model)
    assert len(tensors) == 320  # as many as torchvision's resnet50 has
    assert sum(name.endswith("num_batches_tracked") for name in tensors) == 53


def test_torchvision_loads_the_state_dict_and_gives_the_same_logits():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    model = registry.build_model(recipe.Model(name="resnet18", stem="space_to_depth"), 10, 64)
    model.eval()
    from_torchvision(model, randomize(to_torchvision(model)))
    theirs = torchvision.models.resnet18(num_classes=10).eval()
    tensors = {name: torch.from_numpy(tensor.copy()) for name, tensor in make_state_dict(model).items()}
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in theirs.state_dict().items()}
    theirs.load_state_dict(tensors, strict=True)
    images = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype(np.float32)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    np.testing.assert_allclose(logits, jax.jit(model)(jnp.asarray(images)), rtol=1e-4, atol=1e-4)


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("to", "format_name", "message"),
    [
        ("model.bin", "", r"the ending of .*model\.bin names no format; use \.safetensors, \.stablehlo, \.onnx"),
        ("model.bin", "onxx", "no format 'onxx' to export to: did you mean onnx?"),
        ("none/model.onnx", "", "cannot write .*: no folder .*none"),
        ("", "onnx", "it is a folder"),
    ],
)
def test_files_that_cannot_be_written_are_refused_in_one_sentence(run, tmp_path, to, format_name, message):
    with pytest.raises(UserError, match=message):
        podscale.export_model(run, tmp_path / to, format_name)
    assert not list(tmp_path.iterdir())


def test_onnx_of_another_kind_of_model_is_refused():
    from flax import nnx

    with pytest.raises(UserError, match="ONNX is written for ResNets, not for a Linear; export to StableHLO"):
        to_onnx(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), recipe.Data(), {})


@pytest.mark.heavy
@pytest.mark.parametrize(("to", "package"), [("m.onnx", "onnx"), ("m.stablehlo", "flatbuffers")])
def test_a_format_whose_package_is_missing_says_what_to_install(run, tmp_path, monkeypatch, to, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"needs the package {package}: pip install {package}"):
        podscale.export_model(run, tmp_path / to)


@pytest.mark.heavy
def test_the_export_command_writes_the_file_and_reports_it(run, tmp_path, capfd):
    assert main(["export", str(run.folder), "--to", str(tmp_path / "m.onnx"), "--checkpoint", "6"]) == 0
    assert f"onnx, 0.1 MiB; {run.folder}, checkpoint 6, " in capfd.readouterr().out
    assert main(["export", str(run.folder), "--to", str(tmp_path / "m.onnx"), "--checkpoint", "7"]) == 2
    assert "has no checkpoint '7'" in capfd.readouterr().err
