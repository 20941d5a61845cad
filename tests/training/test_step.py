"""Which compiler options a plan needs."""

import types

import pytest

from podscale import plan as plans
from podscale.config.options import Options
from podscale.kernels.layer_spec import HOPPER
from podscale.plan import Counts
from podscale.pod import Pod
from podscale.recipe import load_recipe
from podscale.training import step

GPU = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
GRAPHS, PRODUCTS = "xla_gpu_enable_command_buffer", "xla_gpu_enable_triton_gemm"


CIFAR, IMAGENET = Counts(50_000, 10_000, 10), Counts(1_281_167, 50_000, 1000)


def make_options(name, counts=CIFAR, *, gpus=1, cache="none", **fields):
    pod = Pod("h200", 1, gpus, devices=(GPU,) * gpus)
    plan = plans.make_plan(load_recipe(name).override(fields), pod, counts, Options(summation="xla", cache=cache))
    return plan, step.make_compiler_options(plan)


def test_the_products_of_a_short_training_are_not_tuned():
    plan, options = make_options("imagefolder")
    assert plan.steps < step.STEPS_TO_TUNE
    assert options == {"xla_gpu_autotune_level": "2", PRODUCTS: False}


def test_the_products_of_a_long_training_are_tuned_where_the_optimizer_has_many():
    plan, options = make_options("imagefolder", **{"train.epochs": 100, "data.image_size": 64})
    assert plan.steps >= step.STEPS_TO_TUNE
    assert PRODUCTS not in options
    plan, options = make_options("resnet50-imagenet-4k", IMAGENET)
    assert plan.kernels == HOPPER
    assert options[PRODUCTS] is False


@pytest.mark.parametrize(("devices", "is_graphed"), [(1, True), (2, False)])
def test_one_gpu_runs_fused_updates_as_one_graph(devices, is_graphed):
    _, options = make_options("resnet50-imagenet-4k", IMAGENET, gpus=devices)
    assert (GRAPHS in options) == is_graphed


def test_small_images_that_live_on_the_gpu_are_tuned_fully_and_graphed():
    _, options = make_options("cifar10-fast", cache="device")
    assert options == {"xla_gpu_autotune_level": "2", GRAPHS: step.GRAPHED_OPERATIONS}
