"""The commands `eval`, `predict` and `export`: use a run's model."""

import argparse
import dataclasses

from podscale import recipe as recipes
from podscale.cli.arguments import collect_fields, make_console, read_options, read_pod, use_program_cache
from podscale.cli.imports import import_user_code
from podscale.cli.result import Result
from podscale.recipe import SECTIONS


def run_eval(arguments: argparse.Namespace) -> Result:
    """Evaluate a run's checkpoint."""
    import_user_code(arguments.imports)
    from podscale.export import inference

    run = inference.open_run(arguments.run)
    run = dataclasses.replace(run, recipe=recipes.override_recipe(run.recipe, collect_fields(arguments, SECTIONS)))
    pod = read_pod(arguments)
    use_program_cache()
    result = inference.evaluate(run, pod, read_options(arguments), arguments.checkpoint)
    make_console(arguments).print(
        f"validation accuracy {result['accuracy']:.2%} ({result['examples']:,} images), "
        f"top-5 {result['accuracy_top5']:.2%}, loss {result['loss']:.4f}; "
        f"{run.where}, checkpoint {result['checkpoint']}\n"
        f"balanced accuracy {result['balanced_accuracy']:.2%}, majority baseline {result['majority_baseline']:.2%}, "
        f"expected calibration error {result['calibration']['expected_error'] or 0:.3f}",
        highlight=False,
        markup=False,
    )
    warnings = [result["warning"]] if result["warning"] else []
    if unreadable := result["unreadable"]:
        warnings.append(f"{len(unreadable):,} unreadable and counted as wrong; the first: {unreadable[0]}")
    for text in warnings:
        make_console(arguments).print(f"warning: {text}", style="bold red", highlight=False, markup=False)
    return Result(result)


def run_predict(arguments: argparse.Namespace) -> Result:
    """Classify images."""
    import_user_code(arguments.imports)
    from podscale.export import inference
    from podscale.report import terminal

    use_program_cache()
    run, console, predictions = inference.open_run(arguments.run), make_console(arguments), []
    step = inference.find_checkpoint(run, arguments.checkpoint)
    console.print(inference.describe_checkpoint(run, step), highlight=False, markup=False)
    try:
        for prediction in inference.iterate_predictions(run, arguments.images, str(step)):
            terminal.show_prediction(prediction, console)
            predictions.append(prediction)
    except KeyboardInterrupt as error:
        raise type(error)(f"{len(predictions)} images were classified") from None
    value = {"run": run.where, "checkpoint": step, "images": predictions}
    return Result(value, terminal.summarize_unreadable(predictions))


def run_export(arguments: argparse.Namespace) -> Result:
    """Write a run's model to a file for other programs."""
    import_user_code(arguments.imports)
    from podscale.export import inference, write

    use_program_cache()
    run = inference.open_run(arguments.run)
    result = write.export_model(run, arguments.to, arguments.format, arguments.checkpoint)
    text = f"{result['format']}, {result['bytes'] / 2**20:,.1f} MiB"
    source = inference.describe_checkpoint(run, result["checkpoint"])
    make_console(arguments).print(f"{result['file']}: {text}; {source}", highlight=False, markup=False)
    return Result(result)
