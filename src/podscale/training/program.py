"""Program: everything that a run computes with, and nothing that training changes. That is the `State`.

The state's way onto the devices, into a checkpoint and back is here, because it follows from the program alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale.data.index.dataset import NO_IMAGES, Splits
from podscale.forecast.choice import Choice
from podscale.models.functional import FunctionalModel, Tree
from podscale.parallel.placement import replicate
from podscale.parallel.state_layout import StateLayout
from podscale.plan import Plan
from podscale.training.step import State, init_state


class Weights(NamedTuple):
    """Parameters and running statistics on the host; they may be abstract arrays."""

    params: Tree
    stats: Tree


@dataclass(frozen=True)
class Program:
    """A plan, and what it takes to compile, train and evaluate it.

    Attributes:
        plan: the recipe on the pod.
        net: the model as functions.
        optimizer: of what the plan's summation lets each device update.
        schedule: the learning rate as a function of the step.
        weights: those that a run from scratch starts from.
        choice: why the plan has its summation.
        data: the data set; empty where only counts are known.
    """

    plan: Plan
    net: FunctionalModel
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    weights: Weights
    choice: Choice
    data: Splits = NO_IMAGES

    @cached_property
    def mesh(self) -> Mesh:
        """The pod's devices, with the plan's batch-norm tiles."""
        return self.plan.pod.mesh(self.plan.tile)

    @cached_property
    def layout(self) -> StateLayout:
        """How the optimizer's state lies on the devices."""
        return StateLayout(self.plan.summation, self.mesh, self.optimizer, self.net.get_param_shapes())

    def init_state(self) -> State:
        """Return the state before the first update, on the devices."""
        initialize = jax.jit(lambda p, s: init_state(self.plan.recipe, p, s, self.optimizer))
        state = jax.tree.map(np.asarray, initialize(*self.weights))
        placed = replicate(state._replace(optimizer=()), self.mesh)
        return placed._replace(optimizer=self.layout.place(state.optimizer))

    def describe_state(self) -> State:
        """Return shapes, dtypes and shardings of the state on the devices."""
        whole = self._describe_whole()
        return whole._replace(optimizer=self.layout.describe(whole.optimizer))

    def to_checkpoint(self, state: State) -> State:
        """Return the state as checkpoints store it: whole arrays, whatever the summation."""
        return state._replace(optimizer=self.layout.gather(state.optimizer))

    def restore_state(self, restore: Callable[[State], State]) -> State:
        """Return the state that `restore` reads, placed as the plan needs it.

        `restore` takes abstract arrays of the same shapes.
        """
        state = restore(self._describe_whole())
        return state._replace(optimizer=self.layout.scatter(state.optimizer))

    def _describe_whole(self) -> State:
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        state = jax.eval_shape(lambda p, s: init_state(self.plan.recipe, p, s, self.optimizer), *self.weights)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), state)
