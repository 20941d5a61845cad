"""Training from initial weights: which arrays are loaded, which keep their random initialization, which are frozen."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from models.weights.test_torchvision import randomize
from rich.console import Console
from training.test_invariants import assert_close, make_small_recipe, train_on_pod

from podscale import pod as pods
from podscale import recipe as recipes
from podscale.cli.main import main
from podscale.data import crop
from podscale.data.index.dataset import open_index
from podscale.data.order import Order, compute_crop_boxes
from podscale.errors import UserError
from podscale.export.write import export_model
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.models.weights.names import name_arrays
from podscale.models.weights.torchvision import from_torchvision, to_torchvision
from podscale.optim import optimizers, schedules
from podscale.runs.folder import Run
from podscale.training import initial_weights, loop, session
from podscale.training import restore as trained
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.device_input import augment
from podscale.training.setup import load_initial_weights, prepare

STEPS = 5
HEAD = ("layers.4.bias", "layers.4.kernel")
NO_COLORS = {"augment.mixup": 0.0, "augment.erase": 0.0, "augment.brightness": 0.0, "augment.contrast": 0.0}


def make_short_recipe(precision="float32", **changes):
    return make_small_recipe(precision, **{"train.epochs": (STEPS - 0.5) * 64 / 1437} | NO_COLORS | changes)


def build_network(classes=10, **config):
    return registry.build_model(recipes.Model(**{"name": "resnet8", "width": 8} | config), classes, 8)


def write_trained_weights(path, classes=10, labels=None, **config):
    """Write a weights file of ours whose values no random initialization has."""
    model = build_network(classes, **config)
    from_torchvision(model, randomize(to_torchvision(model)))
    _, params, stats = make_functional(model)
    arrays = {name: np.asarray(array) for name, array in name_arrays(params, stats).items()}
    safetensors.numpy.save_file(arrays, path, {"labels": json.dumps(labels)} if labels else None)
    return arrays


def initialize(path, model=None, freeze=()):
    net, params, stats = make_functional(model or build_network(), freeze)
    weights = initial_weights.initialize_from(str(path), net, params, stats)
    return weights, name_arrays(weights.params, weights.stats)


# --- loading -------------------------------------------------------------------------------------------------------


def test_all_arrays_are_loaded_if_all_fit(tmp_path):
    arrays = write_trained_weights(tmp_path / "w.safetensors")
    weights, arrays_now = initialize(tmp_path / "w.safetensors")
    assert weights.reinitialized == []
    assert weights.loaded_arrays == len(arrays)
    assert all(np.array_equal(arrays_now[name], arrays[name]) for name in arrays)


def test_a_head_of_another_size_keeps_its_random_initialization_and_is_reported(tmp_path):
    arrays = write_trained_weights(tmp_path / "w.safetensors", classes=7)
    weights, arrays_now = initialize(tmp_path / "w.safetensors")
    _, params, stats = make_functional(build_network())
    initial = name_arrays(params, stats)
    for name, array in arrays_now.items():
        np.testing.assert_array_equal(array, initial[name] if name in HEAD else arrays[name])
    assert weights.reinitialized == list(HEAD)
    assert weights.describe().endswith(
        "45 arrays taken, the head randomly initialized (layers.4.bias, layers.4.kernel), because it has another size"
    )


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ("abcdefghij", ""),
        ("jihgfedcba", "the source is for other classes, or for the same in another order"),
        (None, "the source does not name its classes, as `labels` in the metadata of a .safetensors file would"),
    ],
)
def test_a_head_of_the_right_size_is_kept_only_if_the_file_names_the_same_classes(tmp_path, labels, reason):
    path = tmp_path / "w.safetensors"
    arrays = write_trained_weights(path)
    metadata = {"labels": json.dumps(list(labels))} if labels else {"labels": "{not json"}
    safetensors.numpy.save_file(arrays, path, metadata)
    net, params, stats = make_functional(build_network())
    weights = initial_weights.initialize_from(str(path), net, params, stats, tuple("abcdefghij"))
    assert weights.reinitialized == (list(HEAD) if reason else [])
    assert weights.describe().endswith(f", because {reason}" if reason else "all 47 arrays taken")


@pytest.mark.parametrize("classes", [10, 1000])
def test_torchvision_weights_are_loaded(tmp_path, classes):
    model = build_network(classes)
    tensors = randomize(to_torchvision(model))
    counters = {"bn1.num_batches_tracked": np.asarray(7)}
    safetensors.numpy.save_file(tensors | counters, tmp_path / "w.safetensors")
    weights, arrays_now = initialize(tmp_path / "w.safetensors")
    assert weights.reinitialized == ([] if classes == 10 else list(HEAD))
    from_torchvision(model, tensors)
    _, params, stats = make_functional(model)
    expected = name_arrays(params, stats)
    assert all(
        np.array_equal(arrays_now[name], expected[name]) for name in arrays_now if name not in weights.reinitialized
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"layers.2.conv1.kernel": np.zeros((3, 3, 8, 9))},
            r"layers\.2\.conv1\.kernel has shape \(3, 3, 8, 9\), wanted",
        ),
        ({"layers.2.norm1.var": None}, r"layers\.2\.norm1\.var is missing, wanted \(16,\)"),
        ({"layers.9.conv1.kernel": np.zeros(3)}, r"layers\.9\.conv1\.kernel has no place in this model"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_first_mismatch(tmp_path, change, words):
    arrays = write_trained_weights(tmp_path / "w.safetensors") | change
    safetensors.numpy.save_file({k: v for k, v in arrays.items() if v is not None}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=f"the weights in .*x.safetensors do not fit: {words}"):
        initialize(tmp_path / "x.safetensors")


def test_missing_weights_are_refused(tmp_path):
    (tmp_path / "w.npz").write_bytes(b"of another format")
    for name, words in {
        "no.safetensors": "there is no run folder or weights file",
        ".": "there is no run in",
        "w.npz": "must be",
    }.items():
        with pytest.raises(UserError, match=words):
            initialize(tmp_path / name)


# --- freezing ------------------------------------------------------------------------------------------------------


def list_frozen_names(freeze):
    net, params, stats = make_functional(build_network(), freeze)
    return {name for name in name_arrays(params, stats) if net.is_frozen(name)}


def test_layers_are_frozen_by_name_and_the_body_is_all_but_the_head():
    every = set(name_arrays(*make_functional(build_network())[1:]))
    assert list_frozen_names(("body",)) == every - set(HEAD)
    assert list_frozen_names(("layers.1", "layers.4.bias")) == {n for n in every if n.startswith("layers.1.")} | {
        HEAD[0]
    }
    assert list_frozen_names(()) == set()


class Headless(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("freeze", "model", "words"),
    [
        (("layer.1",), None, r"the model has no layer 'layer\.1': did you mean layers\.1"),
        (("layers",), None, "leaves nothing to learn"),
        (("body",), Headless(), "needs a model with a `head` or a list of `layers`"),
    ],
)
def test_layers_that_cannot_be_frozen_are_refused(freeze, model, words):
    with pytest.raises(UserError, match=words):
        make_functional(model or build_network(), freeze)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("rule", "freeze"),
    [
        ("lars", ("body",)),
        ("sgd", ("layers.1",)),  # between a stem and a head that learn
        pytest.param("adamw", ("layers.1",), marks=pytest.mark.slow),
    ],
)
def test_frozen_layers_update_neither_parameters_nor_statistics(rule, freeze):
    changes = {
        "model.freeze": freeze,
        "optimizer.name": rule,
        "optimizer.clip_norm": 1.0,
        "optimizer.weight_decay": 0.1,
    }
    recipe = make_short_recipe(**changes)
    _, state = train_on_pod(recipe, "1x1")
    net, params, stats = make_functional(registry.build_model(recipe.model, 10, 8, recipe.train.seed), freeze)
    before, after = name_arrays(params, stats), name_arrays(state.params, state.stats)
    for name, array in after.items():
        assert np.array_equal(array, before[name]) == net.is_frozen(name), name
    held = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer))
    learnt = sum(leaf.size for leaf in jax.tree.leaves(net.split(params)[0]))
    assert held <= 2 * learnt + 3  # moments of trainable parameters alone, and counters


def train_head_reference(recipe):
    """Train the head alone on the features of the body in evaluation mode: no mesh, and nothing frozen."""
    data, size = open_index(recipe.data), recipe.data.image_size
    order = Order(len(data.train), recipe.data.lanes, recipe.batch.size, recipe.train.seed)
    net, params, stats = make_functional(registry.build_model(recipe.model, 10, size, recipe.train.seed))
    optimizer = optimizers.make_optimizer(
        recipe, schedules.make_schedule(recipe, STEPS, len(data.train) / recipe.batch.size)
    )
    last, positions = max(params["layers"]), np.arange(recipe.batch.size)
    head = params["layers"].pop(last)
    state, losses = optimizer.init(head), []

    @jax.jit
    def gradient(head, images, labels, at):
        inputs, targets = augment.prepare_batch(recipe, images, labels, at, positions, 10)

        def loss(head):
            whole = {"layers": params["layers"] | {last: head}}
            return -(targets * jax.nn.log_softmax(net.evaluate(whole, stats, inputs))).sum(-1).mean()

        return jax.value_and_grad(loss)(head)

    for at in range(STEPS):
        samples, passes = order.get_samples(at, positions)
        boxes, flips = compute_crop_boxes(
            recipe.augment, recipe.train.seed, passes, samples, data.train.sizes[samples], size
        )
        images = np.empty((len(samples), size, size, 3), np.uint8)
        crop.crop_batch(data.train, samples, boxes, flips, images)
        loss, grads = gradient(head, images, data.train.labels[samples], jnp.int32(at))
        updates, state = optimizer.update(grads, state, head)
        head = optax.apply_updates(head, updates)
        losses.append(float(loss))
    return np.array(losses), head


@pytest.mark.heavy
def test_every_pod_learns_the_same_head_on_a_frozen_body_in_float64():
    with jax.enable_x64(True):
        recipe = make_short_recipe("float64", **{"model.freeze": ["body"]})
        expected, head = train_head_reference(recipe)
        for shape, micro_batches, summation in (("1x1", 1, "xla"), ("2x2", 2, "torus")):
            losses, state = train_on_pod(recipe, shape, micro_batches, summation=summation)
            np.testing.assert_allclose(losses, expected, rtol=1e-9)
            assert_close(state.params["layers"][2], head, 1e-8)


@pytest.mark.slow
def test_every_pod_learns_the_same_around_frozen_layers_in_float64():
    with jax.enable_x64(True):
        recipe = make_short_recipe("float64", **{"model.name": "resnet8", "model.freeze": ["layers.0", "layers.2"]})
        (one, first), (four, train_from) = (
            train_on_pod(recipe, "1x1"),
            train_on_pod(recipe, "2x2", 1, summation="torus4"),
        )
    np.testing.assert_allclose(one, four, rtol=1e-9)
    assert_close(train_from.params, first.params, 1e-8)
    assert_close(train_from.stats, first.stats, 1e-8)


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(short_run):
    """A run to start from."""
    return Run.load(short_run)


def train_from(folder, init, console=None, **changes):
    settings = {"model.width": 4, "train.epochs": 0.2, "train.seed": 1, "model.init": str(init), "model.freeze": "body"}
    recipe = recipes.load_recipe("digits").override(settings | changes)
    pod = pods.make_pod(jax.devices(), "1x1")
    return loop.train(recipe, pod=pod, folder=folder, console=console or Console(quiet=True))


@pytest.mark.heavy
def test_a_run_starts_from_another_run_and_resumes_without_it(first, tmp_path, capsys):
    source, folder = tmp_path / "w.safetensors", tmp_path / "run"
    export_model(first, source)
    train_from(folder, source, Console(soft_wrap=True))
    assert f"initialized from {source}: all 47 arrays taken" in capsys.readouterr().out
    note = json.loads((folder / "init.json").read_text())
    assert (note["source"], note["drawn"]) == (str(source), [])
    before, after = (trained.load_trained(run) for run in (first, Run.load(folder)))
    frozen = name_arrays(before.params, before.stats)
    moved = [
        name
        for name, array in name_arrays(after.params, after.stats).items()
        if not np.array_equal(array, frozen[name])
    ]
    assert moved == list(HEAD)

    content = source.read_bytes()
    source.write_bytes(content[:-4] + b"\0\0\0\1")
    with pytest.raises(UserError, match=f"started differently .*had digest {note['digest']}, now "):
        train_from(folder, source)
    source.unlink()
    assert train_from(folder, source)["steps"] == 3  # it is not needed any more
    for changes, words in (
        ({"model.freeze": "layers.0"}, "model.freeze ['body'], now ['layers.0']"),
        ({"model.freeze": []}, "model.freeze ['body'], now none"),
        ({"model.init": ""}, f"model.init {source}, now none"),
    ):
        with pytest.raises(UserError, match=re.escape(f"another recipe ({words})")):
            train_from(folder, source, **changes)


@pytest.mark.heavy
def test_a_run_killed_before_its_first_checkpoint_restarts_from_the_same_weights_or_is_refused(tmp_path):
    source = tmp_path / "w.safetensors"
    arrays = write_trained_weights(source, labels=list("0123456789"))
    recipe = recipes.load_recipe("digits").override({"model.width": 8, "model.init": str(source)})
    setup = prepare(recipe, pods.make_pod(jax.devices(), "1x1"))
    setup, weights = load_initial_weights(setup)
    np.testing.assert_array_equal(setup.weights.params["layers"][0]["conv"]["kernel"], arrays["layers.0.conv.kernel"])
    with Checkpoints(tmp_path / "none") as empty:  # as if there had been checkpoints, but none of them whole
        fresh = prepare(recipe, pods.make_pod(jax.devices(), "1x1"))
        again, step = session.resume(
            fresh, empty, Console(quiet=True), session.Settings(from_scratch=True), initialized=False
        )
    assert step == 0
    np.testing.assert_array_equal(again.params["layers"][4]["kernel"], arrays["layers.4.kernel"])
    folder = tmp_path / "run"
    Run.create(folder, recipe, setup.plan.to_dict(), setup.data.classes)
    (folder / "init.json").write_text(json.dumps(weights.to_dict() | {"digest": "0" * 16}))
    with pytest.raises(UserError, match="had digest 0000000000000000, now"):
        loop.train(recipe, pod=pods.make_pod(jax.devices(), "1x1"), folder=folder, console=Console(quiet=True))


@pytest.mark.heavy
def test_the_train_command_starts_from_a_runs_folder(first, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = ["train", "digits", "--model.width", "4", "--pod.virtual", "1x1", "--run", "run", "--init"]
    assert main([*command, "nowhere.pth"]) == 2
    assert main([*command, str(first.folder), "--freeze", "layers.9"]) == 2
    assert "did you mean layers" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*command, str(first.folder), "--freeze", "layers.0,layers.1", "--train.epochs", "0.1"]) == 0
    assert Run.load("run").recipe.model.freeze == ("layers.0", "layers.1")
    assert json.loads((tmp_path / "run" / "init.json").read_text())["taken"] == 47
