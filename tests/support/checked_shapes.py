"""Trace training steps and kernels with every annotated shape and type checked by beartype; a wrong one raises."""

import jax
import jax.numpy as jnp
from jaxtyping import install_import_hook

CHECKED = ["podscale.parallel", "podscale.optim", "podscale.kernels", "podscale.training.step"]
CASES = {
    "torus4": ({"optimizer.name": "lars"}, {"summation": "torus4", "payload": "bfloat16", "fused": "on"}),
    "xla": ({"optimizer.name": "muon"}, {"summation": "xla", "steps_per_call": 2}),
    "sharded": (
        {"optimizer.name": "adamw", "optimizer.clip_norm": 1.0},
        {"summation": "sharded", "micro_batches": 2, "cache": "device"},
    ),
    "joint-muon": (
        {"optimizer.name": "muon", "optimizer.renormalize": True, "model.precision": "bfloat16"},
        {"summation": "ring"},
    ),
    "sharded-muon": ({"optimizer.name": "muon"}, {"summation": "sharded"}),
    "rmsprop": ({"optimizer.name": "rmsprop", "schedule.layer_decay": 0.9}, {"summation": "xla"}),
    "lars-optax": ({"optimizer.form": "optax"}, {"summation": "sharded"}),
    "lars-scaled": ({"optimizer.form": "scaled"}, {"summation": "torus"}),
}


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    with install_import_hook(CHECKED, "beartype.beartype"):
        from podscale.kernels import fused, gelu, layer_norm, pool
        from podscale.training import compilation, setup, update_rule
        from podscale.training import step as steps
    from podscale import pod, recipe
    from podscale.config.options import Options

    torus = pod.make_pod(jax.devices(), "2x2")
    for name, (changes, options) in CASES.items():
        small = recipe.load_recipe("digits").override({"model.width": 4, **changes})
        program = setup.prepare(small, torus, Options(**options))
        batch = steps.describe_call_arguments(program.plan, program.mesh)
        scalars = update_rule.describe_scalars(program.plan, program.mesh)
        compilation.make_train_call(program).trace(program.describe_state(), *batch, scalars)
        print(name)
    check_layers(fused, pool)
    check_transformer_layers(gelu, layer_norm)


def check_layers(fused, pool):
    """Trace fused layers, their gradients and the end of the stem: by XLA, and by the kernels in the interpreter."""
    from podscale.kernels.layer_spec import INTERPRET, REFERENCE, LayerSpec

    def run_chain(kernels, images, wide):
        spec = LayerSpec(groups=2, keep_input=True, kernels=kernels)
        affine = (jnp.ones((2, 64)), jnp.zeros((2, 64)))
        blocks, windows = pool.make_raw_blocks(spec, images)
        y = pool.normalize_and_pool(spec, blocks, windows, affine)
        _, raw = fused.apply_layer(spec, y, (), None, (), jnp.ones((1, 1, 64, 64)))
        kept, raw = fused.apply_layer(spec, raw, affine, y, (), jnp.ones((1, 1, 64, 128)))
        doubled = jnp.ones((2, 128)), jnp.zeros((2, 128))
        _, raw = fused.apply_layer(spec, raw, doubled, raw, doubled, jnp.ones((3, 3, 128, wide)))
        return fused.activate(spec, raw, (jnp.ones((2, wide)), jnp.zeros((2, wide)))).sum() + kept.sum()

    images = jax.ShapeDtypeStruct((4, 8, 8, 256), jnp.bfloat16)
    for kernels in (REFERENCE, INTERPRET):
        jax.make_jaxpr(jax.grad(run_chain, argnums=1), static_argnums=(0, 2))(kernels, images, 64)
        print(kernels.name)


def check_transformer_layers(gelu, layer_norm):
    """Trace the fused layers of transformers and their gradients, as `check_layers` does."""
    from podscale.kernels.layer_spec import INTERPRET, REFERENCE

    def run(kernels, x):
        width = x.shape[-1]
        scale, shift = jnp.ones(width), jnp.zeros(width)
        total, first, second = layer_norm.add_and_normalize(kernels, x, x, shift, (scale, shift), 1e-6, copies=2)
        return gelu.add_bias_and_gelu(kernels, total + first + second, shift).astype(jnp.float32).sum()

    for kernels in (REFERENCE, INTERPRET):
        jax.make_jaxpr(jax.grad(run, argnums=1), static_argnums=0)(kernels, jnp.ones((4, 64, 128), jnp.bfloat16))
        print("transformer", kernels.name)


if __name__ == "__main__":
    main()
