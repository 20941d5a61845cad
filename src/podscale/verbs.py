"""The verbs: what each command does with its arguments, and what it says. JAX is imported only where it is needed."""

import argparse
import dataclasses
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO, cast

from podscale import recipe as recipes
from podscale.errors import UserError
from podscale.fields import changed
from podscale.options import Options, PodOptions
from podscale.recipe import SECTIONS, Recipe
from podscale.unfazed import Unfazed
from podscale.until import Until


def train(arguments: argparse.Namespace) -> Any:
    recipe = recipe_of(arguments)
    until = Until.parse(arguments.until) if arguments.until else None
    allowed = [kind.strip() for kind in arguments.allow_changed.split(",") if kind.strip()]
    from podscale import train
    from podscale.report import words

    pod, options = _pod(arguments), plan_options(arguments)
    console = console_of(arguments)  # after the processes have joined: only the first one's says anything
    summary = train.train(
        recipe,
        pod=pod,
        options=options,
        folder=arguments.run,
        until=until,
        console=console,
        allow_changed=allowed,
        track=[name.strip() for name in arguments.track.split(",") if name.strip()],
    )
    words.show(summary, console)
    return summary


def launch(arguments: argparse.Namespace) -> Any:
    from podscale.launch import launch

    arguments.code = launch(arguments.command, arguments.processes, arguments.restarts, arguments.logs)


def evaluate(arguments: argparse.Namespace) -> Any:
    from podscale import inference

    run = inference.open_run(arguments.run)
    run = dataclasses.replace(run, recipe=recipes.override(run.recipe, _given(arguments, SECTIONS)))
    found = inference.evaluate(run, _pod(arguments), plan_options(arguments), arguments.checkpoint)
    console_of(arguments).print(
        f"{found['accuracy']:.2%} of {found['examples']:,} right (top 5: {found['accuracy_top5']:.2%}), "
        f"loss {found['loss']:.4f}, checkpoint {found['checkpoint']}",
        highlight=False,
    )
    return found


def predict(arguments: argparse.Namespace) -> Any:
    from podscale import inference
    from podscale.report import words

    run, console, found = inference.open_run(arguments.run), console_of(arguments), []
    try:
        for picture in inference.predictions(run, arguments.images, arguments.checkpoint):
            words.show_prediction(picture, console)
            found.append(picture)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(found)} pictures were named") from None
    arguments.problem = words.unreadable(found)
    return {"run": str(run.folder), "images": found}


def report(arguments: argparse.Namespace) -> Any:
    from podscale.report import compare, page
    from podscale.run import Run

    runs = [Run.load(folder) for folder in arguments.runs] or [Run.newest()]
    if len(runs) > 1:
        path = compare.write(runs, Path(arguments.to or "comparison.html"))
    elif arguments.to:
        raise UserError("--to is for comparisons, of two runs or more; a run's own report is in its folder")
    else:
        path = page.write(runs[0])
    console_of(arguments).print(f"{path}: open it in a browser", highlight=False, markup=False)
    return {"report": str(path), "runs": [str(run.folder) for run in runs]}


def export(arguments: argparse.Namespace) -> Any:
    from podscale import export, inference

    run = inference.open_run(arguments.run)
    found = export.export(run, arguments.to, arguments.format, arguments.checkpoint)
    accuracy = "not evaluated" if found["accuracy"] is None else f"{found['accuracy']:.2%} right"
    told = f"{found['format']}, {found['bytes'] / 2**20:,.1f} MiB; checkpoint {found['checkpoint']}, {accuracy}"
    console_of(arguments).print(f"{found['file']}: {told}", highlight=False, markup=False)
    return found


def plan(arguments: argparse.Namespace) -> Any:
    if arguments.published:
        return _published(arguments)
    recipe = recipe_of(arguments)
    if arguments.search:
        return _searched(arguments, recipe)
    from podscale.forecast import answers

    options, name = plan_options(arguments), ""
    if arguments.pod and answers.follows_from(recipe):
        name = answers.key(recipe, arguments.pod, options, arguments.compile)
    answer = answers.kept(name) if name else None
    if answer is None:
        answer = _asked(arguments, recipe, options)
        if name:
            answers.keep(name, answer)
    from podscale.report import words

    console_of(arguments).print(words.table("plan", answer["rows"]))
    return answer["values"] | (_drawn(arguments, recipe) if arguments.plot else {})


def _asked(arguments: argparse.Namespace, recipe: Recipe, options: Options) -> dict[str, Any]:
    from podscale import pod
    from podscale.forecast import ask, described

    if arguments.pod:
        described.leave_chips_alone()
    where = pod.named(arguments.pod) if arguments.pod else _pod(arguments)
    with console_of(arguments).status("compiling") if arguments.compile and arguments.pod else nullcontext():
        return ask.about(recipe, where, options, arguments.compile)._asdict()


def _published(arguments: argparse.Namespace) -> Any:
    from podscale.forecast import described, published
    from podscale.report import words

    described.leave_chips_alone()
    found = published.compare()
    values = published.to_dict(found)
    console_of(arguments).print(words.columns(published.HEAD, published.rows(found)))
    console_of(arguments).print(
        f"median error {values['median_error']:.1%}, largest {values['largest_error']:.1%} "
        "(* further checks, not counted; no constant comes from any row)",
        highlight=False,
    )
    return values


def _searched(arguments: argparse.Namespace, recipe: Recipe) -> Any:
    from podscale.forecast import ask, search
    from podscale.report import words

    rows, values = ask.searched(recipe, arguments.search, arguments.chip_hours)
    console_of(arguments).print(words.columns(search.HEAD, rows))
    return values | (_drawn(arguments, recipe) if arguments.plot else {})


def _drawn(arguments: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    from podscale.forecast import ask

    kind = (arguments.search or arguments.pod).partition(":")[0]
    if not kind:
        raise UserError("--plot needs a kind of chip: give --pod KIND:RxC or --search KIND")
    found = ask.drawn(recipe, kind, arguments.plot)
    console_of(arguments).print(f"drawn: {arguments.plot}", highlight=False, markup=False)
    return found


def list_recipes(arguments: argparse.Namespace) -> Any:
    found = recipes.presets()
    console = console_of(arguments)
    for name, doc in found.items():
        console.print(f"[bold]{name}[/bold]", highlight=False)
        for line in doc.splitlines():
            console.print(f"  {line}", highlight=False, markup=False)
    return found


def rehearse(arguments: argparse.Namespace) -> Any:
    recipe = recipe_of(arguments)
    from podscale import rehearsal
    from podscale.report import words

    pod, options, console = _pod(arguments), plan_options(arguments), console_of(arguments)
    with console.status("rehearsing") as status:
        found = rehearsal.rehearse(recipe, pod, options, images=arguments.images, tell=status.update)
    console.print(words.table("rehearsal", rehearsal.rows(found)))
    if found["decoded"]["unreadable"]:
        arguments.problem = found["decoded"]["unreadable"][0]
    return found


def study(arguments: argparse.Namespace) -> Any:
    from podscale.study import grid, spread

    asked = grid.load(arguments.study, _given(arguments, SECTIONS), arguments.seeds)
    from podscale.report import words
    from podscale.study import running

    folder, pod = Path(arguments.run or Path("runs") / asked.name), _pod(arguments)
    console = console_of(arguments)
    found = running.run(asked, folder, pod, plan_options(arguments), console)
    console.print(words.columns(spread.HEAD, spread.rows(found)))
    console.print(
        f"{asked.measure}; table: {folder}/study.json, plot: {folder}/study.svg", highlight=False, markup=False
    )
    arguments.problem = spread.failures(found)
    return found


def bench_step(arguments: argparse.Namespace) -> Any:
    recipe = recipe_of(arguments)
    from podscale import bench

    pod, options, console = _pod(arguments), plan_options(arguments), console_of(arguments)
    asked = recipe, pod, options, arguments.images, arguments.repeats
    if arguments.evaluate and arguments.profile:
        raise UserError("--profile is of the training step: leave out --evaluate")
    found = bench.evaluation(*asked) if arguments.evaluate else bench.step(*asked, arguments.profile)
    console.print(
        f"{recipe.model.name}, {recipe.data.image_size} px, {found['images_per_device']} images a device on "
        f"{found['devices']}: {found['step_ms']:.2f} ms a step, {found['images_per_s']:,.0f} images/s "
        f"(compiled in {found['compile_s']:.0f} s)",
        highlight=False,
    )
    if arguments.profile:
        from podscale.budget import sheet
        from podscale.report import words

        console.print(words.columns(sheet.HEAD, sheet.rows(found["budget"])))
        console.print(sheet.told(found["budget"]), highlight=False)
    return found


def bench_input(arguments: argparse.Namespace) -> Any:
    recipe = recipe_of(arguments)
    from podscale import bench_input
    from podscale.report import rates

    pod, options, console = _pod(arguments), plan_options(arguments), console_of(arguments)
    asked = {name: getattr(arguments, name) for name in ("images", "feed", "threads")}
    found = bench_input.measure(recipe, pod, options, **asked)
    rates.show(found, console)
    return found


def bench_sum(arguments: argparse.Namespace) -> Any:
    recipe = recipe_of(arguments)
    sizes = [_bytes(text) for text in arguments.bytes.split(",") if text]
    names = [name.strip() for name in arguments.strategies.split(",") if name.strip()]
    from podscale import bench_sum
    from podscale.report import words

    pod, options, console = _pod(arguments), plan_options(arguments), console_of(arguments)
    found = bench_sum.measure(recipe, pod, options, names, sizes or bench_sum.SIZES, arguments.tree, arguments.repeats)
    console.print(words.columns(bench_sum.HEAD, bench_sum.rows(found)))
    return found


def _bytes(text: str) -> int:
    if not text.strip().isdecimal():
        raise UserError(f"--bytes takes whole numbers, with commas between them, not {text!r}")
    return int(text)


def show_completion(arguments: argparse.Namespace) -> Any:
    from podscale.completion import SCRIPTS

    script = SCRIPTS[arguments.shell]
    if not arguments.json:
        print(script, end="")
    return {"shell": arguments.shell, "script": script}


def doctor(arguments: argparse.Namespace) -> Any:
    from podscale.doctor.examine import examine, rows
    from podscale.report import words

    pod, console = _pod(arguments), console_of(arguments)
    with console.status("measuring") as status:
        found = examine(pod, Path(arguments.path), lambda part: status.update(f"measuring: {part}"))
    console.print(words.table("doctor", rows(found)))
    console.print(found["verdict"], highlight=False, markup=False)
    return found


# --- from arguments to values ------------------------------------------------------------------------------------


def _given(arguments: argparse.Namespace, sections: Any) -> dict[str, str]:
    return {k: v for k, v in vars(arguments).items() if k.partition(".")[0] in sections and "." in k}


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    return recipes.override(recipes.load(arguments.recipe), _given(arguments, SECTIONS))


def _section(arguments: argparse.Namespace, name: str) -> dict[str, str]:
    return {k.partition(".")[2]: v for k, v in _given(arguments, (name,)).items()}


def plan_options(arguments: argparse.Namespace) -> Options:
    return changed(Options(), "plan", _section(arguments, "plan"))


def _pod(arguments: argparse.Namespace) -> Any:
    from podscale import lastwords, pod

    options = changed(PodOptions(), "pod", _section(arguments, "pod"))
    pod.join(arguments.coordinator, arguments.processes, arguments.process, options.heartbeat_s)
    lastwords.ready(*pod.place_among())
    return pod.find(options.shape, options.virtual, options.cores)


def console_of(arguments: argparse.Namespace) -> Any:
    """Where people are told of things."""
    from rich.console import Console

    # With --json, stdout carries the one JSON object and everything for people goes to stderr.
    stream = Unfazed(sys.stderr if arguments.json else sys.stdout)
    return Console(file=cast(TextIO, stream), soft_wrap=True, quiet=not speaks())


def speaks() -> bool:
    """Whether this process talks to people: of several that have joined, only the first does."""
    if "jax" not in sys.modules:
        return True
    from podscale.pod import speaks

    return speaks()


# --- endings, of one process or of several ---------------------------------------------------------------------------


def failed(error: Exception) -> int:
    """Tells of an error that is none of the user's: where it came up, or which other process is gone."""
    if "podscale.peers" in sys.modules:
        from podscale import peers

        found = peers.settle(error)
        if found:
            peers.say(found)
            return found.code
    traceback.print_exception(error)
    return 1


def ended(code: int, why: str) -> int:
    """The exit code of a process that does not end well: that of whoever failed first, if there are several."""
    if "podscale.peers" not in sys.modules:
        return code
    from podscale import peers

    return peers.farewell(code, why)
