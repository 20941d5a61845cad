"""The rank program: one process of a group that runs case after case, as the driver sends them.

Cases arrive on stdin, one JSON object a line, and a line of JSON goes back for each. All processes of a group get the
same cases in the same order, so that joining, and starting the devices, is paid for once.
"""

import json
import os
import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from podscale import recipe as recipes
from podscale.bench.sums import measure_sums
from podscale.config.options import Options
from podscale.kernels.layer_spec import HOPPER, REFERENCE
from podscale.models import fused_resnet
from podscale.models.functional import make_functional
from podscale.models.resnet import BottleneckBlock, ResNet
from podscale.parallel import sharded
from podscale.parallel.batch_norm import BatchNorm, Groups, Moments
from podscale.parallel.strategies import STRATEGIES, list_replicated
from podscale.parallel.summation import PAYLOADS, Transfer
from podscale.plan import HOPPER_CAPABILITY
from podscale.pod import ALL_AXES, BATCH_AXES, TILE, find_pod
from podscale.processes import abort_message, group
from podscale.training import loop

HEARTBEAT_S = 60


def run(coordinator, processes, process):
    """Join the group, if there are several processes, and run the cases that arrive on stdin."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no result
    if processes > 1:
        group.join(coordinator, processes, process, HEARTBEAT_S)
        abort_message.install(*group.get_rank_and_size())
    print(json.dumps({"devices": [str(device) for device in jax.devices()]}), file=results)
    for line in sys.stdin:
        start = time.perf_counter()
        try:
            result = run_case(json.loads(line))
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result | {"seconds": time.perf_counter() - start}), file=results)
    if processes > 1:
        group.leave()


def run_case(case):
    """Return the result of a case; floats are computed as its precision says."""
    exact = jax.enable_x64(True) if case["precision"] == "float64" else nullcontext()
    precise = jax.default_matmul_precision("highest") if case["precision"] == "float32" else nullcontext()
    with exact, precise:
        return KINDS[case["kind"]](case, find_pod(case["shape"]))


# --- training --------------------------------------------------------------------------------------------------------


def train(case, pod):
    """Train, or resume, a run; the driver reads its losses and arrays from its folder."""
    changes = case["recipe"] | {"model.precision": case["precision"]}
    recipe = recipes.override_recipe(recipes.load_recipe("digits"), {k: str(v) for k, v in changes.items()})
    stop = [lambda event: event.kind == "eval"] if case["stops"] else []
    console = Console(file=sys.stderr, force_terminal=False)
    options = Options(**case["options"])
    summary = loop.train(recipe, pod=pod, options=options, folder=case["folder"], console=console, callbacks=stop)
    return {"steps": summary["steps"], "accuracy": summary["accuracy"]}


# --- sums ------------------------------------------------------------------------------------------------------------

SIZES = [(1,), (7,), (1000,), (3, 5)]


def sum_trees(case, pod):
    """Sum integers and floats by every strategy as every payload; compare with sums of NumPy's."""
    errors = {}
    for payload in PAYLOADS:
        for strategy in [*list_replicated(), "sharded"]:
            errors[f"{strategy} {payload}"] = _find_wrong_sums(pod, strategy, payload)
    return {"wrong": {name: wrong for name, wrong in errors.items() if wrong}, "sums": len(errors)}


def _find_wrong_sums(pod, strategy, payload):
    draw = np.random.default_rng(0)
    tree = {f"int {size}": draw.integers(-100, 100, (pod.size, *size)).astype(np.float32) for size in SIZES}
    tree |= {f"float {size}": draw.standard_normal((pod.size, *size)).astype(np.float32) for size in SIZES}
    mesh, transfer = pod.mesh((1, pod.cols)), Transfer(payload)
    whole = {name: x[0] for name, x in tree.items()}

    def body(tree):
        own = jax.tree.map(lambda x: x[0], tree)
        total = STRATEGIES[strategy].sum_gradients(own, transfer)
        if strategy == "sharded":
            total = sharded.gather_parameters(total, whole, transfer)
        return jax.tree.map(lambda x: x[None], total)

    spec = P(ALL_AXES)
    put = partial(jax.make_array_from_callback, sharding=NamedSharding(mesh, spec))
    arrays = {name: put(x.shape, data_callback=lambda index, x=x: x[index]) for name, x in tree.items()}
    total = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(arrays)
    replicas = jax.jit(lambda t: t, out_shardings=NamedSharding(mesh, P()))(total)
    wrong = []
    for name, x in tree.items():
        result = np.asarray(replicas[name])
        rounding = len(x) * (2.0**-8 if payload == "bfloat16" else 2.0**-24)
        bound = 0 if name.startswith("int") and payload == "float32" else rounding
        if not (result.view(np.uint32) == result[:1].view(np.uint32)).all():
            wrong.append(f"{name}: devices differ")
        if not (np.abs(result[0] - x.sum(0)) <= bound * np.abs(x).sum(0)).all():
            wrong.append(f"{name}: off by {np.abs(result[0] - x.sum(0)).max()}")
    return wrong


def bench(case, pod):
    """Time sums as `podscale bench sum` does; its sums must be right."""
    result = measure_sums(recipes.load_recipe("digits"), pod, sizes=(4096, 1_000_000), tree=False, repeats=2)
    points = [{k: p[k] for k in ("strategy", "bytes", "ms", "relative_error")} for p in result["points"]]
    return {"points": points, "largest_error": max(p["relative_error"] for p in points)}


# --- fused layers ----------------------------------------------------------------------------------------------------


def differentiate_fused_layers(case, pod):
    """Write the gradients of a bottleneck block with groups of half of the images, as fused layers.

    On one device both groups lie side by side; on several a group spans the devices of a row.
    """
    is_hopper = getattr(jax.devices()[0], "compute_capability", "") == HOPPER_CAPABILITY
    kernels = HOPPER if is_hopper and case["precision"] == "bfloat16" else REFERENCE
    images, size = (96, 32) if is_hopper else (16, 8)
    config = recipes.Model(stem="small", width=64, precision=case["precision"])
    net, params, stats = make_functional(ResNet(BottleneckBlock, (1,), config, 10, nnx.Rngs(0)))
    draw = np.random.default_rng(1)
    pixels = draw.standard_normal((images, size, size, 3)).astype(np.float32)
    weights = draw.standard_normal((images, 10)).astype(np.float32)
    params = jax.tree.map(lambda v: v + 0.1 * draw.standard_normal(v.shape).astype(np.float32), params)
    mesh = pod.mesh((1, pod.cols))
    groups = Groups(images // pod.size, TILE) if pod.size > 1 else Groups(images // 2)

    def compute_loss(params, pixels, weights):
        model = net.build_module(params, stats)
        model.train()
        model.set_attributes(BatchNorm, groups=groups)
        logits = fused_resnet.forward(model, pixels, kernels)
        nnx.pop(model, Moments)
        return (logits.astype(jnp.float32) * weights).sum()

    def body(pixels, weights):
        return jax.lax.psum(jax.value_and_grad(compute_loss)(params, pixels, weights), ALL_AXES)

    put = partial(jax.make_array_from_callback, sharding=NamedSharding(mesh, P(BATCH_AXES)))
    inputs = [put(x.shape, data_callback=lambda index, x=x: x[index]) for x in (pixels, weights)]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(BATCH_AXES), out_specs=P(), check_vma=False)
    loss, gradients = jax.jit(mapped)(*inputs)
    if group.is_main_process():
        paths = jax.tree.leaves_with_path(gradients)
        arrays = {jax.tree_util.keystr(path): np.asarray(x, np.float32) for path, x in paths}
        Path(case["folder"]).mkdir(parents=True, exist_ok=True)
        np.savez(Path(case["folder"]) / "arrays.npz", loss=np.asarray(loss), **arrays)
    return {"kernels": kernels.name}


KINDS = {"train": train, "sums": sum_trees, "bench": bench, "fused": differentiate_fused_layers}

if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
