"""Train on your own photos: look at the data, train, classify, and export the model.

    python examples/own_photos.py PHOTOS

PHOTOS contains train/CLASS/FILE and val/CLASS/FILE. Without it, two classes of synthetic images are used.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import podscale
from podscale.data.tools.survey import survey_data_set
from podscale.planner import samples


def make_photos(folder: Path) -> Path:
    """Write images of two classes: light discs and light squares on noise."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:48, :48]
    for split, count in (("train", 50), ("val", 16)):
        for kind in ("disc", "square"):
            class_folder = folder / split / kind
            class_folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                left, top, radius = random.integers((14, 14, 8), (34, 34, 13)).tolist()
                distance = np.hypot(x - left, y - top) if kind == "disc" else np.maximum(abs(x - left), abs(y - top))
                pixels = random.integers(0, 120, (48, 48, 3)) + 110 * (distance < radius)[..., None]
                Image.fromarray(pixels.astype(np.uint8)).save(class_folder / f"{i}.jpg", quality=90)
    return folder


def main(photos: Path) -> None:
    data_set = survey_data_set(str(photos))
    print(f"{data_set['splits']['train']['images']} images to learn from, of {', '.join(data_set['classes'])}")

    settings = {"data.path": str(photos), "data.image_size": 32, "model.name": "resnet8", "model.stem": "small"}
    settings |= {"model.width": 16, "model.precision": "float32", "batch.size": 20, "batch.span": 20}
    settings |= {"train.epochs": 24, "train.eval_epochs": 8, "schedule.scale_batch": 0}
    recipe = podscale.load_recipe("imagefolder").override(settings)
    samples.write_grid(recipe, Path("samples.png"), count=20)  # what the model will see

    summary = podscale.train(recipe, pod=podscale.find_pod(virtual="1x1"), folder="runs/photos")
    print(f"validation accuracy {summary['accuracy']:.1%}; see {summary['run']}/report.html")

    run = podscale.Run.load("runs/photos")
    for prediction in podscale.predict(run, sorted((photos / "val").glob("*/*"))[:2]):
        print(f"{prediction['image']}: {prediction['top'][0]['class']}")
    podscale.export_model(run, "photos.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else make_photos(Path("made-up-photos")))
