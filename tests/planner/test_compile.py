"""Compilation for pods that are not here, what is read from its result, and answers that are kept."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from podscale import recipe as recipes
from podscale.config.options import Options
from podscale.models import registry
from podscale.models.functional import functional
from podscale.parallel.summation import make_buckets
from podscale.planner import answer_cache, compile, described_devices, questions
from podscale.planner.compile import Collective, Report, collectives
from podscale.pod import named
from podscale.training import setup

needs_libtpu = pytest.mark.skipif(bool(described_devices.why_not(named("v3:2x2"))), reason=described_devices.NO_LIBTPU)
needs_cuda = pytest.mark.skipif(bool(described_devices.why_not(named("h200:1x8"))), reason=described_devices.NO_CUDA)
RESNET = recipes.load("resnet50-imagenet-32k")
SMALL = recipes.override(
    RESNET,
    {"model.name": "resnet8", "data.image_size": 32, "model.stem": "small", "batch.size": 512, "data.lanes": 8},
)


def planned(recipe, pod, **options):
    return setup.plan_recipe(recipe, named(pod), Options(**options))


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
def test_a_pod_has_its_compilers_name(pod, name):
    assert described_devices.topology_name(named(pod)) == name


HLO = """
  %all-reduce.1 = (f32[8020,1024]{1,0}, f32[64]{0}) all-reduce(%a, %b), replica_groups={}, to_apply=%add
  %all-reduce.2 = f32[2,1,1,64]{3,2,1,0} all-reduce(%c), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %all-reduce.3 = f32[2,1,1,64]{3,2,1,0} all-reduce(%d), replica_groups=[2,4]<=[8], to_apply=%add
  %collective-permute-start = (bf16[512]{0}, bf16[512]{0}) collective-permute-start(%e), source_target_pairs={{0,1}}
  %not-one = f32[2]{0} add(%f, %g), metadata={op_name="all-reduce"}
"""


def test_collectives_are_read_with_sizes_groups_and_kinds():
    assert collectives(HLO, devices=8) == (
        Collective("all-reduce", 1, 4 * (8020 * 1024 + 64), 8, False),
        Collective("all-reduce", 2, 512, 4, False),
        Collective("collective-permute", 1, 1024, 8, True),
    )


def test_alike_collectives_are_told_together_and_memory_beside_its_limit():
    found = (Collective("all-reduce", 1, 4096, 8, False), Collective("all-reduce", 3, 1024, 8, False))
    report = Report(2.0, 1 << 20, 3 << 20, 1 << 20, 4 << 20, 1e9, 1e9, found)
    texts = [text for _, text in compile.rows(report)]
    assert "does not fit the 4 MiB of a device" in texts[0]
    assert texts[-1] == "4 x all-reduce of 1.0 to 4.0 KiB over groups of 8, synchronous"


def test_where_nothing_can_be_compiled_one_line_says_so(monkeypatch):
    monkeypatch.setattr(described_devices, "_installed", lambda name: False)
    rows, values = questions.about(SMALL, named("v3:2x2"), Options())
    assert dict(rows)["compiled"] == described_devices.NO_LIBTPU
    assert values["compiled"] == {"why_not": described_devices.NO_LIBTPU}
    assert values["forecast"]["step_s"] > 0
    assert dict(questions.about(SMALL, named("h100:1x8"), Options()).rows)["compiled"] == described_devices.NO_CUDA
    assert dict(questions.about(SMALL, named("cpu:2x2"), Options()).rows)["compiled"] == described_devices.NO_COMPILER
    assert "compiled" not in dict(questions.about(SMALL, named("v3:2x2"), Options(), compiles=False).rows)


# --- the compiler --------------------------------------------------------------------------------------------------


@needs_libtpu
def test_the_whole_step_compiles_with_a_sum_per_bucket_and_batch_norm_over_its_tiles():
    recipe = recipes.override(SMALL, {"batch.span": 256})
    plan = planned(recipe, "v3:2x2", bucket_mib=2, steps_per_call=1)
    assert plan.tile_devices == 4
    report = compile.compiled(plan)
    params = functional(registry.build(recipe.model, 1000, 32))[1]
    sums = [size for size in bucket_sizes(params, 2 << 20) if size > 2**20]
    found = [row.bytes for row in report.collectives for _ in range(row.count) if row.group == plan.pod.size]
    assert len([size for size in found if size > 2**20]) == len(sums) > 1
    norms = sum(row.count for row in report.collectives if row.group == 4)
    assert 9 <= norms <= 18  # nine batch norms, each forward and backward; the compiler joins some
    assert report.total_bytes < report.limit_bytes
    assert report.flops > 1e9


def bucket_sizes(params, limit):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return [sum(leaves[i].nbytes for i in bucket) for bucket in make_buckets(leaves, limit)]


@needs_libtpu
def test_a_pod_that_libtpu_refuses_gets_one_sentence():
    rows, _ = questions.about(recipes.override(SMALL, {"batch.size": 448, "data.lanes": 7}), named("v3:1x7"), Options())
    assert dict(rows)["compiled"].startswith("the compiler knows no pod v3:7x1")
    assert "\n" not in dict(rows)["compiled"]


@needs_cuda
def test_the_whole_step_compiles_for_nodes_of_gpus():
    plan = planned(recipes.override(SMALL, {"batch.span": 256}), "h200:2x8", bucket_mib=2, steps_per_call=1)
    report = compile.compiled(plan)
    assert [row for row in report.collectives if row.group == plan.pod.size and row.bytes > 2**20]
    assert [row for row in report.collectives if row.group == plan.tile_devices]
    assert report.temporary_bytes > 2**20


# --- answers that are kept -----------------------------------------------------------------------------------------


def test_an_answers_name_follows_from_all_that_it_depends_on(monkeypatch):
    base = (RESNET, "v3:32x32", Options(), True)
    names = {
        answer_cache.key(*base),
        answer_cache.key(recipes.override(RESNET, {"train.epochs": 1}), *base[1:]),
        answer_cache.key(RESNET, "v3:16x32", *base[2:]),
        answer_cache.key(*base[:2], Options(payload="bfloat16"), True),
        answer_cache.key(*base[:3], False),
    }
    monkeypatch.setattr(answer_cache, "_versions", lambda: {"jax": "another"})
    names.add(answer_cache.key(*base))
    assert len(names) == 6


def test_what_is_kept_comes_back_and_what_is_damaged_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert answer_cache.kept("a") is None
    answer_cache.keep("a", {"rows": [["step", "1 ms"]]})
    assert answer_cache.kept("a") == {"rows": [["step", "1 ms"]]}
    (tmp_path / "podscale/plans/a.json").write_text('{"rows": [')
    assert answer_cache.kept("a") is None


def test_a_recipe_whose_counts_come_from_its_data_is_not_kept():
    assert answer_cache.follows_from(RESNET)
    assert not answer_cache.follows_from(recipes.load("digits"))


ASK = ["-m", "podscale", "plan", "resnet50-imagenet-32k", "--pod", "v3:32x32", "--no-compile", "--json"]


def test_a_kept_answer_needs_no_jax(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    first = subprocess.run([sys.executable, *ASK], env=environment, capture_output=True, check=True)
    (tmp_path / "jax.py").write_text("raise ImportError('JAX was imported')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    again = subprocess.run(
        [sys.executable, *ASK], env=environment | {"PYTHONPATH": path}, capture_output=True, check=True
    )
    assert json.loads(first.stdout) == json.loads(again.stdout)
    assert json.loads(again.stdout)["forecast"]["images_per_s"] > 1e6
