"""Claim: weights that know other pictures help. With few photos the last layer alone learns as well as all of them.

Half of the kinds of a folder of photos are learnt from nothing, by `imagefolder`. From these weights the other half is
learnt, from all of its photos and from few of each kind: by `imagefolder`, by `finetune`, and by both from nothing.

    python benchmarks/finetune.py imagewoof-128 [--few 20] [--seeds 0,1,2] [--run runs/finetune] [--FIELD VALUE ...]

Fields, such as `--data.image_size 64`, change the recipes of all. The validation photos are read once a run, at its
end. What is done stays done: the same command goes on.
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
name = "imagefolder, from nothing"
recipe = "imagefolder"

[[case]]
name = "finetune, from nothing"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="a folder with train/CLASS/FILE and val/CLASS/FILE")
    parser.add_argument("--few", type=int, default=20, help="photos of each kind")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--run", type=Path, default=Path("runs/finetune"))
    arguments, more = parser.parse_known_args()
    kinds = sorted(path.name for path in (arguments.photos / "train").glob("*") if path.is_dir())
    if len(kinds) < 4:
        parser.error(f"{arguments.photos}/train needs folders of at least four kinds of photos")
    if arguments.few < 1:
        parser.error("--few must be at least 1")
    half, folder, few = len(kinds) // 2, arguments.run.absolute(), f"{arguments.few}-of-each"
    linked(arguments.photos, folder / "first", kinds[:half])
    linked(arguments.photos, folder / "all", kinds[half:])
    linked(arguments.photos, folder / few, kinds[half:], arguments.few)
    weights = folder / "weights"
    if code := podscale("train", "imagefolder", "--data.path", folder / "first", "--run", weights, *more):
        raise SystemExit(code)
    study = folder / "study.toml"
    own = recipes.load("finetune")
    study.write_text(STUDY.format(epochs=own.train.epochs, quarter=own.schedule.peak / 4, weights=weights))
    codes = []
    for photos in ("all", few):
        command = ["study", study, "--run", folder / f"from-{photos}", "--data.path", folder / photos]
        codes.append(podscale(*command, "--seeds", arguments.seeds, *more))
    raise SystemExit(max(codes))


def linked(photos: Path, folder: Path, kinds: list[str], few: int = 0) -> None:
    """Links to the photos of some kinds: all of them, or few of each to train on, spread evenly over their names."""
    for part in ("train", "val"):
        for kind in kinds:
            files = sorted((photos / part / kind).iterdir())
            if few and part == "train":
                files = files[:: max(1, len(files) // few)][:few]
            own = folder / part / kind
            own.mkdir(parents=True, exist_ok=True)
            for file in files:
                if not (own / file.name).exists():
                    (own / file.name).symlink_to(file.absolute())


def podscale(*arguments: object) -> int:
    """The exit code of a command, which says by itself what was wrong."""
    return subprocess.run([sys.executable, "-m", "podscale", *map(str, arguments)], check=False).returncode


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        raise SystemExit(str(error)) from None
