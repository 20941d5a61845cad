"""Claim: the ResNet-50 training step (224 px, bfloat16) is no slower on one GPU than torch.compile's.

The peer is torchvision's ResNet-50 under torch.compile: channels_last, bfloat16 autocast, label smoothing, fused SGD
with momentum. Ours is `podscale bench step`: the full step with LARS and label smoothing, once with batch norm over all
images of the device, which is the peer's work, and once in the recipe's groups of 64, which is more work.
Both train on made-up pictures that are already on the device. Each measurement is a process of its own, ours and the
peer's in turn, so that neither inherits the other's memory or clocks; medians over rounds are compared.

    python benchmarks/step.py [--images 256 512] [--rounds 2]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

OURS = [sys.executable, "-m", "podscale", "bench", "step", "resnet50-imagenet-4k", "--json"]
STEPS, REPEATS = 30, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(torch_step(arguments.peer)))
        return
    print(f"{'images':>6}  {'what':<24}  {'images/s':>9}  {'ratio':>5}  {'peak GiB':>8}")
    with tempfile.TemporaryDirectory() as cache:  # later rounds need not compile again
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        for images in arguments.images:
            compare(images, arguments.rounds, environment)


def compare(images: int, rounds: int, environment: dict[str, str]) -> None:
    """One table row for the peer and one for each of ours."""
    commands = {
        "torch.compile": [sys.executable, __file__, "--peer", str(images)],
        f"podscale, span {images}": [*OURS, "--images", str(images), "--batch.span", str(images)],
        "podscale, span 64": [*OURS, "--images", str(images)],
    }
    found: dict[str, list[dict]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    rates = {name: statistics.median(f["images_per_s"] for f in all_) for name, all_ in found.items()}
    for name, rate in rates.items():
        peak = max(f["peak_bytes"] for f in found[name]) / 2**30
        print(f"{images:6}  {name:<24}  {rate:9,.0f}  {rate / rates['torch.compile']:5.2f}  {peak:8.1f}", flush=True)


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


if __name__ == "__main__":
    main()
