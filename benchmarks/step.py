"""Claim: the ResNet-50 training step (224 px, bfloat16) is at least 1.3 times as fast on one H200 as torch.compile's.

The peers are torchvision's ResNet-50 under torch.compile (channels_last, bfloat16 autocast, label smoothing, fused SGD
with momentum) and the same network in plain flax.nnx with optax's SGD, jitted. Ours is `podscale bench step`: the full
step with LARS and label smoothing, once with batch norm over all images of the device, which is the peers' work, and
once in the recipe's groups of 64, which is more work. All train on made-up images that are already on the device.
Each measurement is a separate process, in turn, so that none inherits another's memory or clocks; medians over rounds
are compared. MFU counts three times the 8.2 GFLOP of a forward pass, against the machine's dense bfloat16 rate.

    python benchmarks/step.py [--images 256 512] [--rounds 2] [--ways torch flax whole groups] [--peak-tflops 989]
    python benchmarks/step.py --evaluate    the same of the evaluation step
"""

import argparse
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
FLOPS = 3 * 2 * 4.089e9  # per image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(make_commands(0)), default=list(make_commands(0)))
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--evaluate", action="store_true", help="the evaluation step instead, without the flax peer")
    parser.add_argument("--peer", choices=["torch", "flax"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer = measure_torch_evaluation if arguments.evaluate else PEERS[arguments.peer]
        print(json.dumps(peer(arguments.images[0])))
        return
    if arguments.evaluate:
        arguments.ways = [way for way in arguments.ways if way in EVALUATION_WAYS]
    print(f"{'images':>6}  {'what':<30}  {'images/s':>9}  {'ratio':>5}  {'MFU':>5}  {'peak GiB':>8}")
    with tempfile.TemporaryDirectory() as cache:  # later rounds need not compile again
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        for images in arguments.images:
            compare(images, arguments, environment)


def make_commands(images: int) -> dict[str, tuple[str, list[str]]]:
    """Return by a short name a description of each measurement and its command."""
    peer = [sys.executable, __file__, "--images", str(images), "--peer"]
    return {
        "torch": ("torch.compile", [*peer, "torch"]),
        "flax": ("plain flax", [*peer, "flax"]),
        "whole": (f"podscale, groups of {images}", [*OURS, "--images", str(images), "--batch.span", str(images)]),
        "groups": ("podscale, groups of 64", [*OURS, "--images", str(images)]),
        "modules": ("podscale, layers not fused", [*OURS, "--images", str(images), "--plan.fused", "off"]),
    }


def compare(images: int, arguments: argparse.Namespace, environment: dict[str, str]) -> None:
    """Print a table row for each way."""
    results: dict[str, list[dict]] = {way: [] for way in arguments.ways}
    for _ in range(arguments.rounds):
        for way in arguments.ways:
            command = make_commands(images)[way][1] + ["--evaluate"] * arguments.evaluate
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            results[way].append(json.loads(process.stdout.splitlines()[-1]))
    rates = {way: statistics.median(result["images_per_s"] for result in all_) for way, all_ in results.items()}
    for way, rate in rates.items():
        peak = max(result["peak_bytes"] for result in results[way]) / 2**30
        ratio = f"{rate / rates['torch']:5.2f}" if "torch" in rates else "    -"
        utilization = rate * FLOPS / (3 if arguments.evaluate else 1) / (1e12 * arguments.peak_tflops)
        print(
            f"{images:6}  {make_commands(images)[way][0]:<30}  {rate:9,.0f}  {ratio}  {utilization:5.1%}  {peak:8.1f}",
            flush=True,
        )


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
EVALUATION_WAYS = ("torch", "groups", "modules")  # batch-norm groups do not matter there: `groups` is podscale


if __name__ == "__main__":
    main()
