"""Claim: the ResNet-50 training step (224 px, bfloat16) is no slower on one GPU than torch.compile's.

The peer is torchvision's ResNet-50 under torch.compile: channels_last, bfloat16 autocast, label smoothing, fused SGD
with momentum. Ours is `podscale bench step`: the full step with LARS, label smoothing and batch norm in groups of 64.
Both work on made-up pictures that are already on the device. Each measurement is its own process, ours and the peer's
in turn, so that neither inherits the other's memory or clocks; medians are compared.

    python benchmarks/step.py [--images 256 512] [--rounds 3]
"""

import argparse
import json
import statistics
import subprocess
import sys

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
    print(f"{'images':>6}  {'podscale':>9}  {'torch.compile':>13}  ratio  {'GiB':>5}  {'GiB':>5} (images/s, peak)")
    for images in arguments.images:
        rounds = [(_ours(images), _peer(images)) for _ in range(arguments.rounds)]
        ours, peer = (statistics.median(r[i]["images_per_s"] for r in rounds) for i in (0, 1))
        memory = [max(r[i]["peak_bytes"] for r in rounds) / 2**30 for i in (0, 1)]
        print(
            f"{images:6}  {ours:9,.0f}  {peer:13,.0f}  {ours / peer:5.2f}  {memory[0]:5.1f}  {memory[1]:5.1f}",
            flush=True,
        )


def _ours(images: int) -> dict:
    return _json([*OURS, "--images", str(images)])


def _peer(images: int) -> dict:
    return _json([sys.executable, __file__, "--peer", str(images)])


def _json(command: list[str]) -> dict:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


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
