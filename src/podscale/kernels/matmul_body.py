"""The device code of `matmul.py`: what the three warpgroups of a block do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from podscale.kernels.blocking import BOX, HALF, ROWS, Blocking

Array = jax.Array
Refs = dict[str, Any]  # references to arrays in a GPU's memory, by name
# How a warpgroup holds a box that it sums over rows: a warp has 16 columns, a lane a pair of them and every fourth row.
# Most of the sum is then within a lane, and nothing moves between warps.
SUM_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 64), (64, 16), (8, 16), (2, 16), (2,))), warp_dims=(-8,), lane_dims=(-5, -2), vector_dim=-1
)


@dataclass(frozen=True)
class Block:
    """The work of a block of warpgroups, and the memory it works on."""

    blocking: Blocking
    rectify: bool
    at: Refs  # in global memory
    shared: Refs  # in shared memory
    interpreted: bool

    @property
    def extras(self) -> list[str]:
        return [name for name in self.at if name in ("add", "mask", "input") or name.startswith("other")]

    @property
    def group(self) -> Any:
        """The batch-norm group whose rows this block works on."""
        return lax.div(lax.axis_index("block"), self.blocking.blocks)

    @property
    def tiles(self) -> Any:
        """How many of the group's tiles this block works on."""
        return lax.div(self.blocking.tiles - self._first + self.blocking.blocks - 1, self.blocking.blocks)

    def find_row(self, tile: Any) -> Any:
        """Return the first row of this block's tile of that number."""
        return (self.group * self.blocking.tiles + self._first + tile * self.blocking.blocks) * ROWS

    @property
    def _first(self) -> Any:
        return lax.rem(lax.axis_index("block"), self.blocking.blocks)

    def cast_layout(self, x: Array, layout: Any) -> Array:
        """Return the same values, distributed over a warpgroup's threads by `layout`."""
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def find_slot(self, ring: str, count: Any) -> Any:
        """Return the slot of a ring that the count-th box takes."""
        return lax.rem(count, jnp.int32(getattr(self.blocking, f"{ring}_ring")))

    def get_full_barrier(self, ring: str, count: Any) -> Any:
        return self.shared[f"{ring}_full"].at[self.find_slot(ring, count)]

    def get_free_barrier(self, ring: str, count: Any) -> Any:
        return self.shared[f"{ring}_free"].at[self.find_slot(ring, count)]


def run_block(block: Block) -> None:
    """Let the third warpgroup load and the other two compute."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _load_boxes(block)

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        Worker(block, warpgroup).work()


# --- the warpgroup that loads --------------------------------------------------------------------------------------


def _load_boxes(block: Block) -> None:
    """Load vectors once, and boxes of all arrays in the order in which the other warpgroups need them."""
    blocking, at, shared = block.blocking, block.at, block.shared
    left_names = [name for name in at if name.startswith("left")]
    for name in at:
        if name.startswith("vector"):
            plgpu.copy_gmem_to_smem(at[name].at[block.group], shared[name], shared["vectors_full"].at[0])

    def load(ring: str, count: Any, names: list[str], *index: Any) -> None:
        """Load a box of each of these arrays, as soon as the box whose slot it takes is free."""
        slots = getattr(blocking, f"{ring}_ring")
        _call_when(count >= slots, plgpu.barrier_wait, block.get_free_barrier(ring, count))
        for name in names:
            slot = shared[name].at[block.find_slot(ring, count)]
            plgpu.copy_gmem_to_smem(at[name].at[index], slot, block.get_full_barrier(ring, count))

    def load_tile(t: Any, _: None) -> None:
        rows = pl.ds(block.find_row(t), ROWS)

        def load_part(n: Any, _: None) -> None:
            def load_step(k: Any, _: None) -> None:
                depth = pl.ds(k * BOX, BOX)
                pl.when(n == 0)(lambda: load("left", t * blocking.steps + k, left_names, rows, depth))
                count = (t * blocking.parts + n) * blocking.steps + k
                load("kernel", count, ["kernel"], depth, pl.ds(n * blocking.part, blocking.part))

            lax.fori_loop(0, blocking.steps, load_step, None)
            for j in range(blocking.part // BOX if block.extras else 0):
                count = (t * blocking.parts + n) * (blocking.part // BOX) + j
                load("extra", count, block.extras, rows, pl.ds(n * blocking.part + j * BOX, BOX))

        lax.fori_loop(0, blocking.parts, load_part, None)

    def drain(ring: str, count: Any) -> None:
        """Wait for the last boxes: no barrier may be freed before every arrival at it."""
        for i in range(getattr(blocking, f"{ring}_ring")):
            _call_when(count > i, plgpu.barrier_wait, block.get_free_barrier(ring, count - 1 - i))

    lax.fori_loop(0, block.tiles, load_tile, None)
    drain("left", block.tiles * blocking.steps)
    drain("kernel", block.tiles * blocking.parts * blocking.steps)
    if block.extras:
        drain("extra", block.tiles * blocking.parts * (blocking.part // BOX))


# --- the two warpgroups that compute -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """One of the two computing warpgroups, which computes its half of every tile."""

    block: Block
    warpgroup: Any

    def work(self) -> None:
        """Compute all tiles of the block, and store the sums."""
        blocking, at, shared = self.block.blocking, self.block.at, self.block.shared
        zero = self.block.cast_layout(jnp.zeros((BOX,), jnp.float32), SUM_LAYOUT.reduce(0))
        for kind in range(blocking.sums):
            for j in range(blocking.parts * blocking.part // BOX):
                shared["sums"][self.warpgroup, kind, j] = zero
        if "vectors_full" in shared:
            plgpu.barrier_wait(shared["vectors_full"].at[0])

        if blocking.kernel_gradient:
            columns = blocking.steps * blocking.parts * blocking.part
            pl.run_scoped(self.compute_with_gradient, plgpu.ACC((BOX, columns), jnp.float32))
        else:

            def compute_tile(t: Any, _: None) -> None:
                lax.fori_loop(0, blocking.parts, lambda n, _: self.compute_part(t, n), None)

            lax.fori_loop(0, self.block.tiles, compute_tile, None)
        if blocking.sums:
            plgpu.commit_smem()
            place = at["sums"].at[lax.axis_index("block"), self.warpgroup]
            plgpu.copy_smem_to_gmem(shared["sums"].at[self.warpgroup], place)
        plgpu.wait_smem_to_gmem(0)

    def compute_with_gradient(self, weights: Any) -> None:
        """Compute all tiles and accumulate the gradient by the kernel, whose location must be known at compile time."""
        blocking = self.block.blocking

        def compute_tile(t: Any, _: None) -> None:
            for n in range(blocking.parts):
                self.compute_part(t, n, weights)

        lax.fori_loop(0, self.block.tiles, compute_tile, None)
        place = self.block.at["weights"].at[lax.axis_index("block"), self.warpgroup]
        place[...] = weights[...]

    def compute_part(self, t: Any, n: Any, weights: Any = None) -> None:
        """Compute some columns of a tile: the product, box by box of its depth, and what finishes it."""
        block, blocking, shared = self.block, self.block.blocking, self.block.shared
        first = (t * blocking.parts + n) * blocking.steps

        def accumulate(acc: Any) -> Array:
            def compute_step(k: Any, _: None) -> None:
                if blocking.parts == 1:
                    left = self.make_left_box(t, k)
                else:
                    pl.when(n == 0)(lambda: self.make_left_box(t, k) and None)
                    left = shared["intermediate"].at[self.warpgroup, k]
                plgpu.barrier_wait(block.get_full_barrier("kernel", first + k))
                plgpu.wgmma(acc, left, shared["kernel"].at[block.find_slot("kernel", first + k)])
                plgpu.wgmma_wait(1)  # the previous product is done, and its boxes are free
                pl.when(k > 0)(lambda: self.release(first + k - 1))

            lax.fori_loop(0, blocking.steps, compute_step, None)
            whole = acc[...]
            self.release(first + blocking.steps - 1)
            return whole

        result = pl.run_scoped(accumulate, plgpu.ACC((HALF, blocking.part), jnp.float32))
        for j in range(blocking.part // BOX):
            self.finish(t, n, j, result[:, j * BOX : (j + 1) * BOX], weights)

    def make_left_box(self, t: Any, k: Any) -> Any:
        """Return the left side's next box: as it was loaded, or computed and then also stored in global memory."""
        block, blocking, shared = self.block, self.block.blocking, self.block.shared
        count = t * blocking.steps + k
        slot = block.find_slot("left", count)
        plgpu.barrier_wait(block.get_full_barrier("left", count))
        if not blocking.computes_left:
            return shared["left0"].at[slot, self.half]
        u = self.load_wide(shared["left0"].at[slot, self.half]) * self.load_vector(0, k) + self.load_vector(1, k)
        if "left1" in shared:
            u += self.load_wide(shared["left1"].at[slot, self.half]) * self.load_vector(2, k)
        u = jnp.maximum(u, 0) if block.rectify else u
        plgpu.barrier_arrive(block.get_free_barrier("left", count))
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        index = k if blocking.left_boxes == blocking.steps else lax.rem(k, jnp.int32(2))
        computed = shared["intermediate"].at[self.warpgroup, index]
        computed[...] = u.astype(block.at["v"].dtype)
        plgpu.commit_smem()
        if not blocking.kernel_gradient:
            plgpu.copy_smem_to_gmem(computed, block.at["u"].at[self.select_rows(t), pl.ds(k * BOX, BOX)])
        return computed

    def release(self, count: Any) -> None:
        """Free the boxes of a product that is done."""
        plgpu.barrier_arrive(self.block.get_free_barrier("kernel", count))
        if not self.block.blocking.computes_left:
            plgpu.barrier_arrive(self.block.get_free_barrier("left", count))

    def finish(self, t: Any, n: Any, j: int, v: Array, weights: Any) -> None:
        """Add to, mask, store and sum a box of the result, and accumulate its share of the gradient by the kernel."""
        block, blocking, shared = self.block, self.block.blocking, self.block.shared
        column = n * (blocking.part // BOX) + j
        count = t * blocking.parts * (blocking.part // BOX) + column
        extra = block.find_slot("extra", count)
        if block.extras:
            plgpu.barrier_wait(block.get_full_barrier("extra", count))
        if blocking.kernel_gradient:
            inputs = self.transpose(shared["mask" if "mask" in shared else "input"].at[extra, self.half])
            for k in range(blocking.steps):
                first = (n * blocking.steps + k) * BOX
                plgpu.wgmma(weights.at[:, first : first + BOX], inputs, shared["intermediate"].at[self.warpgroup, k])
        if "add" in shared:
            v += self.load_wide(shared["add"].at[extra, self.half])
        if "mask" in shared:
            v = jnp.where(self.load_wide(shared["mask"].at[extra, self.half]) > 0, v, 0.0)
        plgpu.wait_smem_to_gmem(blocking.pending_stores, wait_read_only=True)
        box = shared["result"].at[self.warpgroup, j % blocking.result_ring]
        box[...] = v.astype(block.at["v"].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(box, block.at["v"].at[self.select_rows(t), pl.ds(column * BOX, BOX)])
        if blocking.sums:
            v = self.load_wide(box, SUM_LAYOUT)
            others = [shared[name].at[extra, self.half] for name in block.extras if name.startswith("other")]
            terms = [v, *(v * self.load_wide(other, SUM_LAYOUT) for other in others)] if others else [v, v * v]
            for number, term in enumerate(terms):
                place = shared["sums"].at[self.warpgroup, number, column]
                place[...] = block.cast_layout(place[...], SUM_LAYOUT.reduce(0)) + term.sum(axis=0)
        if blocking.kernel_gradient:
            plgpu.wgmma_wait(0)
        if block.extras:
            plgpu.barrier_arrive(block.get_free_barrier("extra", count))

    @property
    def half(self) -> Any:
        """This warpgroup's rows of a box."""
        return pl.ds(self.warpgroup * HALF, HALF)

    def select_rows(self, t: Any) -> Any:
        """Return this warpgroup's rows of a tile, as rows of the whole arrays."""
        return pl.ds(self.block.find_row(t) + self.warpgroup * HALF, HALF)

    def load_wide(self, ref: Any, layout: Any = plgpu.Layout.WGMMA) -> Array:
        """Load a box as float32."""
        return self.block.cast_layout(ref[...], layout).astype(jnp.float32)

    def transpose(self, ref: Any) -> Any:
        """Return a transposed view of a box; the interpreter of jax 0.10 needs a transposed copy instead."""
        if self.block.interpreted:
            copy = self.block.shared["transposed"].at[self.warpgroup]
            copy[...] = ref[...].T
            return copy
        return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))

    def load_vector(self, i: int, k: Any) -> Array:
        """Load a box of the i-th vector, broadcast over rows."""
        values = self.block.cast_layout(self.block.shared[f"vector{i}"][k], plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(values, (HALF, BOX), [1])


def _call_when(condition: Any, function: Callable[[Any], None], ref: Any) -> None:
    pl.when(condition)(lambda: function(ref))
