"""A small network of each family trains the same on every pod, in float64, with all random features on."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from support import processes, small_models
from support.small_models import FEATURES, MUON, STEPS, make_recipe, make_settings
from training.test_invariants import assert_close, train_on_pod, train_reference

from podscale import pod
from podscale.config.options import Options
from podscale.data import loader
from podscale.models.random_layers import RandomLayer
from podscale.parallel.placement import replicate
from podscale.pod import make_batch_sharding
from podscale.recipe import load_recipe
from podscale.runs.folder import Run
from podscale.training.compilation import compile_train_step
from podscale.training.setup import prepare

CASES = {**{family: {} for family in FEATURES}, **{f"{family}-muon": dict(MUON) for family in FEATURES}}
PODS = [  # shape, cores, micro-batches, steps per call, summation: 1 to 16 devices
    ("1x1", 1, 4, 1, "xla"),
    ("1x2", 1, 1, 3, "xla"),
    ("1x1", 4, 1, 1, "ring2"),
    ("2x2", 1, 2, 1, "sharded"),
    ("2x4", 1, 2, 1, "torus"),
    ("2x2*2", 1, 1, 1, "sharded"),
    ("4x4", 1, 1, 1, "torus4"),
    ("2x4", 2, 1, 3, "sharded"),
]
FAST = ("vit", "2x2*2", "sharded")  # with all random features; the ResNets of test_invariants.py have batch norm


def make_case(case):
    return make_recipe(case.partition("-")[0], **CASES[case])


@functools.cache
def compute_reference(case):
    with jax.enable_x64(True):
        return train_reference(make_case(case), STEPS)


def list_cases():
    """Yield every case on every pod; all but one are slow."""
    for case in CASES:
        for pod_case in PODS:
            is_fast = (case, pod_case[0], pod_case[4]) == FAST
            yield pytest.param(case, *pod_case, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.heavy
@pytest.mark.parametrize(("case", "shape", "cores", "micro_batches", "steps_per_call", "summation"), list(list_cases()))
def test_every_pod_trains_the_same_in_float64(case, shape, cores, micro_batches, steps_per_call, summation):
    losses, params, stats, average = compute_reference(case)
    with jax.enable_x64(True):
        ours, state = train_on_pod(make_case(case), shape, micro_batches, steps_per_call, summation, cores=cores)
    np.testing.assert_allclose(ours, losses, rtol=1e-9)
    assert_close(state.params, params, 1e-8)
    assert_close(state.stats, stats, 1e-9)
    assert_close(state.average["params"], average, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["device", "row", "slice", "pod"])
def test_muon_trains_the_same_with_every_group_of_devices(group):
    losses, params, _, _ = compute_reference("vit-muon")
    with jax.enable_x64(True):
        ours, state = train_on_pod(make_case("vit-muon"), "2x2*2", orthogonalize=group, cores=2)
    np.testing.assert_allclose(ours, losses, rtol=1e-9)
    assert_close(state.params, params, 1e-9)


# --- random layers of a user's own model -----------------------------------------------------------------------------


class Noise(RandomLayer):
    """Adds noise to every image, by the image's own key."""

    def __call__(self, x):
        keys = self.get_keys()
        if keys is None:
            return x
        return x + 0.1 * jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys).astype(x.dtype)


class UsersModel(nnx.Module):
    def __init__(self):
        rngs, types = nnx.Rngs(0), {"param_dtype": "float64", "dtype": "float64"}
        self.noise, self.dropout = Noise(), nnx.Dropout(0.3, rngs=rngs)
        self.body, self.head = nnx.Linear(192, 8, rngs=rngs, **types), nnx.Linear(8, 10, rngs=rngs, **types)

    def __call__(self, images):
        x = self.noise(images).reshape(len(images), -1)
        return self.head(self.dropout(jax.nn.relu(self.body(x))))


@pytest.mark.heavy
def test_random_layers_of_a_users_model_draw_the_same_on_every_pod():
    recipe = load_recipe("digits").override(
        {"model.precision": "float64", "batch.size": 64, "batch.span": 16, "train.epochs": 2.5 * 64 / 1437}
    )
    with jax.enable_x64(True):
        alone, _ = train_on_pod(recipe, "1x1", model=UsersModel())
        shared, _ = train_on_pod(recipe, "2x2", micro_batches=2, model=UsersModel())
    assert len(set(alone)) == STEPS
    np.testing.assert_allclose(shared, alone, rtol=1e-9)


# --- another pod, other processes ------------------------------------------------------------------------------------


def train_in_turns(recipe, turns):
    """Train one step on each pod in turn, through what a checkpoint holds; return the losses and the last state."""
    losses, saved = [], None
    for i, (shape, options) in enumerate(turns):
        setup = prepare(recipe, pod.make_pod(jax.devices(), shape), Options(**options))
        call = compile_train_step(setup)
        state = setup.init_state() if saved is None else setup.restore_state(lambda _: replicate(saved, setup.mesh))  # noqa: B023
        sharding = make_batch_sharding(setup.mesh, axis=2)
        with loader.load_train_batches(setup.data.train, setup.plan, [range(i, i + 1)], sharding) as batches:
            batch = next(iter(batches))
            state, metrics = call(state, batch.images, batch.labels, np.int32(batch.count))
        losses += list(np.asarray(metrics.loss)[:1])
        saved = jax.device_get(setup.to_checkpoint(state))
    return np.array(losses), saved


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_family_resumes_on_another_pod(case):
    turns = [
        ("2x2", {"summation": "sharded"}),
        ("1x1", {"micro_batches": 4}),
        ("4x4", {"summation": "sharded"}),
    ]
    losses, params, _, average = compute_reference(case)
    with jax.enable_x64(True):
        ours, state = train_in_turns(make_case(case), turns)
    np.testing.assert_allclose(ours, losses, rtol=1e-9)
    assert_close(state.params, params, 1e-8)
    assert_close(state.average["params"], average, 1e-8)


def format_options(settings):
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return [part for name, text in texts.items() for part in (f"--{name}", text)]


@pytest.mark.slow
@pytest.mark.processes(4)
@pytest.mark.parametrize(("count", "shape", "summation"), [(2, "1x2", "sharded"), (4, "2x2", "torus")], ids=["2", "4"])
@pytest.mark.parametrize("case", CASES)
def test_processes_train_every_family_the_same(case, count, shape, summation, tmp_path):
    settings = make_settings(case.partition("-")[0], **CASES[case])
    join = ["--coordinator", f"127.0.0.1:{processes.find_free_port()}", "--processes", count]
    options = ["--pod.shape", shape, "--plan.summation", summation, "--run", tmp_path / "run"]
    command = [
        *processes.PROGRAM,
        "train",
        "digits",
        "--import",
        Path(small_models.__file__).with_name("register_small_models.py"),
    ]
    started = [
        processes.start([*command, *format_options(settings), *join, "--process", i, *options]) for i in range(count)
    ]
    outputs = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0] * count, outputs[0][1][-2000:]
    losses = [m["loss"] for m in Run.load(tmp_path / "run").metrics() if m["event"] == "train"]
    np.testing.assert_allclose(losses, compute_reference(case)[0], rtol=1e-9)
