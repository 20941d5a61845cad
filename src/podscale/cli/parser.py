"""The command line's grammar: commands, their options, and the functions that carry them out."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from podscale.cli import completion
from podscale.cli.commands import bench as benchs
from podscale.cli.commands import data as datas
from podscale.cli.commands import inference
from podscale.cli.commands import plan as plans
from podscale.cli.commands import report as reports
from podscale.cli.commands import study as studys
from podscale.cli.commands import train as trains
from podscale.config.options import Options, PodOptions
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.recipe import SECTIONS

# --- parsing -----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (podscale --help lists what there is)")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    options = [word for word in unknown if word.startswith("--")]
    if options:
        name, words = options[0].partition("=")[0], [word for word in argv if not word.startswith("-")]
        known = completion.candidates(parser, [*words, "--"])
        raise UserError(f"there is no option {name} here: {suggest_names(name, known)}")
    if unknown:
        raise UserError(f"what is {unknown[0]!r} for? podscale --help lists what there is")
    if arguments.verb is trains.launch:
        _check_launched(arguments.command)
    return arguments


def _check_launched(command: list[str]) -> None:
    """Finds mistakes in a command before it is started many times."""
    if not command:
        raise UserError("launch what? for example: podscale launch -n 4 train digits")
    launched = parse(command)
    if not hasattr(launched, "coordinator"):
        raise UserError(f"{command[0]} is for one process; launch starts train, eval, plan and bench")
    if launched.coordinator or launched.processes or launched.process >= 0:
        raise UserError("launch gives --coordinator, --processes and --process by itself; leave them out")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="podscale",
        description="Train image classifiers at supercomputer scale, and on one machine, with the same recipe.",
        epilog="example: podscale train digits --pod.virtual 2x2",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=_Parser)

    train = _verb(verbs, "train", trains.train, "train a recipe, or resume it", "train cifar10 --data.path cifar10.npz")
    _takes_recipe(train, "digits")
    train.add_argument("--until", metavar="accuracy=X", default="", help="stop at the first evaluation that reaches it")
    text = (
        "go on with a run although one of these differs: recipe, data, versions (of libraries); or several, by commas"
    )
    train.add_argument("--allow-changed", metavar="WHAT", default="", help=text)
    train.add_argument("--run", metavar="DIR", help="the run's folder (default: runs/NAME-DIGEST, one per recipe)")

    text = "tell wandb or mlflow of the run, too, or both, by commas (TensorBoard's files are always written)"
    train.add_argument("--track", metavar="NAMES", default="", help=text)
    text = "weights to begin from: a run's folder, .safetensors, or torchvision's .pth; the same as --model.init"
    train.add_argument("--init", dest="model.init", default=argparse.SUPPRESS, metavar="WEIGHTS", help=text)
    text = "layers that stay as they are, such as body, which is all but the head; the same as --model.freeze"
    train.add_argument("--freeze", dest="model.freeze", default=argparse.SUPPRESS, metavar="LAYERS", help=text)

    _takes_launch(verbs)

    evaluate = _verb(verbs, "eval", inference.evaluate, "evaluate a run's checkpoint, exactly", "eval --run runs/mine")
    _takes_fields(evaluate, [("data", SECTIONS["data"])])  # another data set, or the same one elsewhere
    _takes_run(evaluate)
    _takes_machine(evaluate)

    predict = _verb(
        verbs, "predict", inference.predict, "name what is on pictures", "predict cat.jpg PHOTOS --run runs/mine"
    )
    text = "picture files, folders of them, or - for a list on stdin, one path a line"
    predict.add_argument("images", nargs="+", metavar="IMAGE", help=text)
    _takes_run(predict)

    text = "write a run's model to a file that other programs read"
    export = _verb(verbs, "export", inference.export, text, "export runs/mine --to mine.onnx")
    export.add_argument("run", nargs="?", metavar="RUN", help="the run's folder (default: the newest under runs/)")
    export.add_argument("--to", required=True, metavar="FILE", help="FILE.safetensors, FILE.stablehlo or FILE.onnx")
    text = "safetensors, stablehlo, onnx or torchvision (default: by the file's ending)"
    export.add_argument("--format", default="", metavar="FORMAT", help=text)
    _takes_checkpoint(export)

    _looking_verbs(verbs)

    _takes_plan(verbs)
    _takes_rehearsal(verbs)
    _takes_study(verbs)
    _verb(verbs, "recipes", reports.list_recipes, "list the recipes that come with podscale", "recipes")

    example = "example: podscale bench step --images 256"
    bench = verbs.add_parser("bench", help="measure this machine", epilog=example, allow_abbrev=False)
    kinds = bench.add_subparsers(required=True, metavar="WHAT", parser_class=_Parser)
    step = _verb(kinds, "step", benchs.bench_step, "time the step on made-up data", "bench step --images 256")
    _takes_recipe(step, "resnet50-imagenet-4k")
    step.add_argument("--images", type=int, default=0, metavar="N", help="images per device (default: batch.size)")
    step.add_argument("--repeats", type=int, default=5, metavar="N", help="timed repetitions; the median counts")
    step.add_argument("--evaluate", action="store_true", help="the evaluation step instead")
    step.add_argument("--profile", action="store_true", help="also where the time goes, by kind of work")
    _takes_bench_input(kinds)
    _takes_bench_sum(kinds)
    _data_verbs(verbs)
    return parser


def _takes_plan(verbs: Any) -> None:
    plan = _verb(
        verbs, "plan", plans.plan, "print how a recipe maps onto a pod", "plan resnet50-imagenet-32k --pod v3:32x32"
    )
    _takes_recipe(plan, "digits")
    plan.add_argument("--pod", metavar="KIND:RxC", default="", help="a pod that need not be here, such as v3:32x32")
    plan.add_argument("--no-compile", dest="compile", action="store_false", help="predict only; compile nothing")
    plan.add_argument("--published", action="store_true", help="the predictions beside published trainings")
    plan.add_argument("--search", metavar="KIND[:CHIPS]", default="", help="find the pods that train soonest")
    plan.add_argument("--chip-hours", type=float, default=0.0, metavar="H", help="with --search: spend no more")
    plan.add_argument("--plot", metavar="FILE.svg", default="", help="draw how the recipe scales on this kind of chip")


def _takes_launch(verbs: Any) -> None:
    text, example = "run a command as several processes on this machine", "launch -n 4 --restarts 3 train digits"
    launch = verbs.add_parser(
        "launch", help=text, description=text.capitalize() + ".", epilog=f"example: podscale {example}"
    )
    launch.set_defaults(verb=trains.launch, json=False)
    launch.add_argument("-n", dest="processes", type=int, required=True, metavar="N", help="how many processes")
    text = "start the same command again after a fault, so many times; a training then resumes by itself"
    launch.add_argument("--restarts", type=int, default=0, metavar="K", help=text)
    text = "folder for the output of all processes but the first (default: shown if they fail, and not kept)"
    launch.add_argument("--logs", metavar="DIR", help=text)
    launch.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command, such as train digits"
    )


def _looking_verbs(verbs: Any) -> None:
    text = "write a run's report, or compare several runs on one page"
    report = _verb(verbs, "report", reports.report, text, "report runs/one runs/other --to comparison.html")
    report.add_argument("runs", nargs="*", metavar="RUN", help="runs' folders (default: the newest under runs/)")
    text = "where a comparison is written (default: comparison.html)"
    report.add_argument("--to", default="", metavar="FILE.html", help=text)

    text = "say what this machine can do, and what will hold a run back, in under a minute"
    doctor = _verb(verbs, "doctor", benchs.doctor, text, "doctor --path /data")
    text = "a folder on the disk to measure; nothing stays in it (default: here)"
    doctor.add_argument("--path", default=".", metavar="DIR", help=text)
    _takes_machine(doctor)

    text = "print what a shell needs to complete commands"
    shell = _verb(verbs, "completion", reports.show_completion, text, "completion bash >> ~/.bashrc")
    shell.add_argument("shell", choices=tuple(completion.SCRIPTS), metavar="bash|zsh|fish", help="which shell")


def _data_verbs(verbs: Any) -> None:
    example = "example: podscale data prepare PHOTOS PREPARED"
    data = verbs.add_parser("data", help="look at a data set, or prepare it", epilog=example, allow_abbrev=False)
    kinds = data.add_subparsers(required=True, metavar="WHAT", parser_class=_Parser)

    index = _verb(kinds, "index", datas.index, "show what a data set holds, and keep its index", "data index PHOTOS")
    index.add_argument("path", metavar="PATH", help="a folder of pictures, of shards, or of CIFAR; or an .npz file")
    _takes_source(index, ("npz", "cifar", "mnist"))

    text = "draw what the model will see: a sheet of samples, cropped, mirrored and mixed as in training"
    show = _verb(kinds, "show", datas.show, text, "data show imagefolder --data.path PHOTOS --to samples.png")
    show.add_argument("recipe", nargs="?", default="imagefolder", metavar="RECIPE", help="a recipe's name or TOML file")
    show.add_argument("--to", default="samples.png", metavar="FILE.png", help="where to draw (default: samples.png)")
    show.add_argument("--split", choices=("train", "val"), default="train", metavar="train|val", help="of which split")
    show.add_argument("--images", type=int, default=48, metavar="N", help="how many samples (default: 48)")
    show.add_argument("--step", type=int, default=0, metavar="N", help="the update whose batch is drawn (default: 0)")
    _takes_fields(show, SECTIONS.items())

    text = "decode every picture, and name what is wrong; exit code 1 if anything is"
    check = _verb(kinds, "check", datas.check, text, "data check PHOTOS")
    check.add_argument("path", metavar="PATH", help="a folder of pictures, or of shards")
    _takes_source(check)

    text = "write a data set again, so that training reads it faster: without loss, unless told otherwise"
    prepare = _verb(kinds, "prepare", datas.prepare, text, "data prepare PHOTOS PREPARED --longest 400")
    prepare.add_argument("src", metavar="SRC", help="the data set, which stays as it is")
    prepare.add_argument("dst", metavar="DST", help="a folder to write to; the same command goes on if it was stopped")
    prepare.add_argument("--longest", type=int, metavar="N", help="shrink pictures whose longer side has more pixels")
    prepare.add_argument("--quality", type=int, metavar="Q", help="encode every picture again (shrunk ones: 90)")
    prepare.add_argument("--subsampling", metavar="420|444", help="chroma of what is encoded again (default: 420)")
    prepare.add_argument("--raw", action="store_true", help="store pixels: the fastest, and the most bytes")
    prepare.add_argument("--shard-mib", type=int, default=256, metavar="N", help="MiB of a shard (default: 256)")
    _takes_source(prepare)


def _takes_rehearsal(verbs: Any) -> None:
    text = "walk through a whole training without computing it"
    rehearse = _verb(verbs, "rehearse", plans.rehearse, text, "rehearse resnet50-imagenet-32k --data.path IMAGENET")
    _takes_recipe(rehearse, "digits")
    text = "pictures of the first step to decode (default: 256)"
    rehearse.add_argument("--images", type=int, default=256, metavar="N", help=text)


def _takes_study(verbs: Any) -> None:
    text = "train a grid of recipes and seeds, and compare them"
    study = _verb(verbs, "study", studys.study, text, "study studies/digits-batch.toml --seeds 0,1,2")
    study.add_argument("study", metavar="STUDY.toml", help="which recipes, which fields, which seeds (docs/studies.md)")
    study.add_argument("--seeds", type=_numbers, default=(), metavar="N,N", help="instead of those in the file")
    study.add_argument("--run", metavar="DIR", help="the folder for all of its runs (default: runs/NAME)")
    _takes_fields(study, SECTIONS.items())
    _takes_machine(study)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _takes_source(parser: argparse.ArgumentParser, more: tuple[str, ...] = ()) -> None:
    text = "what the folder holds (default: what is found in it)"
    kinds = ("folder", "tar", "tfrecord", "parquet", *more)
    parser.add_argument("--source", choices=kinds, default="", metavar="|".join(kinds), help=text)


def _takes_bench_input(kinds: Any) -> None:
    text = "images/s from files to the devices, by stage"
    source = _verb(kinds, "input", benchs.bench_input, text, "bench input --data.path IMAGENET --feed 7000")
    _takes_recipe(source, "resnet50-imagenet-4k")
    source.add_argument("--images", type=int, default=512, metavar="N", help="pictures to measure with (default: 512)")
    source.add_argument("--feed", type=float, default=0.0, metavar="N", help="images/s that shall be fed")
    source.add_argument("--threads", type=int, default=0, metavar="N", help="decoding threads (default: one a core)")


def _takes_bench_sum(kinds: Any) -> None:
    text = "time the summation of gradients, by strategy and payload, beside the model of time"
    example = "bench sum --pod.virtual 2x2 --bytes 64,1000000"
    total = _verb(kinds, "sum", benchs.bench_sum, text, example)
    _takes_recipe(total, "resnet50-imagenet-4k")
    total.add_argument("--strategies", default="", metavar="A,B", help="which (default: all)")
    total.add_argument("--bytes", default="", metavar="N,N", help="payloads a device (default: 64 to 100000000)")
    total.add_argument("--no-tree", dest="tree", action="store_false", help="leave out the recipe's own gradients")
    total.add_argument("--repeats", type=int, default=5, metavar="N", help="timed repetitions; the median counts")


def _verb(verbs: Any, name: str, function: Callable[[Any], Any], text: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text.capitalize() + ".", epilog=f"example: podscale {example}", allow_abbrev=False
    )
    parser.set_defaults(verb=function)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    return parser


def _takes_recipe(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"a recipe's name or TOML file (default: {default})"
    parser.add_argument("recipe", nargs="?", default=default, metavar="RECIPE", help=text)
    _takes_fields(parser, SECTIONS.items())
    _takes_machine(parser)


def _takes_machine(parser: argparse.ArgumentParser) -> None:
    _takes_fields(parser, (("pod", PodOptions), ("plan", Options)))
    group = parser.add_argument_group("processes", "Found by themselves under Slurm, Open MPI, Kubernetes and TPUs.")
    group.add_argument("--coordinator", default="", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--processes", type=int, default=0, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, default=-1, metavar="I", help="which one this is")


def _takes_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="the run's folder (default: the newest under runs/)")
    _takes_checkpoint(parser)


def _takes_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best, newest, or a step (default: best)")


def _takes_fields(parser: argparse.ArgumentParser, sections: Any) -> None:
    for name, kind in sections:
        group = parser.add_argument_group(name, kind.__doc__)
        for field in dataclasses.fields(kind):
            text = (
                f"{field.metadata['doc']} (default: as the recipe says)" if name in SECTIONS else field.metadata["doc"]
            )
            group.add_argument(
                f"--{name}.{field.name}", default=argparse.SUPPRESS, metavar="X", help=text.replace("%", "%%")
            )
