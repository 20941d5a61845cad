"""Compilation for pods that are not available, the report of the compiler, and cached answers."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.forecast.compute import count_work
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.parallel.summation import make_buckets
from podscale.planner import compile, plan_cache, queries, topologies
from podscale.planner.compile import Collective, CompilerReport, read_collectives
from podscale.pod import parse_pod
from podscale.training import setup

needs_libtpu = pytest.mark.skipif(
    bool(topologies.explain_no_compiler(parse_pod("v3:2x2"))), reason=topologies.NO_LIBTPU
)
needs_cuda = pytest.mark.skipif(bool(topologies.explain_no_compiler(parse_pod("h200:1x8"))), reason=topologies.NO_CUDA)
RESNET = recipes.load_recipe("resnet50-imagenet-32k")
SMALL = recipes.override_recipe(
    RESNET,
    {"model.name": "resnet8", "data.image_size": 32, "model.stem": "small", "batch.size": 512, "data.lanes": 8},
)


def make_plan(recipe, pod, **options):
    return setup.plan_recipe(recipe, parse_pod(pod), Options(**options))


# --- names and texts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "name"),
    [
        ("v3:2x4", "v3:4x2"),
        ("v4:4x8x2", "v4:8x4x2"),
        ("v4:2x2", "v4:2x2x1"),
        ("v5e:4x4", "v5e:4x4"),
        ("h100:32x8", "1x32x8"),
    ],
)
def test_a_pod_is_named_as_its_compiler_names_it(pod, name):
    assert topologies.name_topology(parse_pod(pod)) == name


HLO = """
  %all-reduce.1 = (f32[8020,1024]{1,0}, f32[64]{0}) all-reduce(%a, %b), replica_groups={}, to_apply=%add
  %all-reduce.2 = f32[2,1,1,64]{3,2,1,0} all-reduce(%c), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %all-reduce.3 = f32[2,1,1,64]{3,2,1,0} all-reduce(%d), replica_groups=[2,4]<=[8], to_apply=%add
  %collective-permute-start = (bf16[512]{0}, bf16[512]{0}) collective-permute-start(%e), source_target_pairs={{0,1}}
  %not-one = f32[2]{0} add(%f, %g), metadata={op_name="all-reduce"}
"""


def test_collectives_are_read_with_sizes_groups_and_kinds():
    assert read_collectives(HLO, devices=8) == (
        Collective("all-reduce", 1, 4 * (8020 * 1024 + 64), 8, False),
        Collective("all-reduce", 2, 512, 4, False),
        Collective("collective-permute", 1, 1024, 8, True),
    )


def test_equal_collectives_are_reported_together_and_memory_with_its_limit():
    rows = (Collective("all-reduce", 1, 4096, 8, False), Collective("all-reduce", 3, 1024, 8, False))
    report = CompilerReport(2.0, 1 << 20, 3 << 20, 1 << 20, 4 << 20, 1e9, 1e9, rows)
    texts = [text for _, text in compile.format_rows(report)]
    assert "does not fit the 4 MiB of a device" in texts[0]
    assert texts[-1] == "4 x all-reduce of 1.0 to 4.0 KiB over groups of 8, synchronous"


@pytest.mark.heavy
def test_a_missing_compiler_is_reported_in_one_row(monkeypatch):
    monkeypatch.setattr(topologies, "_is_installed", lambda name: False)
    rows, values = queries.plan_on_pod(SMALL, parse_pod("v3:2x2"), Options())
    assert dict(rows)["compiled"] == topologies.NO_LIBTPU
    assert values["compiled"] == {"why_not": topologies.NO_LIBTPU}
    assert values["forecast"]["step_s"] > 0
    assert dict(queries.plan_on_pod(SMALL, parse_pod("h100:1x8"), Options()).rows)["compiled"] == topologies.NO_CUDA
    assert dict(queries.plan_on_pod(SMALL, parse_pod("cpu:2x2"), Options()).rows)["compiled"] == topologies.NO_COMPILER
    assert "compiled" not in dict(queries.plan_on_pod(SMALL, parse_pod("v3:2x2"), Options(), compiles=False).rows)


# --- the compiler --------------------------------------------------------------------------------------------------


@needs_libtpu
def test_the_whole_step_compiles_with_a_sum_per_bucket_and_batch_norm_over_its_tiles():
    recipe = recipes.override_recipe(SMALL, {"batch.span": 256})
    plan = make_plan(recipe, "v3:2x2", bucket_mib=2, steps_per_call=1)
    assert plan.tile_devices == 4
    report = compile.compile_plan(plan)
    params = make_functional(registry.build_model(recipe.model, 1000, 32))[1]
    sums = [size for size in compute_bucket_sizes(params, 2 << 20) if size > 2**20]
    rows = [row.bytes for row in report.collectives for _ in range(row.count) if row.group == plan.pod.size]
    assert len([size for size in rows if size > 2**20]) == len(sums) > 1
    norms = sum(row.count for row in report.collectives if row.group == 4)
    assert 9 <= norms <= 18  # nine batch norms, each forward and backward; the compiler merges some
    assert report.total_bytes < report.limit_bytes
    assert report.flops > 1e9


def compute_bucket_sizes(params, limit):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return [sum(leaves[i].nbytes for i in bucket) for bucket in make_buckets(leaves, limit)]


@needs_libtpu
def test_a_pod_that_libtpu_refuses_is_reported_in_one_sentence():
    rows, _ = queries.plan_on_pod(
        recipes.override_recipe(SMALL, {"batch.size": 448, "data.lanes": 7}), parse_pod("v3:1x7"), Options()
    )
    assert dict(rows)["compiled"].startswith("the compiler knows no pod v3:7x1")
    assert "\n" not in dict(rows)["compiled"]


@needs_cuda
def test_the_whole_step_compiles_for_nodes_of_gpus():
    plan = make_plan(recipes.override_recipe(SMALL, {"batch.span": 256}), "h200:2x8", bucket_mib=2, steps_per_call=1)
    report = compile.compile_plan(plan)
    assert [row for row in report.collectives if row.group == plan.pod.size and row.bytes > 2**20]
    assert [row for row in report.collectives if row.group == plan.tile_devices]
    assert report.temporary_bytes > 2**20


# --- cached answers ------------------------------------------------------------------------------------------------


def test_an_answers_key_depends_on_all_its_inputs(monkeypatch):
    base = (RESNET, "v3:32x32", Options(), {})
    keys = {
        plan_cache.make_key(*base),
        plan_cache.make_key(recipes.override_recipe(RESNET, {"train.epochs": 1}), *base[1:]),
        plan_cache.make_key(RESNET, "v3:16x32", *base[2:]),
        plan_cache.make_key(*base[:2], Options(payload="bfloat16"), {}),
        plan_cache.make_key(*base[:3], {"compile": False}),
    }
    monkeypatch.setattr(plan_cache, "_list_versions", lambda: {"jax": "another"})
    keys.add(plan_cache.make_key(*base))
    assert len(keys) == 6


def test_a_cached_answer_is_loaded_unless_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_cache.load_result("a") is None
    plan_cache.save_result("a", {"rows": [["step", "1 ms"]]})
    assert plan_cache.load_result("a") == {"rows": [["step", "1 ms"]]}
    (tmp_path / "podscale/plans/a.json").write_text('{"rows": [')
    assert plan_cache.load_result("a") is None


def test_a_recipe_whose_counts_come_from_its_data_is_not_cacheable():
    assert plan_cache.is_cacheable(RESNET)
    assert not plan_cache.is_cacheable(recipes.load_recipe("digits"))


COMMAND = ["-m", "podscale", "plan", "resnet50-imagenet-32k", "--pod", "v3:32x32", "--no-compile", "--json"]


@pytest.mark.heavy
def test_a_cached_answer_needs_no_jax(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    first = subprocess.run([sys.executable, *COMMAND], env=environment, capture_output=True, check=True)
    (tmp_path / "jax.py").write_text("raise ImportError('JAX was imported')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    again = subprocess.run(
        [sys.executable, *COMMAND], env=environment | {"PYTHONPATH": path}, capture_output=True, check=True
    )
    assert json.loads(first.stdout) == json.loads(again.stdout)
    assert json.loads(again.stdout)["forecast"]["images_per_s"] > 1e6


# --- modern models -------------------------------------------------------------------------------------------------


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pod", "changes"),
    [
        ("vit-s16-imagenet", "v5e:16x16", {}),
        ("vit-s16-imagenet", "v3:32x32", {"batch.size": 32768}),
        ("efficientnet-b0-imagenet-4k", "v5e:16x16", {}),
        ("efficientnet-b0-imagenet-4k", "v3:32x32", {"batch.size": 32768}),
    ],
)
def test_modern_models_compile_for_tpu_pods_and_need_what_the_plan_says(name, pod, changes):
    """Operations as counted from the model's program; arguments are parameters, optimizer state and images."""
    recipe = recipes.override_recipe(recipes.load_recipe(name), changes)
    plan = make_plan(recipe, pod)
    report = compile.compile_plan(plan)
    assert report.fits
    if name.startswith("vit"):  # depthwise convolutions count otherwise: see docs/forecast.md
        assert report.flops / plan.images_per_device == pytest.approx(count_work(recipe, 1000).flops, rel=0.1)
    memory = plan.memory
    state = memory.parameters - 4 * count_work(recipe, 1000).parameters + memory.optimizer  # without gradients
    images = memory.input_per_image * plan.images_per_device * plan.steps_per_call
    assert report.argument_bytes == pytest.approx(state + images, rel=0.1)
    assert report.temporary_bytes < 2 * memory.activations_per_image * plan.micro_images + (512 << 20)
