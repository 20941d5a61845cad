"""Which devices share Muon's matrices, and what the plan and the forecast say about it."""

import pytest

from podscale.config.options import Options
from podscale.forecast.compute import count_work
from podscale.forecast.model import format_rows, make_forecast
from podscale.forecast.orthogonalization import choose_group, count_update_bytes, predict_orthogonalization_s
from podscale.optim.muon_matrices import list_matrices
from podscale.parallel.shared_matrices import Kind
from podscale.pod import Pod, parse_pod
from podscale.recipe import load_recipe
from podscale.training.setup import plan_recipe

STEPS = 5
WIDTH, DEPTH = 384, 12
BLOCK = {
    "qkv": (WIDTH, 3 * WIDTH),
    "project": (WIDTH, WIDTH),
    "expand": (WIDTH, 4 * WIDTH),
    "shrink": (4 * WIDTH, WIDTH),
}
XLA = Options(summation="xla")


class Shape:
    def __init__(self, *shape):
        self.shape = shape


VIT = list_matrices(
    {"blocks": {i: {name: {"kernel": Shape(*shape)} for name, shape in BLOCK.items()} for i in range(DEPTH)}},
    "head",
    STEPS,
    "float32",
)


def choose(pod, options=XLA, kinds=VIT):
    return choose_group(options, pod, kinds, STEPS).orthogonalize


def test_matrices_of_a_vision_transformer_are_counted():
    assert {name: kind.count for name, kind in VIT.items()} == {
        "384x1152 in 3": 12,
        "384x384": 12,
        "384x1536": 12,
        "1536x384": 12,
    }
    flops = sum(kind.count * kind.cost for kind in VIT.values())
    square, long = (4 * WIDTH**2 * length + 2 * WIDTH**3 for length in (WIDTH, 4 * WIDTH))
    assert flops == STEPS * DEPTH * (4 * square + 2 * long)


@pytest.mark.parametrize("pod", ["v3:32x32", "v5e:16x16", "h200:1x8", "h200:8x8", "v4:8x8x4"])
def test_the_fastest_group_is_chosen_and_sharded_parts_are_faster_still(pod):
    torus, seconds = parse_pod(pod), {}
    for group in ("auto", "device", "row", "slice", "pod"):
        seconds[group] = predict_orthogonalization_s(Options(summation="xla", orthogonalize=group), torus, VIT, STEPS)
    assert choose(torus) != "device"
    assert seconds["auto"] == min(seconds.values()) < 0.75 * seconds["device"]
    assert predict_orthogonalization_s(Options(summation="sharded"), torus, VIT, STEPS) < seconds["auto"]


def test_slow_links_between_nodes_are_left_alone():
    assert choose(parse_pod("h200:8x8")) == "row"


def test_one_device_does_all():
    assert choose(parse_pod("h200:1x1")) == choose(Pod("cpu", 1, 1)) == "device"


def test_sharded_parts_are_shared_by_the_pod_and_rules_without_matrices_by_nobody():
    torus = parse_pod("v3:2x2")
    assert choose(torus, Options(summation="sharded", orthogonalize="row")) == "pod"
    assert choose(torus, kinds={}) == "device"
    assert predict_orthogonalization_s(XLA, torus, {}, STEPS) == count_update_bytes(XLA, torus, {}) == 0


def test_what_the_user_fixes_stays():
    assert choose(parse_pod("v3:32x32"), Options(summation="xla", orthogonalize="device")) == "device"


def test_without_figures_of_the_chips_no_group_has_more_idle_devices_than_matrices():
    few = {"4x4": Kind(2, (4, 4), 1.0)}
    assert choose(Pod("cpu", 4, 4), kinds=few) == "row"
    assert choose(Pod("cpu", 2, 8), kinds=few) == "device"
    assert choose(Pod("cpu", 4, 4)) in ("slice", "pod")


@pytest.mark.slow
def test_plan_and_forecast_of_muon_on_a_pod():
    adamw = load_recipe("vit-s16-imagenet").override({"batch.size": 32768})
    recipe, pod = adamw.override({"optimizer.name": "muon"}), parse_pod("v3:32x32")
    plan = plan_recipe(recipe, pod, Options())
    work = count_work(recipe, plan.counts.classes)
    assert sum(kind.count for kind in work.matrices.values()) == 4 * 12 + 1  # and the patches
    forecast = make_forecast(plan, work)
    assert 0 < forecast.orthogonalization_s == forecast.parts["orthogonalization"]
    assert "orthogonalization" in dict(format_rows(forecast))["step"]
    assert dict(plan.rows())["muon"] == f"each matrix once per {plan.options.orthogonalize}"
    assert plan.to_dict()["orthogonalize"] == plan.options.orthogonalize != "device"
    assert plan.memory.update == plan.to_dict()["bytes_per_device"]["update"] > 0
    alone = plan_recipe(recipe, pod, Options(orthogonalize="device"))
    assert make_forecast(alone, work).step_s > forecast.step_s
    shards = plan_recipe(recipe, pod, Options(summation="sharded"))
    assert shards.options.orthogonalize == "pod"
    assert shards.memory.optimizer < plan.memory.optimizer / 2000
    assert shards.memory.update < plan.memory.update
    other = plan_recipe(adamw, pod, Options())
    assert (other.memory.update, other.options.orthogonalize) == (0, "device")
    assert make_forecast(other, count_work(adamw, 1000)).orthogonalization_s == 0
    assert "muon" not in dict(other.rows())
