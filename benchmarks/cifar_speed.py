"""Claim: one H200 learns CIFAR-10 to 94 % mean test accuracy in under 2 seconds, compilation apart.

Ours is the recipe `cifar10-fast`, so many seeds in one process: the program is compiled once and called for every seed,
which is no part of it. Its pictures are on the device before the clock starts, as are the weights of each seed, its
whitened first layer included. The clock runs from before the first batch is drawn up. It is read when the last update
is done, and again when the accuracy over all test pictures is known, which are looked at once. A training before the
first that counts is for warming up, and counts for nothing.

The peer, if PyTorch is installed, does the same work on the same machine right after: network, pictures, batch, epochs,
augmentation, optimizer and views are the same, under torch.compile, channels_last, in float16, with its pictures on the
GPU, as its author's own code has it. It is warmed up and timed alike. Each side has a process of its own.

    python benchmarks/cifar_speed.py cifar10.npz [--seeds 10] [--set train.epochs=8.5 ...] [--only podscale]

To tune, validate on pictures of the training set: --set data.hold_out=0.1.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from podscale import recipe as recipes
from podscale.recipe import Recipe

SIDES = ("podscale", "torch")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="CIFAR-10 as an .npz file")
    parser.add_argument("--seeds", type=int, default=10, help="trainings that count")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="other values of recipe fields")
    parser.add_argument("--only", choices=SIDES, help="one side alone")
    parser.add_argument("--steps-per-call", type=int, default=0, help="updates per call of ours; 0: an epoch on a GPU")
    parser.add_argument("--mode", default="default", help="of torch.compile, such as max-autotune; eager: none")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    if arguments.side:
        run = ours if arguments.side == "podscale" else torchs
        print(json.dumps(run(recipe_of(arguments), arguments)), flush=True)
        return
    found = {side: measured(side) for side in [arguments.only] if side} or {side: measured(side) for side in there()}
    for side, all_ in found.items():
        tell(side, all_)
    if len(found) > 1:
        spent = {side: statistics.fmean(run["total_s"] for run in all_["runs"]) for side, all_ in found.items()}
        print(f"ratio: torch takes {spent['torch'] / spent['podscale']:.2f} times as long")


def there() -> list[str]:
    """The sides that can be run here."""
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: podscale alone")
        return ["podscale"]
    return list(SIDES)


def measured(side: str) -> dict[str, Any]:
    """What one side found, in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if side == "torch" else {})
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def tell(side: str, found: dict[str, Any]) -> None:
    runs = found["runs"]
    print(f"{side} on {found['device']}; {found['apart']}")
    for number, run in enumerate(runs, 1):
        print(f"  {number:3}  {run['accuracy']:7.2%}  {run['train_s']:7.3f} s  {run['total_s']:7.3f} s with evaluation")
    for name, scale, unit in (("accuracy", 100, "%"), ("train_s", 1, "s"), ("total_s", 1, "s")):
        values = [scale * run[name] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        print(f"  {name:<8}  mean {statistics.fmean(values):.3f} {unit}, standard deviation {spread:.3f}")


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    changes = dict(change.split("=", 1) for change in arguments.set)
    recipe = recipes.load("cifar10-fast").override({"data.path": arguments.data} | changes)
    if recipe.augment.erase or recipe.augment.mixup:
        raise SystemExit("erasing and mixing draw by the seed inside the program, which then is not one for all seeds")
    return recipe


def seeds(arguments: argparse.Namespace) -> range:
    """The first is for warming up."""
    return range(arguments.seeds + 1)


# --- ours ----------------------------------------------------------------------------------------------------------


def ours(recipe: Recipe, arguments: argparse.Namespace) -> dict[str, Any]:
    """All seeds by one compiled program."""
    import jax

    from podscale import pod as pods
    from podscale.config.options import Options
    from podscale.training import compilation, setup
    from podscale.training import evaluate as evaluates

    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compilations.append(name) if "backend_compile" in name else None
    )
    pod, options = pods.find(), Options(cache="device", steps_per_call=arguments.steps_per_call)
    first = setup.prepare(recipe, pod, options)
    counts = first.plan.counts
    began = time.perf_counter()
    call, evaluate = compilation.compile_train_step(first), evaluates.Evaluator(first)
    compile_s = time.perf_counter() - began
    runs, fit_s = [], 0.0
    for seed in seeds(arguments):
        fresh = setup.assemble(recipe.override({"train.seed": seed}), pod, counts, options, data=first.data)
        began = time.perf_counter()
        job = setup.fitted(fresh)
        jax.block_until_ready(job.state)
        fit_s, before = time.perf_counter() - began, len(compilations)
        runs.append(one_of_ours(job, call, evaluate))
        if seed and len(compilations) > before:
            raise SystemExit(f"something was compiled while seed {seed} was timed: {compilations[before:]}")
    apart = f"apart: {compile_s:.1f} s of compiling once, {fit_s:.2f} s of whitening a seed"
    device = f"{first.mesh.size} x {jax.devices()[0].device_kind}"
    return {"runs": runs[1:], "device": f"{device}, {first.plan.steps_per_call} updates a call", "apart": apart}


def one_of_ours(job: Any, call: Any, evaluate: Any) -> dict[str, float]:
    """One training, timed."""
    import jax
    import numpy as np

    from podscale.training import setup

    state, began = job.state, time.perf_counter()
    with setup.train_batches(job, job.plan.calls()) as batches:
        for batch in batches:
            state, _ = call(state, batch.images, batch.labels, np.int32(batch.count))
        jax.block_until_ready(state)
        train_s = time.perf_counter() - began
        found = evaluate(state)
        total_s = time.perf_counter() - began
    return {"accuracy": found["accuracy"], "train_s": train_s, "total_s": total_s}


# --- PyTorch's -----------------------------------------------------------------------------------------------------


def torchs(recipe: Recipe, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same trainings in PyTorch, as its users write them."""
    import torch

    if not (recipe.augment.flip and recipe.augment.alternate and recipe.augment.crop == "padded"):
        raise SystemExit("the peer mirrors by turns and crops with padding; leave the recipe's augmentation so")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    splits = torch_data(recipe, device)
    net = torch_net(recipe).to(device, memory_format=torch.channels_last)
    compiled = net if arguments.mode == "eager" else torch.compile(net, mode=arguments.mode)
    orthogonal = torch_orthogonal if arguments.mode == "eager" else torch.compile(torch_orthogonal)
    runs, began = [], time.perf_counter()
    for seed in seeds(arguments):
        torch.manual_seed(seed)
        net.reset(splits["train"][0][:5000])
        runs.append(one_of_torchs(recipe, net, compiled, orthogonal, splits, device))
        if not seed:
            warm_s = time.perf_counter() - began
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {
        "runs": runs[1:],
        "device": f"{name}, torch.compile mode {arguments.mode}",
        "apart": f"apart: {warm_s:.1f} s of compiling and warming up, and whitening",
    }


def torch_data(recipe: Recipe, device: Any) -> dict[str, tuple[Any, Any]]:
    """Normalized pictures [n, 3, 32, 32] and labels of either split, on the device."""
    import torch

    from podscale.data.index.dataset import open_index

    found, kind = open_index(recipe.data), torch_dtype(device)
    mean, std = (torch.tensor(value, device=device).view(1, 3, 1, 1) for value in (recipe.data.mean, recipe.data.std))
    splits = {}
    for name, index in (("train", found.train), ("val", found.val)):
        pixels = torch.from_numpy(index.images).to(device).permute(0, 3, 1, 2).float() / 255
        images = ((pixels - mean) / std).to(kind).to(memory_format=torch.channels_last)
        splits[name] = images, torch.from_numpy(index.labels).to(device).long()
    return splits


def torch_dtype(device: Any) -> Any:
    import torch

    return torch.float16 if device.type == "cuda" else torch.float32


def torch_net(recipe: Recipe) -> Any:
    """`podscale.models.cifarnet` again."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Norm(nn.BatchNorm2d):
        def __init__(self, features: int) -> None:
            super().__init__(features, momentum=1 - recipe.train.stats_momentum)
            self.weight.requires_grad = False

    class Group(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, padding="same", bias=False)
            self.norm1 = Norm(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, padding="same", bias=False)
            self.norm2 = Norm(outputs)

        def forward(self, x: Any) -> Any:
            x = functional.gelu(self.norm1(functional.max_pool2d(self.conv1(x), 2)), approximate="tanh")
            return functional.gelu(self.norm2(self.conv2(x)), approximate="tanh")

    class Net(nn.Module):
        def __init__(self, width: int, classes: int) -> None:
            super().__init__()
            self.whiten = nn.Conv2d(3, 24, 2)
            self.whiten.weight.requires_grad = False
            self.groups = nn.Sequential(Group(24, width), Group(width, 4 * width), Group(4 * width, 4 * width))
            self.head = nn.Linear(4 * width, classes, bias=False)
            kind = torch_dtype(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            for module in self.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    module.to(kind)

        def forward(self, x: Any, early: bool) -> Any:
            bias = self.whiten.bias if early else self.whiten.bias.detach()
            x = functional.gelu(functional.conv2d(x, self.whiten.weight, bias), approximate="tanh")
            x = self.groups(x)
            x = functional.max_pool2d(x, x.shape[-1]).flatten(1)  # amax's gradient, compiled, is 0/0 in float16
            return self.head(x) / x.shape[1]

        @torch.no_grad()
        def reset(self, images: Any) -> None:
            """Draws all anew, and whitens by these pictures."""
            for module in self.modules():
                if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
                    module.reset_parameters()
                if isinstance(module, nn.Conv2d) and module is not self.whiten:
                    nn.init.dirac_(module.weight[: module.weight.shape[1]])
            nn.init.normal_(self.head.weight)
            self.whiten.bias.zero_()
            patches = functional.unfold(images.float(), 2).transpose(1, 2).reshape(-1, 12)
            variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
            filters = (directions / (variances + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
            self.whiten.weight.copy_(torch.cat([filters, -filters]))

    return Net(recipe.model.width, recipe.data.classes)


def torch_orthogonal(matrix: Any, steps: int) -> Any:
    """Newton and Schulz's iteration towards the nearest orthogonal matrix."""
    import torch

    a, b, c = NEWTON_SCHULZ
    x = matrix.to(torch.bfloat16)
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def one_of_torchs(recipe: Recipe, net: Any, compiled: Any, orthogonal: Any, splits: Any, device: Any) -> dict:
    """One training, timed."""
    import torch
    from torch.nn import functional

    wanted, batch, (images, labels) = recipe.optimizer, recipe.batch.size, splits["train"]
    kernels = [p for p in net.groups.parameters() if p.ndim == 4]
    biases = [p for p in net.groups.parameters() if p.ndim == 1 and p.requires_grad]
    # The loss is a sum here, because small gradients would vanish in float16, so rates are those of one picture.
    parts = [([net.whiten.bias], recipe.schedule.bias_peak, 0.0), (biases, recipe.schedule.bias_peak, 0.0)]
    parts += [([net.head.weight], recipe.schedule.head_peak, wanted.weight_decay * batch)]
    groups = [{"params": p, "lr": peak / batch, "weight_decay": decay} for p, peak, decay in parts]
    momentum = wanted.rest_momentum or wanted.momentum
    sgd = torch.optim.SGD(groups, momentum=momentum, nesterov=wanted.nesterov, fused=device.type == "cuda")
    moments = [torch.zeros_like(kernel) for kernel in kernels]
    each = len(images) // batch
    steps = math.ceil(recipe.train.epochs * each)
    early_steps = math.ceil(recipe.schedule.stem_epochs * each) or steps

    @torch.no_grad()
    def update(step: int) -> None:
        left = 1 - step / steps
        for group, (_, peak, _) in zip(sgd.param_groups, parts, strict=True):
            group["lr"] = peak / batch * left
        sgd.param_groups[0]["lr"] = parts[0][1] / batch * max(0.0, 1 - step / early_steps)
        sgd.step()
        for kernel, moment in zip(kernels, moments, strict=True):
            moment.mul_(wanted.momentum).add_(kernel.grad)
            along = kernel.grad.add(moment, alpha=wanted.momentum) if wanted.nesterov else moment
            moved = orthogonal(along.reshape(len(along), -1), wanted.newton_schulz).view_as(kernel)
            kernel.mul_(math.sqrt(len(kernel)) / kernel.norm()).add_(
                moved.to(kernel.dtype), alpha=-recipe.schedule.peak * wanted.trust * left
            )
        net.zero_grad(set_to_none=True)

    def finished() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    net.train()
    began, step = finished(), 0
    mirrored = torch.rand(len(images), device=device) < 0.5
    while step < steps:
        shown = torch_crops(images, recipe.augment.padding)
        sides = mirrored ^ bool(step // each % 2)
        shown = torch.where(sides.view(-1, 1, 1, 1), shown.flip(-1), shown)
        order = torch.randperm(len(images), device=device)
        for some in order.split(batch)[: min(each, steps - step)]:
            answers = compiled(shown[some], step < early_steps)
            smoothing = recipe.augment.label_smoothing
            functional.cross_entropy(answers, labels[some], label_smoothing=smoothing, reduction="sum").backward()
            update(step)
            step += 1
    train_s = finished() - began
    accuracy = torch_accuracy(compiled, net, *splits["val"], batch, recipe.data.eval_views)
    return {"accuracy": accuracy, "train_s": train_s, "total_s": finished() - began}


def torch_crops(images: Any, padding: int) -> Any:
    """Every picture moved by up to `padding` pixels each way, all that move alike in one go."""
    import torch
    from torch.nn import functional

    if not padding:
        return images
    side, span = images.shape[-1], 2 * padding + 1
    padded = functional.pad(images, (padding,) * 4, "reflect")
    shifts = torch.randint(0, span, (2, len(images)), device=images.device)
    out = torch.empty_like(images)
    for y in range(span):
        for x in range(span):
            alike = (shifts[0] == y) & (shifts[1] == x)
            out[alike] = padded[alike, :, y : y + side, x : x + side]
    return out


def torch_accuracy(compiled: Any, net: Any, images: Any, labels: Any, batch: int, views: int) -> float:
    """The share of pictures that the mean over their views gets right."""
    import torch
    from torch.nn import functional

    net.eval()
    right = torch.zeros((), device=images.device, dtype=torch.long)
    with torch.inference_mode():
        for some, truth in zip(images.split(batch), labels.split(batch), strict=True):
            shown = [(1.0, some)]
            if views == 6:
                wide, side = functional.pad(some, (1,) * 4, "reflect"), some.shape[-1]
                shown = [(0.5, some), (0.25, wide[..., :side, :side]), (0.25, wide[..., 2:, 2:])]
            if views > 1:
                shown = [(share / 2, view) for share, one in shown for view in (one, one.flip(-1))]
            layout = torch.channels_last
            answers = [share * compiled(view.contiguous(memory_format=layout), False) for share, view in shown]
            right += (torch.stack(answers).sum(0).argmax(1) == truth).sum()
    return right.item() / len(images)


if __name__ == "__main__":
    main()
