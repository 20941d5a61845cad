"""Plan: the recipe mapped onto the pod. Everything the machine decides, and nothing that changes what is learnt.

Images per device, micro-batches, the batch-norm tile, gradient summation and the calls that training is cut into all
follow from here. A plan is printed before every run, and needs no device to be made.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from podscale.config.options import Options
from podscale.config.suggestions import divisors, suggest_numbers
from podscale.errors import UserError
from podscale.parallel.batch_norm import Groups
from podscale.pod import CORE, TILE, Pod
from podscale.recipe import Recipe

HOPPER, BOTTLENECKS = "9.0", ("resnet50", "resnet101", "resnet152")  # what fused layers have kernels for
WORTH_FUSING = 1_000_000 * 224**2  # pixels a device trains on: what they save then is what compiling them takes
BUCKET_MIB = 32  # unless something else is chosen
BATCHES_IN_FLIGHT = 3  # one in use and two ahead of it
PICK_BYTES = 16  # sample, left, top, mirrored: what names a crop of a picture that is on the device already
MOST_STEPS_A_CALL = 64  # where the input is no limit: a run that is asked to stop finishes its call first
SPARE = 0.85  # share of a device's memory that a plan may fill; the rest is for the compiler's temporaries


@dataclass(frozen=True)
class Counts:
    """What a plan must know of the data: how many pictures there are, and of how many classes."""

    train: int
    val: int
    classes: int


@dataclass(frozen=True)
class Memory:
    """Bytes per device, by purpose; activations are an estimate until a compiler says more."""

    parameters: int = 0
    optimizer: int = 0
    input_per_image: int = 0
    activations_per_image: int = 0
    pictures: int = 0  # the data set, where it lives on the devices

    def total(self, micro_images: int, input_images: int) -> int:
        """With so many images at work and so many waiting, already on the device."""
        waiting, at_work = self.input_per_image * input_images, self.activations_per_image * micro_images
        return self.parameters + self.optimizer + self.pictures + waiting + at_work


@dataclass(frozen=True)
class Plan:
    """The recipe on the pod; see `make`."""

    recipe: Recipe
    pod: Pod
    counts: Counts
    tile: tuple[int, int]  # chips: rows, columns
    micro_batches: int
    steps_per_call: int
    eval_images: int
    summation: str
    payload: str
    bucket_bytes: int
    save_steps: int
    keep: int
    timeout_s: float
    check_steps: int
    kernels: str  # of fused layers: "hopper" or "plain"; empty: layers are not fused
    deterministic: bool
    memory: Memory
    resident: bool = False  # the pictures live on the devices; what is loaded says which of them, and where cropped

    # --- images ---

    @property
    def images_per_device(self) -> int:
        return self.recipe.batch.size // self.pod.size

    @property
    def micro_images(self) -> int:
        """Images per device and micro-batch."""
        return self.images_per_device // self.micro_batches

    @property
    def input_images(self) -> int:
        """Images on a device that are in use or wait for it."""
        return self.images_per_device * self.steps_per_call * BATCHES_IN_FLIGHT

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """Of a call's labels, over the pod: [steps, micro-batches, images of a micro-batch]."""
        return self.steps_per_call, self.micro_batches, self.recipe.batch.size // self.micro_batches

    @property
    def tile_devices(self) -> int:
        return self.tile[0] * self.tile[1] * self.pod.cores

    @property
    def groups(self) -> Groups:
        """How the images of one device and micro-batch fall into batch-norm groups."""
        span = self.recipe.batch.span
        return Groups(span) if span <= self.micro_images else tiled(self.pod, self.micro_images)

    def positions(self, device: Any) -> Any:
        """Positions of the global batch that device number `device` (in batch order) works on: [micro-batch, image].

        A tile owns a contiguous block; micro-batch j is its j-th slice; the tile's devices split each slice evenly.
        """
        m, M, T = self.micro_images, self.micro_batches, self.tile_devices
        within = np.arange(M)[:, None] * (T * m) + np.arange(m)
        return (device // T) * (T * m * M) + (device % T) * m + within

    # --- steps ---

    @property
    def steps_per_epoch(self) -> float:
        return self.counts.train / self.recipe.batch.size

    @property
    def steps(self) -> int:
        return self.recipe.steps(self.counts.train)

    def eval_steps(self) -> list[int]:
        """Numbers of updates after which the model is evaluated; the last is always among them."""
        every, epochs = (Fraction(str(e)) for e in (self.recipe.train.eval_epochs, self.recipe.train.epochs))
        every = max(every, Fraction(self.recipe.batch.size, self.counts.train))  # no more often than every update
        due = (self.recipe.steps(self.counts.train, k * every) for k in range(1, int(epochs / every) + 1))
        return sorted({*due, self.steps})

    def save_points(self) -> set[int]:
        """Numbers of updates after which a checkpoint is written."""
        regular = range(self.save_steps, self.steps, self.save_steps) if self.save_steps else ()
        return {*self.eval_steps(), *regular}

    def calls(self, start: int = 0) -> list[range]:
        """Step ranges of the compiled calls from `start` on: fixed absolute ranges, whatever was done before."""
        S = self.steps_per_call
        cuts = sorted({0, *range(S, self.steps, S), *self.save_points()})
        return [range(max(a, start), b) for a, b in pairwise(cuts) if b > start]

    # --- words ---

    def rows(self) -> list[tuple[str, str]]:
        """The plan as names and values, for people."""
        p, b, h, w = self.pod, self.recipe.batch, *self.tile
        if b.span <= self.micro_images:
            many = self.micro_images // b.span
            norm = f"{many} group{'s' * (many > 1)} of {b.span} inside each device"
        else:
            norm = f"groups of {b.span} over tiles of {h}x{w} chips" + (f" x {p.cores} cores" if p.cores > 1 else "")
        lanes = self.recipe.data.lanes
        need = self.memory.total(self.micro_images, self.input_images)
        return [
            ("recipe", f"{self.recipe.name} {self.recipe.digest()}"),
            ("data", f"{self.counts.train:,} train, {self.counts.val:,} val, {self.counts.classes:,} classes"),
            ("model", f"{self.recipe.model.name}, {self.recipe.data.image_size} px, {self.recipe.model.precision}"),
            *([("frozen", ", ".join(self.recipe.model.freeze))] if self.recipe.model.freeze else []),
            ("pod", f"{p.kind}, {p.shape} torus" + (f" x {p.cores} cores" if p.cores > 1 else "") + _plural_hosts(p)),
            ("batch", f"{b.size:,} images, {self.images_per_device} a device" + _slices(self)),
            ("batch norm", norm),
            ("summation", f"{self.summation}, {self.payload} payload"),
            ("input", f"{lanes} lane{'s' * (lanes > 1)}, {lanes_per_host(self)} a host" + _where(self)),
            ("steps", f"{self.steps:,} ({self.steps_per_epoch:.1f} an epoch), {self.steps_per_call} a call"),
            (
                "memory",
                f"about {need / 2**20:,.0f} MiB of {p.memory_bytes / 2**20:,.0f} MiB a device" + _too_much(need, p),
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for programs."""
        return {
            "pod": {"kind": self.pod.kind, "rows": self.pod.rows, "cols": self.pod.cols, "cores": self.pod.cores}
            | {"hosts": self.pod.hosts, "devices": self.pod.size},
            "counts": {"train": self.counts.train, "val": self.counts.val, "classes": self.counts.classes},
            "images_per_device": self.images_per_device,
            "micro_batches": self.micro_batches,
            "tile": list(self.tile),
            "span": self.recipe.batch.span,
            "summation": self.summation,
            "payload": self.payload,
            "bucket_bytes": self.bucket_bytes,
            "kernels": self.kernels,
            "deterministic": self.deterministic,
            "lanes_per_host": lanes_per_host(self),
            "steps": self.steps,
            "steps_per_epoch": self.steps_per_epoch,
            "steps_per_call": self.steps_per_call,
            "bytes_per_device": {
                "parameters": self.memory.parameters,
                "optimizer": self.memory.optimizer,
                "input": self.memory.input_per_image * self.input_images,
                "activations": self.memory.activations_per_image * self.micro_images,
                "pictures": self.memory.pictures,
                "limit": self.pod.memory_bytes,
            },
        }


def tiled(pod: Pod, images: int) -> Groups:
    """Groups that are spread over tiles, so many of their images on each device.

    One sum over the whole tile is one latency, and the better choice on TPUs
    (`tests/integration/test_tpu_program.py`). Between CPUs it is a ring through all devices of all processes, so the
    devices of each process are summed first.
    """
    inner = (CORE,) if pod.kind == "cpu" and pod.hosts > 1 and pod.cores > 1 else ()
    return Groups(images, TILE, inner)


def lanes_per_host(plan: Plan) -> int:
    """The most lanes that one host reads; neighbours share a lane where hosts do not divide the lanes."""
    lanes, hosts = plan.recipe.data.lanes, plan.pod.hosts  # host h reads lanes from h*K/H up to (h+1)*K/H
    return max(-(-(h + 1) * lanes // hosts) - h * lanes // hosts for h in range(hosts))


def _plural_hosts(pod: Pod) -> str:
    return f", {pod.hosts} hosts" if pod.hosts > 1 else ""


def _where(plan: Plan) -> str:
    return f"; all pictures on every device ({plan.memory.pictures / 2**20:,.0f} MiB)" if plan.resident else ""


def _too_much(need: int, pod: Pod) -> str:
    return ": more than there is, even in slices of one group" if need > pod.memory_bytes else ""


def _slices(plan: Plan) -> str:
    return f" in {plan.micro_batches} micro-batches of {plan.micro_images}" if plan.micro_batches > 1 else ""


# --- making one ----------------------------------------------------------------------------------------------------


def make_plan(
    recipe: Recipe,
    pod: Pod,
    counts: Counts,
    options: Options = Options(),
    memory: Memory = Memory(),
) -> Plan:
    """The plan for a recipe on a pod, or one sentence that says why there is none.

    >>> from podscale import recipe
    >>> plan = make(recipe.load("digits"), Pod("cpu", 2, 2), Counts(1437, 360, 10))
    >>> plan.tile, plan.images_per_device, plan.steps
    ((1, 2), 32, 337)
    """
    _check_options(options)
    B, N = recipe.batch.size, pod.size
    if B % N:
        sizes = (B // N * N, (B // N + 1) * N)
        raise UserError(f"batch.size {B} does not divide over {N} devices; {suggest_numbers(B, filter(None, sizes))}")
    summation = _summation(options)
    if summation == "sharded":
        memory = replace(memory, optimizer=-(-memory.optimizer // N))
    resident = options.cache == "device"
    if resident:
        if why := not_resident(recipe):
            raise UserError(f"plan.cache device: {why}")
        held = 3 * recipe.data.image_size**2 * (counts.train + counts.val)
        memory = replace(memory, input_per_image=PICK_BYTES, pictures=held)
    steps_per_call = _steps_per_call(recipe, pod, options, counts)
    micro_batches, tile = _slicing(recipe, pod, options, memory, B // N * steps_per_call * BATCHES_IN_FLIGHT)
    _check_mixing(recipe, B // N // micro_batches)
    return Plan(
        recipe=recipe,
        pod=pod,
        counts=counts,
        tile=tile,
        micro_batches=micro_batches,
        steps_per_call=steps_per_call,
        eval_images=options.eval_images or _eval_images(B // N // micro_batches, counts.val, N),
        summation=summation,
        payload=options.payload,
        bucket_bytes=(BUCKET_MIB if options.bucket_mib < 0 else options.bucket_mib) << 20,
        save_steps=options.save_steps,
        keep=options.keep,
        timeout_s=options.timeout_s,
        check_steps=options.check_steps,
        kernels=_kernels(recipe, options, pod, counts),
        deterministic=options.deterministic,
        memory=memory,
        resident=resident,
    )


def _kernels(recipe: Recipe, options: Options, pod: Pod, counts: Counts) -> str:
    known = bool(pod.devices) and getattr(pod.devices[0], "compute_capability", "") == HOPPER
    pixels = recipe.steps(counts.train) * recipe.batch.size // pod.size * recipe.data.image_size**2
    gains = recipe.model.name in BOTTLENECKS and recipe.model.precision == "bfloat16" and pixels >= WORTH_FUSING
    if options.fused == "off" or (options.fused == "auto" and not (known and gains)):
        return ""
    return "hopper" if known else "plain"


def _check_options(options: Options) -> None:
    for field, value in vars(options).items():
        least = -1 if field == "bucket_mib" else 0
        if isinstance(value, int | float) and value < least:
            raise UserError(f"plan.{field} must be {least} or more, not {value}")


def _slicing(recipe: Recipe, pod: Pod, options: Options, memory: Memory, waiting: int) -> tuple[int, tuple[int, int]]:
    """Micro-batches and batch-norm tile: the fewest slices that fit the memory and hold whole groups."""
    images, span = recipe.batch.size // pod.size, recipe.batch.span
    if options.micro_batches and images % options.micro_batches:
        raise UserError(
            f"plan.micro_batches {options.micro_batches} does not divide {images} images per device; "
            f"{suggest_numbers(options.micro_batches, divisors(images))}"
        )
    counts = [options.micro_batches] if options.micro_batches else divisors(images)
    fitting = [(M, tile) for M in counts if (tile := tile_for(span, images // M, pod))]
    if not fitting:
        spans = [s for s in divisors(recipe.batch.size) if any(tile_for(s, images // M, pod) for M in counts)]
        where = f"{images // counts[0]} images per device on a {pod.shape} torus"
        raise UserError(f"batch.span {span} does not fit {where}; {suggest_numbers(span, spans)}")
    roomy = [f for f in fitting if memory.total(images // f[0], waiting) <= SPARE * pod.memory_bytes]
    return roomy[0] if roomy else fitting[-1]


def tile_for(span: int, images: int, pod: Pod) -> tuple[int, int] | None:
    """The chips (rows, columns) that share one batch-norm group, as square as can be; None if nothing fits.

    >>> tile_for(64, 16, Pod("cpu", 4, 4)), tile_for(64, 64, Pod("cpu", 4, 4)), tile_for(48, 32, Pod("cpu", 4, 4))
    ((2, 2), (1, 1), None)
    """
    if images % span == 0:
        return 1, 1
    devices, rest = divmod(span, images)
    if rest or devices % pod.cores:
        return None
    chips = devices // pod.cores
    tiles = [(h, chips // h) for h in divisors(chips) if pod.rows % h == 0 and pod.cols % (chips // h) == 0]
    return min(tiles, key=lambda t: (abs(t[0] - t[1]), t[0]), default=None)


def _summation(options: Options) -> str:
    """XLA's own all-reduce unless something else is chosen (`forecast/choice.py`)."""
    return "xla" if options.summation == "auto" else options.summation


def not_resident(recipe: Recipe) -> str:
    """Why this recipe's pictures cannot live on the devices and be cropped there; empty where they can."""
    if recipe.data.source not in ("digits", "npz", "cifar", "mnist"):
        return f"pictures of data.source {recipe.data.source} are in files; decoded is as far as they can be kept"
    if recipe.augment.crop == "resized":
        return "augment.crop resized needs the host; padded and centre do not"
    if recipe.augment.randaugment:
        return "augment.randaugment needs the host; leave it out"
    return ""


def _steps_per_call(recipe: Recipe, pod: Pod, options: Options, counts: Counts) -> int:
    """One on CPUs, where loops around convolutions are slow; else as many as keep the input under 256 MiB, up to 8.

    Where the pictures are on the device already, an epoch.
    """
    if options.steps_per_call or pod.kind == "cpu":
        return options.steps_per_call or 1
    if options.cache == "device":
        return max(1, min(MOST_STEPS_A_CALL, round(counts.train / recipe.batch.size)))
    image_bytes = 3 * recipe.data.image_size**2
    return max(1, min(8, (256 << 20) // (recipe.batch.size // pod.size * image_bytes)))


def _eval_images(micro_images: int, val: int, devices: int) -> int:
    return max(1, min(micro_images, math.ceil(val / devices)))


def _check_mixing(recipe: Recipe, micro_images: int) -> None:
    if recipe.augment.mixup and micro_images % 2:
        raise UserError(
            f"augment.mixup pairs neighbours, but a device holds {micro_images} image(s); use an even number"
        )
