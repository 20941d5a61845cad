"""Weights: the numbers of a trained network by name, out of a run's checkpoint or a file, and into a new network.

A name is where a number stands in the model, such as `layers.0.conv.kernel`; parameters and running statistics share
one table, since no two of them stand in the same place.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from podscale.errors import UserError
from podscale.models.functional import Functional, Tree, within
from podscale.models.weights.names import digest_arrays, digest_file, name_arrays
from podscale.models.weights.torchvision import is_torchvision, read_tensors, renamed
from podscale.runs.folder import Run
from podscale.training.trained import load_trained

# --- beginning from them -------------------------------------------------------------------------------------------


class Beginning(NamedTuple):
    """A network's numbers at the start of a training that others came before."""

    params: Tree
    stats: Tree
    source: str
    digest: str  # of what the source held
    taken: int  # arrays
    drawn: list[str]  # names of those that stay as they were drawn: the head, if it has another size

    def told(self) -> str:
        """What became of the weights, for people."""
        if not self.drawn:
            return f"begun from {self.source}: all {self.taken} arrays taken"
        return f"begun from {self.source}: {self.taken} arrays taken, the head drawn anew ({', '.join(self.drawn)})"

    def to_dict(self) -> dict[str, Any]:
        return {"source": self.source, "digest": self.digest, "taken": self.taken, "drawn": self.drawn}


def begin(source: str, net: Functional, params: Tree, stats: Tree) -> Beginning:
    """Freshly drawn numbers replaced by those of a run's folder or a file; only the head may have another size."""
    tensors = read(source)
    digest = digest_file(source) or digest_arrays(tensors)
    try:
        if is_torchvision(tensors):
            tensors = renamed(net.model(params, stats), tensors)
        wanted = name_arrays(params, stats)
        _check_fits(tensors, wanted, net.head)
    except UserError as error:
        raise UserError(f"the weights in {source} do not fit: {error}") from None
    head = [name for name in wanted if within(name, (net.head,))]
    drawn = head if any(_shape(tensors, name) != wanted[name].shape for name in head) else []

    def filled(tree: Tree) -> Tree:
        new = [
            wanted[name] if name in drawn else np.asarray(tensors[name], wanted[name].dtype)
            for name in name_arrays(tree)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), new)

    return Beginning(filled(params), filled(stats), source, digest, len(wanted) - len(drawn), drawn)


def read(source: str) -> dict[str, np.ndarray]:
    """All arrays of a run's best checkpoint, or of a weights file, by the names that they have there."""
    path = Path(source).expanduser()
    if not path.is_dir():
        return read_tensors(path)
    trained = load_trained(Run.load(path))
    return {name: np.asarray(array) for name, array in name_arrays(trained.params, trained.stats).items()}


def _check_fits(tensors: dict[str, np.ndarray], wanted: dict[str, Any], head: str) -> None:
    for name, array in wanted.items():
        if _shape(tensors, name) != array.shape and not within(name, (head,)):
            found = f"has shape {tensors[name].shape}" if name in tensors else "is missing"
            raise UserError(f"{name} {found}, wanted {array.shape}")
    for name in tensors:
        if name not in wanted and not within(name, (head,)):
            raise UserError(f"{name} has no place in this model")


def _shape(tensors: dict[str, np.ndarray], name: str) -> tuple[int, ...] | None:
    return tensors[name].shape if name in tensors else None
