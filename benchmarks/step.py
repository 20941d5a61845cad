"""Claim: the ResNet-50 training step (224 px, bfloat16) is at least 1.3 times as fast on one H200 as torch.compile's.

The peers are torchvision's ResNet-50 under torch.compile (channels_last, bfloat16 autocast, label smoothing, fused SGD
with momentum) and the same network in plain flax.nnx with optax's SGD, jitted. Ours is `podscale bench step`: the full
step with LARS and label smoothing, once with batch norm over all images of the device, which is the peers' work, and
once in the recipe's groups of 64, which is more work. All train on made-up images that are already on the device.
Each measurement is a separate process, in turn, so that none inherits another's memory or clocks; medians over rounds
are compared. MFU counts three times the 8.2 GFLOP of a forward pass, against the machine's dense bfloat16 rate.

    python benchmarks/step.py [--images 256 512] [--rounds 2] [--ways torch flax whole groups] [--peak-tflops 989]
    python benchmarks/step.py --evaluate    the same of the evaluation step
    python benchmarks/step.py --ways groups deterministic    what repeatable bits cost

Any other model is measured beside timm's network of the same parameters under torch.compile (bfloat16 autocast,
channels_last for convolutional networks, fused AdamW, label smoothing), on both sides with AdamW and without dropout:

    python benchmarks/step.py --model vit_small --images 256
    python benchmarks/step.py --model efficientnet_b0 convnext_tiny vit_base [--image-size 224]

Its ways are torch, whole (ours; batch norm, if there is any, over all images), groups (ours, groups of 64), and modules
(ours without fused kernels). MFU then counts three times the products and convolutions of our forward pass.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

OURS = [sys.executable, "-m", "podscale", "bench", "step", "resnet50-imagenet-4k", "--json"]
STEPS, REPEATS = 30, 5
RESNET50, RESNET50_FLOPS = "resnet50", 3 * 2 * 4.089e9  # per image
TIMM_NAMES = {
    "vit_tiny": "vit_tiny_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
}  # of others the name is the same
ADAMW = {  # what replaces the recipe's fields for other models than ResNet-50
    "model.stem": "small",
    "optimizer.name": "adamw",
    "optimizer.weight_decay": "0.05",
    "optimizer.second_moment": "0.999",
    "schedule.peak": "1e-3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", nargs="+", default=[RESNET50])
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--ways", nargs="+", choices=list(make_commands(RESNET50, 0, 0)))
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--evaluate", action="store_true", help="the evaluation step instead, without the flax peer")
    parser.add_argument("--peer", choices=["torch", "flax"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(measure_peer(arguments)))
        return
    print(f"{'model':<18}  {'images':>6}  {'what':<26}  {'images/s':>9}  {'ratio':>5}  {'MFU':>5}  {'peak GiB':>8}")
    with tempfile.TemporaryDirectory() as cache:  # later rounds need not compile again
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        for model in arguments.model:
            for images in arguments.images:
                compare(model, images, arguments, environment)


def make_commands(model: str, images: int, image_size: int) -> dict[str, tuple[str, list[str]]]:
    """Return by a short name a description of each measurement and its command."""
    peer = [sys.executable, __file__, "--images", str(images), "--image-size", str(image_size), "--model", model]
    ours = [*OURS, "--images", str(images), "--model.name", model, "--data.image_size", str(image_size)]
    if model != RESNET50:
        ours += [text for field, value in ADAMW.items() for text in (f"--{field}", value)]
    whole = ["--batch.span", str(images)]
    ways = {
        "torch": ("torch.compile", [*peer, "--peer", "torch"]),
        "flax": ("plain flax", [*peer, "--peer", "flax"]),
        "whole": (f"podscale, groups of {images}", [*ours, *whole]),
        "groups": ("podscale, groups of 64", ours),
        "modules": ("podscale, layers not fused", [*ours, "--plan.fused", "off"]),
        "deterministic": ("podscale, deterministic", [*ours, "--plan.deterministic", "true"]),
    }
    return ways if model == RESNET50 else {way: command for way, command in ways.items() if way != "flax"}


def choose_ways(model: str, arguments: argparse.Namespace) -> list[str]:
    """Return the ways to measure a model: those asked for, or those that differ."""
    ways = [way for way in make_commands(model, 0, 0) if way in (arguments.ways or DEFAULT_WAYS)]
    if not arguments.ways and model.startswith(("vit", "convnext")):  # without batch norm, groups are no difference
        ways = ["torch", "whole", "modules"]
    elif not arguments.ways and model != RESNET50:
        ways = ["torch", "whole", "groups"]
    return [way for way in ways if way in EVALUATION_WAYS] if arguments.evaluate else ways


def measure_peer(arguments: argparse.Namespace) -> dict:
    """Measure one peer in this process."""
    images, (model,) = arguments.images[0], arguments.model
    if model != RESNET50:
        return measure_timm(model, images, arguments.image_size, arguments.evaluate)
    return (measure_torch_evaluation if arguments.evaluate else PEERS[arguments.peer])(images)


def compare(model: str, images: int, arguments: argparse.Namespace, environment: dict[str, str]) -> None:
    """Print a table row for each way."""
    commands, ways = make_commands(model, images, arguments.image_size), choose_ways(model, arguments)
    results: dict[str, list[dict]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:
            command = commands[way][1] + ["--evaluate"] * arguments.evaluate
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            results[way].append(json.loads(process.stdout.splitlines()[-1]))
    rates = {way: statistics.median(result["images_per_s"] for result in all_) for way, all_ in results.items()}
    flops = count_flops(model, arguments.image_size) / (3 if arguments.evaluate else 1)
    for way, rate in rates.items():
        peak = max(result["peak_bytes"] for result in results[way]) / 2**30
        ratio = f"{rate / rates['torch']:5.2f}" if "torch" in rates else "    -"
        utilization = rate * flops / (1e12 * arguments.peak_tflops)
        row = f"{model:<18}  {images:6}  {commands[way][0]:<26}  {rate:9,.0f}  {ratio}  {utilization:5.1%}  {peak:8.1f}"
        print(row, flush=True)


@functools.cache
def count_flops(model: str, image_size: int) -> float:
    """Return the multiplications and additions of a training step, per image."""
    if model == RESNET50:
        return RESNET50_FLOPS
    program = (
        "from podscale.forecast.compute import count_work; from podscale.recipe import Recipe, override_recipe; "
        f"changes = {{'model.name': '{model}', 'data.image_size': {image_size}}}; "
        "print(count_work(override_recipe(Recipe(), changes), 1000).flops)"
    )
    # In a process of its own that leaves the GPU to those that are measured.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return float(process.stdout)


def measure_torch_step(images: int) -> dict:
    """Return images per second of torch.compile's step: the median of several repeats."""
    import torch
    import torchvision

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    compute_loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    inputs = torch.randn(images, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (images,), device="cuda")
    forward = torch.compile(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = compute_loss(forward(inputs), labels)
        loss.backward()
        optimizer.step()

    return time_torch(images, step)


def measure_timm(name: str, images: int, image_size: int, evaluate: bool) -> dict:
    """Return images per second of timm's network under torch.compile, in training or evaluation."""
    import timm
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    size = {"img_size": image_size} if name.startswith("vit") else {}
    layout = torch.contiguous_format if name.startswith("vit") else torch.channels_last
    model = timm.create_model(TIMM_NAMES.get(name, name), num_classes=1000, **size)
    model = model.cuda().to(memory_format=layout).train(not evaluate)
    inputs = torch.randn(images, 3, image_size, image_size, device="cuda").to(memory_format=layout)
    labels = torch.randint(0, 1000, (images,), device="cuda")
    correct = torch.zeros((), device="cuda", dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    compute_loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    forward = torch.compile(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = compute_loss(forward(inputs), labels)
        loss.backward()
        optimizer.step()

    def count_correct() -> None:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            correct.add_((forward(inputs).argmax(1) == labels).sum())

    return time_torch(images, count_correct if evaluate else step)


def measure_torch_evaluation(images: int) -> dict:
    """Return images per second of torch.compile's evaluation, which counts correct predictions."""
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last).eval()
    inputs = torch.randn(images, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (images,), device="cuda")
    correct = torch.zeros((), device="cuda", dtype=torch.int64)
    forward = torch.compile(model)

    def step() -> None:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            correct.add_((forward(inputs).argmax(1) == labels).sum())

    return time_torch(images, step)


def time_torch(images: int, step: Callable[[], None]) -> dict:
    """Return images per second of a step, and the peak memory."""
    import torch

    for _ in range(10):
        step()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(STEPS):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / STEPS)
    rate = images / statistics.median(times)
    return {"images_per_s": rate, "peak_bytes": torch.cuda.max_memory_allocated()}


def measure_flax_step(images: int) -> dict:
    """Return images per second of a network as in flax's own examples."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    half = jnp.bfloat16

    def make_convolution(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
        shape = {"kernel_size": (size, size), "strides": stride, "padding": size // 2, "use_bias": False}
        return nnx.Conv(inputs, outputs, **shape, dtype=half, param_dtype=jnp.float32, rngs=rngs)

    def make_norm(features: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
        return nnx.BatchNorm(features, momentum=0.9, dtype=half, param_dtype=jnp.float32, rngs=rngs)

    class Block(nnx.Module):
        def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs):
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
            self.convs = nnx.List([make_convolution(*shape, rngs) for shape in shapes])
            self.norms = nnx.List([make_norm(shape[1], rngs) for shape in shapes])
            projection = [make_convolution(inputs, 4 * width, 1, stride, rngs), make_norm(4 * width, rngs)]
            self.shortcut = nnx.List(projection if stride > 1 or inputs != 4 * width else [])

        def __call__(self, x: jax.Array) -> jax.Array:
            shortcut = x
            for layer in self.shortcut:
                shortcut = layer(shortcut)
            for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
                x = norm(conv(x))
                x = nnx.relu(x if i < 2 else x + shortcut)
            return x

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.stem, self.norm = make_convolution(3, 64, 7, 2, rngs), make_norm(64, rngs)
            blocks, inputs = [], 64
            for stage, number in enumerate((3, 4, 6, 3)):
                for i in range(number):
                    blocks.append(Block(inputs, 64 << stage, 2 if stage and not i else 1, rngs))
                    inputs = 256 << stage
            self.blocks, self.head = nnx.List(blocks), nnx.Linear(2048, 1000, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.norm(self.stem(x)))
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((1, 2)).astype(jnp.float32))

    net = Net(nnx.Rngs(0))
    net.train()
    optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    inputs = jax.random.normal(jax.random.key(0), (images, 224, 224, 3), half)
    labels = jax.random.randint(jax.random.key(1), (images,), 0, 1000)

    @nnx.jit(donate_argnums=(0, 1))
    def step(net: nnx.Module, optimizer: nnx.Optimizer, inputs: jax.Array, labels: jax.Array) -> None:
        def compute_loss(net: nnx.Module) -> jax.Array:
            targets = optax.smooth_labels(jax.nn.one_hot(labels, 1000), 0.1)
            return optax.softmax_cross_entropy(net(inputs), targets).mean()

        optimizer.update(net, nnx.grad(compute_loss)(net))

    call = nnx.cached_partial(step, net, optimizer)
    times = []
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(STEPS):
            call(inputs, labels)
        jax.block_until_ready(nnx.state(net))
        times += [(time.perf_counter() - start) / STEPS] if repeat else []
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {"images_per_s": images / statistics.median(times), "peak_bytes": peak}


PEERS = {"torch": measure_torch_step, "flax": measure_flax_step}
DEFAULT_WAYS = ("torch", "flax", "whole", "groups", "modules")
EVALUATION_WAYS = ("torch", "groups", "modules")  # batch-norm groups do not matter there: `groups` is podscale


if __name__ == "__main__":
    main()
