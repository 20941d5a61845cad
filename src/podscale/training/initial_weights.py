"""Initial weights: start a training from the arrays of another run or of a weights file (`model.init`).

Arrays are matched by name, such as `layers.0.conv.kernel`. Parameters and running statistics share one table, since no
two of them have the same name. Only the head may have another size. It is taken only from a source that names the same
classes: else it keeps its random initialization, also if it happens to have the right size.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from podscale.config.json_types import JsonObject
from podscale.errors import UserError
from podscale.models.functional import FunctionalModel, Tree, is_within
from podscale.models.weights.files import read_labels, read_tensors
from podscale.models.weights.hub import fetch_weights, is_hub
from podscale.models.weights.layouts import adapt_tensors
from podscale.models.weights.names import digest_arrays, digest_file, name_arrays
from podscale.runs.bucket import resolve_folder
from podscale.runs.folder import Run
from podscale.training.restore import load_trained

REQUIRED = "required"  # as `model.init`: the recipe makes no sense from scratch


class InitialWeights(NamedTuple):
    """Parameters and statistics to start a training from, and where they come from."""

    params: Tree
    stats: Tree
    source: str
    digest: str  # of the source's content
    loaded_arrays: int
    reinitialized: list[str]  # names of arrays that keep their random initialization: the head, for other classes
    reason: str = ""  # why they do

    def describe(self) -> str:
        """Return one sentence for people: how many arrays were loaded, which were not, and why."""
        if not self.reinitialized:
            return f"initialized from {self.source}: all {self.loaded_arrays} arrays taken"
        names = ", ".join(self.reinitialized)
        taken = f"{self.loaded_arrays} arrays taken"
        return (
            f"initialized from {self.source}: {taken}, the head randomly initialized ({names}), because {self.reason}"
        )

    def to_dict(self) -> JsonObject:
        """Return what `init.json` in the run's folder holds."""
        return {
            "source": self.source,
            "digest": self.digest,
            "taken": self.loaded_arrays,
            "drawn": self.reinitialized,
        }


class SourceWeights(NamedTuple):
    """All arrays of a source, under the names that they have there, and its classes, where it names them."""

    tensors: dict[str, np.ndarray]
    classes: tuple[str, ...] | None
    digest: str


def initialize_from(
    source: str, net: FunctionalModel, params: Tree, stats: Tree, classes: Sequence[str] = ()
) -> InitialWeights:
    """Return `params` and `stats` with their arrays replaced by those of a run's folder or a weights file.

    Args:
        source: a run's folder, a file of ours or in another layout (`models/weights/layouts.py`), or `hub:OWNER/NAME`.
        net: the model that the arrays are for.
        params: randomly initialized parameters; the head keeps them unless the source has one for these classes.
        stats: initial running statistics.
        classes: of the data set, in the order of the logits; the head keeps its random initialization unless the
            source names the same ones. Empty: they are not known, and the head is taken if its size is right.

    Raises:
        UserError: the source cannot be read, or an array outside the head is missing, superfluous or has another shape.
    """
    weights = read_weights(source)
    try:
        tensors = adapt_tensors(net.build_module(params, stats), weights.tensors, source)
        arrays = name_arrays(params, stats)
        _check_fits(tensors, arrays, net.head)
    except UserError as error:
        raise UserError(f"the weights in {source} do not fit: {error}") from None
    head = [name for name in arrays if is_within(name, (net.head,))]
    has_other_size = any(_get_shape(tensors, name) != arrays[name].shape for name in head)
    reason = "it has another size" if has_other_size else _find_difference(weights.classes, classes)
    reinitialized = head if reason else []

    def fill(tree: Tree) -> Tree:
        leaves = [
            arrays[name] if name in reinitialized else np.asarray(tensors[name], arrays[name].dtype)
            for name in name_arrays(tree)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    loaded = len(arrays) - len(reinitialized)
    return InitialWeights(fill(params), fill(stats), source, weights.digest, loaded, reinitialized, reason)


def check_source(source: str) -> None:
    """Refuse `model.init` that only says that weights are required.

    Raises:
        UserError: the message says where weights come from.
    """
    if source == REQUIRED:
        raise UserError(
            "this recipe fine-tunes: name initial weights with --init (a run's folder, a .safetensors file, "
            "torchvision's resnet50-*.pth, or hub:timm/resnet50.a1_in1k) and train the last layer with --freeze body, "
            "or train from scratch with `podscale train imagefolder`"
        )


def read_weights(source: str) -> SourceWeights:
    """Return all arrays of a run's best checkpoint, of a weights file or of a repository on the hub."""
    check_source(source)
    if is_hub(source):
        path = fetch_weights(source)
        return SourceWeights(read_tensors(path), None, digest_file(str(path)))
    path = resolve_folder(source, "--init")
    if not path.exists():
        raise UserError(f"there is no run folder or weights file {source} to start from; check --init")
    if not path.is_dir():
        return SourceWeights(read_tensors(path), read_labels(path), digest_file(source))
    run = Run.load(path)
    trained = load_trained(run)
    tensors = {name: np.asarray(array) for name, array in name_arrays(trained.params, trained.stats).items()}
    return SourceWeights(tensors, tuple(run.classes()), digest_arrays(tensors))


def _find_difference(theirs: tuple[str, ...] | None, classes: Sequence[str]) -> str:
    """Return why a head for these classes may not be one for the data set's; "" if it is, or if those are unknown."""
    if not classes or theirs == tuple(classes):
        return ""
    if theirs is None:
        return "the source does not name its classes, as `labels` in the metadata of a .safetensors file would"
    return "the source is for other classes, or for the same in another order"


def _check_fits(tensors: dict[str, np.ndarray], arrays: Mapping[str, jax.Array], head: str) -> None:
    """Raise a `UserError` at the first array outside the head that does not match."""
    for name, array in arrays.items():
        if _get_shape(tensors, name) != array.shape and not is_within(name, (head,)):
            problem = f"has shape {tensors[name].shape}" if name in tensors else "is missing"
            raise UserError(f"{name} {problem}, wanted {array.shape}")
    for name in tensors:
        if name not in arrays and not is_within(name, (head,)):
            raise UserError(f"{name} has no place in this model")


def _get_shape(tensors: dict[str, np.ndarray], name: str) -> tuple[int, ...] | None:
    return tensors[name].shape if name in tensors else None
