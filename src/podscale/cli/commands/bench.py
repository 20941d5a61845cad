"""The commands bench and doctor."""

import argparse
from pathlib import Path
from typing import Any

from podscale.cli.arguments import make_console, read_options, read_pod, read_recipe
from podscale.errors import UserError


def bench_step(arguments: argparse.Namespace) -> Any:
    recipe = read_recipe(arguments)
    from podscale.bench import step

    pod, options, console = read_pod(arguments), read_options(arguments), make_console(arguments)
    asked = recipe, pod, options, arguments.images, arguments.repeats
    if arguments.evaluate and arguments.profile:
        raise UserError("--profile is of the training step: leave out --evaluate")
    found = step.measure_evaluation(*asked) if arguments.evaluate else step.measure_step(*asked, arguments.profile)
    console.print(
        f"{recipe.model.name}, {recipe.data.image_size} px, {found['images_per_device']} images a device on "
        f"{found['devices']}: {found['step_ms']:.2f} ms a step, {found['images_per_s']:,.0f} images/s "
        f"(compiled in {found['compile_s']:.0f} s)",
        highlight=False,
    )
    if arguments.profile:
        from podscale.bench.profile import budget
        from podscale.report import terminal

        console.print(terminal.columns(budget.HEAD, budget.rows(found["budget"])))
        console.print(budget.told(found["budget"]), highlight=False)
    return found


def bench_input(arguments: argparse.Namespace) -> Any:
    recipe = read_recipe(arguments)
    from podscale.bench import input
    from podscale.report import input_table

    pod, options, console = read_pod(arguments), read_options(arguments), make_console(arguments)
    asked = {name: getattr(arguments, name) for name in ("images", "feed", "threads")}
    found = input.measure(recipe, pod, options, **asked)
    input_table.show(found, console)
    return found


def bench_sum(arguments: argparse.Namespace) -> Any:
    recipe = read_recipe(arguments)
    sizes = [_bytes(text) for text in arguments.bytes.split(",") if text]
    names = [name.strip() for name in arguments.strategies.split(",") if name.strip()]
    from podscale.bench import sums
    from podscale.report import terminal

    pod, options, console = read_pod(arguments), read_options(arguments), make_console(arguments)
    found = sums.measure(recipe, pod, options, names, sizes or sums.SIZES, arguments.tree, arguments.repeats)
    console.print(terminal.columns(sums.HEAD, sums.rows(found)))
    return found


def _bytes(text: str) -> int:
    if not text.strip().isdecimal():
        raise UserError(f"--bytes takes whole numbers, with commas between them, not {text!r}")
    return int(text)


def doctor(arguments: argparse.Namespace) -> Any:
    from podscale.bench.doctor.examine import examine, rows
    from podscale.report import terminal

    pod, console = read_pod(arguments), make_console(arguments)
    with console.status("measuring") as status:
        found = examine(pod, Path(arguments.path), lambda part: status.update(f"measuring: {part}"))
    console.print(terminal.table("doctor", rows(found)))
    console.print(found["verdict"], highlight=False, markup=False)
    return found
