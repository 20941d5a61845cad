"""The grammar of the command line: commands, their options, and the function that runs each.

Every field of a recipe is an option, `--section.field VALUE`, and so are the options of the pod and of the plan.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

from podscale.cli import completion
from podscale.cli.commands import bench as bench_commands
from podscale.cli.commands import data as data_commands
from podscale.cli.commands import inference as inference_commands
from podscale.cli.commands import plan as plan_commands
from podscale.cli.commands import report as report_commands
from podscale.cli.commands import study as study_commands
from podscale.cli.commands import train as train_commands
from podscale.config.options import Options, PodOptions
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.recipe import SECTIONS, Recipe

# --- parsing -------------------------------------------------------------------------------------------------------


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse a command line into a namespace whose `function` runs the command.

    Args:
        argv: the command line without the program's name.

    Raises:
        UserError: the command line has a mistake.
    """
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    options = [argument for argument in unknown if argument.startswith("--")]
    if options:
        name, positional = options[0].partition("=")[0], [word for word in argv if not word.startswith("-")]
        candidates = completion.list_candidates(parser, [*positional, "--"])
        raise UserError(f"there is no option {name} here: {suggest_names(name, candidates)}")
    if unknown:
        raise UserError(f"what is {unknown[0]!r} for? podscale --help lists what there is")
    if arguments.function is train_commands.run_launch:
        _check_launch_command(arguments.command)
    return arguments


def _check_launch_command(command: list[str]) -> None:
    """Find mistakes in a command before it is started many times."""
    if not command:
        raise UserError("launch what? for example: podscale launch -n 4 train digits")
    arguments = parse_arguments(command)
    if not hasattr(arguments, "coordinator"):
        raise UserError(f"{command[0]} is for one process; launch starts train, eval, plan and bench")
    if arguments.coordinator or arguments.processes or arguments.process >= 0:
        raise UserError("launch gives --coordinator, --processes and --process by itself; leave them out")


class _Parser(argparse.ArgumentParser):
    """A parser that raises UserError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (podscale --help lists what there is)")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, without importing JAX."""
    parser = _Parser(
        prog="podscale",
        description="Train image classifiers at supercomputer scale, and on one machine, with the same recipe.",
        epilog="example: podscale train digits --pod.virtual 2x2",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_train(commands)
    _add_launch(commands)
    _add_eval(commands)
    _add_predict(commands)
    _add_export(commands)
    _add_report(commands)
    _add_doctor(commands)
    _add_completion(commands)
    _add_plan(commands)
    _add_rehearse(commands)
    _add_study(commands)
    text = "list the recipes that come with podscale"
    _add_command(commands, "recipes", report_commands.run_recipes, text, "recipes")
    _add_bench(commands)
    _add_data(commands)
    return parser


# --- training and inference ----------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    text, example = "train a recipe, or resume it", "train cifar10 --data.path cifar10.npz"
    train = _add_command(commands, "train", train_commands.run_train, text, example)
    _add_recipe_options(train, "digits")
    train.add_argument("--until", metavar="accuracy=X", default="", help="stop at the first evaluation that reaches it")
    text = "resume a run although one of these differs: recipe, data, versions (of libraries); or several, by commas"
    train.add_argument("--allow-changed", metavar="WHAT", default="", help=text)
    text = "start at step 0 if the run had checkpoints and none is left (default: end); one that is whole is resumed"
    train.add_argument("--from-scratch", action="store_true", help=text)
    train.add_argument("--run", metavar="DIR", help="the run's folder (default: runs/NAME-DIGEST, one per recipe)")
    text = "report the run to wandb or mlflow, too, or both, by commas (TensorBoard's files are always written)"
    train.add_argument("--track", metavar="NAMES", default="", help=text)
    text = (
        "weights to begin from: a run's folder, .safetensors, a torch .pth, or hub:OWNER/NAME; the same as --model.init"
    )
    train.add_argument("--init", dest="model.init", default=argparse.SUPPRESS, metavar="WEIGHTS", help=text)
    text = "layers that stay as they are, such as body, which is all but the head; the same as --model.freeze"
    train.add_argument("--freeze", dest="model.freeze", default=argparse.SUPPRESS, metavar="LAYERS", help=text)


def _add_launch(commands: Any) -> None:
    text, example = "run a command as several processes on this machine", "launch -n 4 --restarts 3 train digits"
    launch = commands.add_parser(
        "launch", help=text, description=text.capitalize() + ".", epilog=f"example: podscale {example}"
    )
    launch.set_defaults(function=train_commands.run_launch, json=False)
    launch.add_argument("-n", dest="processes", type=int, required=True, metavar="N", help="how many processes")
    text = "start the same command again after a fault, so many times; a training then resumes by itself"
    launch.add_argument("--restarts", type=int, default=0, metavar="K", help=text)
    text = "folder for the output of all processes but the first (default: shown if they fail, and not kept)"
    launch.add_argument("--logs", metavar="DIR", help=text)
    launch.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command, such as train digits"
    )


def _add_eval(commands: Any) -> None:
    text = "evaluate a run's checkpoint, exactly"
    evaluate = _add_command(commands, "eval", inference_commands.run_eval, text, "eval --run runs/mine")
    _add_fields(evaluate, [("data", SECTIONS["data"])])  # another data set, or the same one elsewhere
    _add_run_options(evaluate)
    _add_machine_options(evaluate)


def _add_predict(commands: Any) -> None:
    text, example = "classify images", "predict cat.jpg PHOTOS --run runs/mine"
    predict = _add_command(commands, "predict", inference_commands.run_predict, text, example)
    text = "image files, folders of them, or - for a list on stdin, one path a line"
    predict.add_argument("images", nargs="+", metavar="IMAGE", help=text)
    _add_run_options(predict)


def _add_export(commands: Any) -> None:
    text = "write a run's model to a file that other programs read"
    export = _add_command(commands, "export", inference_commands.run_export, text, "export runs/mine --to mine.onnx")
    export.add_argument("run", nargs="?", metavar="RUN", help="the run's folder (default: the newest under runs/)")
    export.add_argument("--to", required=True, metavar="FILE", help="FILE.safetensors, FILE.stablehlo or FILE.onnx")
    text = "safetensors, stablehlo, onnx, torchvision or timm (default: by the file's ending)"
    export.add_argument("--format", default="", metavar="FORMAT", help=text)
    _add_checkpoint_option(export)


# --- inspection ----------------------------------------------------------------------------------------------------


def _add_report(commands: Any) -> None:
    text = "write a run's report, or compare several runs on one page"
    example = "report runs/one runs/other --to comparison.html"
    report = _add_command(commands, "report", report_commands.run_report, text, example)
    report.add_argument("runs", nargs="*", metavar="RUN", help="runs' folders (default: the newest under runs/)")
    text = "where a comparison is written (default: comparison.html)"
    report.add_argument("--to", default="", metavar="FILE.html", help=text)


def _add_doctor(commands: Any) -> None:
    text = "say what this machine can do, and what will hold a run back, in under a minute"
    doctor = _add_command(commands, "doctor", bench_commands.run_doctor, text, "doctor --path /data")
    text = "a folder on the disk to measure; nothing stays in it (default: here)"
    doctor.add_argument("--path", default=".", metavar="DIR", help=text)
    _add_machine_options(doctor)


def _add_completion(commands: Any) -> None:
    text = "print what a shell needs to complete commands"
    shell = _add_command(commands, "completion", report_commands.run_completion, text, "completion bash >> ~/.bashrc")
    shell.add_argument("shell", choices=tuple(completion.SCRIPTS), metavar="bash|zsh|fish", help="which shell")


# --- planning and studies ------------------------------------------------------------------------------------------


def _add_plan(commands: Any) -> None:
    text, example = "print how a recipe maps onto a pod", "plan resnet50-imagenet-32k --pod v3:32x32"
    plan = _add_command(commands, "plan", plan_commands.run_plan, text, example)
    _add_recipe_options(plan, "digits")
    plan.add_argument("--pod", metavar="KIND:RxC", default="", help="a pod that need not be here, such as v3:32x32")
    plan.add_argument("--no-compile", dest="compile", action="store_false", help="predict only; compile nothing")
    plan.add_argument("--published", action="store_true", help="the predictions beside published trainings")
    plan.add_argument("--search", metavar="KIND[:CHIPS]", default="", help="find the pods that train soonest")
    plan.add_argument("--chip-hours", type=float, default=0.0, metavar="H", help="with --search: spend no more")
    plan.add_argument("--plot", metavar="FILE.svg", default="", help="draw how the recipe scales on this kind of chip")


def _add_rehearse(commands: Any) -> None:
    text = "walk through a whole training without computing it"
    example = "rehearse resnet50-imagenet-32k --data.path IMAGENET"
    rehearse = _add_command(commands, "rehearse", plan_commands.run_rehearse, text, example)
    _add_recipe_options(rehearse, "digits")
    text = "images of the first step to decode (default: 256)"
    rehearse.add_argument("--images", type=int, default=256, metavar="N", help=text)


def _add_study(commands: Any) -> None:
    text = "train a grid of recipes and seeds, and compare them"
    example = "study studies/digits-batch.toml --seeds 0,1,2"
    study = _add_command(commands, "study", study_commands.run_study, text, example)
    study.add_argument("study", metavar="STUDY.toml", help="which recipes, which fields, which seeds (docs/studies.md)")
    study.add_argument("--seeds", type=_parse_numbers, default=(), metavar="N,N", help="instead of those in the file")
    study.add_argument("--run", metavar="DIR", help="the folder for all of its runs (default: runs/NAME)")
    _add_fields(study, SECTIONS.items())
    _add_machine_options(study)


def _parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


# --- benchmarks ----------------------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    example = "example: podscale bench step --images 256"
    bench = commands.add_parser("bench", help="measure this machine", epilog=example, allow_abbrev=False)
    benchmarks = bench.add_subparsers(required=True, metavar="WHAT", parser_class=_Parser)
    _add_bench_step(benchmarks)
    _add_bench_input(benchmarks)
    _add_bench_sum(benchmarks)


def _add_bench_step(benchmarks: Any) -> None:
    text, example = "time the step on made-up data", "bench step --images 256"
    step = _add_command(benchmarks, "step", bench_commands.run_bench_step, text, example)
    _add_recipe_options(step, "resnet50-imagenet-4k")
    step.add_argument("--images", type=int, default=0, metavar="N", help="images per device (default: batch.size)")
    step.add_argument("--repeats", type=int, default=5, metavar="N", help="timed repetitions; the median counts")
    step.add_argument("--evaluate", action="store_true", help="the evaluation step instead")
    step.add_argument("--profile", action="store_true", help="also where the time goes, by kind of work")


def _add_bench_input(benchmarks: Any) -> None:
    text = "images/s from files to the devices, by stage"
    example = "bench input --data.path IMAGENET --feed 7000"
    source = _add_command(benchmarks, "input", bench_commands.run_bench_input, text, example)
    _add_recipe_options(source, "resnet50-imagenet-4k")
    source.add_argument("--images", type=int, default=512, metavar="N", help="images to measure with (default: 512)")
    source.add_argument("--feed", type=float, default=0.0, metavar="N", help="images/s that must be fed")
    source.add_argument("--threads", type=int, default=0, metavar="N", help="decoding threads (default: one a core)")


def _add_bench_sum(benchmarks: Any) -> None:
    text = "time the summation of gradients, by strategy and payload, beside the model of time"
    example = "bench sum --pod.virtual 2x2 --bytes 64,1000000"
    total = _add_command(benchmarks, "sum", bench_commands.run_bench_sum, text, example)
    _add_recipe_options(total, "resnet50-imagenet-4k")
    total.add_argument("--strategies", default="", metavar="A,B", help="which (default: all)")
    total.add_argument("--bytes", default="", metavar="N,N", help="payloads a device (default: 64 to 100000000)")
    total.add_argument("--no-tree", dest="tree", action="store_false", help="leave out the recipe's own gradients")
    total.add_argument("--repeats", type=int, default=5, metavar="N", help="timed repetitions; the median counts")


# --- data sets -----------------------------------------------------------------------------------------------------


def _add_data(commands: Any) -> None:
    example = "example: podscale data prepare PHOTOS PREPARED"
    data = commands.add_parser("data", help="look at a data set, or prepare it", epilog=example, allow_abbrev=False)
    tools = data.add_subparsers(required=True, metavar="WHAT", parser_class=_Parser)
    _add_data_index(tools)
    _add_data_show(tools)
    _add_data_check(tools)
    _add_data_prepare(tools)


def _add_data_index(tools: Any) -> None:
    text = "show what a data set holds, and keep its index"
    index = _add_command(tools, "index", data_commands.run_index, text, "data index PHOTOS")
    index.add_argument("path", metavar="PATH", help="a folder of images, of shards, or of CIFAR; or an .npz file")
    _add_source_option(index, ("npz", "cifar", "mnist"))


def _add_data_show(tools: Any) -> None:
    text = "draw what the model will see: a sheet of samples, cropped, mirrored and mixed as in training"
    example = "data show imagefolder --data.path PHOTOS --to samples.png"
    show = _add_command(tools, "show", data_commands.run_show, text, example)
    show.add_argument("recipe", nargs="?", default="imagefolder", metavar="RECIPE", help="a recipe's name or TOML file")
    show.add_argument("--to", default="samples.png", metavar="FILE.png", help="where to draw (default: samples.png)")
    show.add_argument("--split", choices=("train", "val"), default="train", metavar="train|val", help="of which split")
    show.add_argument("--images", type=int, default=48, metavar="N", help="how many samples (default: 48)")
    show.add_argument("--step", type=int, default=0, metavar="N", help="the update whose batch is drawn (default: 0)")
    _add_fields(show, SECTIONS.items())


def _add_data_check(tools: Any) -> None:
    text = "decode every image, and name what is wrong; exit code 1 if anything is"
    check = _add_command(tools, "check", data_commands.run_check, text, "data check PHOTOS")
    check.add_argument("path", metavar="PATH", help="a folder of images, or of shards")
    _add_source_option(check)


def _add_data_prepare(tools: Any) -> None:
    text = "write a data set again, so that training reads it faster: without loss by default"
    example = "data prepare PHOTOS PREPARED --longest 400"
    prepare = _add_command(tools, "prepare", data_commands.run_prepare, text, example)
    prepare.add_argument("src", metavar="SRC", help="the data set, which stays as it is")
    text = "a folder to write to; the same command resumes if it was stopped"
    prepare.add_argument("dst", metavar="DST", help=text)
    prepare.add_argument("--longest", type=int, metavar="N", help="shrink images whose longer side has more pixels")
    prepare.add_argument("--quality", type=int, metavar="Q", help="encode every image again (shrunk ones: 90)")
    prepare.add_argument("--subsampling", metavar="420|444", help="chroma of what is encoded again (default: 420)")
    prepare.add_argument("--raw", action="store_true", help="store pixels: the fastest, and the most bytes")
    prepare.add_argument("--shard-mib", type=int, default=256, metavar="N", help="MiB of a shard (default: 256)")
    _add_source_option(prepare)


# --- shared options ------------------------------------------------------------------------------------------------


def _add_command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], Any], text: str, example: str
) -> argparse.ArgumentParser:
    """Add a command that `function` runs, with `--json` and an example; return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text.capitalize() + ".", epilog=f"example: podscale {example}", allow_abbrev=False
    )
    parser.set_defaults(function=function)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
    return parser


def _add_recipe_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add a recipe's name, all its fields, and the machine's options."""
    text = f"a recipe's name or TOML file (default: {default})"
    parser.add_argument("recipe", nargs="?", default=default, metavar="RECIPE", help=text)
    _add_fields(parser, SECTIONS.items())
    _add_machine_options(parser)


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the pod, of the plan, and of the processes."""
    _add_fields(parser, (("pod", PodOptions), ("plan", Options)))
    group = parser.add_argument_group("processes", "Found by themselves under Slurm, Open MPI, Kubernetes and TPUs.")
    group.add_argument("--coordinator", default="", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--processes", type=int, default=0, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, default=-1, metavar="I", help="which one this is")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="the run's folder (default: the newest under runs/)")
    _add_checkpoint_option(parser)


def _add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", default="best", metavar="WHICH", help="best, newest, or a step (default: best)")


def _add_source_option(parser: argparse.ArgumentParser, more: tuple[str, ...] = ()) -> None:
    text = "what the folder holds (default: what is found in it)"
    kinds = ("folder", "tar", "tfrecord", "parquet", *more)
    parser.add_argument("--source", choices=kinds, default="", metavar="|".join(kinds), help=text)
    text, default = "memory that decoding one image may take (default: 1024)", Recipe().data.max_image_mib
    parser.add_argument("--max-image-mib", type=_parse_mib, default=default, metavar="N", help=text)


def _parse_mib(text: str) -> int:
    return Recipe().override({"data.max_image_mib": text}).data.max_image_mib


def _add_fields(parser: argparse.ArgumentParser, sections: Any) -> None:
    """Add an option for every field of the sections, given as (name, dataclass)."""
    for name, kind in sections:
        group = parser.add_argument_group(name, kind.__doc__.partition("\n")[0])
        for field in dataclasses.fields(kind):
            text = (
                f"{field.metadata['doc']} (default: as the recipe says)" if name in SECTIONS else field.metadata["doc"]
            )
            group.add_argument(
                f"--{name}.{field.name}", default=argparse.SUPPRESS, metavar="X", help=text.replace("%", "%%")
            )
