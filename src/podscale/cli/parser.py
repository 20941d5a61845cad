"""The grammar of the command line: commands, their options, and the function that runs each.

Options that several commands share are in `podscale.cli.options`.
"""

import argparse

from podscale.cli import completion
from podscale.cli.commands import bench as bench_commands
from podscale.cli.commands import data as data_commands
from podscale.cli.commands import inference as inference_commands
from podscale.cli.commands import plan as plan_commands
from podscale.cli.commands import report as report_commands
from podscale.cli.commands import study as study_commands
from podscale.cli.commands import train as train_commands
from podscale.cli.options import (
    Commands,
    Parser,
    add_checkpoint_option,
    add_command,
    add_fields,
    add_import_option,
    add_machine_options,
    add_recipe,
    add_recipe_options,
    add_run_argument,
    add_run_options,
    add_source_option,
    expand_path,
    make_help_function,
    show_recipe_defaults,
)
from podscale.config.suggestions import suggest_names
from podscale.errors import UserError
from podscale.recipe import SECTIONS
from podscale.storage.prices import READ_USD

# --- parsing -------------------------------------------------------------------------------------------------------


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse a command line into a namespace whose `function` runs the command.

    Args:
        argv: the command line without the program's name.

    Raises:
        UserError: the command line has a mistake.
    """
    parser = make_parser()
    _check_commands(parser, argv)
    if "--help" in argv or "-h" in argv:
        show_recipe_defaults(parser, argv)
    arguments, unknown = parser.parse_known_args(argv)
    options = [argument for argument in unknown if argument.startswith("--")]
    if options:
        name, positional = options[0].partition("=")[0], [argument for argument in argv if not argument.startswith("-")]
        candidates = completion.list_candidates(parser, [*positional, "--"])
        raise UserError(f"there is no option {name} here: {suggest_names(name, candidates)}")
    if unknown:
        raise UserError(f"unexpected argument {unknown[0]!r}; see --help for what this command takes")
    if arguments.function is train_commands.run_launch:
        _check_launch_command(arguments.command)
    return arguments


def _check_commands(parser: Parser, argv: list[str]) -> None:
    """Suggest the nearest command for one that does not exist, at every level."""
    for name in argv:
        if parser.commands is None or name.startswith("-"):
            return
        if name not in parser.commands.choices:
            known = parser.commands.choices
            raise UserError(f"there is no command '{parser.prog} {name}': {suggest_names(name, known)}")
        parser = parser.commands.choices[name]


def _check_launch_command(command: list[str]) -> None:
    """Find mistakes in a command before it is started many times."""
    if not command:
        raise UserError("launch needs a command; for example: podscale launch -n 4 train digits")
    arguments = parse_arguments(command)
    if not hasattr(arguments, "coordinator"):
        raise UserError(f"{command[0]} runs in one process; launch can start train, eval, plan and bench")
    if arguments.coordinator or arguments.processes or arguments.process >= 0:
        raise UserError("launch sets --coordinator, --processes and --process itself; leave them out")


def make_parser() -> Parser:
    """Return the parser of the whole command line, without importing JAX."""
    parser = Parser(
        prog="podscale",
        description="Train image classifiers at supercomputer scale, and on one machine, with the same recipe.",
        epilog="example: podscale train digits --pod.virtual 2x2",
    )
    parser.set_defaults(json=False, function=make_help_function(parser))
    parser.add_argument("--version", action="version", version=f"podscale {_read_version()}", help="print the version")
    commands = parser.add_commands("COMMAND")
    _add_train(commands)
    _add_launch(commands)
    _add_eval(commands)
    _add_predict(commands)
    _add_export(commands)
    _add_report(commands)
    _add_watch(commands)
    _add_doctor(commands)
    _add_plan(commands)
    _add_rehearse(commands)
    _add_study(commands)
    text = "list the recipes that ship with Podscale"
    add_command(commands, "recipes", report_commands.run_recipes, text, example="recipes")
    _add_bench(commands)
    _add_data(commands)
    _add_completion(commands)
    return parser


def _read_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("podscale")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


# --- training and inference ----------------------------------------------------------------------------------------


def _add_train(commands: Commands) -> None:
    text, example = "train a recipe, or resume its run", "train imagefolder --data.path PHOTOS"
    train = add_command(commands, "train", train_commands.run_train, text, example=example, arguments="[RECIPE]")
    add_recipe_options(train, "digits")  # first, so that the help begins with the fields that most users set
    text = "initial weights: a run's folder, .safetensors, a torch .pth or hub:OWNER/NAME; same as --model.init"
    train.add_argument("--init", dest="model.init", default=argparse.SUPPRESS, metavar="WEIGHTS", help=text)
    text = "layers that are not trained, such as body, which is all but the head; same as --model.freeze"
    train.add_argument("--freeze", dest="model.freeze", default=argparse.SUPPRESS, metavar="LAYERS", help=text)
    text = "the run's folder (default: runs/NAME-DIGEST, one per recipe)"
    train.add_argument("--run", metavar="DIR", type=expand_path, help=text)
    text = "stop at the first evaluation with at least this accuracy (accuracy=0.9 or top5=0.99)"
    train.add_argument("--until", metavar="accuracy=X", default="", help=text)
    text = "also log to wandb, mlflow or both, separated by commas (TensorBoard files are always written)"
    train.add_argument("--track", metavar="NAMES", default="", help=text)
    text = "resume even if these have changed (comma-separated): recipe, data, versions (of libraries)"
    train.add_argument("--allow-changed", metavar="WHAT", default="", help=text)
    text = "restart at step 0 if every checkpoint is missing or damaged; intact checkpoints are still resumed"
    train.add_argument("--from-scratch", action="store_true", help=text)


def _add_launch(commands: Commands) -> None:
    text, example = "run a command as several processes on this machine", "launch -n 4 --restarts 3 train digits"
    launch = commands.add_parser(
        "launch",
        help=text,
        description=text.capitalize() + ".",
        epilog=f"example: podscale {example}",
        usage="%(prog)s -n N [options] COMMAND ...",
    )
    launch.set_defaults(function=train_commands.run_launch, json=False)
    launch.add_argument("-n", dest="processes", type=int, required=True, metavar="N", help="number of processes")
    text = "start the command again after a failure, up to K times; training resumes"
    launch.add_argument("--restarts", type=int, default=0, metavar="K", help=text)
    text = "elastic training with MIN to MAX processes: survivors continue without a restart, lost ones are replaced"
    launch.add_argument("--elastic", metavar="MIN:MAX", default="", help=text)
    text = "folder for the output of all processes but the first (default: printed only if one fails)"
    launch.add_argument("--logs", metavar="DIR", type=expand_path, help=text)
    launch.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as train digits")


def _add_eval(commands: Commands) -> None:
    text = "evaluate a run's checkpoint on all validation images"
    evaluate = add_command(commands, "eval", inference_commands.run_eval, text, example="eval --run runs/mine")
    add_run_options(evaluate)
    add_fields(evaluate, [("data", SECTIONS["data"])])  # another data set, or the same one elsewhere
    add_machine_options(evaluate)


def _add_predict(commands: Commands) -> None:
    text, example = "classify images", "predict cat.jpg PHOTOS --run runs/mine"
    predict = add_command(
        commands, "predict", inference_commands.run_predict, text, example=example, arguments="IMAGE..."
    )
    text = "image files, folders of them, or - for a list of paths on stdin, one per line"
    predict.add_argument("images", nargs="+", metavar="IMAGE", type=expand_path, help=text)
    add_run_options(predict)


def _add_export(commands: Commands) -> None:
    text, example = "write a run's model to a file for other programs", "export runs/mine --to mine.onnx"
    export = add_command(
        commands, "export", inference_commands.run_export, text, example=example, arguments="[RUN] --to FILE"
    )
    add_run_argument(export, "the run's folder (default: the newest one under runs/ that has a checkpoint)")
    text = "FILE.onnx, FILE.stablehlo or FILE.safetensors"
    export.add_argument("--to", required=True, metavar="FILE", type=expand_path, help=text)
    text = "safetensors, stablehlo, onnx, torchvision or timm (default: by the file's extension)"
    export.add_argument("--format", default="", metavar="FORMAT", help=text)
    add_checkpoint_option(export)
    add_import_option(export)


# --- inspection ----------------------------------------------------------------------------------------------------


def _add_report(commands: Commands) -> None:
    text = "write a run's report, or compare several runs on one page"
    example = "report runs/one runs/other --to comparison.html"
    report = add_command(commands, "report", report_commands.run_report, text, example=example, arguments="[RUN...]")
    add_run_argument(report, "run folders (default: the newest one under runs/)", several=True)
    text = "file for a comparison (default: comparison-NAMES.html)"
    report.add_argument("--to", default="", metavar="FILE.html", type=expand_path, help=text)


def _add_watch(commands: Commands) -> None:
    text, example = "serve a run's report on this machine and refresh it during the run", "watch runs/mine"
    watch = add_command(commands, "watch", report_commands.run_watch, text, example=example, arguments="[RUN]")
    add_run_argument(watch, "the run's folder (default: the newest one under runs/)")
    watch.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")


def _add_doctor(commands: Commands) -> None:
    text = "measure this machine in under a minute, and name what will limit a run"
    doctor = add_command(commands, "doctor", bench_commands.run_doctor, text, example="doctor --path /data")
    text = "folder on the disk, or in the bucket, to measure; nothing is left in it (default: the current folder)"
    doctor.add_argument("--path", default=".", metavar="DIR", type=expand_path, help=text)
    add_machine_options(doctor)


def _add_completion(commands: Commands) -> None:
    text, example = "print a shell's completion script", "completion bash >> ~/.bashrc"
    run = report_commands.run_completion
    shell = add_command(commands, "completion", run, text, example=example, arguments="bash|zsh|fish")
    shell.add_argument("shell", choices=tuple(completion.SCRIPTS), metavar="bash|zsh|fish", help="which shell")


# --- planning and studies ------------------------------------------------------------------------------------------


def _add_plan(commands: Commands) -> None:
    text, example = "predict time and memory of a recipe on a pod", "plan resnet50-imagenet-32k --pod v3:32x32"
    plan = add_command(commands, "plan", plan_commands.run_plan, text, example=example, arguments="[RECIPE]")
    text = "the pod to plan for; it need not be available; for example v3:32x32, or v5e:16x16*4 for four slices"
    plan.add_argument("--pod", metavar="KIND:RxC", default="", help=text)
    plan.add_argument("--no-compile", dest="compile", action="store_false", help="predict only; compile nothing")
    text = "compare predictions with published trainings: ten, or one half of MLPerf's"
    parts = ("known", "first", "second")
    plan.add_argument("--published", nargs="?", const="known", default="", choices=parts, metavar="HALF", help=text)
    plan.add_argument("--search", metavar="KIND[:CHIPS]", default="", help="find the pods that train fastest")
    plan.add_argument("--chip-hours", type=float, default=0.0, metavar="H", help="with --search: the budget")
    text = "price of a million reads, if the data is in a bucket (default: 0.4, as of S3 in us-east-1)"
    plan.add_argument("--read-price", type=float, default=READ_USD, metavar="USD", help=text)
    text = "plot how the recipe scales on this kind of chip"
    plan.add_argument("--plot", metavar="FILE.svg", default="", type=expand_path, help=text)
    add_recipe_options(plan, "digits")


def _add_rehearse(commands: Commands) -> None:
    text = "dry-run a whole training: data, order, schedule and checkpoints, without computing"
    example = "rehearse resnet50-imagenet-32k --data.path IMAGENET"
    run = plan_commands.run_rehearse
    rehearse = add_command(commands, "rehearse", run, text, example=example, arguments="[RECIPE]")
    text = "images of the first step to decode (default: 256)"
    rehearse.add_argument("--images", type=int, default=256, metavar="N", help=text)
    add_recipe_options(rehearse, "digits")


def _add_study(commands: Commands) -> None:
    text = "train a grid of recipes and seeds, and compare them"
    example = "study studies/digits-batch.toml --seeds 0,1,2"
    study = add_command(commands, "study", study_commands.run_study, text, example=example, arguments="STUDY.toml")
    text = "file with recipes, fields and seeds (docs/studies.md)"
    study.add_argument("study", metavar="STUDY.toml", type=expand_path, help=text)
    text = "instead of the seeds in the file"
    study.add_argument("--seeds", type=_parse_numbers, default=(), metavar="N,N", help=text)
    text = "folder for all its runs (default: runs/NAME)"
    study.add_argument("--run", metavar="DIR", type=expand_path, help=text)
    add_import_option(study)
    add_fields(study, SECTIONS.items())
    add_machine_options(study)


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers separated by commas, not {text!r}") from None


# --- benchmarks ----------------------------------------------------------------------------------------------------


def _add_bench(commands: Commands) -> None:
    text, example = "measure this machine", "example: podscale bench step --images 256"
    bench = commands.add_parser("bench", help=text, description=text.capitalize() + ".", epilog=example)
    bench.set_defaults(function=make_help_function(bench), json=False)
    benchmarks = bench.add_commands("WHAT")
    _add_bench_step(benchmarks)
    _add_bench_input(benchmarks)
    _add_bench_sum(benchmarks)


def _add_bench_step(benchmarks: Commands) -> None:
    text, example = "time the training step on synthetic data", "bench step --images 256"
    run = bench_commands.run_bench_step
    step = add_command(benchmarks, "step", run, text, example=example, arguments="[RECIPE]")
    step.add_argument("--images", type=int, default=0, metavar="N", help="images per device (default: batch.size)")
    step.add_argument("--repeats", type=int, default=5, metavar="N", help="timed repetitions; the median counts")
    step.add_argument("--evaluate", action="store_true", help="time the evaluation step instead")
    step.add_argument("--profile", action="store_true", help="also show where the time goes, by kind of operation")
    add_recipe_options(step, "resnet50-imagenet-4k")


def _add_bench_input(benchmarks: Commands) -> None:
    text, example = (
        "measure images/s from files to the devices, by stage",
        "bench input --data.path IMAGENET --feed 7000",
    )
    run = bench_commands.run_bench_input
    source = add_command(benchmarks, "input", run, text, example=example, arguments="[RECIPE]")
    source.add_argument("--images", type=int, default=512, metavar="N", help="images to measure with (default: 512)")
    source.add_argument("--feed", type=float, default=0.0, metavar="N", help="required images/s")
    text = "decoding threads (default: one per core)"
    source.add_argument("--threads", type=int, default=0, metavar="N", help=text)
    add_recipe_options(source, "resnet50-imagenet-4k")


def _add_bench_sum(benchmarks: Commands) -> None:
    text = "time gradient summation by strategy and payload, beside the predicted time"
    example, run = "bench sum --pod.virtual 2x2 --bytes 64,1000000", bench_commands.run_bench_sum
    total = add_command(benchmarks, "sum", run, text, example=example, arguments="[RECIPE]")
    total.add_argument("--strategies", default="", metavar="A,B", help="strategies to time (default: all)")
    text = "bytes per device (default: 64 to 100000000)"
    total.add_argument("--bytes", default="", metavar="N,N", help=text)
    total.add_argument("--no-tree", dest="tree", action="store_false", help="leave out the recipe's own gradients")
    total.add_argument("--repeats", type=int, default=5, metavar="N", help="timed repetitions; the median counts")
    add_recipe_options(total, "resnet50-imagenet-4k")


# --- data sets -----------------------------------------------------------------------------------------------------


def _add_data(commands: Commands) -> None:
    text, example = "inspect, check or prepare a data set", "example: podscale data prepare PHOTOS PREPARED"
    data = commands.add_parser("data", help=text, description=text.capitalize() + ".", epilog=example)
    data.set_defaults(function=make_help_function(data), json=False)
    tools = data.add_commands("WHAT")
    _add_data_index(tools)
    _add_data_show(tools)
    _add_data_check(tools)
    _add_data_prepare(tools)


def _add_data_index(tools: Commands) -> None:
    text = "list a data set's classes, counts and sizes, and store its index"
    run = data_commands.run_index
    index = add_command(tools, "index", run, text, example="data index PHOTOS", arguments="PATH")
    text = "a folder of images, of shards, or of CIFAR; or an .npz file"
    index.add_argument("path", metavar="PATH", type=expand_path, help=text)
    add_source_option(index, ("npz", "cifar", "mnist"))


def _add_data_show(tools: Commands) -> None:
    text = "write a grid of images as the model sees them in training, augmented"
    example = "data show imagefolder --data.path PHOTOS --to samples.png"
    show = add_command(tools, "show", data_commands.run_show, text, example=example, arguments="[RECIPE]")
    text = "the file to write (default: samples.png)"
    show.add_argument("--to", default="samples.png", metavar="FILE.png", type=expand_path, help=text)
    show.add_argument("--split", choices=("train", "val"), default="train", metavar="train|val", help="which split")
    show.add_argument("--images", type=int, default=48, metavar="N", help="number of images (default: 48)")
    show.add_argument("--step", type=int, default=0, metavar="N", help="the update whose batch is shown (default: 0)")
    add_import_option(show)
    add_recipe(show, "imagefolder")
    add_fields(show, SECTIONS.items())


def _add_data_check(tools: Commands) -> None:
    text = "decode every image and list broken files, duplicates and leaks; exit code 1 if there are any"
    run = data_commands.run_check
    check = add_command(tools, "check", run, text, example="data check PHOTOS", arguments="PATH")
    check.add_argument("path", metavar="PATH", type=expand_path, help="a folder of images, or of shards")
    add_source_option(check)


def _add_data_prepare(tools: Commands) -> None:
    text = "rewrite a data set so that training reads it faster; lossless by default"
    example, run = "data prepare PHOTOS PREPARED --longest 400", data_commands.run_prepare
    prepare = add_command(tools, "prepare", run, text, example=example, arguments="SRC DST")
    text = "the data set; it is not changed"
    prepare.add_argument("src", metavar="SRC", type=expand_path, help=text)
    text = "folder to write to; the same command resumes"
    prepare.add_argument("dst", metavar="DST", type=expand_path, help=text)
    prepare.add_argument("--longest", type=int, metavar="N", help="shrink images with more pixels on the longer side")
    prepare.add_argument("--quality", type=int, metavar="Q", help="re-encode every image (shrunk ones: 90)")
    text = "chroma subsampling of re-encoded images (default: 420)"
    prepare.add_argument("--subsampling", metavar="420|444", help=text)
    prepare.add_argument("--raw", action="store_true", help="store pixels: fastest to read, most bytes")
    prepare.add_argument("--shard-mib", type=int, default=256, metavar="N", help="MiB per shard (default: 256)")
    add_source_option(prepare)
