"""The commands eval, predict and export."""

import argparse
import dataclasses
from typing import Any

from podscale import recipe as recipes
from podscale.cli.arguments import given_fields, make_console, read_options, read_pod
from podscale.recipe import SECTIONS


def evaluate(arguments: argparse.Namespace) -> Any:
    from podscale.export import inference

    run = inference.open_run(arguments.run)
    run = dataclasses.replace(run, recipe=recipes.override(run.recipe, given_fields(arguments, SECTIONS)))
    found = inference.evaluate(run, read_pod(arguments), read_options(arguments), arguments.checkpoint)
    make_console(arguments).print(
        f"{found['accuracy']:.2%} of {found['examples']:,} right (top 5: {found['accuracy_top5']:.2%}), "
        f"loss {found['loss']:.4f}, checkpoint {found['checkpoint']}",
        highlight=False,
    )
    return found


def predict(arguments: argparse.Namespace) -> Any:
    from podscale.export import inference
    from podscale.report import terminal

    run, console, found = inference.open_run(arguments.run), make_console(arguments), []
    try:
        for picture in inference.predictions(run, arguments.images, arguments.checkpoint):
            terminal.show_prediction(picture, console)
            found.append(picture)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(found)} pictures were named") from None
    arguments.problem = terminal.unreadable(found)
    return {"run": str(run.folder), "images": found}


def export(arguments: argparse.Namespace) -> Any:
    from podscale.export import inference, write

    run = inference.open_run(arguments.run)
    found = write.export_model(run, arguments.to, arguments.format, arguments.checkpoint)
    accuracy = "not evaluated" if found["accuracy"] is None else f"{found['accuracy']:.2%} right"
    told = f"{found['format']}, {found['bytes'] / 2**20:,.1f} MiB; checkpoint {found['checkpoint']}, {accuracy}"
    make_console(arguments).print(f"{found['file']}: {told}", highlight=False, markup=False)
    return found
