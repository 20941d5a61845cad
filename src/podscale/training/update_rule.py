"""The update rule of a recipe, and the numbers that a compiled step takes as arguments.

Learning rates, weight decay, momentum, the seed and the length of a training are arguments of the compiled step instead
of constants in it. So the trainings of a study that differ only in these compile one program, and the cache of compiled
programs holds it for the next one.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from numpy.typing import NDArray

from podscale.config.options import Options
from podscale.models.functional import FunctionalModel
from podscale.optim import optimizers
from podscale.optim.muon import Sharing
from podscale.optim.muon_matrices import name_parameter
from podscale.optim.schedules import Times, count_times, make_timed_schedule
from podscale.parallel.shared_matrices import GROUP_AXES
from podscale.parallel.strategies import find_summation
from podscale.plan import Plan
from podscale.recipe import SEED, Recipe, read_scalars, replace_scalars


class Scalars(NamedTuple):
    """The numbers that a compiled step takes as arguments: fields of the recipe, by name, and times of the schedule."""

    fields: Mapping[str, ArrayLike]
    times: Times


class UpdateRule(NamedTuple):
    """What an update follows.

    Attributes:
        recipe: its numbers may be arguments of the compiled step.
        optimizer: of what the plan's summation lets each device update.
        schedule: the learning rate as a function of the step.
    """

    recipe: Recipe
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule


def make_update_rule(recipe: Recipe, net: FunctionalModel, options: Options, times: Times) -> UpdateRule:
    """Return the update rule of a recipe's optimizer and schedule; devices may share its work on matrices."""
    summation, schedule = find_summation(options.summation), make_timed_schedule(recipe, times)
    shapes = {name_parameter(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(net.get_param_shapes())}
    shared_map = summation.share_matrices(GROUP_AXES[options.orthogonalize])
    sharing = Sharing(shapes, shared_map) if shared_map else None
    rule = optimizers.make_optimizer(recipe, schedule, summation.norms, stem=net.stem, head=net.head, sharing=sharing)
    return UpdateRule(recipe, net.wrap_optimizer(rule), schedule)


def bind_scalars(plan: Plan, net: FunctionalModel, scalars: Scalars) -> UpdateRule:
    """Return the plan's update rule with numbers that are arguments of the compiled step."""
    return make_update_rule(replace_scalars(plan.recipe, scalars.fields), net, plan.options, scalars.times)


def read_plan_scalars(plan: Plan) -> Scalars:
    """Return a plan's numbers in the type of the parameters; the seed is an unsigned integer.

    A registered optimizer may need its settings while it is built, so they stay constants.
    """
    recipe, dtype = plan.recipe, jnp.promote_types(plan.recipe.model.precision, jnp.float32)
    constant = "optimizer." if recipe.optimizer.name not in optimizers.BUILT_IN_NAMES else "none"
    fields = {
        name: np.asarray(value, np.uint32 if name == SEED else dtype)
        for name, value in read_scalars(recipe).items()
        if not name.startswith(constant)
    }
    times = count_times(recipe, plan.steps, plan.steps_per_epoch)
    return Scalars(fields, Times(*(np.asarray(time, dtype) for time in times)))


def place_scalars(plan: Plan, mesh: Mesh) -> Scalars:
    """Return a plan's numbers on its devices. All processes have the same recipe, so nothing is compared."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(number: NDArray) -> jax.Array:
        return jax.make_array_from_callback(number.shape, everywhere, lambda index: number[index])

    placed: Scalars = jax.tree.map(place, read_plan_scalars(plan))
    return placed


def describe_scalars(plan: Plan, mesh: Mesh) -> Scalars:
    """Return the shapes, dtypes and shardings of a plan's numbers; the devices need not exist."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    described: Scalars = jax.tree.map(
        lambda number: jax.ShapeDtypeStruct(number.shape, number.dtype, sharding=everywhere), read_plan_scalars(plan)
    )
    return described
