"""CifarNet and its recipe: what each part computes, and that it learns, resumes and is evaluated consistently."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from rich.console import Console

from podscale import pod
from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.config.stop_condition import StopCondition
from podscale.errors import UserError
from podscale.export import inference, write
from podscale.models import cifarnet, registry
from podscale.runs.folder import Run
from podscale.training import compilation, loop, setup, step, views
from podscale.training.checkpoint.checkpoints import Checkpoints
from podscale.training.device_input import augment
from podscale.training.restore import load_trained

QUIET = Console(quiet=True)
SIZE, CLASSES, TRAIN, VAL = 12, 4, 600, 150


@pytest.fixture(scope="module")
def stripes(tmp_path_factory):
    """An .npz file of wide and narrow stripes, vertical and horizontal, of random color and phase, with noise."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:SIZE, :SIZE]
    phases = np.stack([x / 3, y / 3, x / 6, y / 6])

    def sample(n):
        labels = np.arange(n) % CLASSES
        waves = np.sin(2 * np.pi * phases[labels] + random.uniform(0, 7, (n, 1, 1)))[..., None]
        colors = random.uniform(20, 60, (n, 1, 1, 3)) * random.choice([-1, 1], (n, 1, 1, 1))
        noisy = 128 + waves * colors + random.normal(0, 15, (n, SIZE, SIZE, 3))
        return noisy.clip(0, 255).astype(np.uint8), labels.astype(np.int64)

    names = ("train_images", "train_labels", "test_images", "test_labels")
    arrays = dict(zip(names, (*sample(TRAIN), *sample(VAL)), strict=True))
    path = tmp_path_factory.mktemp("stripes") / "stripes.npz"
    np.savez(path, **arrays)
    return path, arrays


@pytest.fixture(scope="module")
def recipe(stripes):
    """A small cifar10-fast; SGD's learning rates grow with the batch, that of the head also with its inputs."""
    changes = {
        "data.path": str(stripes[0]),
        "data.image_size": SIZE,
        "data.classes": CLASSES,
        "data.eval_views": 1,
        "data.eval_confidence": 1.0,
        "model.width": 8,
        "model.precision": "float32",
        "batch.size": 100,
        "batch.span": 50,
        "train.epochs": 4,
        "train.eval_epochs": 2,
        "schedule.stem_epochs": 1,
        "schedule.bias_peak": 5,
        "schedule.head_peak": 40,
    }
    return recipes.override_recipe(recipes.load_recipe("cifar10-fast"), changes)


def make_torus(shape="1x2"):
    return pod.make_pod(jax.devices(), shape)


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifarnet") / "run"
    options = Options(cache="device")
    return folder, loop.train(recipe, pod=make_torus(), folder=folder, options=options, console=QUIET)


def load_states(folder, recipe):
    """Return the initial state of a run and that of its newest checkpoint."""
    prepared = setup.prepare(recipe, make_torus())
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        return jax.device_get(
            (setup.fit_model(prepared).init_state(), checkpoints.restore(checkpoints.newest(), prepared.init_state()))
        )


# --- the network -------------------------------------------------------------------------------------------------


def test_filters_whiten_patches_of_given_moments(stripes):
    images = (stripes[1]["train_images"] / np.float32(255) - np.float32(0.5)) / np.float32(0.25)
    patches = cut_patches(images)
    filters = cifarnet.compute_whitening_filters(patches.T @ patches / len(patches))
    covariance = (patches @ filters.T).T @ (patches @ filters.T) / len(patches)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 1e-9
    variances = 1 / (filters**2).sum(axis=1) - cifarnet.VARIANCE_EPSILON
    np.testing.assert_allclose(np.diag(covariance), variances / (variances + cifarnet.VARIANCE_EPSILON), rtol=1e-6)
    assert (np.diff(variances) <= 0).all()


def cut_patches(images):
    """Return all 2x2 patches [n, 12] in float64, each as [height, width, channel]."""
    height, width = (side - 1 for side in images.shape[1:3])
    parts = [images[:, y : y + height, x : x + width] for y in range(2) for x in range(2)]
    return np.concatenate(parts, axis=3).reshape(-1, 12).astype(np.float64)


def bound_moment_error(images):
    """Return a bound on the spectral norm of the error of moments whose sums over an image are in float32.

    A float32 sum of the n patches' products of an image, in any order, has an error of at most γ(n)·Σ|xᵢxⱼ| with
    γ(n) = nu/(1 - nu) and u = 2⁻²⁴, the products' own rounding included (Higham 2002, section 3.1); HIGHEST may split
    each factor, which adds less than 2u. The sum over images is in float64. So each moment is wrong by at most
    γ(n+2)·E|xᵢxⱼ| <= γ(n+2)·√(E xᵢ² E xⱼ²), and the Frobenius norm of such a matrix is γ(n+2) times the trace of the
    moments.
    """
    n = (images.shape[1] - 1) * (images.shape[2] - 1) + 2
    return n * 2.0**-24 / (1 - n * 2.0**-24) * (cut_patches(images) ** 2).mean(axis=0).sum()


def assert_whitens(kernel, images):
    """Check that the first 12 filters make patches uncorrelated, with the variance λ/(λ + ε) for moments of variance λ.

    Filters F come from moments M + E, which they make diagonal: F(M + E)Fᵀ = D, with D = λ/(λ + ε). So the patches'
    own covariance FMFᵀ differs from D by FEFᵀ, of norm at most ‖E‖·‖F‖², and ‖F‖² is 1/(smallest λ + ε), which is the
    largest |f|². A float32 kernel is F(1 + δ) with |δ| <= u, which adds 3u·trace(M)·‖F‖² at most.
    """
    filters = np.asarray(kernel, np.float64)[..., :12].reshape(12, 12).T
    patches = cut_patches(images)
    covariance = (patches @ filters.T).T @ (patches @ filters.T) / len(patches)
    squared_norms = (filters**2).sum(axis=1)  # 1/(λ + ε)
    error = bound_moment_error(images) + 3 * 2.0**-24 * (patches**2).mean(axis=0).sum()
    expected = np.diag(1 - cifarnet.VARIANCE_EPSILON * squared_norms)
    assert np.abs(covariance - expected).max() <= error * squared_norms.max()
    assert error * squared_norms.max() < 5e-3  # the bound is tight enough to mean something
    assert (np.diff(squared_norms) >= 0).all()


def test_moments_of_patches_are_those_of_all_patches(monkeypatch):
    images = np.random.default_rng(0).normal(size=(50, 9, 7, 3)).astype(np.float32)
    patches = cut_patches(images)
    expected = patches.T @ patches / len(patches)
    assert np.linalg.norm(cifarnet.compute_patch_moments(images) - expected, 2) <= bound_moment_error(images)
    monkeypatch.setattr(cifarnet, "PATCH_VALUES", 12 * 8 * 6 * 20)  # 20 images at once
    assert np.linalg.norm(cifarnet.compute_patch_moments(images) - expected, 2) <= bound_moment_error(images)


def test_first_layer_holds_both_signs_of_every_filter():
    images = np.random.default_rng(0).normal(size=(50, 9, 9, 3)).astype(np.float32)
    kernel = cifarnet.compute_whitening_kernel(images)
    np.testing.assert_array_equal(kernel[..., :12], -kernel[..., 12:])
    assert_whitens(kernel, images)


def test_convolutions_start_as_the_identity_as_far_as_they_have_channels():
    group = cifarnet.Group(6, 10, precision="float32", rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 5, 6)), jnp.float32)
    y = group.conv1(x)
    np.testing.assert_allclose(y[..., :6], x, atol=1e-5)
    random = np.asarray(cifarnet.Group(24, 100, precision="float32", rngs=nnx.Rngs(0)).conv1.kernel[...])[..., 24:]
    assert random.std() == pytest.approx(1 / np.sqrt(27 * 24), rel=0.03)


@pytest.mark.heavy
def test_max_pool_and_its_gradient_match_flax():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 6, 3)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 3, 3)), jnp.float32)

    def differentiate(pool):
        return jax.jit(jax.value_and_grad(lambda x: (pool(x) * weights).sum()))(x)

    expected = differentiate(lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)))
    for a, b in zip(differentiate(cifarnet.max_pool_2x2), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    tied = jax.jit(jax.grad(lambda x: cifarnet.max_pool_2x2(x).sum()))(np.ones((1, 2, 2, 1), np.float32))
    np.testing.assert_array_equal(tied.ravel(), [1, 0, 0, 0])  # all of it goes to the first


@pytest.mark.parametrize("side", [6, 7])
def test_convolution_skips_what_max_pooling_discards(side):
    conv = cifarnet.Group(3, 5, precision="float32", rngs=nnx.Rngs(0)).conv1
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, side, side, 3)), jnp.float32)
    np.testing.assert_allclose(cifarnet._convolve_even_part(conv, x), conv(x)[:, :6, :6], atol=1e-6)


def test_gelu_and_its_gradient_match_flax():
    x = np.linspace(-4, 4, 101, dtype=np.float32)
    (ours, our_slopes), (theirs, their_slopes) = compute_slopes(cifarnet.gelu, x), compute_slopes(nnx.gelu, x)
    np.testing.assert_allclose(ours, theirs, atol=1e-7)
    np.testing.assert_allclose(our_slopes, their_slopes, atol=1e-6)


def compute_slopes(function, x):
    """Return the values and the derivatives of a function of one number at all x."""
    return jax.jit(jax.vmap(jax.value_and_grad(function)))(x)


def test_cubic_gelu_is_close_to_gelu_and_its_gradient_is_that_of_its_formula():
    x = np.linspace(-4, 4, 101, dtype=np.float32)

    def compute_by_formula(x):
        t = jnp.clip(x / cifarnet.GATE_EDGE, -1, 1)
        return x * (1 / 2 + 3 / 4 * t - 1 / 4 * t**3)

    (ours, our_slopes), (expected, slopes) = (compute_slopes(f, x) for f in (cifarnet.cubic_gelu, compute_by_formula))
    np.testing.assert_allclose(ours, jax.jit(lambda x: nnx.gelu(x, approximate=False))(x), atol=0.031)
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    np.testing.assert_allclose(our_slopes, slopes, atol=1e-5)


def test_network_has_two_million_parameters_and_no_scales():
    model = nnx.eval_shape(lambda: registry.build_model(recipes.load_recipe("cifar10-fast").model, 10, 32))
    names = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == 1_971_640
    assert {path[-1] for path in names} == {"kernel", "bias"}


def test_images_that_are_too_small_are_refused():
    with pytest.raises(UserError, match="image_size 8 does not fit cifarnet, which needs at least 9"):
        registry.build_model(recipes.Model(name="cifarnet"), 10, 8)


def test_blocks_need_an_even_size():
    with pytest.raises(UserError, match=r"image_size 11 does not fit model\.stem space_to_depth"):
        registry.build_model(recipes.Model(name="cifarnet", stem="space_to_depth"), 10, 11)


def test_a_resnet_has_no_activation_of_cifarnet():
    with pytest.raises(UserError, match=r"resnet8 has no model.activation \(which is for cifarnet\)"):
        registry.build_model(recipes.Model(name="resnet8", activation="cubic_gelu"), 10, 8)


# --- the recipe --------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_network_learns(trained):
    assert trained[1]["steps"] == 24
    assert trained[1]["accuracy"] > 0.9


@pytest.mark.heavy
def test_whitening_fits_the_training_images_and_stays_while_its_bias_learns_at_first(trained, recipe, stripes):
    first, last = (state.params["layers"] for state in load_states(trained[0], recipe))
    images = stripes[1]["train_images"] / np.float32(255)
    mean, std = (np.asarray(value, np.float32) for value in (recipe.data.mean, recipe.data.std))
    assert_whitens(first[0]["kernel"], (images - mean) / std)
    np.testing.assert_array_equal(first[0]["kernel"], last[0]["kernel"])
    assert np.abs(first[0]["bias"]).max() == 0 < np.abs(last[0]["bias"]).max()
    middle = load_state(trained[0], recipe, 12).params["layers"]
    np.testing.assert_array_equal(middle[0]["bias"], last[0]["bias"])  # an epoch is 6 updates
    assert np.abs(middle[1]["norm1"]["bias"] - last[1]["norm1"]["bias"]).max() > 0


def load_state(folder, recipe, number):
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        return jax.device_get(checkpoints.restore(number, setup.prepare(recipe, make_torus()).init_state()))


@pytest.mark.heavy
def test_muon_keeps_the_norms_of_kernels(trained, recipe):
    _, last = load_states(trained[0], recipe)
    for group in (1, 2, 3):
        for name in ("conv1", "conv2"):
            kernel = last.params["layers"][group][name]["kernel"]
            assert np.linalg.norm(kernel) == pytest.approx(np.sqrt(kernel.shape[-1]), rel=0.1)


@pytest.mark.heavy
@pytest.mark.slow
def test_calls_may_end_anywhere_around_the_update_after_which_the_first_layer_has_no_gradient(recipe):
    """It learns for the first six updates and not after them, whether calls have one update or four."""

    def train_by_calls_of(steps_per_call):
        options = Options(cache="device", steps_per_call=steps_per_call)
        prepared = setup.prepare(recipe, make_torus(), options)
        call, state, biases = compilation.compile_train_step(prepared), setup.fit_model(prepared).init_state(), []
        calls = [range(a, a + steps_per_call) for a in range(0, 8, steps_per_call)]
        with setup.load_train_batches(prepared, calls) as batches:
            for batch in batches:
                state, _ = call(state, batch.images, batch.labels, np.int32(batch.count))
                biases.append(np.asarray(state.params["layers"][0]["bias"]))
        return biases, jax.device_get(state.params)

    biases, expected = train_by_calls_of(1)
    moves = [np.abs(after - before).max() for before, after in pairwise(biases)]
    assert min(moves[:4]) > 0 == max(moves[5:])
    other_biases, params = train_by_calls_of(4)
    np.testing.assert_allclose(other_biases[-1], biases[-1], rtol=1e-3, atol=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_resume_is_bit_identical(trained, recipe, tmp_path):
    """Resumes from the middle, on the same pod, with its images now on the host."""
    options = Options(cache="none")
    stopped = loop.train(
        recipe, pod=make_torus(), folder=tmp_path, options=options, until=StopCondition("accuracy", 0.0), console=QUIET
    )
    assert stopped["steps"] == 12
    loop.train(recipe, pod=make_torus(), folder=tmp_path, options=options, console=QUIET)
    first, second = (load_states(folder, recipe)[1] for folder in (trained[0], tmp_path))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


# --- views -------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_evaluation_prediction_and_export_average_over_the_same_views(trained, stripes, tmp_path):
    run = Run.load(trained[0])
    recipe = run.recipe.override({"data.eval_views": 6, "data.eval_confidence": 1.0})
    run_with_views = Run(run.folder, recipe)
    images, labels = stripes[1]["test_images"], stripes[1]["test_labels"]
    model = load_trained(run_with_views, "newest")
    evaluate = jax.jit(lambda *weights, view: model.net.evaluate(*weights, augment.normalize(recipe, view)))
    six_views = jax.jit(lambda images: augment.make_views(images, 6))(images)
    logits = sum(weight * np.asarray(evaluate(model.params, model.stats, view=view)) for weight, view in six_views)
    expected = np.asarray(jax.nn.softmax(logits))
    probabilities = step.make_predictor(model.net, recipe)(model.params, model.stats, images)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    accuracy = (expected.argmax(1) == labels).mean()
    assert inference.evaluate(run_with_views, make_torus(), which="newest")["accuracy"] == pytest.approx(accuracy)
    Image.fromarray(images[3]).save(tmp_path / "three.png")
    top = inference.predict(run_with_views, [tmp_path / "three.png"], "newest")[0]["top"][0]
    assert top["class"] == str(expected[3].argmax())
    assert top["probability"] == pytest.approx(float(expected[3].max()), abs=1e-5)
    write.export_model(run_with_views, tmp_path / "net.stablehlo", which="newest")
    np.testing.assert_allclose(load_exported(tmp_path / "net.stablehlo")(images), expected, atol=1e-4)
    with pytest.raises(UserError, match="ONNX is written for ResNets, not for a CifarNet"):
        write.export_model(run_with_views, tmp_path / "net.onnx")


@pytest.mark.heavy
def test_further_views_are_computed_only_where_the_first_is_not_confident(trained, stripes):
    """The loop of evaluation gives what prediction gives, whatever the share of images that need further views."""
    run = Run.load(trained[0])
    model = load_trained(run, "newest")
    images = jnp.asarray(stripes[1]["test_images"])

    def compute(confidence, function):
        recipe = run.recipe.override({"data.eval_views": 6, "data.eval_confidence": confidence})
        return np.asarray(function(model.net, recipe, model.params, model.stats, images))

    first, average = compute(0.0, views.average_views), compute(1.0, views.average_views)
    assert np.abs(first - average).max() > 1e-3
    confidences = np.asarray(jax.nn.softmax(first)).max(1)
    for share in (0.01, 0.3, 0.9):
        threshold = float(np.sort(confidences)[int(share * len(confidences))])
        expected = compute(threshold, views.average_views)
        np.testing.assert_allclose(expected, np.where((confidences < threshold)[:, None], average, first), atol=1e-6)
        np.testing.assert_allclose(compute(threshold, views.evaluate_views), expected, atol=1e-5)
    np.testing.assert_allclose(compute(0.0, views.evaluate_views), first, atol=1e-6)
    np.testing.assert_allclose(compute(1.0, views.evaluate_views), average, atol=1e-6)


def load_exported(path):
    import zipfile

    from jax import export as jax_export

    with zipfile.ZipFile(path) as archive:
        return jax_export.deserialize(bytearray(archive.read("program.jax"))).call


# --- the benchmark -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_benchmark_times_several_seeds_with_one_program(recipe):
    fields = {"data": ("image_size", "classes"), "model": ("width", "precision"), "batch": ("size", "span")}
    fields |= {"schedule": ("bias_peak", "head_peak", "stem_epochs"), "train": ("epochs",)}
    settings = [f"{name}.{f}={getattr(getattr(recipe, name), f)}" for name, all_ in fields.items() for f in all_]
    script = Path(__file__).parents[2] / "benchmarks" / "cifar_speed.py"
    command = [sys.executable, script, recipe.data.path, "--seeds", "3", "--steps-per-call", "4", "--set", *settings]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert len(re.findall(r"^ +\d  +\d+\.\d\d%  +\d+\.\d+ s$", done.stdout, re.M)) == 3
    assert float(re.search(r"accuracy +mean ([\d.]+) %", done.stdout)[1]) > 90
