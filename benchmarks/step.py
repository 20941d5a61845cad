"""Claim: the ResNet-50 training step (224 px, bfloat16) is at least 1.3 times as fast on one H200 as torch.compile's.

The peers are torchvision's ResNet-50 under torch.compile (channels_last, bfloat16 autocast, label smoothing, fused SGD
with momentum) and the same network in plain flax.nnx with optax's SGD, jitted. Ours is `podscale bench step`: the full
step with LARS and label smoothing, once with batch norm over all images of the device, which is the peers' work, and
once in the recipe's groups of 64, which is more work. All train on made-up pictures that are on the device already.
Each measurement is a process of its own, in turn, so that none inherits another's memory or clocks; medians over rounds
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
FLOPS = 3 * 2 * 4.089e9  # of an image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(commands(0)), default=list(commands(0)))
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--evaluate", action="store_true", help="the evaluation step instead, without the flax peer")
    parser.add_argument("--peer", choices=["torch", "flax"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer = torch_evaluation if arguments.evaluate else PEERS[arguments.peer]
        print(json.dumps(peer(arguments.images[0])))
        return
    if arguments.evaluate:
        arguments.ways = [way for way in arguments.ways if way in EVALUATED]
    print(f"{'images':>6}  {'what':<30}  {'images/s':>9}  {'ratio':>5}  {'MFU':>5}  {'peak GiB':>8}")
    with tempfile.TemporaryDirectory() as cache:  # later rounds need not compile again
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        for images in arguments.images:
            compare(images, arguments, environment)


def commands(images: int) -> dict[str, tuple[str, list[str]]]:
    """By a short name, what is measured and how."""
    peer = [sys.executable, __file__, "--images", str(images), "--peer"]
    return {
        "torch": ("torch.compile", [*peer, "torch"]),
        "flax": ("plain flax", [*peer, "flax"]),
        "whole": (f"podscale, groups of {images}", [*OURS, "--images", str(images), "--batch.span", str(images)]),
        "groups": ("podscale, groups of 64", [*OURS, "--images", str(images)]),
        "modules": ("podscale, layers not fused", [*OURS, "--images", str(images), "--plan.fused", "off"]),
    }


def compare(images: int, arguments: argparse.Namespace, environment: dict[str, str]) -> None:
    """A table row for each way."""
    found: dict[str, list[dict]] = {way: [] for way in arguments.ways}
    for _ in range(arguments.rounds):
        for way in arguments.ways:
            command = commands(images)[way][1] + ["--evaluate"] * arguments.evaluate
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    rates = {way: statistics.median(f["images_per_s"] for f in all_) for way, all_ in found.items()}
    for way, rate in rates.items():
        peak = max(f["peak_bytes"] for f in found[way]) / 2**30
        ratio = f"{rate / rates['torch']:5.2f}" if "torch" in rates else "    -"
        used = rate * FLOPS / (3 if arguments.evaluate else 1) / (1e12 * arguments.peak_tflops)
        print(
            f"{images:6}  {commands(images)[way][0]:<30}  {rate:9,.0f}  {ratio}  {used:5.1%}  {peak:8.1f}", flush=True
        )


def torch_step(images: int) -> dict:
    """Images per second of torch.compile's step: the median of several stretches."""
    import torch
    import torchvision

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    pictures = torch.randn(images, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (images,), device="cuda")
    forward = torch.compile(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(forward(pictures), labels)
        loss.backward()
        optimizer.step()

    return torch_timed(images, step)


def torch_evaluation(images: int) -> dict:
    """The same of its evaluation: right answers are counted."""
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last).eval()
    pictures = torch.randn(images, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (images,), device="cuda")
    right = torch.zeros((), device="cuda", dtype=torch.int64)
    forward = torch.compile(model)

    def step() -> None:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            right.add_((forward(pictures).argmax(1) == labels).sum())

    return torch_timed(images, step)


def torch_timed(images: int, step: Callable[[], None]) -> dict:
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


def flax_step(images: int) -> dict:
    """The same of a network as flax's own examples have it."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    half = jnp.bfloat16

    def convolution(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
        shape = {"kernel_size": (size, size), "strides": stride, "padding": size // 2, "use_bias": False}
        return nnx.Conv(inputs, outputs, **shape, dtype=half, param_dtype=jnp.float32, rngs=rngs)

    def normalization(features: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
        return nnx.BatchNorm(features, momentum=0.9, dtype=half, param_dtype=jnp.float32, rngs=rngs)

    class Block(nnx.Module):
        def __init__(self, inputs: int, width: int, stride: int, rngs: nnx.Rngs):
            shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
            self.convs = nnx.List([convolution(*shape, rngs) for shape in shapes])
            self.norms = nnx.List([normalization(shape[1], rngs) for shape in shapes])
            beside = [convolution(inputs, 4 * width, 1, stride, rngs), normalization(4 * width, rngs)]
            self.beside = nnx.List(beside if stride > 1 or inputs != 4 * width else [])

        def __call__(self, x: jax.Array) -> jax.Array:
            rest = x
            for layer in self.beside:
                rest = layer(rest)
            for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
                x = norm(conv(x))
                x = nnx.relu(x if i < 2 else x + rest)
            return x

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.stem, self.norm = convolution(3, 64, 7, 2, rngs), normalization(64, rngs)
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
    pictures = jax.random.normal(jax.random.key(0), (images, 224, 224, 3), half)
    labels = jax.random.randint(jax.random.key(1), (images,), 0, 1000)

    @nnx.jit(donate_argnums=(0, 1))
    def step(net: nnx.Module, optimizer: nnx.Optimizer, pictures: jax.Array, labels: jax.Array) -> None:
        def loss_of(net: nnx.Module) -> jax.Array:
            targets = optax.smooth_labels(jax.nn.one_hot(labels, 1000), 0.1)
            return optax.softmax_cross_entropy(net(pictures), targets).mean()

        optimizer.update(net, nnx.grad(loss_of)(net))

    call = nnx.cached_partial(step, net, optimizer)
    times = []
    for repeat in range(REPEATS + 1):
        began = time.perf_counter()
        for _ in range(STEPS):
            call(pictures, labels)
        jax.block_until_ready(nnx.state(net))
        times += [(time.perf_counter() - began) / STEPS] if repeat else []
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {"images_per_s": images / statistics.median(times), "peak_bytes": peak}


PEERS = {"torch": torch_step, "flax": flax_step}
EVALUATED = ("torch", "groups", "modules")  # groups have no meaning there: it is podscale's


if __name__ == "__main__":
    main()
