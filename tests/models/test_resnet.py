"""ResNets: parameters, arithmetic, and the image sizes that fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from podscale import recipe
from podscale.errors import UserError
from podscale.models import registry, resnet

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
}


def make_config(**changes) -> recipe.Model:
    return recipe.Model(**{"name": "resnet8", "stem": "small", "width": 8} | changes)


def build_abstract(config: recipe.Model, classes: int = 1000, image_size: int = 224) -> nnx.Module:
    """Return the model with shapes only, without random initialization."""
    return nnx.eval_shape(lambda: registry.build_model(config, classes, image_size))


def sample_images(size: int, dtype=jnp.float32, n: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(n, size, size, 3)), dtype)


def trace_convolutions(model: nnx.Module, images: jax.ShapeDtypeStruct) -> list[tuple[int, int, jnp.dtype]]:
    """Return (kernel side, stride, dtype) of every convolution, in the order of the forward pass."""
    graph, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, images)
    return [
        (e.invars[1].aval.shape[0], e.params["window_strides"][0], e.outvars[0].aval.dtype)
        for e in jaxpr.eqns
        if e.primitive.name == "conv_general_dilated"
    ]


# --- image sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stem", "size", "sentence"),
    [
        ("space_to_depth", 225, "needs an even number, at least 32; nearest that do: 224, 226"),
        ("space_to_depth", 31, "needs an even number, at least 32; nearest that do: 32"),
        ("conv7", 31, "needs at least 32; nearest that do: 32"),
        ("small", 7, "needs at least 8; nearest that do: 8"),
    ],
)
def test_image_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(stem, size, sentence):
    with pytest.raises(UserError) as error:
        registry.build_model(make_config(stem=stem), 10, size)
    assert str(error.value) == f"data.image_size {size} does not fit the stem {stem}, which {sentence}"


@pytest.mark.parametrize(("stem", "size"), [("space_to_depth", 32), ("conv7", 32), ("conv7", 33), ("small", 8)])
@pytest.mark.parametrize("name", ["resnet8", "resnet18", "resnet50"])
def test_smallest_image_sizes_work(name, stem, size):
    model = build_abstract(make_config(name=name, stem=stem), 10, size)
    graph, state = nnx.split(model)
    images = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)
    assert jax.eval_shape(lambda state, x: nnx.merge(graph, state)(x), state, images).shape == (2, 10)


# --- parameters --------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("stem", ["conv7", "space_to_depth"])
def test_parameter_counts_are_the_published_ones(name, stem):
    params = nnx.state(build_abstract(recipe.Model(name=name, stem=stem)), nnx.Param)
    assert sum(p.size for p in jax.tree.leaves(params)) == PARAMETERS[name]


def test_parameters_are_sorted_in_the_order_of_the_forward_pass():
    model = build_abstract(recipe.Model(name="resnet50", stem="conv7"))
    layers = [path[1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert layers == sorted(layers)
    assert set(layers) == set(range(18))


def test_parameters_have_the_usual_names():
    flat = nnx.to_flat_state(nnx.state(build_abstract(recipe.Model(name="resnet50", stem="conv7")), nnx.Param))
    assert {(path[-1], len(leaf.shape)) for path, leaf in flat} == {
        ("kernel", 4),
        ("kernel", 2),
        ("scale", 1),
        ("bias", 1),
    }


@pytest.mark.heavy
def test_kernels_are_initialized_he_normal_by_fan_out_and_the_head_small():
    model = registry.build_model(make_config(name="resnet18", width=32), 1000, 32)
    kernel = np.asarray(model.layers[-2].conv2.kernel[...])  # 3x3, 256 channels out
    assert kernel.std() == pytest.approx(np.sqrt(2 / (9 * 256)), rel=0.01)
    assert abs(kernel).max() > 3 * kernel.std()  # not truncated
    head = model.layers[-1]
    assert np.asarray(head.kernel[...]).std() == pytest.approx(0.01, rel=0.01)
    assert not np.asarray(head.bias[...]).any()


@pytest.mark.heavy
def test_seed_determines_the_parameters_and_float64_starts_from_the_same_values():
    def kernels(**kwargs):
        config = make_config(precision=kwargs.pop("precision", "float32"))
        params = nnx.state(registry.build_model(config, 10, 8, **kwargs), nnx.Param)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]

    first = kernels(seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(first, kernels(seed=1), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, kernels(seed=2), strict=True))
    with jax.enable_x64(True):
        wide = kernels(seed=1, precision="float64")
    assert all(b.dtype == np.float64 and np.array_equal(a, b) for a, b in zip(first, wide, strict=True))


# --- arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("size", [32, 38])
def test_space_to_depth_stem_matches_the_7x7_stem(dtype, tolerance, size):
    with jax.enable_x64(dtype == "float64"):
        plain, blocked = (
            conv(3, 16, 7, 2, precision=dtype, rngs=nnx.Rngs(3)) for conv in (resnet.Conv, resnet.SpaceToDepthConv)
        )
        x = sample_images(size, dtype)
        outputs = [jax.jit(conv)(x) for conv in (plain, blocked)]
        weights = jnp.asarray(np.random.default_rng(1).normal(size=outputs[0].shape), dtype)
        differentiate = nnx.jit(nnx.grad(lambda conv: (conv(x) * weights).mean()))
        gradients = [differentiate(conv).kernel[...] for conv in (plain, blocked)]
        assert outputs[1].dtype == dtype
        assert gradients[1].shape == (7, 7, 3, 16)
        for a, b in (outputs, gradients):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(abs(a).max()))


def test_stem_with_four_outputs_at_a_time_matches_the_7x7_stem():
    with jax.enable_x64(True):
        conv, x = resnet.Conv(3, 16, 7, 2, precision="float64", rngs=nnx.Rngs(3)), sample_images(32, "float64")
        kernel = conv.kernel[...]
        weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 8, 64)))

        def pull_back(convolve):
            def compute(kernel):
                values, pull = jax.vjp(lambda kernel: convolve(x, kernel), kernel)
                return values, pull(weights)[0]

            return jax.jit(compute)(kernel)

        plain, gradient = pull_back(lambda x, kernel: resnet.space_to_depth(resnet._convolve(x, kernel, 2, (3, 3))))
        blocked, gradient_blocked = pull_back(resnet.convolve_four_outputs)
        np.testing.assert_allclose(blocked, plain, rtol=0, atol=1e-12)
        np.testing.assert_allclose(gradient_blocked, gradient, rtol=0, atol=1e-10)


def test_models_with_the_two_large_stems_agree():
    x = sample_images(32)
    logits = [jax.jit(registry.build_model(make_config(stem=stem), 10, 32))(x) for stem in ("conv7", "space_to_depth")]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5 * float(abs(logits[0]).max()))


def test_bottlenecks_stride_in_the_3x3_convolution():
    model = build_abstract(recipe.Model(name="resnet50", stem="conv7"))
    strided = [c for c in trace_convolutions(model, jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)) if c[1] == 2]
    sides = [side for side, _, _ in strided]
    assert sides == [7] + 3 * [3, 1]  # the stem; then in each later stage the 3x3 and the projection of the shortcut


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "depths"), [(resnet.BasicBlock, (1, 1)), (resnet.BottleneckBlock, (2, 1))], ids=["basic", "bottleneck"]
)
def test_newly_initialized_block_equals_its_shortcut(kind, depths):
    model = resnet.ResNet(kind, depths, make_config(), 10, nnx.Rngs(0))
    for mode in (model.train, model.eval):
        mode()
        for block, shortcut in compute_outputs_and_shortcuts(nnx.clone(model), sample_images(16)):
            np.testing.assert_array_equal(block, shortcut)


@nnx.jit
def compute_outputs_and_shortcuts(model: nnx.Module, x: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Return the output of every block and of its shortcut alone."""
    x = model.layers[0](x)
    pairs = []
    for block in model.layers[1:-1]:
        shortcut = x if block.shortcut is None else nnx.clone(block.shortcut)(x)  # a batch norm is used once per pass
        x = block(x)
        pairs.append((x, nnx.relu(shortcut)))
    return pairs


@pytest.mark.heavy
def test_zero_scales_of_a_new_block_have_a_gradient():
    model = registry.build_model(make_config(), 10, 8)
    model.train()
    x = sample_images(8, n=8)
    gradient = nnx.jit(nnx.grad(lambda model: (model(x) ** 2).mean()))(model)
    assert float(abs(gradient.layers[1].norm2.scale[...]).max()) > 0


@pytest.mark.heavy
@pytest.mark.parametrize("stem", ["small", "space_to_depth"])
def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters_and_logits(stem):
    config = make_config(stem=stem, precision="bfloat16")
    model = registry.build_model(config, 10, 32)
    model.train()
    assert nnx.jit(lambda model, x: model(x))(model, sample_images(32, jnp.bfloat16)).dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat)))} == {
        jnp.dtype(jnp.float32)
    }
    convolutions = trace_convolutions(
        build_abstract(config, 10, 32), jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.bfloat16)
    )
    assert len(convolutions) == 1 + 6 + 2
    assert {dtype for _, _, dtype in convolutions} == {jnp.dtype(jnp.bfloat16)}


def test_float64_model_computes_in_float64():
    with jax.enable_x64(True):
        model = registry.build_model(make_config(precision="float64"), 10, 8)
        assert jax.jit(model)(sample_images(8, jnp.float64)).dtype == jnp.float64
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.float64)}
