"""What the user should know before the first step of a run: where images are decoded and cached, and warnings."""

from podscale.config.json_types import JsonObject
from podscale.data import decode
from podscale.training.program import Program


def list_warnings(program: Program, facts: JsonObject, *, is_new: bool) -> list[str]:
    """Return what the user should know before the first step."""
    warnings = list(program.data.warnings)
    if count := sum(len(index.list_unreadable()) for index in (program.data.train, program.data.val)):
        fact = "1 image cannot be read: it is" if count == 1 else f"{count:,} images cannot be read: they are"
        advice = f"`podscale data check {program.plan.recipe.data.path}` lists all"
        warnings.append(f"{fact} replaced in training and wrong in validation; {advice}")
    batch, images = program.plan.recipe.batch.size, len(program.data.train)
    if batch > images:
        warnings.append(
            f"batch.size {batch:,} exceeds the {images:,} training images; each update repeats some of them"
        )
    if is_new and facts["decoder"] == decode.NOT_BUILT:
        warnings.append(
            "using the slow Pillow decoder; install gcc and libjpeg-dev and reinstall Podscale to decode photos more "
            "than twice as fast"
        )
    return warnings


def describe_decoding(facts: JsonObject) -> list[tuple[str, str]]:
    """Return the plan's row about images in files."""
    if facts["decoder"] == "none":
        return []
    caches = ", ".join(f"{split} {kind}" for split, kind in facts["cache"].items() if kind != "none")
    size = f"{facts['cache_bytes'] / 2**30:.2f} GiB"
    memory = f"kept in memory: {caches} ({size})" if caches else "nothing kept in memory"
    return [("decoder", f"{facts['decoder']}; {memory}")]
