"""The commands `data index`, `data check`, `data show` and `data prepare`."""

import argparse
from pathlib import Path

from podscale.cli.arguments import make_console, make_progress_console, read_recipe
from podscale.cli.result import Result
from podscale.storage.locations import has_scheme


def run_index(arguments: argparse.Namespace) -> Result:
    """Index a data set and print what it contains."""
    from podscale.data.tools.survey import survey_data_set
    from podscale.report import dataset_tables
    from podscale.report.counter import show_progress

    console = make_console(arguments)
    with show_progress(make_progress_console(), "indexing") as progress:
        result = survey_data_set(arguments.path, arguments.source, progress, arguments.max_image_mib)
    dataset_tables.show_survey(result, console)
    return Result(result)


def run_check(arguments: argparse.Namespace) -> Result:
    """Decode every image and print what is wrong; the exit code is 1 if anything is."""
    from podscale.data.tools import check as check_tool
    from podscale.report import dataset_tables
    from podscale.report.counter import show_progress

    console = make_console(arguments)
    with show_progress(make_progress_console()) as progress:
        result = check_tool.check_data_set(
            arguments.path, arguments.source, progress, max_image_bytes=arguments.max_image_mib * 2**20
        )
    dataset_tables.show_check(result, console)
    return Result(result, code=0 if result["clean"] else 1)


def run_show(arguments: argparse.Namespace) -> Result:
    """Draw a grid of samples as the model sees them."""
    recipe = read_recipe(arguments)
    from podscale.planner import samples
    from podscale.report.counter import show_progress

    console = make_console(arguments)
    with show_progress(make_progress_console(), "indexing") as progress:
        result = samples.write_grid(
            recipe, Path(arguments.to), arguments.split, arguments.images, arguments.step, progress=progress
        )
    console.print(f"{result['file']}: {result['description']}", highlight=False, markup=False)
    return Result(result)


def run_prepare(arguments: argparse.Namespace) -> Result:
    """Rewrite a data set so that training reads it faster."""
    from podscale.data.tools import prepare as prepare_tool
    from podscale.data.tools.bucket_target import prepare_into_bucket
    from podscale.report import dataset_tables
    from podscale.report.counter import show_progress

    names = ("longest", "quality", "subsampling", "raw", "shard_mib")
    settings = prepare_tool.Settings(**{name: getattr(arguments, name) for name in names})
    console = make_console(arguments)
    try:
        with show_progress(make_progress_console()) as progress:
            prepare = prepare_into_bucket if has_scheme(arguments.dst) else prepare_tool.prepare_data_set
            result = prepare(
                arguments.src,
                arguments.dst,
                settings,
                arguments.source,
                progress=progress,
                max_image_mib=arguments.max_image_mib,
            )
    except KeyboardInterrupt as error:
        raise type(error)("the same command resumes after the last complete shard") from None
    dataset_tables.show_preparation(result, console)
    return Result(result)
