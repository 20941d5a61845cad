"""The commands `bench step`, `bench input`, `bench sum` and `doctor`: measure this machine."""

import argparse

from podscale.cli.arguments import (
    make_console,
    make_progress_console,
    read_options,
    read_pod,
    read_recipe,
    use_program_cache,
)
from podscale.cli.result import Result
from podscale.errors import UserError


def run_bench_step(arguments: argparse.Namespace) -> Result:
    """Time the training step or the evaluation step."""
    recipe = read_recipe(arguments)
    from podscale.bench import step

    pod, options, console = read_pod(arguments), read_options(arguments), make_console(arguments)
    use_program_cache()
    settings = recipe, pod, options, arguments.images, arguments.repeats
    if arguments.evaluate and arguments.profile:
        raise UserError("--profile applies to the training step; leave out --evaluate")
    result = (
        step.measure_evaluation(*settings) if arguments.evaluate else step.measure_step(*settings, arguments.profile)
    )
    console.print(
        f"{recipe.model.name}, {recipe.data.image_size} px, {result['images_per_device']} images per device on "
        f"{result['devices']}: {result['step_ms']:.2f} ms per step, {result['images_per_s']:,.0f} images/s "
        f"(compiled or loaded in {result['compile_s']:.0f} s)",
        highlight=False,
    )
    if arguments.profile:
        from podscale.bench.profile import budget
        from podscale.report import terminal

        console.print(terminal.format_columns(budget.HEADER, budget.format_rows(result["budget"])))
        console.print(budget.format_verdict(result["budget"]), highlight=False)
    return Result(result)


def run_bench_input(arguments: argparse.Namespace) -> Result:
    """Measure the input pipeline."""
    recipe = read_recipe(arguments)
    from podscale.bench import input
    from podscale.report import input_table

    pod, options, console = read_pod(arguments), read_options(arguments), make_console(arguments)
    use_program_cache()
    settings = {name: getattr(arguments, name) for name in ("images", "feed", "threads")}
    result = input.measure_input(recipe, pod, options, **settings)
    input_table.show_input(result, console)
    return Result(result)


def run_bench_sum(arguments: argparse.Namespace) -> Result:
    """Time gradient summation by strategy and payload."""
    recipe = read_recipe(arguments)
    sizes = [_parse_bytes(text) for text in arguments.bytes.split(",") if text]
    names = [name.strip() for name in arguments.strategies.split(",") if name.strip()]
    from podscale.bench import sums
    from podscale.report import terminal

    pod, options, console = read_pod(arguments), read_options(arguments), make_console(arguments)
    use_program_cache()
    result = sums.measure_sums(recipe, pod, options, names, sizes or sums.SIZES, arguments.tree, arguments.repeats)
    console.print(terminal.format_columns(sums.HEADER, sums.format_rows(result)))
    return Result(result)


def _parse_bytes(text: str) -> int:
    if not text.strip().isdecimal():
        raise UserError(f"--bytes takes whole numbers separated by commas, not {text!r}")
    return int(text)


def run_doctor(arguments: argparse.Namespace) -> Result:
    """Measure each part of this machine and print the bottleneck."""
    from podscale.bench.doctor.examine import examine_machine, format_rows
    from podscale.report import terminal

    pod, console = read_pod(arguments), make_console(arguments)
    with make_progress_console().status("measuring") as status:
        result = examine_machine(pod, arguments.path, lambda part: status.update(f"measuring: {part}"))
    console.print(terminal.make_table("doctor", format_rows(result)))
    console.print(result["verdict"], highlight=False, markup=False)
    return Result(result)
