"""Rematerialization that the plan chooses: only where memory requires it, with the same training."""

from dataclasses import replace

import jax
import pytest
from flax import nnx

from podscale import pod as pods
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast.compute import count_work
from podscale.models import registry
from podscale.pod import Pod, parse_pod
from podscale.recipe import Model, load_recipe
from podscale.training.setup import describe_program, plan_recipe, prepare

VIT = load_recipe("vit-s16-imagenet").override({"batch.size": 1024, "batch.span": 512})


def plan_with_memory(gib, **options):
    """Return the plan of a ViT with groups of 512 images on devices of so much memory."""
    pod = replace(parse_pod("v3:1x1"), memory_bytes=int(gib * 2**30))
    return plan_recipe(VIT, pod, Options(**options))


@pytest.mark.heavy
def test_plan_computes_layers_again_only_where_memory_requires_it():
    ample, scarce = plan_with_memory(64), plan_with_memory(12)
    assert (ample.options.remat, scarce.options.remat) == ("off", "on")
    assert ample.fits_memory
    assert scarce.fits_memory
    assert scarce.memory.activations_per_image < ample.memory.activations_per_image / 2
    assert "with every layer computed again" in dict(scarce.rows())["memory"]
    assert scarce.to_dict()["remat"]
    assert not plan_with_memory(12, remat="off").fits_memory
    assert plan_with_memory(64, remat="on").options.remat == "on"


@pytest.mark.heavy
def test_forecast_counts_the_second_forward_pass():
    once, twice = (count_work(VIT.override({"model.remat": remat}), 1000).flops for remat in (False, True))
    assert once * 1.25 < twice < once * (1 + 1 / 3) * (1 + 1e-6)


@pytest.mark.heavy
def test_described_program_is_that_of_the_plan():
    plan = plan_with_memory(12)
    program = describe_program(plan)
    model = program.net.build_abstract_module()
    assert model.remat
    assert not plan.recipe.model.remat


@pytest.mark.heavy
def test_model_that_cannot_is_refused():
    class Linear(nnx.Module):
        def __init__(self):
            self.head = nnx.Linear(192, 10, rngs=nnx.Rngs(0))

        def __call__(self, images):
            return self.head(images.reshape(len(images), -1))

    with pytest.raises(UserError, match=r"plan\.remat on: a Linear cannot compute its layers again"):
        prepare(load_recipe("digits"), pods.make_pod(jax.devices(), "1x1"), Options(remat="on"), Linear())
    assert plan_recipe(load_recipe("digits"), Pod("cpu", 1, 1), Options()).options.remat == "off"


@pytest.mark.heavy
def test_a_module_of_the_caller_stays_as_it_is():
    recipe = load_recipe("digits").override({"model.width": Model.width, "model.name": "vit_tiny", "model.patch": 4})
    model = registry.build_model(recipe.model, 10, recipe.data.image_size)
    pod = pods.make_pod(jax.devices()[:1], "1x1")
    for remat in ("on", "off"):
        program = prepare(recipe, pod, Options(remat=remat), model)
        assert program.plan.options.remat == remat
        assert program.net.build_abstract_module().remat == (remat == "on")
        assert not model.remat
