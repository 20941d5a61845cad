"""The model of time: published runs, properties that hold for all numbers, searches and plots."""

import dataclasses
import io
import types
import xml.etree.ElementTree as ET

import jax
import pytest
from flax import nnx
from rich.console import Console

import podscale
from podscale import plan as plans
from podscale import pod as pods
from podscale import recipe as recipes
from podscale.config import fields
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast import chips, compute, model
from podscale.forecast.chips import get_chip, list_kinds
from podscale.forecast.compute import RESNET50, predict_step_s
from podscale.forecast.software import PODSCALE, Software
from podscale.models.functional import make_functional
from podscale.parallel.shared_matrices import Kind
from podscale.plan import Memory
from podscale.planner import plot, published, search
from podscale.planner.published import IMAGENET
from podscale.pod import parse_pod
from podscale.report import terminal
from podscale.training import step as steps

RESNET = recipes.load_recipe("resnet50-imagenet-32k")
MEMORY = Memory(parameters=300 << 20, optimizer=100 << 20, input_per_image=150_528, activations_per_image=50_000_000)


def predict(pod, recipe=RESNET, work=RESNET50, software=PODSCALE, **options):
    return model.make_forecast(plans.make_plan(recipe, parse_pod(pod), IMAGENET, Options(**options)), work, software)


@pytest.fixture
def change_chip(monkeypatch):
    """Change a chip's row for one test; a kind without one gets the H200's."""

    def change(kind, **fields):
        table = chips._load_chips() | {kind: dataclasses.replace(chips.find_chip(kind) or get_chip("h200"), **fields)}
        monkeypatch.setattr(chips, "_load_chips", lambda: table)
        compute._load_curve.cache_clear()

    yield change
    compute._load_curve.cache_clear()


# --- published runs ------------------------------------------------------------------------------------------------


def test_the_seven_published_runs_are_predicted():
    result = [c for c in published.compare_runs() if c.run.listed]
    assert len(result) == 7
    assert published.compute_median_error(result) <= 0.15
    assert all(abs(c.error) <= 0.30 for c in result), [f"{c.run.pod} {c.error:+.1%}" for c in result]


def test_other_chips_and_sizes_are_predicted_with_the_same_constants():
    others = {c.run.pod: c.error for c in published.compare_runs() if not c.run.listed}
    assert abs(others["v4:8x8x4"]) <= 0.25  # no rate of the v4 is known: its level is the v3's
    assert abs(others["v3:32x128"]) <= 0.10
    assert abs(others["v2:16x16"]) <= 0.10


def test_the_tpu_compilers_cycles_are_close_to_measured_boards():
    for kind in ("v2", "v3"):
        assert compute._compute_level(get_chip(kind)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", [kind for kind in list_kinds() if get_chip(kind).rate])
def test_a_chip_trains_at_its_published_rate(kind):
    row = get_chip(kind)
    program = Software(kernels=row.rate_kernels, host_layout=True, sums_in_place=True)
    seconds = predict_step_s(row, RESNET50, row.rate_images, program)
    assert row.rate_images * row.cores / seconds == pytest.approx(row.rate)


# --- compute -------------------------------------------------------------------------------------------------------


def test_the_counted_work_of_resnet50_is_that_of_the_curves():
    result = compute.count_work(RESNET, classes=1000)
    assert (result.layers, result.norms, result.norm_channels, result.parameters) == (54, 53, 26_560, 25_557_032)
    assert result.flops == pytest.approx(RESNET50.flops, rel=0.01)
    assert result.bytes == pytest.approx(RESNET50.bytes, rel=0.01)


def test_a_smaller_model_takes_less_time():
    small = compute.count_work(recipes.override_recipe(RESNET, {"model.name": "resnet18"}), classes=1000)
    for kind in list_kinds():
        assert predict_step_s(get_chip(kind), small, 64) < predict_step_s(get_chip(kind), RESNET50, 64)


@pytest.mark.parametrize("kind", list_kinds())
def test_more_images_take_longer_and_train_faster(kind):
    images = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    times = [predict_step_s(get_chip(kind), RESNET50, count) for count in images]
    rates = [count / seconds for count, seconds in zip(images, times, strict=True)]
    assert times == sorted(times)
    assert rates == sorted(rates)


@pytest.mark.parametrize("field", ["link_rate", "memory_rate", "flops"])
@pytest.mark.parametrize("pod", ["v4:8x8", "v6e:4x8"])
def test_better_hardware_is_never_slower(change_chip, pod, field):
    kind = pod.partition(":")[0]
    before = predict(pod).step_s
    change_chip(kind, **{field: 2 * getattr(get_chip(kind), field)})
    assert predict(pod).step_s < before


def test_a_model_without_products_still_has_a_forecast():
    class Bias(nnx.Module):
        def __init__(self):
            self.bias = nnx.Param(jax.numpy.zeros(10))

        def __call__(self, images):
            return images.mean(axis=(1, 2, 3))[:, None] + self.bias[...]

    recipe = recipes.load_recipe("digits")
    work = compute.count_model_work(recipe, *make_functional(Bias()))
    assert model.make_forecast(plans.make_plan(recipe, parse_pod("h200:1x1"), IMAGENET), work).step_s > 0


# --- steps and trainings ---------------------------------------------------------------------------------------------


def test_parts_make_up_the_step_and_steps_the_training():
    result = predict("v3:32x32")
    assert sum(result.parts.values()) == pytest.approx(result.step_s)
    assert result.train_s == pytest.approx(result.plan.steps * result.step_s + 18 * result.eval_s)
    assert result.epoch_s == pytest.approx(IMAGENET.train / result.images_per_s)
    assert dict(model.format_rows(result))["limited by"] == "compute (16 images per device)"


def test_batch_norm_sends_messages_only_where_groups_span_devices():
    assert predict("v3:4x4").batch_norm_s == 0
    assert predict("v3:32x32").batch_norm_s > 0


def test_summation_overlaps_with_the_backward_pass_on_gpus_but_never_fully():
    result = predict("h100:32x8")
    assert 0 < result.summation_s < result.summations["xla"]
    assert predict("v3:32x32").summation_s == predict("v3:32x32").summations["xla"]


def test_half_the_bytes_are_summed_faster():
    assert predict("v3:32x32", payload="bfloat16").summation_s < predict("v3:32x32").summation_s


def test_devices_are_idle_if_hosts_are_too_slow(change_chip):
    change_chip("h200", host_cores=4)
    result = predict("h200:4x8")
    assert result.limit == "input"
    assert result.parts["idle"] == pytest.approx(result.input_s - result.device_s)
    assert result.host_capacity < result.host_images_per_s
    assert "too few" in dict(model.format_rows(result))["host input"]


def test_a_kind_without_a_row_is_refused_in_one_sentence():
    with pytest.raises(UserError, match="nothing is known of the speed of chip kind 'cpu'"):
        predict("cpu:2x2")


# --- programs other than Podscale's ----------------------------------------------------------------------------------


def test_a_sharded_update_takes_its_share_of_the_time():
    whole, sharded = (predict("v3:32x32", summation=name).compute_s for name in ("xla", "sharded"))
    update_s = compute._load_curve("v3").update_s
    assert whole - sharded == pytest.approx(update_s * (1 - 1 / 2048))
    assert predict("v3:32x32", software=Software(shards_update=True)).compute_s == pytest.approx(sharded)


def test_a_plan_says_what_dividing_the_update_saves_or_costs():
    here, there = predict("v3:8x8"), predict("v3:8x8", summation="sharded")
    assert here.divided_update_saves_s == pytest.approx({"sharded": here.step_s - there.step_s})
    assert "plan.summation sharded saves" in dict(model.format_rows(here))["update"]
    assert "plan.summation sharded costs" in dict(model.format_rows(predict("v4:8x8x8")))["update"]
    assert all("update" not in dict(model.format_rows(result)) for result in (there, predict("h100:8x8")))


def test_a_sharded_sum_gathers_unrounded_parameters():
    rounded, mixed, unrounded = (
        predict("v4:8x8x8", software=Software(shards_update=shards), payload=payload).summation_s
        for shards, payload in ((False, "bfloat16"), (True, "bfloat16"), (True, "float32"))
    )
    assert rounded < mixed < unrounded
    assert unrounded == predict("v4:8x8x8").summation_s


@pytest.mark.parametrize(("field", "part"), [("host_layout", "layout_s"), ("sums_in_place", "copy_s")])
def test_what_a_program_leaves_to_others_costs_the_same_however_many_images(field, part):
    row, program = get_chip("v4"), Software(**{field: True})
    saved = [predict_step_s(row, RESNET50, n) - predict_step_s(row, RESNET50, n, program) for n in (8, 64)]
    assert saved == pytest.approx([getattr(compute._load_curve("v4"), part)] * 2)
    assert saved[0] > 0


def test_fewer_kernels_save_the_gaps_between_them_on_gpus_only():
    row = get_chip("h200")
    saved = predict_step_s(row, RESNET50, 16) - predict_step_s(row, RESNET50, 16, Software(kernels=row.kernels - 100))
    assert saved == pytest.approx(100 * row.gap_s)
    slower = get_chip("a100")  # by its clock
    less = predict_step_s(slower, RESNET50, 16) - predict_step_s(
        slower, RESNET50, 16, Software(kernels=row.kernels - 100)
    )
    assert less == pytest.approx(saved * 1.98 / 1.41)
    few = Software(kernels=100)
    assert predict_step_s(get_chip("v3"), RESNET50, 16, few) == predict_step_s(get_chip("v3"), RESNET50, 16)


def test_sums_that_do_not_overlap_take_all_of_their_time():
    result = predict("h100:32x8", software=Software(overlaps_sums=False))
    assert result.summation_s == result.summations["xla"]


def test_norms_that_exchange_sums_in_their_kernels_start_no_collectives():
    one, other = (predict("h100:512x8", software=Software(peer_norms=peers)).batch_norm_s for peers in (False, True))
    assert one - other == pytest.approx(2 * RESNET50.norms * get_chip("h100").start_s)
    assert other > 0


def test_start_and_evaluations_of_a_program_add_to_the_training():
    slow = predict("v3:32x32", software=Software(start_s=10.0, eval_s=2.0))
    assert slow.train_s - predict("v3:32x32").train_s == pytest.approx(10 + 18 * 2)
    assert slow.step_s == predict("v3:32x32").step_s


def test_a_chip_with_faster_memory_trains_its_images_faster_by_the_roofline():
    plain, fast = get_chip("a100"), get_chip("a100-80gb")
    ratio = compute.predict_roofline_s(fast, RESNET50) / compute.predict_roofline_s(plain, RESNET50)
    one, other = (predict_step_s(row, RESNET50, 500) - predict_step_s(row, RESNET50, 100) for row in (plain, fast))
    assert other == pytest.approx(ratio * one)
    assert compute._load_curve("a100-80gb").fixed_s == pytest.approx(compute._load_curve("a100").fixed_s)


def test_many_images_take_a_v4_as_long_as_a_v3_by_their_rooflines():
    ratio = compute._compute_roofline_ratio(get_chip("v4"), get_chip("v3"))
    program = Software(host_layout=True, sums_in_place=True)
    one, other = (compute.predict_images_s(get_chip(kind), RESNET50, 128, program) for kind in ("v3", "v4"))
    assert other == pytest.approx(ratio * one)


# --- comparison with a run -------------------------------------------------------------------------------------------


def test_a_measured_step_is_compared_with_the_predicted_one():
    result = predict("h200:1x8", recipes.override_recipe(RESNET, {"batch.size": 2048, "data.lanes": 64}))
    step = model.compare_step(result, devices_s=result.device_s * 1.1, waited_s=0.5)
    assert step["differs_most"] == "input wait"
    assert step["measured_s"] == pytest.approx(result.device_s * 1.1 + 0.5)
    assert "most of the difference: input wait (500.0 ms, 0.0 predicted)" in terminal._format_step(step)


def train(folder):
    text = io.StringIO()
    recipe = recipes.override_recipe(recipes.load_recipe("digits"), {"train.epochs": 0.2})
    pod = pods.make_pod(jax.devices(), "1x1")
    summary = podscale.train(recipe, pod=pod, folder=folder, console=Console(file=io.StringIO()))
    terminal.show_summary(summary, Console(file=text, width=200))
    return summary, text.getvalue()


@pytest.mark.slow
def test_training_reports_its_step_only_for_known_chips(tmp_path, change_chip):
    summary, text = train(tmp_path / "unknown")
    assert "step" not in summary
    assert "predicted" not in text
    change_chip("cpu")
    summary, text = train(tmp_path / "known")
    assert summary["step"]["measured_s"] > 0
    assert summary["step"]["predicted_s"] > 0
    assert "ms predicted; most of the difference: " in text


def test_the_tpu_compiler_gets_the_largest_size_of_a_sum():
    plan = plans.make_plan(RESNET, parse_pod("v3:4x4"), IMAGENET)
    assert steps.make_compiler_options(plan) == {}  # no devices are present
    device = types.SimpleNamespace(platform="tpu")
    here = dataclasses.replace(plan, pod=dataclasses.replace(plan.pod, devices=(device,) * 32))
    assert steps.make_compiler_options(here) == {"xla_jf_crs_combiner_threshold_in_bytes": 32 << 20}


# --- search ----------------------------------------------------------------------------------------------------------


def search_pods(text, chip_hours=0.0, recipe=RESNET):
    return search.find_fastest_pods(search.SearchRequest.parse(text, chip_hours), recipe, IMAGENET, MEMORY, RESNET50)


@pytest.mark.heavy
def test_every_pod_of_a_search_is_faster_than_the_smaller_ones():
    result = search_pods("v3")
    counts = [f.plan.pod.rows * f.plan.pod.cols for f in result]
    times = [f.train_s for f in result]
    assert counts == sorted(set(counts))
    assert times == sorted(times, reverse=True)
    assert counts[0] == 1
    assert counts[-1] >= 1024
    assert len({f.plan.recipe.batch.size for f in result}) > 1


def test_a_search_shares_out_the_update_where_that_is_faster():
    (only,) = search_pods("v3:64")
    assert only.plan.options.summation == "sharded"


@pytest.mark.parametrize(("optimizer", "can"), [("lars", True), ("adamw", True), ("muon", True), ("own", False)])
def test_a_search_tries_sharded_updates_if_the_optimizer_can_update_a_part_of_an_array(optimizer, can, monkeypatch):
    monkeypatch.setattr(fields.ADDED_CHOICES, "_parts", {"optimizer.name": ("own",)})
    recipe = recipes.override_recipe(RESNET, {"optimizer.name": optimizer})
    variants = search._iterate_variants(recipe, parse_pod("v3:8x8"), IMAGENET, MEMORY, {})
    assert ("sharded" in {plan.options.summation for plan in variants}) == can


def test_a_search_forecasts_the_orthogonalization_of_sharded_muon():
    recipe = recipes.override_recipe(RESNET, {"optimizer.name": "muon"})
    work = dataclasses.replace(RESNET50, matrices={"512x4608": Kind(4, (512, 4608), 1e9)})
    (sharded,) = (
        plan
        for plan in search._iterate_variants(recipe, parse_pod("v3:8x8"), IMAGENET, MEMORY, work.matrices)
        if (plan.options.summation, plan.micro_batches) == ("sharded", 1)
    )
    assert model.make_forecast(sharded, work).orthogonalization_s > 0
    assert (sharded.options.orthogonalize, sharded.memory.update > 0) == ("pod", True)


def test_a_search_finds_the_plans_that_fit_only_because_devices_share_the_optimizer_state():
    pod = parse_pod("v3:8x8")
    large = dataclasses.replace(MEMORY, optimizer=pod.memory_bytes)
    variants = list(search._iterate_variants(RESNET, pod, IMAGENET, large, {}))
    assert {plan.options.summation for plan in variants} == {"sharded"}
    assert all(plan.fits_memory for plan in variants)


@pytest.mark.heavy
def test_a_search_keeps_to_its_chips_and_to_its_budget():
    (only,) = search_pods("v3:256")
    assert only.plan.pod.rows * only.plan.pod.cols == 256
    assert all(f.chip_hours <= 14 for f in search_pods("v3", 14.0))
    nodes = [f.plan.pod for f in search_pods("h100")]
    assert all(pod.cols == 8 for pod in nodes if pod.rows > 1)


@pytest.mark.parametrize("kind", ["v5e", "v6e"])
def test_a_search_has_several_slices_where_one_would_be_larger_than_there_are(kind):
    assert [pod.shape for pod in search.iterate_pods(kind, 256)] == ["16x16"]
    assert [pod.shape for pod in search.iterate_pods(kind, 512)] == ["16x16*2"]
    assert not list(search.iterate_pods(kind, 300))
    assert [pod.shape for pod in search.iterate_pods("v3", 4096)] == ["32x128", "64x64"]


@pytest.mark.heavy
def test_every_plan_of_a_search_fits_the_memory():
    for result in search_pods("v2"):
        need = result.plan.memory.total(result.plan.micro_images, result.plan.input_images)
        assert need <= plans.USABLE_SHARE * result.plan.pod.memory_bytes


@pytest.mark.parametrize(
    ("text", "hours", "words"),
    [
        ("v9", 0.0, "chip kind 'v9'"),
        ("v3:0", 0.0, "KIND or KIND:CHIPS"),
        ("v3:x", 0.0, "KIND or KIND:CHIPS"),
        ("v3", -1.0, "--chip-hours"),
        ("v3", 0.001, "try more chips or chip-hours"),
        ("v3:7", 0.0, "no pod of v3 with 7 chips"),
    ],
)
def test_an_impossible_search_is_refused_in_one_sentence(text, hours, words):
    with pytest.raises(UserError, match=words):
        search_pods(text, hours)


@pytest.mark.parametrize("text", ["v3:0x4", "v3:4", "v4:4x4x0", "v3:4x4x4", "v3:-1x4", "v3:axb", "v4:2x2x2x2"])
def test_a_pod_without_chips_is_refused(text):
    with pytest.raises(UserError, match="shape is ROWSxCOLUMNS"):
        parse_pod(text)


# --- the plot --------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_the_plot_shows_parts_and_published_points(tmp_path):
    result = search.find_best_by_chips(search.SearchRequest("v3"), RESNET, IMAGENET, MEMORY, RESNET50)
    text = plot.draw_scaling(result, published.load_runs(), "ResNet-50 <on> v3")
    svg = ET.fromstring(text)
    titles = [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[-4:] == ["compute", "batch norm", "summation", "idle"]
    assert sum("images/s" in title for title in titles) == sum(
        run.pod.startswith("v3:") for run in published.load_runs()
    )
    for polygon in svg.iter("{http://www.w3.org/2000/svg}polygon"):
        for pair in polygon.get("points").split():
            x, y = map(float, pair.split(","))
            assert plot.RIGHT[0] <= x <= plot.RIGHT[1]
            assert plot.TOP - 0.1 <= y <= plot.BOTTOM + 0.1
