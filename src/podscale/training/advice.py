"""Warn before the first step of a run, and describe where images are decoded and cached."""

import shlex

from podscale.config.json_types import JsonObject
from podscale.data import decode
from podscale.data.bucket.disk_cache import explain_missing_cache
from podscale.data.bucket.files import BucketFiles
from podscale.training.program import Program


def list_warnings(program: Program, facts: JsonObject, *, is_new: bool) -> list[str]:
    """Return warnings to print before the first step."""
    warnings = list(program.data.warnings)
    if count := sum(len(index.list_unreadable()) for index in (program.data.train, program.data.val)):
        fact = (
            "1 image cannot be read: it is replaced in training and counts as wrong in validation"
            if count == 1
            else f"{count:,} images cannot be read: they are replaced in training and count as wrong in validation"
        )
        advice = f"`podscale data check {shlex.quote(program.plan.recipe.data.path)}` lists all"
        warnings.append(f"{fact}; {advice}")
    if isinstance(program.data.train.files, BucketFiles) and (reason := explain_missing_cache()):
        warnings.append(
            f"nothing that is fetched from the bucket is kept on disk, so every epoch fetches all: {reason}"
        )
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
