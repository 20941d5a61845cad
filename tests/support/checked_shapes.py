"""Lower training steps with every annotated shape and type checked by beartype; a wrong one raises."""

import jax
from jaxtyping import install_import_hook

CHECKED = ["podscale.parallel", "podscale.optim", "podscale.kernels", "podscale.training.step"]
CASES = [
    ({"optimizer.name": "lars"}, {"summation": "torus4", "payload": "bfloat16", "fused": "on"}),
    ({"optimizer.name": "muon"}, {"summation": "xla", "steps_per_call": 2}),
    ({"optimizer.name": "adamw"}, {"summation": "sharded", "micro_batches": 2, "cache": "device"}),
]


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    with install_import_hook(CHECKED, "beartype.beartype"):
        from podscale.training import compilation, setup
        from podscale.training import step as steps
    from podscale import pod, recipe
    from podscale.config.options import Options

    torus = pod.make_pod(jax.devices(), "2x2")
    for changes, options in CASES:
        small = recipe.load_recipe("digits").override({"model.width": 4, **changes})
        program = setup.prepare(small, torus, Options(**options))
        batch = steps.describe_call_arguments(program.plan, program.mesh)
        compilation.make_train_call(program).lower(program.describe_state(), *batch)
        print(f"checked {options['summation']}")


if __name__ == "__main__":
    main()
