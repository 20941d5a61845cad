"""Plans: the same positions and batch-norm groups on every pod, calls at fixed steps, and suggestions that work."""

import math
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from podscale.config.options import Options
from podscale.errors import UserError
from podscale.parallel.batch_norm import Groups
from podscale.plan import USABLE_SHARE, Counts, Memory, choose_tile, count_lanes_per_host, make_plan
from podscale.pod import TILE, Pod, parse_pod
from podscale.recipe import Recipe, load_recipe, override_recipe

COUNTS = Counts(10_000, 1000, 10)


def make_recipe(size, span, **changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return override_recipe(Recipe(), {"batch.size": size, "batch.span": span} | changes)


def get_refusal(*arguments, **options):
    with pytest.raises(UserError) as error:
        make_plan(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- tiles and groups ----------------------------------------------------------------------------------------------

TILES = [  # batch, span, rows, columns, cores, micro-batches: tile, images per device and micro-batch, groups
    (128, 64, 1, 1, 1, 1, (1, 1), 128, Groups(64)),
    (128, 64, 1, 1, 1, 2, (1, 1), 64, Groups(64)),
    (128, 64, 1, 2, 1, 1, (1, 1), 64, Groups(64)),
    (128, 64, 2, 2, 1, 1, (1, 2), 32, Groups(32, TILE)),
    (128, 64, 4, 1, 1, 1, (2, 1), 32, Groups(32, TILE)),
    (128, 128, 2, 2, 1, 1, (2, 2), 32, Groups(32, TILE)),
    (128, 128, 1, 4, 1, 2, None, 16, None),  # eight devices would be needed
    (128, 32, 2, 2, 1, 2, (1, 2), 16, Groups(16, TILE)),
    (128, 32, 2, 2, 1, 4, (2, 2), 8, Groups(8, TILE)),
    (1024, 64, 8, 8, 1, 1, (2, 2), 16, Groups(16, TILE)),
    (1024, 128, 8, 8, 1, 1, (2, 4), 16, Groups(16, TILE)),
    (1024, 64, 4, 8, 2, 1, (1, 2), 16, Groups(16, TILE)),
    (1024, 32, 4, 8, 2, 1, (1, 1), 16, Groups(16, TILE)),  # the two cores of a chip
    (1024, 16, 4, 8, 2, 1, (1, 1), 16, Groups(16)),
    (72, 36, 3, 2, 1, 1, (3, 1), 12, Groups(12, TILE)),
    (120, 60, 2, 5, 1, 1, (1, 5), 12, Groups(12, TILE)),
]


@pytest.mark.parametrize(("size", "span", "rows", "cols", "cores", "micro", "tile", "images", "groups"), TILES)
def test_tiles_are_as_square_as_possible(size, span, rows, cols, cores, micro, tile, images, groups):
    pod = Pod("cpu", rows, cols, cores)
    if tile is None:
        assert f"batch.span {span}" in get_refusal(make_recipe(size, span), pod, COUNTS, Options(micro_batches=micro))
        return
    plan = make_plan(make_recipe(size, span), pod, COUNTS, Options(micro_batches=micro))
    assert (plan.tile, plan.micro_images, plan.groups) == (tile, images, groups)
    assert plan.tile_devices == tile[0] * tile[1] * cores
    assert plan.images_per_device == images * micro


NUMBERS = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def plans(draw):
    """Draw any valid plan: random pod, images and micro-batches, and a span that fits."""
    pod = Pod("cpu", draw(NUMBERS), draw(NUMBERS), draw(st.sampled_from([1, 2])))
    micro_batches, images = draw(NUMBERS), draw(NUMBERS)
    spans = {images // d for d in (1, 2, 3, 4) if images % d == 0}
    spans |= {
        images * h * w * pod.cores for h in range(1, 9) for w in range(1, 9) if not (pod.rows % h or pod.cols % w)
    }
    span = draw(st.sampled_from(sorted(spans)))
    size = images * micro_batches * pod.size
    assume(size % span == 0)
    return make_plan(make_recipe(size, span), pod, COUNTS, Options(micro_batches=micro_batches))


@settings(deadline=None, max_examples=300)
@given(plans())
def test_positions_are_split_once_and_groups_stay_together(plan):
    size, span = plan.recipe.batch.size, plan.recipe.batch.span
    positions = [plan.positions(device) for device in range(plan.pod.size)]
    assert all(p.shape == (plan.micro_batches, plan.micro_images) for p in positions)
    assert np.array_equal(np.sort(np.concatenate(positions, axis=None)), np.arange(size))
    places = {}  # batch-norm group -> (tile, micro-batch, device) of its images
    for device, device_positions in enumerate(positions):
        for micro, row in enumerate(device_positions):
            for group in row // span:
                places.setdefault(group, set()).add((device // plan.tile_devices, micro, device))
    assert len(places) == size // span
    for members in places.values():
        assert len({member[:2] for member in members}) == 1
        if plan.groups.axes:
            assert plan.groups.images * plan.tile_devices == span
            assert len(members) == plan.tile_devices
        else:
            assert plan.groups.images == span
            assert len(members) == 1


@settings(deadline=None, max_examples=100)
@given(plans())
def test_the_groups_of_a_device_are_contiguous(plan):
    """As `batch_norm` requires: images k·n .. (k+1)·n-1 of a micro-batch are of one group, n of each."""
    for device in range(plan.pod.size):
        groups = plan.positions(device) // plan.recipe.batch.span
        blocks = groups.reshape(plan.micro_batches, -1, plan.groups.images)
        assert np.all(blocks == blocks[..., :1])


@settings(deadline=None, max_examples=200)
@given(
    lanes=st.sampled_from([1, 2, 3, 4, 5, 6, 8]), hosts=st.sampled_from([1, 2, 3, 4, 5, 6, 8]), times=st.integers(1, 3)
)
def test_a_host_reads_the_lanes_of_its_positions(lanes, hosts, times):
    size = lanes * hosts * times
    plan = make_plan(make_recipe(size, 1, data__lanes=lanes), Pod("cpu", 1, hosts, hosts=hosts), COUNTS)
    most = max(len(set((plan.positions(host) // (size // lanes)).ravel())) for host in range(hosts))
    assert count_lanes_per_host(plan) == most


# --- steps ---------------------------------------------------------------------------------------------------------


def test_the_plan_on_the_pod_of_the_paper():
    plan = make_plan(load_recipe("resnet50-imagenet-32k"), parse_pod("v3:32x32"), Counts(1_281_167, 50_000, 1000))
    assert (plan.images_per_device, plan.micro_batches, plan.tile_devices, plan.steps) == (16, 1, 4, 2816)
    assert plan.tile == (1, 2)
    assert plan.groups == Groups(16, TILE)
    long = make_plan(override_recipe(plan.recipe, {"train.epochs": 91}), plan.pod, plan.counts)
    assert long.steps == 3558
    assert plan.eval_steps()[:2] == [157, 313]  # after 4 and 8 epochs of 39.1 steps


@st.composite
def long_plans(draw):
    epochs, every = draw(st.floats(0.05, 9)), draw(st.floats(0.01, 4))
    counts = Counts(draw(st.integers(1, 900)), 5, 10)
    options = Options(steps_per_call=draw(st.integers(1, 9)), save_steps=draw(st.integers(0, 7)))
    return make_plan(
        make_recipe(8, 8, train__epochs=epochs, train__eval_epochs=every), Pod("cpu", 1, 1), counts, options
    )


@settings(deadline=None)
@given(long_plans())
def test_evaluations_follow_eval_epochs_and_include_the_end(plan):
    steps = plan.eval_steps()
    assert plan.steps == math.ceil(Fraction(str(plan.recipe.train.epochs)) * plan.counts.train / 8)
    assert steps == sorted(set(steps))
    assert steps[0] >= 1
    assert steps[-1] == plan.steps
    every = plan.recipe.train.eval_epochs * plan.counts.train / 8
    for number, step in enumerate(steps[:-1], start=1):
        assert abs(step - number * every) <= 1 or every < 2


@settings(deadline=None)
@given(plan=long_plans(), data=st.data())
def test_calls_are_fixed_ranges_that_cover_every_step_once(plan, data):
    calls = plan.calls()
    assert [step for call in calls for step in call] == list(range(plan.steps))
    assert all(1 <= len(call) <= plan.steps_per_call for call in calls)
    ends = {call.stop for call in calls}
    every = plan.options.save_steps
    regular = set(range(every, plan.steps, every)) if every else set()
    assert plan.save_points() == set(plan.eval_steps()) | regular
    assert plan.save_points() <= ends
    assert set(range(plan.steps_per_call, plan.steps, plan.steps_per_call)) <= ends
    done = data.draw(st.sampled_from([0, *sorted(ends)]))
    assert plan.calls(done) == [call for call in calls if call.start >= done]


@settings(deadline=None)
@given(plan=long_plans(), data=st.data())
def test_calls_from_the_checkpoint_of_another_plan_skip_no_step(plan, data):
    """A run saved with other options, or on another pod, resumes at a step that is not a boundary here."""
    done = data.draw(st.integers(0, plan.steps))
    assert [step for call in plan.calls(done) for step in call] == list(range(done, plan.steps))
    assert set(plan.calls(done)[1:]) <= set(plan.calls())


def test_a_cpu_does_one_step_per_call_and_others_several():
    counts = Counts(1_281_167, 50_000, 1000)
    assert make_plan(load_recipe("digits"), Pod("cpu", 1, 1), COUNTS).steps_per_call == 1
    assert 1 < make_plan(load_recipe("resnet50-imagenet-32k"), parse_pod("v3:32x32"), counts).steps_per_call <= 8
    assert make_plan(load_recipe("resnet50-imagenet-4k"), parse_pod("h200:1x1"), counts).steps_per_call == 1


# --- memory --------------------------------------------------------------------------------------------------------


def test_micro_batches_follow_from_memory():
    memory = Memory(parameters=100, optimizer=50, activations_per_image=20)
    fixed = 150 + 3 * 64 * 192  # three calls of 64 images, 8 x 8 x 3 bytes each, are in use or prefetched
    for need, micro_batches in ((fixed + 20 * 64, 1), (fixed + 20 * 32, 2), (fixed + 20 * 31, 4), (fixed + 20 * 8, 8)):
        pod = Pod("cpu", 1, 2, memory_bytes=math.ceil(need / USABLE_SHARE))
        plan = make_plan(make_recipe(128, 8), pod, COUNTS, memory=memory)
        assert plan.micro_batches == micro_batches
        assert memory.total(plan.micro_images, plan.input_images) <= USABLE_SHARE * pod.memory_bytes
        assert make_plan(make_recipe(128, 8), pod, COUNTS, Options(micro_batches=2), memory).micro_batches == 2


def test_micro_batches_have_whole_groups_even_if_memory_is_short():
    memory = Memory(activations_per_image=1 << 30)
    plan = make_plan(make_recipe(128, 64), Pod("cpu", 1, 2), COUNTS, memory=memory)
    assert plan.recipe.batch.span % plan.micro_images == 0
    assert (plan.micro_batches, plan.tile) == (2, (1, 2))


def test_a_plan_describes_itself():
    plan = make_plan(load_recipe("digits"), Pod("v3", 2, 2, 2, hosts=1), COUNTS, Options(micro_batches=2))
    rows = dict(plan.rows())
    assert rows["batch"] == "128 images, 16 per device in 2 micro-batches of 8"
    assert rows["batch norm"] == "groups of 64 over tiles of 2x2 chips x 2 cores"
    assert plan.to_dict()["tile"] == [2, 2]
    assert plan.to_dict()["pod"]["devices"] == 8


# --- refusals ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(rows=NUMBERS, cols=NUMBERS, cores=st.sampled_from([1, 2]), images=st.sampled_from([1, 4, 6, 16]), data=st.data())
def test_spans_that_do_not_fit_are_refused_with_spans_that_do(rows, cols, cores, images, data):
    pod = Pod("cpu", rows, cols, cores)
    size = images * pod.size
    span = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    options = Options(micro_batches=data.draw(st.sampled_from([0, 1, 2])) if images % 2 == 0 else 0)
    counts = [options.micro_batches] if options.micro_batches else [m for m in range(1, images + 1) if images % m == 0]
    if any(choose_tile(span, images // m, pod) for m in counts):
        make_plan(make_recipe(size, span), pod, COUNTS, options)
        return
    message = get_refusal(make_recipe(size, span), pod, COUNTS, options)
    assert message.startswith(f"batch.span {span} does not fit ")
    suggested = [int(number) for number in re.findall(r"\d+", message.partition("nearest that do: ")[2])]
    assert suggested
    for other in suggested:
        make_plan(make_recipe(size, other), pod, COUNTS, options)
        between = range(min(other, span) + 1, max(other, span))
        nearer = [s for s in between if size % s == 0 and any(choose_tile(s, images // m, pod) for m in counts)]
        assert not nearer


def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do():
    message = get_refusal(make_recipe(128, 64), Pod("cpu", 1, 3), COUNTS)
    assert message == "batch.size 128 does not divide over 3 devices; nearest that do: 126, 129"
    assert get_refusal(make_recipe(8, 8), Pod("cpu", 4, 4), COUNTS).endswith("nearest that do: 16")


def test_micro_batches_that_do_not_divide_are_refused():
    message = get_refusal(make_recipe(128, 64), Pod("cpu", 1, 1), COUNTS, Options(micro_batches=3))
    assert message == "plan.micro_batches 3 does not divide 128 images per device; nearest that do: 2, 4"


@pytest.mark.parametrize(
    "field", ["micro_batches", "steps_per_call", "eval_images", "save_steps", "bucket_mib", "keep"]
)
def test_options_below_zero_are_refused(field):
    assert f"plan.{field}" in get_refusal(make_recipe(128, 64), Pod("cpu", 1, 1), COUNTS, Options(**{field: -2}))


def test_mixup_needs_pairs_on_one_device():
    assert "augment.mixup" in get_refusal(make_recipe(6, 3, augment__mixup=0.2), Pod("cpu", 1, 2), COUNTS)
    make_plan(make_recipe(8, 4, augment__mixup=0.2), Pod("cpu", 1, 2), COUNTS)


@pytest.mark.parametrize(("val", "images"), [(1000, 64), (100, 50), (1, 1)])
def test_evaluation_steps_are_no_larger_than_the_validation_set(val, images):
    assert make_plan(make_recipe(128, 64), Pod("cpu", 1, 2), Counts(1000, val, 10)).eval_images == images
    assert (
        make_plan(make_recipe(128, 64), Pod("cpu", 1, 2), Counts(1000, val, 10), Options(eval_images=7)).eval_images
        == 7
    )


@pytest.mark.parametrize(
    ("fused", "capability", "changes", "kernels"),
    [
        ("auto", "9.0", {}, "hopper"),
        ("auto", "9.0", {"model.precision": "float32"}, ""),
        ("auto", "9.0", {"model.name": "resnet18"}, "batch_norm"),
        ("auto", "9.0", {"train.epochs": 0.5}, "batch_norm"),
        ("auto", "9.0", {"model.name": "resnet18", "model.precision": "float32"}, ""),
        ("auto", "9.0", {"model.name": "cifarnet"}, ""),
        ("auto", "8.0", {}, ""),
        ("on", "8.0", {"model.name": "resnet18"}, "plain"),
        ("on", "9.0", {"model.name": "resnet18"}, "hopper"),
        ("off", "9.0", {}, ""),
        ("off", "9.0", {"model.name": "resnet18"}, ""),
    ],
)
def test_layers_are_fused_where_kernels_save_time(fused, capability, changes, kernels):
    gpu = SimpleNamespace(platform="gpu", compute_capability=capability)
    pod = Pod("gpu", 1, 1, devices=(gpu,))
    changes = {"batch.size": 256, "batch.span": 64, "data.lanes": 1} | changes
    recipe = load_recipe("resnet50-imagenet-4k").override(changes)
    assert make_plan(recipe, pod, Counts(1281167, 50000, 1000), Options(fused=fused)).to_dict()["kernels"] == kernels


@pytest.mark.parametrize(
    ("text", "span", "images", "tile"),
    [
        ("v5e:4x4*4", 128, 8, (4, 4)),  # as square as fits one slice
        ("v5e:2x8*2", 128, 8, (2, 8)),
        ("v5e:2x2*4", 128, 8, None),  # 16 chips; a slice has 4
        ("h200:4x8", 64, 16, (1, 4)),  # NVLink, not 2x2 over two nodes
        ("h200:4x8", 128, 8, (2, 8)),
        ("v5e:4x8", 64, 16, (2, 2)),
    ],
)
def test_tiles_stay_in_a_slice_and_prefer_one_node(text, span, images, tile):
    assert choose_tile(span, images, parse_pod(text)) == tile
