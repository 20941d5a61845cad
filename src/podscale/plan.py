"""Plan: the recipe mapped onto the pod. All that depends on the machine, and nothing that changes what is learnt.

Images per device, micro-batches, the batch-norm tile, gradient summation and the calls that training consists of all
follow from here. A plan is printed before every run, and needs no device to be made.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from podscale.config.json_types import JsonObject
from podscale.config.options import Options, check_options, set_summation
from podscale.config.suggestions import list_divisors, suggest_numbers
from podscale.errors import UserError
from podscale.kernels.layer_spec import BATCH_NORM, CUDNN, HOPPER, REFERENCE, TRITON, Kernels
from podscale.parallel.batch_norm import Groups, make_tiled_groups
from podscale.parallel.input_kinds import find_input
from podscale.parallel.inputs import Input
from podscale.parallel.strategies import describe_summation, find_summation
from podscale.parallel.summation import Summation, Transfer
from podscale.pod import Pod
from podscale.recipe import Recipe, describe_sizes, list_size_ranges

HOPPER_CAPABILITY, BOTTLENECK_MODELS = "9.0", ("resnet50", "resnet101", "resnet152")  # that have kernels
ATTENTION_MODELS = ("vit_tiny", "vit_small", "vit_base")  # cuDNN computes attention in one kernel
CONVNEXTS = ("convnext_tiny", "convnext_small", "convnext_base")  # that have kernels
MIN_PIXELS_TO_FUSE = 1_000_000 * 224**2  # per device: then fused layers save the time that compiling them takes
BUCKET_MIB = 32  # by default
BATCHES_IN_FLIGHT = 3  # one in use and two prefetched
USABLE_SHARE = 0.85  # share of a device's memory that a plan may use; the compiler's temporaries need the remainder


@dataclass(frozen=True)
class Counts:
    """Numbers of training images, validation images and classes: all that a plan needs of the data."""

    train: int
    val: int
    classes: int


@dataclass(frozen=True)
class Memory:
    """Bytes per device, by purpose; activations are an estimate until the step is compiled."""

    parameters: int = 0
    optimizer: int = 0
    input_per_image: int = 0
    activations_per_image: int = 0
    images: int = 0  # the data set, where it is resident on the devices
    update: int = 0  # of the optimizer's work, after activations are gone

    def total(self, micro_images: int, input_images: int) -> int:
        """Return all bytes, with so many images in a micro-batch, and so many in use or prefetched."""
        inputs, activations = self.input_per_image * input_images, self.activations_per_image * micro_images
        return self.parameters + self.optimizer + self.images + inputs + max(activations, self.update)


@dataclass(frozen=True)
class Plan:
    """A recipe mapped onto a pod; `make_plan` makes it.

    Args: the fields, documented below.

    >>> from podscale import load_recipe
    >>> make_plan(load_recipe("digits"), Pod("cpu", 2, 2), Counts(1437, 360, 10)).calls()[-1]
    range(336, 337)
    """

    recipe: Recipe
    pod: Pod
    counts: Counts
    options: Options  # with every value that was left open decided
    tile: tuple[int, int]  # chips (rows, columns) that share a batch-norm group
    kernels: Kernels | None  # that compute fused layers, or sums of batch norms; None: XLA computes all
    memory: Memory  # bytes per device

    # --- parts that the options name ---

    @property
    def summation(self) -> Summation:
        """The strategy that sums gradients."""
        return find_summation(self.options.summation)

    @property
    def transfer(self) -> Transfer:
        """How gradients travel."""
        return Transfer(self.options.payload, self.options.bucket_mib << 20)

    @property
    def input(self) -> Input:
        """How the devices get a step's images."""
        return find_input(self.options.cache)

    # --- images ---

    @property
    def micro_batches(self) -> int:
        """Parts of its images that a device processes one after the other in each update."""
        return self.options.micro_batches

    @property
    def steps_per_call(self) -> int:
        """Updates per call of the compiled program."""
        return self.options.steps_per_call

    @property
    def eval_images(self) -> int:
        """Images per device and evaluation step."""
        return self.options.eval_images

    @property
    def images_per_device(self) -> int:
        """Images per device and update."""
        return self.recipe.batch.size // self.pod.size

    @property
    def micro_images(self) -> int:
        """Images per device and micro-batch."""
        return self.images_per_device // self.micro_batches

    @property
    def input_images(self) -> int:
        """Images on a device that are in use or prefetched."""
        return self.images_per_device * self.steps_per_call * BATCHES_IN_FLIGHT

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """Shape of a call's labels, over the pod: [steps, micro-batches, images of a micro-batch]."""
        return self.steps_per_call, self.micro_batches, self.recipe.batch.size // self.micro_batches

    @property
    def tile_devices(self) -> int:
        """Devices that share a batch-norm group."""
        return self.tile[0] * self.tile[1] * self.pod.cores

    @property
    def groups(self) -> Groups:
        """How the images of one device and micro-batch are grouped for batch norm."""
        span = self.recipe.batch.span
        exchanges = self.options.tile_summation == "swing_latency"
        tiled = make_tiled_groups(self.pod, self.micro_images, exchanges=exchanges)
        return Groups(span) if span <= self.micro_images else tiled

    def positions(self, device: Any) -> Any:
        """Return positions of the global batch that a device, numbered in batch order, processes: [micro-batch, image].

        A tile owns a contiguous block; micro-batch j is its j-th part; the tile's devices split each part evenly.
        """
        m, M, T = self.micro_images, self.micro_batches, self.tile_devices
        within = np.arange(M)[:, None] * (T * m) + np.arange(m)
        return (device // T) * (T * m * M) + (device % T) * m + within

    @property
    def fits_memory(self) -> bool:
        """Whether a device holds the step, with what the compiler's temporaries need left over."""
        need = self.memory.total(self.micro_images, self.input_images)
        return need <= USABLE_SHARE * self.pod.memory_bytes

    # --- steps ---

    @property
    def steps_per_epoch(self) -> float:
        """Updates per pass over the training images."""
        return self.counts.train / self.recipe.batch.size

    @property
    def steps(self) -> int:
        """Updates of the whole run."""
        return self.recipe.steps(self.counts.train)

    def eval_steps(self) -> list[int]:
        """Return the steps after which the model is evaluated; the last one is always included."""
        every, epochs = (Fraction(str(e)) for e in (self.recipe.train.eval_epochs, self.recipe.train.epochs))
        every = max(every, Fraction(self.recipe.batch.size, self.counts.train))  # no more often than every update
        due = (self.recipe.steps(self.counts.train, k * every) for k in range(1, int(epochs / every) + 1))
        return sorted({*due, self.steps})

    def save_points(self) -> set[int]:
        """Return the steps after which a checkpoint is written."""
        every = self.options.save_steps
        regular = range(every, self.steps, every) if every else ()
        return {*self.eval_steps(), *regular}

    def calls(self, start: int = 0) -> list[range]:
        """Return step ranges of the compiled calls from `start` on; their ends do not depend on `start`."""
        S = self.steps_per_call
        changes = (steps.start for steps, _ in list_size_ranges(self.recipe, self.counts.train))
        boundaries = sorted({0, *range(S, self.steps, S), *changes, *self.save_points()})
        return [range(max(a, start), b) for a, b in pairwise(boundaries) if b > start]

    # --- output ---

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as names and values, for people."""
        p, b, h, w = self.pod, self.recipe.batch, *self.tile
        if b.span <= self.micro_images:
            groups = self.micro_images // b.span
            norm = f"{groups} group{'s' * (groups > 1)} of {b.span} inside each device"
        else:
            norm = f"groups of {b.span} over tiles of {h}x{w} chips" + (f" x {p.cores} cores" if p.cores > 1 else "")
            norm += ", by swing_latency" if self.groups.exchanges else ""
        lanes, need = self.recipe.data.lanes, self.memory.total(self.micro_images, self.input_images)
        cores = f" x {p.cores} cores" if p.cores > 1 else ""
        hosts = f", {p.hosts} hosts" if p.hosts > 1 else ""
        parts = f" in {self.micro_batches} micro-batches of {self.micro_images}" if self.micro_batches > 1 else ""
        images = self.memory.images
        resident = f"; all images on every device ({images / 2**20:,.0f} MiB)" if images else ""
        again = ", with every layer computed again" if self.options.remat == "on" else ""
        excess = ": does not fit, even one batch-norm group at a time" if need > p.memory_bytes else ""
        return [
            ("recipe", f"{self.recipe.name} {self.recipe.digest()}"),
            ("data", f"{self.counts.train:,} train, {self.counts.val:,} val, {self.counts.classes:,} classes"),
            ("model", f"{self.recipe.model.name}, {describe_sizes(self.recipe)}, {self.recipe.model.precision}"),
            *([("frozen", ", ".join(self.recipe.model.freeze))] if self.recipe.model.freeze else []),
            ("pod", f"{p.kind}, {p.shape} torus{cores}{hosts}"),
            ("batch", f"{b.size:,} images, {self.images_per_device} per device{parts}"),
            ("batch norm", norm),
            ("summation", f"{describe_summation(self.options.summation)}, {self.options.payload} payload"),
            *([("muon", f"each matrix once per {self.options.orthogonalize}")] if self.memory.update else []),
            ("input", f"{lanes} lane{'s' * (lanes > 1)}, {count_lanes_per_host(self)} per host{resident}"),
            ("steps", f"{self.steps:,} ({self.steps_per_epoch:.1f} per epoch), {self.steps_per_call} per call"),
            ("memory", f"about {need / 2**20:,.0f} MiB of {p.memory_bytes / 2**20:,.0f} MiB per device{again}{excess}"),
        ]

    def to_dict(self) -> JsonObject:
        """Return the plan as plain values, for programs."""
        return {
            "pod": {name: getattr(self.pod, name) for name in ("kind", "rows", "cols", "cores", "hosts")}
            | {"devices": self.pod.size, **({"slices": self.pod.slices} if self.pod.slices > 1 else {})},
            "counts": {"train": self.counts.train, "val": self.counts.val, "classes": self.counts.classes},
            "images_per_device": self.images_per_device,
            "micro_batches": self.micro_batches,
            "tile": list(self.tile),
            "span": self.recipe.batch.span,
            "summation": self.options.summation,
            "tile_summation": self.options.tile_summation,
            "payload": self.options.payload,
            "bucket_bytes": self.transfer.bucket_bytes,
            "kernels": self.kernels.name if self.kernels else "",
            "deterministic": self.options.deterministic,
            "remat": self.options.remat == "on",
            "orthogonalize": self.options.orthogonalize,
            "lanes_per_host": count_lanes_per_host(self),
            "steps": self.steps,
            "steps_per_epoch": self.steps_per_epoch,
            "steps_per_call": self.steps_per_call,
            "bytes_per_device": {
                "parameters": self.memory.parameters,
                "optimizer": self.memory.optimizer,
                "input": self.memory.input_per_image * self.input_images,
                "activations": self.memory.activations_per_image * self.micro_images,
                "update": self.memory.update,
                "images": self.memory.images,
                "limit": self.pod.memory_bytes,
            },
        }


def count_lanes_per_host(plan: Plan) -> int:
    """Return the most lanes that one host reads; neighbours share a lane if hosts do not divide the lanes."""
    lanes, hosts = Fraction(plan.recipe.data.lanes, plan.pod.hosts).as_integer_ratio()
    return -(-(lanes + hosts - 1) // hosts)  # from h*K/H to (h+1)*K/H, which at worst starts just before a lane ends


# --- making a plan -------------------------------------------------------------------------------------------------


def make_plan(
    recipe: Recipe, pod: Pod, counts: Counts, options: Options = Options(), memory: Memory = Memory()
) -> Plan:
    """Return the plan for a recipe on a pod.

    Args:
        recipe: what to train.
        pod: on which devices; they need not exist.
        counts: of the data.
        options: what the user fixes; the plan chooses the others.
        memory: bytes per device, of which those of the optimizer and the input are adapted to the plan.

    Raises:
        UserError: the recipe does not fit the pod; the message names the nearest values that do.

    >>> from podscale import load_recipe
    >>> plan = make_plan(load_recipe("digits"), Pod("cpu", 2, 2), Counts(1437, 360, 10))
    >>> plan.tile, plan.images_per_device, plan.steps
    ((1, 2), 32, 337)
    """
    check_options(options)
    B, N = recipe.batch.size, pod.size
    if B % N:
        sizes = (B // N * N, (B // N + 1) * N)
        raise UserError(f"batch.size {B} does not divide over {N} devices; {suggest_numbers(B, filter(None, sizes))}")
    options = _decide_messages(options, pod, recipe, counts)
    memory = _fit_memory(memory, recipe, pod, counts, options)
    input_images = B // N * options.steps_per_call * BATCHES_IN_FLIGHT
    micro_batches, tile = _choose_micro_batches(recipe, pod, options, memory, input_images)
    micro_images = B // N // micro_batches
    _check_mixing(recipe, micro_images)
    eval_images = options.eval_images or max(1, min(micro_images, math.ceil(counts.val / N)))
    options = replace(options, micro_batches=micro_batches, eval_images=eval_images)
    return Plan(recipe, pod, counts, options, tile, _choose_kernels(recipe, options, pod, counts), memory)


def set_remat(plan: Plan, *, is_on: bool) -> Plan:
    """Return the plan with its rematerialization decided; fused layers of ResNets keep what they compute."""
    kernels = plan.kernels
    if is_on and plan.recipe.model.name in BOTTLENECK_MODELS:
        kernels = BATCH_NORM if kernels and kernels.are_pallas else None
    return replace(plan, options=replace(plan.options, remat="on" if is_on else "off"), kernels=kernels)


def _decide_messages(options: Options, pod: Pod, recipe: Recipe, counts: Counts) -> Options:
    """Return the options with summation, buckets and steps per call decided.

    The summation is XLA's own all-reduce unless another strategy was chosen (`forecast/choice.py`). On CPUs, where
    loops around convolutions are slow, a call is one step.
    """
    kind = find_input(options.cache)
    if obstacle := kind.explain_obstacle(recipe):
        raise UserError(f"plan.cache {options.cache}: {obstacle}")
    default_steps = 1 if pod.kind == "cpu" else kind.choose_steps_per_call(recipe, pod.size, counts.train)
    strategy = find_summation("xla" if options.summation == "auto" else options.summation)
    options = set_summation(options, strategy.name, BUCKET_MIB if options.bucket_mib < 0 else options.bucket_mib)
    options = options if options.tile_summation != "auto" else replace(options, tile_summation="xla")
    return replace(options, steps_per_call=options.steps_per_call or default_steps)


def _fit_memory(memory: Memory, recipe: Recipe, pod: Pod, counts: Counts, options: Options) -> Memory:
    """Return the memory with the input's bytes, and the optimizer's as the summation lays them out."""
    images = find_input(options.cache).count_bytes(recipe, counts.train + counts.val)
    optimizer = find_summation(options.summation).count_state_bytes(memory.optimizer, pod.size)
    return replace(memory, optimizer=optimizer, input_per_image=images.per_image, images=images.resident)


def _choose_kernels(recipe: Recipe, options: Options, pod: Pod, counts: Counts) -> Kernels | None:
    device, is_bfloat16 = pod.devices[0] if pod.devices else None, recipe.model.precision == "bfloat16"
    has_kernels = getattr(device, "compute_capability", "") == HOPPER_CAPABILITY
    if options.fused == "off":
        return None
    if recipe.model.name in ATTENTION_MODELS:
        return (TRITON if has_kernels else CUDNN) if getattr(device, "platform", "") == "gpu" and is_bfloat16 else None
    if recipe.model.name in CONVNEXTS:
        return TRITON if has_kernels and is_bfloat16 else None
    pixels = recipe.steps(counts.train) * recipe.batch.size // pod.size * recipe.data.image_size**2
    is_faster = recipe.model.name in BOTTLENECK_MODELS and pixels >= MIN_PIXELS_TO_FUSE
    if options.fused == "on" or (has_kernels and is_bfloat16 and is_faster):
        return HOPPER if has_kernels else REFERENCE
    return BATCH_NORM if has_kernels and is_bfloat16 and recipe.model.name.startswith("resnet") else None


def _choose_micro_batches(
    recipe: Recipe, pod: Pod, options: Options, memory: Memory, input_images: int
) -> tuple[int, tuple[int, int]]:
    """Return micro-batches and batch-norm tile: the fewest micro-batches of whole groups that fit the memory."""
    images, span = recipe.batch.size // pod.size, recipe.batch.span
    if options.micro_batches and images % options.micro_batches:
        raise UserError(
            f"plan.micro_batches {options.micro_batches} does not divide {images} images per device; "
            f"{suggest_numbers(options.micro_batches, list_divisors(images))}"
        )
    counts = [options.micro_batches] if options.micro_batches else list_divisors(images)
    fitting = [(M, tile) for M in counts if (tile := choose_tile(span, images // M, pod))]
    if not fitting:
        spans = [s for s in list_divisors(recipe.batch.size) if any(choose_tile(s, images // M, pod) for M in counts)]
        where = f"{images // counts[0]} images per device on a {pod.shape} torus"
        raise UserError(f"batch.span {span} does not fit {where}; {suggest_numbers(span, spans)}")
    affordable = [f for f in fitting if memory.total(images // f[0], input_images) <= USABLE_SHARE * pod.memory_bytes]
    return affordable[0] if affordable else fitting[-1]


def choose_tile(span: int, images: int, pod: Pod) -> tuple[int, int] | None:
    """Return the chips (rows, columns) of a slice that share a group: square, or of few GPU nodes; None if none fit.

    A group has `span` images, a device and micro-batch `images`.

    >>> choose_tile(64, 16, Pod("cpu", 4, 4)), choose_tile(64, 64, Pod("cpu", 4, 4))
    ((2, 2), (1, 1))
    >>> choose_tile(48, 32, Pod("cpu", 4, 4))
    """
    if images % span == 0:
        return 1, 1
    devices, remainder = divmod(span, images)
    if remainder or devices % pod.cores:
        return None
    chips = devices // pod.cores
    tiles = [(h, chips // h) for h in list_divisors(chips) if pod.slice_rows % h == 0 and pod.cols % (chips // h) == 0]
    return min(tiles, key=lambda t: (0 if pod.is_gpu_cluster else abs(t[0] - t[1]), t[0]), default=None)


def _check_mixing(recipe: Recipe, micro_images: int) -> None:
    field = "mixup" if recipe.augment.mixup else "cutmix"
    if (recipe.augment.mixup or recipe.augment.cutmix) and micro_images % 2:
        raise UserError(
            f"augment.{field} pairs neighbours, but a device holds {micro_images} image(s); use an even number"
        )
