"""The commands `eval`, `predict` and `export`: use a run's model."""

import argparse
import dataclasses
from typing import Any

from podscale import recipe as recipes
from podscale.cli.arguments import collect_fields, make_console, read_options, read_pod
from podscale.recipe import SECTIONS


def run_eval(arguments: argparse.Namespace) -> Any:
    """Evaluate a run's checkpoint."""
    from podscale.export import inference

    run = inference.open_run(arguments.run)
    run = dataclasses.replace(run, recipe=recipes.override_recipe(run.recipe, collect_fields(arguments, SECTIONS)))
    result = inference.evaluate(run, read_pod(arguments), read_options(arguments), arguments.checkpoint)
    make_console(arguments).print(
        f"validation accuracy {result['accuracy']:.2%} ({result['examples']:,} images), "
        f"top 5: {result['accuracy_top5']:.2%}, loss {result['loss']:.4f}, checkpoint {result['checkpoint']}",
        highlight=False,
    )
    return result


def run_predict(arguments: argparse.Namespace) -> Any:
    """Classify images."""
    from podscale.export import inference
    from podscale.report import terminal

    run, console, predictions = inference.open_run(arguments.run), make_console(arguments), []
    try:
        for prediction in inference.iterate_predictions(run, arguments.images, arguments.checkpoint):
            terminal.show_prediction(prediction, console)
            predictions.append(prediction)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(predictions)} images were named") from None
    arguments.problem = terminal.summarize_unreadable(predictions)
    return {"run": str(run.folder), "images": predictions}


def run_export(arguments: argparse.Namespace) -> Any:
    """Write a run's model to a file for other programs."""
    from podscale.export import inference, write

    run = inference.open_run(arguments.run)
    result = write.export_model(run, arguments.to, arguments.format, arguments.checkpoint)
    accuracy = "not evaluated" if result["accuracy"] is None else f"accuracy {result['accuracy']:.2%}"
    text = f"{result['format']}, {result['bytes'] / 2**20:,.1f} MiB; checkpoint {result['checkpoint']}, {accuracy}"
    make_console(arguments).print(f"{result['file']}: {text}", highlight=False, markup=False)
    return result
