"""Weights: the numbers of a trained network by name, out of a run's checkpoint or a file, and into a new network.

A name is where a number stands in the model, such as `layers.0.conv.kernel`; parameters and running statistics share
one table, since no two of them stand in the same place.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from podscale import models, optim
from podscale import step as steps
from podscale.checkpoint import Checkpoints
from podscale.errors import UserError, nearest
from podscale.models.functional import Functional, Tree, functional, within
from podscale.models.torchvision import is_torchvision, read_tensors, renamed
from podscale.run import Run


class Trained(NamedTuple):
    """What a checkpoint knows: a network, its numbers (averaged over steps if the recipe has an average), its step."""

    net: Functional
    params: Tree
    stats: Tree
    step: int

    def model(self) -> nnx.Module:
        """The network, ready to be called on normalized images."""
        model: nnx.Module = self.net.model(self.params, self.stats)
        model.eval()
        return model


def of_run(run: Run, which: str = "best", model: nnx.Module | None = None) -> Trained:
    """What the run's checkpoint "best", "newest" or of a step holds; `model` replaces the recipe's own."""
    recipe, classes = run.recipe, len(run.classes())
    model = model or models.build(recipe.model, classes, recipe.data.image_size, recipe.train.seed)
    net, params, stats = functional(model, recipe.model.freeze)
    # The schedule's length has no part in the state's structure, which is all that is wanted here.
    optimizer = net.learner(optim.optimizer(recipe, optim.schedule(recipe, 1, 1.0), stem=net.stem, head=net.head))
    with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
        step = chosen_step(run, checkpoints, which)
        state = checkpoints.restore(step, steps.initial_state(recipe, params, stats, optimizer))
    numbers = state.average or {"params": state.params, "stats": state.stats}
    return Trained(net, numbers["params"], numbers["stats"], step)


def chosen_step(run: Run, checkpoints: Checkpoints, which: str) -> int:
    """The step that "best", "newest" or a number names."""
    known = checkpoints.steps()
    if not known:
        raise UserError(f"{run.folder} has no checkpoint yet")
    if which in ("best", "newest"):
        return (checkpoints.best() if which == "best" else checkpoints.newest()) or known[-1]
    if not which.isdecimal() or int(which) not in known:
        raise UserError(
            f"{run.folder} has no checkpoint {which!r}: {nearest(which, ['best', 'newest', *map(str, known)])}"
        )
    return int(which)


def named(*trees: Tree) -> dict[str, Any]:
    """The arrays of nested dicts by name.

    >>> named({"conv": {"kernel": 1}}, {"norm": {"mean": 2}})
    {'conv.kernel': 1, 'norm.mean': 2}
    """
    leaves = [pair for tree in trees for pair in jax.tree.leaves_with_path(tree)]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


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
    digest = file_digest(source) or digest_of(tensors)
    try:
        if is_torchvision(tensors):
            tensors = renamed(net.model(params, stats), tensors)
        wanted = named(params, stats)
        _check_fits(tensors, wanted, net.head)
    except UserError as error:
        raise UserError(f"the weights in {source} do not fit: {error}") from None
    head = [name for name in wanted if within(name, (net.head,))]
    drawn = head if any(_shape(tensors, name) != wanted[name].shape for name in head) else []

    def filled(tree: Tree) -> Tree:
        new = [wanted[name] if name in drawn else np.asarray(tensors[name], wanted[name].dtype) for name in named(tree)]
        return jax.tree.unflatten(jax.tree.structure(tree), new)

    return Beginning(filled(params), filled(stats), source, digest, len(wanted) - len(drawn), drawn)


def read(source: str) -> dict[str, np.ndarray]:
    """All arrays of a run's best checkpoint, or of a weights file, by the names that they have there."""
    path = Path(source).expanduser()
    if not path.is_dir():
        return read_tensors(path)
    trained = of_run(Run.load(path))
    return {name: np.asarray(array) for name, array in named(trained.params, trained.stats).items()}


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


def file_digest(source: str) -> str:
    """Of a file's bytes; empty where there is no file, but a run's folder or nothing any more."""
    path = Path(source).expanduser()
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def digest_of(tensors: dict[str, np.ndarray]) -> str:
    """Of named arrays, whatever their order."""
    whole = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        whole.update(f"{name} {array.dtype} {array.shape}".encode())
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()[:16]
