"""Claim: weights trained on other images help. With few photos, training the last layer alone is as good as all layers.

Half of the classes of a folder of photos are trained from scratch, by `imagefolder`. From these weights the other half
is trained, with all photos and with few of each class: by `imagefolder`, by `finetune`, and by both from scratch.

    python benchmarks/finetune.py imagewoof-128 [--few 20] [--seeds 0,1,2] [--run runs/finetune] [--FIELD VALUE ...]

Fields, such as `--data.image_size 64`, change the recipes of all. The validation photos are read once per run, at its
end. Finished trainings are kept: the same command resumes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from podscale import recipe as recipes

STUDY = """recipe = "finetune"

[set]
train.eval_epochs = {epochs}

[[case]]
name = "imagefolder, from weights"
recipe = "imagefolder"
set.model.init = "{weights}"

[[case]]
name = "finetune, from weights"
set.model.init = "{weights}"

[[case]]
name = "finetune, from weights, a quarter of its peak"
set.model.init = "{weights}"
set.schedule.peak = {quarter}

[[case]]
name = "finetune, from weights, body frozen"
set.model = {{ init = "{weights}", freeze = ["body"] }}

[[case]]
name = "imagefolder, from scratch"
recipe = "imagefolder"

[[case]]
name = "finetune, from scratch"
set.model.init = ""
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="a folder with train/CLASS/FILE and val/CLASS/FILE")
    parser.add_argument("--few", type=int, default=20, help="photos of each class")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--run", type=Path, default=Path("runs/finetune"))
    arguments, extra = parser.parse_known_args()
    class_names = sorted(path.name for path in (arguments.photos / "train").glob("*") if path.is_dir())
    if len(class_names) < 4:
        parser.error(f"{arguments.photos}/train needs folders of at least four classes of photos")
    if arguments.few < 1:
        parser.error("--few must be at least 1")
    raise SystemExit(train_from_own(arguments, class_names, extra))


def train_from_own(arguments: argparse.Namespace, class_names: list[str], extra: list[str]) -> int:
    """Train half of the classes from scratch, and the others from these weights; return the exit code."""
    half, folder, few = len(class_names) // 2, arguments.run.absolute(), f"{arguments.few}-of-each"
    link_photos(arguments.photos, folder / "first", class_names[:half])
    link_photos(arguments.photos, folder / "all", class_names[half:])
    link_photos(arguments.photos, folder / few, class_names[half:], arguments.few)
    weights = folder / "weights"
    if code := run_podscale("train", "imagefolder", "--data.path", folder / "first", "--run", weights, *extra):
        return code
    study = folder / "study.toml"
    recipe = recipes.load_recipe("finetune")
    study.write_text(STUDY.format(epochs=recipe.train.epochs, quarter=recipe.schedule.peak / 4, weights=weights))
    return run_studies(study, ["all", few], arguments, extra)


def run_studies(study: Path, photos: list[str], arguments: argparse.Namespace, extra: list[str]) -> int:
    """Run a study on several folders of photos; return the largest exit code."""
    codes = []
    for name in photos:
        command = ["study", study, "--run", study.parent / f"from-{name}", "--data.path", study.parent / name]
        codes.append(run_podscale(*command, "--seeds", arguments.seeds, *extra))
    return max(codes)


def link_photos(photos: Path, folder: Path, class_names: list[str], few: int = 0) -> None:
    """Link the photos of some classes: all of them, or few of each to train on, spread evenly over their names."""
    for split in ("train", "val"):
        for class_name in class_names:
            files = sorted((photos / split / class_name).iterdir())
            if few and split == "train":
                files = spread(files, few)
            target = folder / split / class_name
            target.mkdir(parents=True, exist_ok=True)
            for file in files:
                if not (target / file.name).exists():
                    (target / file.name).symlink_to(file.absolute())


def spread(files: list[Path], count: int) -> list[Path]:
    """Return so many of the files, evenly over their order."""
    return files[:: max(1, len(files) // count)][:count]


def run_podscale(*arguments: object) -> int:
    """Run a command and return its exit code; it reports by itself what is wrong."""
    return subprocess.run([sys.executable, "-m", "podscale", *map(str, arguments)], check=False).returncode


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        raise SystemExit(str(error)) from None
