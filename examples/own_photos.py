"""Your own photos: look at them, train on them, ask the model, hand it to another program.

    python examples/own_photos.py PHOTOS

PHOTOS holds train/CLASS/FILE and val/CLASS/FILE. Without it, two classes of made-up pictures take their place.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import podscale
from podscale.data.tools.survey import survey_data_set
from podscale.planner import samples


def made_up(folder: Path) -> Path:
    """Pictures of two kinds: light discs and light squares on noise."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:48, :48]
    for split, count in (("train", 50), ("val", 16)):
        for kind in ("disc", "square"):
            place = folder / split / kind
            place.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                left, top, radius = random.integers((14, 14, 8), (34, 34, 13)).tolist()
                away = np.hypot(x - left, y - top) if kind == "disc" else np.maximum(abs(x - left), abs(y - top))
                pixels = random.integers(0, 120, (48, 48, 3)) + 110 * (away < radius)[..., None]
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.jpg", quality=90)
    return folder


def main(photos: Path) -> None:
    found = survey_data_set(str(photos))
    print(f"{found['splits']['train']['pictures']} pictures to learn from, of {', '.join(found['classes'])}")

    small = {"data.path": str(photos), "data.image_size": 32, "model.name": "resnet8", "model.stem": "small"}
    small |= {"model.width": 16, "model.precision": "float32", "batch.size": 20, "batch.span": 20}
    small |= {"train.epochs": 24, "train.eval_epochs": 8, "schedule.scale_batch": 0}
    recipe = podscale.load_recipe("imagefolder").override(small)
    samples.write_sheet(recipe, Path("samples.png"), count=20)  # what the model will see

    summary = podscale.train(recipe, pod=podscale.find_pod(virtual="1x1"), folder="runs/photos")
    print(f"{summary['accuracy']:.1%} right; see {summary['run']}/report.html")

    run = podscale.Run.load("runs/photos")
    for picture in podscale.predict(run, sorted((photos / "val").glob("*/*"))[:2]):
        print(f"{picture['image']}: {picture['top'][0]['class']}")
    podscale.export_model(run, "photos.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else made_up(Path("made-up-photos")))
