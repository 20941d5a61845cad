"""The estimate of a device's memory, and the message when it is full."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from support.short_run import train

from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.optim import optimizers
from podscale.pod import parse_pod
from podscale.training import memory, setup
from podscale.training.out_of_memory import explain_out_of_memory


class Net(nnx.Module):
    """One convolution, called directly or inside a transformed function."""

    def __init__(self, wrap):
        self.conv, self.wrap = nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0)), wrap

    def __call__(self, images):
        apply = {"plain": lambda m, x: m(x), "jit": nnx.jit(lambda m, x: m(x)), "remat": nnx.remat(lambda m, x: m(x))}
        return apply[self.wrap](self.conv, images).mean((1, 2))


@pytest.mark.heavy
@pytest.mark.parametrize("wrap", ["jit", "remat"])
def test_operations_inside_called_functions_count(wrap):
    recipe = recipes.load_recipe("digits")
    estimates = [
        memory.estimate_memory(recipe, *make_functional(Net(kind)), optax.sgd(0.1)).activations_per_image
        for kind in ("plain", wrap)
    ]
    assert estimates[0] == estimates[1] > 2 * 8 * 8 * 8 * 4


def test_parameters_and_optimizer_are_exact():
    recipe = recipes.load_recipe("digits").override({"optimizer.average": 0.9})
    net, params, stats = make_functional(registry.build_model(recipe.model, 10, 8))
    estimates = memory.estimate_memory(recipe, net, params, stats, optimizers.make_optimizer(recipe, 0.1))
    count = sum(p.size for p in list_leaves(params))
    running = sum(s.size for s in list_leaves(stats))
    assert estimates.parameters == 4 * (3 * count + 2 * running)  # weights, their average and the gradient
    assert estimates.optimizer == pytest.approx(4 * count, abs=16)  # momentum, and a counter or two


def list_leaves(tree):
    return [leaf for child in tree.values() for leaf in list_leaves(child)] if isinstance(tree, dict) else [tree]


@pytest.mark.heavy
def test_resnet_50_fits_the_papers_pod_and_needs_micro_batches_on_a_smaller_one():
    recipe = recipes.load_recipe("resnet50-imagenet-32k")
    assert setup.plan_recipe(recipe, parse_pod("v3:32x32"), Options()).micro_batches == 1
    assert setup.plan_recipe(recipe, parse_pod("v3:2x2"), Options()).micro_batches > 1


def test_a_plan_refuses_the_lanes_that_training_refuses():
    recipe = recipes.load_recipe("digits").override({"data.lanes": 128})
    with pytest.raises(UserError, match="fewer than 500 of 1437 images per lane"):
        setup.plan_recipe(recipe, parse_pod("cpu:1x1"), Options())


def test_bfloat16_halves_the_activations():
    wide, narrow = (
        setup.plan_recipe(
            recipes.load_recipe("cifar10").override(
                {"model.precision": p, "data.train_samples": 50000, "data.val_samples": 10000}
            ),
            parse_pod("cpu:1x1"),
            Options(),
        ).memory.activations_per_image
        for p in ("float32", "bfloat16")
    )
    assert jnp.allclose(wide / narrow, 2.0, rtol=0.05)


@pytest.mark.heavy
def test_a_full_device_memory_is_reported_in_one_sentence(tmp_path):
    def allocate_too_much(event):
        if event.kind == "train":
            jax.block_until_ready(jnp.zeros(10**13))

    with pytest.raises(
        UserError, match=r"a device is out of memory \(40000000000000 bytes more .* --plan.micro_batches"
    ):
        train(tmp_path / "run", callbacks=[allocate_too_much])


TPU = "Ran out of memory in memory space"
FULL = {
    "Out of memory while trying to allocate 18.98GiB with allocator GPU_0_bfc on device 0.": "(18.98GiB more",
    "Error allocating device buffer: Attempting to allocate 1.00G. That was not possible.": "(1.00G more",
    f"XLA:TPU compile permanent error. {TPU} hbm. Used 17.00G of 15.48G hbm.": "a device is out of memory: ",
}


@pytest.mark.parametrize("message", FULL)
def test_out_of_memory_errors_of_gpus_and_tpus_are_recognized(message):
    with pytest.raises(UserError) as error, explain_out_of_memory():
        raise RuntimeError(f"RESOURCE_EXHAUSTED: {message}")
    assert FULL[message] in str(error.value)


@pytest.mark.parametrize(
    "message",
    [
        "enough",
        "INTERNAL: Out of memory",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 245768, available: 232448",
        f"RESOURCE_EXHAUSTED: {TPU} vmem. It should not be possible to run out of vmem",
        "RESOURCE_EXHAUSTED: Error writing checkpoint: No space left on device",
    ],
)
def test_other_exhausted_resources_keep_their_own_message(message):
    with pytest.raises(RuntimeError) as error, explain_out_of_memory():
        raise RuntimeError(message)
    assert str(error.value) == message
