"""The model of time: published runs, what must hold whatever the numbers, searches and pictures."""

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
from podscale.config.options import Options
from podscale.errors import UserError
from podscale.forecast import chips, compute, model
from podscale.forecast.chips import chip, kinds
from podscale.forecast.compute import RESNET50, step_s
from podscale.models.functional import functional
from podscale.plan import Memory
from podscale.planner import plot, published, search
from podscale.planner.published import IMAGENET
from podscale.pod import named
from podscale.report import terminal
from podscale.training import step as steps

RESNET = recipes.load("resnet50-imagenet-32k")
MEMORY = Memory(parameters=300 << 20, optimizer=100 << 20, input_per_image=150_528, activations_per_image=50_000_000)


def forecast(pod, recipe=RESNET, work=RESNET50, **options):
    return model.forecast(plans.make_plan(recipe, named(pod), IMAGENET, Options(**options)), work)


@pytest.fixture
def changed(monkeypatch):
    """Changes a chip's row for one test; a kind without one gets the H200's."""

    def change(kind, **fields):
        table = chips._table() | {kind: dataclasses.replace(chips.known(kind) or chip("h200"), **fields)}
        monkeypatch.setattr(chips, "_table", lambda: table)
        compute._curve.cache_clear()

    yield change
    compute._curve.cache_clear()


# --- published runs ------------------------------------------------------------------------------------------------


def test_the_seven_published_runs_are_predicted():
    found = [c for c in published.compare() if c.run.listed]
    assert len(found) == 7
    assert published.median_error(found) <= 0.15
    assert all(abs(c.error) <= 0.30 for c in found), [f"{c.run.pod} {c.error:+.1%}" for c in found]


def test_other_chips_and_sizes_are_predicted_by_the_same_constants():
    others = {c.run.pod: c.error for c in published.compare() if not c.run.listed}
    assert abs(others["v4:8x8x4"]) <= 0.15  # no rate of the v4 is known: its level is the v3's
    assert abs(others["v3:32x128"]) <= 0.40
    assert abs(others["v2:16x16"]) <= 0.40


def test_the_tpu_compilers_cycles_are_close_to_what_boards_were_measured_at():
    for kind in ("v2", "v3"):
        assert compute._level(chip(kind)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", [kind for kind in kinds() if chip(kind).rate])
def test_a_chip_trains_at_its_published_rate(kind):
    row = chip(kind)
    assert row.rate_images * row.cores / step_s(row, RESNET50, row.rate_images) == pytest.approx(row.rate)


# --- compute -------------------------------------------------------------------------------------------------------


def test_the_work_of_resnet50_is_what_the_curves_are_of():
    found = compute.work_of(RESNET, classes=1000)
    assert (found.layers, found.norms, found.norm_channels, found.parameters) == (54, 53, 26_560, 25_557_032)
    assert found.flops == pytest.approx(RESNET50.flops, rel=0.01)
    assert found.bytes == pytest.approx(RESNET50.bytes, rel=0.01)


def test_a_smaller_model_takes_less_time():
    small = compute.work_of(recipes.override(RESNET, {"model.name": "resnet18"}), classes=1000)
    for kind in kinds():
        assert step_s(chip(kind), small, 64) < step_s(chip(kind), RESNET50, 64)


@pytest.mark.parametrize("kind", kinds())
def test_more_images_take_longer_and_train_faster(kind):
    images = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    times = [step_s(chip(kind), RESNET50, count) for count in images]
    rates = [count / seconds for count, seconds in zip(images, times, strict=True)]
    assert times == sorted(times)
    assert rates == sorted(rates)


@pytest.mark.parametrize("field", ["link_rate", "memory_rate", "flops"])
@pytest.mark.parametrize("pod", ["v4:8x8", "v6e:4x8"])
def test_better_hardware_is_never_slower(changed, pod, field):
    kind = pod.partition(":")[0]
    before = forecast(pod).step_s
    changed(kind, **{field: 2 * getattr(chip(kind), field)})
    assert forecast(pod).step_s < before


def test_a_model_without_products_still_has_a_forecast():
    class Bias(nnx.Module):
        def __init__(self):
            self.bias = nnx.Param(jax.numpy.zeros(10))

        def __call__(self, images):
            return images.mean(axis=(1, 2, 3))[:, None] + self.bias[...]

    recipe = recipes.load("digits")
    work = compute.work_in(recipe, *functional(Bias()))
    assert model.forecast(plans.make_plan(recipe, named("h200:1x1"), IMAGENET), work).step_s > 0


# --- steps and trainings ---------------------------------------------------------------------------------------------


def test_parts_make_up_the_step_and_steps_the_training():
    found = forecast("v3:32x32")
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.train_s == pytest.approx(found.plan.steps * found.step_s + 18 * found.eval_s)
    assert found.epoch_s == pytest.approx(IMAGENET.train / found.images_per_s)
    assert dict(model.rows(found))["limited by"] == "compute (16 images a device)"


def test_batch_norm_sends_messages_only_where_groups_span_devices():
    assert forecast("v3:4x4").batch_norm_s == 0
    assert forecast("v3:32x32").batch_norm_s > 0


def test_gradients_hide_behind_the_backward_pass_on_gpus_but_never_all_of_them():
    found = forecast("h100:32x8")
    assert 0 < found.summation_s < found.summations["xla"]
    assert forecast("v3:32x32").summation_s == forecast("v3:32x32").summations["xla"]


def test_half_the_bytes_travel_sooner():
    assert forecast("v3:32x32", payload="bfloat16").summation_s < forecast("v3:32x32").summation_s


def test_devices_stand_idle_where_hosts_are_too_slow(changed):
    changed("h200", host_cores=4)
    found = forecast("h200:4x8")
    assert found.limit == "input"
    assert found.parts["idle"] == pytest.approx(found.input_s - found.device_s)
    assert found.host_can < found.host_images_per_s
    assert "too few" in dict(model.rows(found))["host input"]


def test_a_kind_without_a_row_is_refused_in_one_sentence():
    with pytest.raises(UserError, match="nothing is known of the speed of chip kind 'cpu'"):
        forecast("cpu:2x2")


# --- beside a run ----------------------------------------------------------------------------------------------------


def test_a_measured_step_stands_beside_the_predicted_one():
    found = forecast("h200:1x8", recipes.override(RESNET, {"batch.size": 2048, "data.lanes": 64}))
    step = model.beside(found, devices_s=found.device_s * 1.1, waited_s=0.5)
    assert step["differs_most"] == "input wait"
    assert step["measured_s"] == pytest.approx(found.device_s * 1.1 + 0.5)
    assert "most of the difference: input wait (500.0 ms, 0.0 predicted)" in terminal._step(step)


def trained(folder):
    text = io.StringIO()
    recipe = recipes.override(recipes.load("digits"), {"train.epochs": 0.2})
    pod = pods.of(jax.devices(), "1x1")
    summary = podscale.train(recipe, pod=pod, folder=folder, console=Console(file=io.StringIO()))
    terminal.show(summary, Console(file=text, width=200))
    return summary, text.getvalue()


@pytest.mark.slow
def test_training_tells_of_its_step_only_where_the_chip_is_known(tmp_path, changed):
    summary, text = trained(tmp_path / "unknown")
    assert "step" not in summary
    assert "predicted" not in text
    changed("cpu")
    summary, text = trained(tmp_path / "known")
    assert summary["step"]["measured_s"] > 0
    assert summary["step"]["predicted_s"] > 0
    assert "ms predicted; most of the difference: " in text


def test_the_tpu_compiler_is_told_how_large_a_sum_may_become():
    plan = plans.make_plan(RESNET, named("v3:4x4"), IMAGENET)
    assert steps.compiler_options(plan) == {}  # nobody is here to be told
    device = types.SimpleNamespace(platform="tpu")
    here = dataclasses.replace(plan, pod=dataclasses.replace(plan.pod, devices=(device,) * 32))
    assert steps.compiler_options(here) == {"xla_jf_crs_combiner_threshold_in_bytes": 32 << 20}


# --- search ----------------------------------------------------------------------------------------------------------


def searched(text, chip_hours=0.0, recipe=RESNET):
    return search.search(search.Wanted.parse(text, chip_hours), recipe, IMAGENET, MEMORY, RESNET50)


def test_every_pod_that_is_found_is_faster_than_the_smaller_ones():
    found = searched("v3")
    counts = [f.plan.pod.rows * f.plan.pod.cols for f in found]
    times = [f.train_s for f in found]
    assert counts == sorted(set(counts))
    assert times == sorted(times, reverse=True)
    assert counts[0] == 1
    assert counts[-1] >= 1024
    assert len({f.plan.recipe.batch.size for f in found}) > 2


def test_a_search_keeps_to_its_chips_and_to_its_budget():
    (only,) = searched("v3:256")
    assert only.plan.pod.rows * only.plan.pod.cols == 256
    assert all(f.chip_hours <= 14 for f in searched("v3", 14.0))
    nodes = [f.plan.pod for f in searched("h100")]
    assert all(pod.cols == 8 for pod in nodes if pod.rows > 1)


def test_what_is_found_fits_the_memory():
    for found in searched("v2"):
        need = MEMORY.total(found.plan.micro_images, found.plan.input_images)
        assert need <= plans.SPARE * found.plan.pod.memory_bytes


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
def test_nonsense_is_refused_in_one_sentence(text, hours, words):
    with pytest.raises(UserError, match=words):
        searched(text, hours)


@pytest.mark.parametrize("text", ["v3:0x4", "v3:4", "v4:4x4x0", "v3:4x4x4", "v3:-1x4", "v3:axb", "v4:2x2x2x2"])
def test_a_pod_without_chips_is_refused(text):
    with pytest.raises(UserError, match="shape is ROWSxCOLUMNS"):
        named(text)


# --- the picture -----------------------------------------------------------------------------------------------------


def test_the_picture_shows_parts_and_published_points(tmp_path):
    found = search.by_chips(search.Wanted("v3"), RESNET, IMAGENET, MEMORY, RESNET50)
    text = plot.draw(found, published.runs(), "ResNet-50 <on> v3")
    picture = ET.fromstring(text)
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[-4:] == ["compute", "batch norm", "summation", "idle"]
    assert sum("images/s" in title for title in titles) == sum(run.pod.startswith("v3:") for run in published.runs())
    for polygon in picture.iter("{http://www.w3.org/2000/svg}polygon"):
        for pair in polygon.get("points").split():
            x, y = map(float, pair.split(","))
            assert plot.RIGHT[0] <= x <= plot.RIGHT[1]
            assert plot.TOP - 0.1 <= y <= plot.BOTTOM + 0.1
