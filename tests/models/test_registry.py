"""Networks by name."""

import pytest
from flax import nnx

from podscale import recipe
from podscale.errors import UserError
from podscale.models import registry


def make_config(**changes) -> recipe.Model:
    return recipe.Model(**{"name": "resnet8", "stem": "small", "width": 8} | changes)


def test_every_depth_is_registered():
    depths = ["resnet8", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
    assert set(depths) <= set(registry.list_models())


def test_unknown_name_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match="there is no model 'resnet51': did you mean resnet50"):
        registry.build_model(make_config(name="resnet51"), 10, 32)


def test_registered_model_is_built_by_name_and_names_are_unique():
    @registry.register_model("mine")
    def mine(config, classes, image_size, rngs):
        return nnx.Linear(image_size, classes, rngs=rngs)

    try:
        assert "mine" in registry.list_models()
        assert registry.build_model(make_config(name="mine"), 10, 7).kernel.shape == (7, 10)
        with pytest.raises(UserError, match="already a model 'mine'"):
            registry.register_model("mine")(mine)
    finally:
        registry.unregister_model("mine")
    assert "mine" not in registry.list_models()


def test_fields_of_another_network_are_refused_with_the_options_that_reset_them():
    config = make_config(name="vit_small", stem="space_to_depth")
    families = "which is for resnet and cifarnet"
    expected = f"vit_small has no model.stem ({families}) and no model.width ({families})"
    with pytest.raises(UserError) as refusal:
        registry.build_model(config, 10, 16)
    assert str(refusal.value) == f"{expected}; reset them with --model.stem small --model.width 64"
    with pytest.raises(UserError, match=r"resnet8 has no model.positions .*; reset it with --model.positions learned$"):
        registry.build_model(make_config(positions="sincos"), 10, 16)


def test_zero_classes_and_float64_without_64_bit_mode_are_refused():
    with pytest.raises(UserError, match="at least one class"):
        registry.build_model(make_config(), 0, 8)
    with pytest.raises(UserError, match="JAX_ENABLE_X64"):
        registry.build_model(make_config(precision="float64"), 10, 8)
