"""The device code of `matmul.py`: what the three warpgroups of a block do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Num

from podscale.kernels.blocking import BOX, HALF, ROWS, Blocking
from podscale.kernels.matmul_memory import Index, Layout, Operands, Outputs, Ref, Ring, Shared, Slice

Box = Float[Array, f"{HALF} {BOX}"]  # a warpgroup's half of a box
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
    interpreted: bool
    operands: Operands[Ref]
    outputs: Outputs[Ref]
    shared: Shared

    @property
    def group(self) -> Int[Array, ""]:
        """The batch-norm group whose rows this block works on."""
        return lax.div(lax.axis_index("block"), self.blocking.blocks)

    @property
    def tiles(self) -> Int[Array, ""]:
        """How many of the group's tiles this block works on."""
        return lax.div(self.blocking.tiles - self._first + self.blocking.blocks - 1, self.blocking.blocks)

    def find_row(self, tile: Index) -> Int[Array, ""]:
        """Return the first row of this block's tile of that number."""
        return (self.group * self.blocking.tiles + self._first + tile * self.blocking.blocks) * ROWS

    @property
    def _first(self) -> Int[Array, ""]:
        return lax.rem(lax.axis_index("block"), self.blocking.blocks)

    def cast_layout(self, x: Num[Array, "*shape"], layout: Layout) -> Num[Array, "*shape"]:
        """Return the same values, distributed over a warpgroup's threads by `layout`."""
        return x if self.interpreted else plgpu.layout_cast(x, layout)


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
    blocking, operands, shared = block.blocking, block.operands, block.shared
    extra_ring = shared.extra_ring
    for vector, boxes in zip(operands.vectors, shared.vectors, strict=True):
        plgpu.copy_gmem_to_smem(vector.at[block.group], boxes, shared.vectors_full.at[0])

    def load(ring: Ring, count: Index, arrays: Sequence[Ref], boxes: Sequence[Ref], *index: Slice) -> None:
        """Load a box of each of these arrays, as soon as the box whose slot it takes is free."""
        _call_when(count >= ring.slots, plgpu.barrier_wait, ring.get_free(count))
        for array, slots in zip(arrays, boxes, strict=True):
            plgpu.copy_gmem_to_smem(array.at[index], slots.at[ring.find_slot(count)], ring.get_full(count))

    def load_tile(t: Index, _: None) -> None:
        rows = pl.ds(block.find_row(t), ROWS)

        def load_part(n: Index, _: None) -> None:
            def load_step(k: Index, _: None) -> None:
                depth = pl.ds(k * BOX, BOX)

                def load_left() -> None:
                    load(shared.left_ring, t * blocking.steps + k, operands.left, shared.left, rows, depth)

                pl.when(n == 0)(load_left)
                count = (t * blocking.parts + n) * blocking.steps + k
                columns = pl.ds(n * blocking.part, blocking.part)
                place = (columns, depth) if blocking.kernel_is_transposed else (depth, columns)
                load(shared.kernel_ring, count, [operands.kernel], [shared.kernel], *place)

            def load_extra(j: Index, _: None) -> None:
                assert extra_ring
                count = (t * blocking.parts + n) * (blocking.part // BOX) + j
                columns = pl.ds(n * blocking.part + j * BOX, BOX)
                load(extra_ring, count, operands.extras, shared.extras, rows, columns)

            lax.fori_loop(0, blocking.steps, load_step, None)
            if extra_ring:
                lax.fori_loop(0, blocking.part // BOX, load_extra, None)

        lax.fori_loop(0, blocking.parts, load_part, None)

    lax.fori_loop(0, block.tiles, load_tile, None)
    _drain(shared.left_ring, block.tiles * blocking.steps)
    _drain(shared.kernel_ring, block.tiles * blocking.parts * blocking.steps)
    if extra_ring:
        _drain(extra_ring, block.tiles * blocking.parts * (blocking.part // BOX))


def _drain(ring: Ring, count: Index) -> None:
    """Wait for the last boxes: no barrier may be freed before every arrival at it."""
    lax.fori_loop(lax.max(count - ring.slots, 0), count, lambda i, _: plgpu.barrier_wait(ring.get_free(i)), None)


# --- the two warpgroups that compute -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """One of the two computing warpgroups, which computes its half of every tile."""

    block: Block
    warpgroup: Index

    def work(self) -> None:
        """Compute all tiles of the block, and store the sums."""
        blocking, outputs, shared = self.block.blocking, self.block.outputs, self.block.shared
        lax.fori_loop(0, blocking.parts * blocking.part // BOX, self.clear_sums, None)
        if shared.vectors:
            plgpu.barrier_wait(shared.vectors_full.at[0])

        if blocking.kernel_gradient:
            columns = blocking.steps * blocking.parts * blocking.part
            pl.run_scoped(self.compute_with_gradient, plgpu.ACC((BOX, columns), jnp.float32))
        else:

            def compute_tile(t: Index, _: None) -> None:
                lax.fori_loop(0, blocking.parts, lambda n, _: self.compute_part(t, n), None)

            lax.fori_loop(0, self.block.tiles, compute_tile, None)
        if outputs.sums is not None:
            plgpu.commit_smem()
            place = outputs.sums.at[lax.axis_index("block"), self.warpgroup]
            plgpu.copy_smem_to_gmem(shared.sums.at[self.warpgroup], place)
        plgpu.wait_smem_to_gmem(0)

    def clear_sums(self, column: Index, _: None) -> None:
        """Set the sums of a box of columns to zero."""
        zero = self.block.cast_layout(jnp.zeros((BOX,), jnp.float32), SUM_LAYOUT.reduce(0))
        for kind in range(self.block.blocking.sums):
            self.block.shared.sums[self.warpgroup, kind, column] = zero

    def compute_with_gradient(self, weights: Ref) -> None:
        """Compute all tiles and accumulate the gradient by the kernel, whose location must be known at compile time."""
        blocking, output = self.block.blocking, self.block.outputs.weights
        assert output is not None

        def compute_tile(t: Index, _: None) -> None:
            for n in range(blocking.parts):
                self.compute_part(t, n, weights)

        lax.fori_loop(0, self.block.tiles, compute_tile, None)
        place = output.at[lax.axis_index("block"), self.warpgroup]
        place[...] = weights[...]

    def compute_part(self, t: Index, n: Index, weights: Ref = None) -> None:
        """Compute some columns of a tile: the product, box by box of its depth, and what finishes it."""
        blocking, shared = self.block.blocking, self.block.shared
        ring, first = shared.kernel_ring, (t * blocking.parts + n) * blocking.steps

        def accumulate(acc: Ref) -> Float[Array, f"{HALF} columns"]:
            def compute_step(k: Index, _: None) -> None:
                if blocking.parts == 1:
                    left = self.make_left_box(t, k)
                else:
                    pl.when(n == 0)(lambda: self.make_left_box(t, k) and None)
                    left = shared.intermediate.at[self.warpgroup, k]
                plgpu.barrier_wait(ring.get_full(first + k))
                plgpu.wgmma(acc, left, self.get_kernel_box(ring.find_slot(first + k)))
                plgpu.wgmma_wait(1)  # the previous product is done, and its boxes are free
                pl.when(k > 0)(lambda: self.release(first + k - 1))

            lax.fori_loop(0, blocking.steps, compute_step, None)
            whole = acc[...]
            self.release(first + blocking.steps - 1)
            return whole

        result = pl.run_scoped(accumulate, plgpu.ACC((HALF, blocking.part), jnp.float32))
        for j in range(blocking.part // BOX):
            self.finish(t, n, j, result[:, j * BOX : (j + 1) * BOX], weights)

    def get_kernel_box(self, slot: Index) -> Ref:
        """Return a box of the right side as [depth, columns]."""
        box = self.block.shared.kernel.at[slot]
        if not self.block.blocking.kernel_is_transposed:
            return box
        return self.transpose(box, self.block.shared.transposed_kernel)

    def make_left_box(self, t: Index, k: Index) -> Ref:
        """Return the left side's next box: as it was loaded, or computed and then also stored in global memory."""
        block, blocking, shared = self.block, self.block.blocking, self.block.shared
        count = t * blocking.steps + k
        slot = shared.left_ring.find_slot(count)
        plgpu.barrier_wait(shared.left_ring.get_full(count))
        if not blocking.computes_left:
            return shared.left[0].at[slot, self.half]
        p = self.load_wide(shared.left[0].at[slot, self.half], plgpu.Layout.WGMMA)
        u = p * self.load_vector(0, k) + self.load_vector(1, k)
        if len(shared.left) > 1:
            u += self.load_wide(shared.left[1].at[slot, self.half]) * self.load_vector(2, k)
        u = jnp.maximum(u, 0) if block.rectify else u
        plgpu.barrier_arrive(shared.left_ring.get_free(count))
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        index = k if blocking.left_boxes == blocking.steps else lax.rem(k, jnp.int32(2))
        computed = shared.intermediate.at[self.warpgroup, index]
        computed[...] = u.astype(block.outputs.v.dtype)
        plgpu.commit_smem()
        if block.outputs.u is not None:
            plgpu.copy_smem_to_gmem(computed, block.outputs.u.at[self.select_rows(t), pl.ds(k * BOX, BOX)])
        return computed

    def release(self, count: Index) -> None:
        """Free the boxes of a product that is done."""
        plgpu.barrier_arrive(self.block.shared.kernel_ring.get_free(count))
        if not self.block.blocking.computes_left:
            plgpu.barrier_arrive(self.block.shared.left_ring.get_free(count))

    def finish(self, t: Index, n: Index, j: int, v: Box, weights: Ref) -> None:
        """Add to, mask, store and sum a box of the result, and accumulate its share of the gradient by the kernel."""
        blocking, outputs, shared = self.block.blocking, self.block.outputs, self.block.shared
        column = n * (blocking.part // BOX) + j
        count = t * blocking.parts * (blocking.part // BOX) + column
        extra = lax.rem(count, jnp.int32(blocking.extra_ring))
        if shared.extra_ring:
            plgpu.barrier_wait(shared.extra_ring.get_full(count))
        if blocking.kernel_gradient:
            inputs = (shared.inputs if shared.mask is None else shared.mask).at[extra, self.half]
            inputs = self.transpose(inputs, shared.transposed)
            for k in range(blocking.steps):
                first = (n * blocking.steps + k) * BOX
                plgpu.wgmma(weights.at[:, first : first + BOX], inputs, shared.intermediate.at[self.warpgroup, k])
        if shared.add is not None:
            v += self.load_wide(shared.add.at[extra, self.half])
        if shared.mask is not None:
            v = jnp.where(self.load_wide(shared.mask.at[extra, self.half]) > 0, v, 0.0)
        plgpu.wait_smem_to_gmem(blocking.pending_stores, wait_read_only=True)
        box = shared.result.at[self.warpgroup, j % blocking.result_ring]
        box[...] = v.astype(outputs.v.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(box, outputs.v.at[self.select_rows(t), pl.ds(column * BOX, BOX)])
        if blocking.sums:
            others = [other.at[extra, self.half] for other in shared.others]
            self.add_sums(self.load_wide(box, SUM_LAYOUT), column, others)
        if blocking.kernel_gradient:
            plgpu.wgmma_wait(0)
        if shared.extra_ring:
            plgpu.barrier_arrive(shared.extra_ring.get_free(count))

    def add_sums(self, v: Box, column: Index, others: Sequence[Ref]) -> None:
        """Add a box of the result to the sums: itself, and times itself or each of the others."""
        terms = [v, *(v * self.load_wide(other) for other in others)] if others else [v, v * v]
        for number, term in enumerate(terms):
            place = self.block.shared.sums.at[self.warpgroup, number, column]
            place[...] += term.sum(axis=0)

    @property
    def half(self) -> Slice:
        """This warpgroup's rows of a box."""
        return pl.ds(self.warpgroup * HALF, HALF)

    def select_rows(self, t: Index) -> Slice:
        """Return this warpgroup's rows of a tile, as rows of the whole arrays."""
        return pl.ds(self.block.find_row(t) + self.warpgroup * HALF, HALF)

    def load_wide(self, ref: Ref, layout: Layout | None = None) -> Box:
        """Load a box as float32, without a layout in that of the box that it is combined with.

        Mosaic finds that layout by itself, which takes it less time than to check a cast.
        """
        box = ref[...] if layout is None else self.block.cast_layout(ref[...], layout)
        return box.astype(jnp.float32)

    def transpose(self, ref: Ref, copies: Ref) -> Ref:
        """Return a transposed view of a box; the interpreter of jax 0.10 needs a transposed copy instead."""
        if self.block.interpreted:
            copy = copies.at[self.warpgroup]
            copy[...] = ref[...].T
            return copy
        return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))

    def load_vector(self, i: int, k: Index) -> Box:
        """Load a box of the i-th vector, broadcast over rows."""
        values = self.block.cast_layout(self.block.shared.vectors[i][k], plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(values, (HALF, BOX), [1])


def _call_when(condition: Bool[Array, ""] | bool, function: Callable[[Ref], None], ref: Ref) -> None:
    pl.when(condition)(lambda: function(ref))
