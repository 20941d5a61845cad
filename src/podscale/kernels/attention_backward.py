"""The backward pass of `attention.py`, as one kernel.

    p = exp2(s · c - lse),  dp = dout vᵀ,  δ = sum p · dp,  ds = p · (dp - δ)
    dq = ds k / √d,  dk = dsᵀ q / √d,  dv = pᵀ dout

All that a pair of an image and a head needs is in shared memory at once. Workers first take 64 queries at a time, for
dq and δ, and then 64 keys, for dk and dv. They compute p and ds for both, as they are and transposed: seven products
instead of five, but p and ds stay in registers, and no two workers add to the same sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from podscale.kernels.attention_forward import (
    BOXES,
    DEPTH,
    EXPONENT,
    REGISTERS,
    SLOTS,
    TILE,
    Geometry,
    Index,
    Interpreter,
    Ref,
    Slice,
    Tokens,
    drain,
    find_tiles,
)

WORKERS = 2
COLUMNS = 128  # queries that a tile of keys is multiplied with at once; the last part has the tail too
HALF = DEPTH // 2
HALVES = (plgpu.TilingTransform((8, HALF)), plgpu.SwizzleTransform(64))
SCALE = 1 / math.sqrt(DEPTH)
Tile = Float[Array, "64 64"]


def run_backward(
    geometry: Geometry,
    operands: tuple[Tokens, Tokens, Tokens, Tokens],
    lse: Float[Array, "images heads rows"],
    interpret: Interpreter | None = None,
    columns: int = COLUMNS,
    in_place: bool = True,
) -> list[Tokens]:
    """Return the gradients by queries, keys and values, or, if they are packed, by all of them as one array.

    Args:
        geometry: sizes.
        operands: queries, keys, values, and the gradient by the result.
        lse: as `run_forward` returns it.
        interpret: parameters of the interpreter.
        columns: as COLUMNS.
        in_place: whether gradients of keys and values take the place of these in shared memory.
    """
    rows = geometry.rows if geometry.interpreted else geometry.tokens  # a tile reads what follows, for no result
    boxes = plgpu.SMEM((SLOTS, rows, DEPTH), jnp.bfloat16, transforms=BOXES)
    values = plgpu.SMEM((SLOTS, geometry.rows), jnp.float32)

    outputs = [geometry.describe_tokens(3 * geometry.heads)] if geometry.is_packed else [geometry.describe_tokens()] * 3

    def body(*refs: Ref) -> None:
        inputs, refs = refs[:5], refs[5:]
        gradients = refs[:1] * 3 if geometry.is_packed else refs[:3]
        _run_block(Block(geometry, columns, in_place, inputs, gradients, *refs[len(outputs) :]))

    results = plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=(
            (boxes, boxes, boxes, boxes),
            (geometry.describe_tail(),) * 3,
            plgpu.SMEM((WORKERS, TILE, HALF), jnp.bfloat16, transforms=HALVES),
            values,
            values,
            geometry.describe_copies(WORKERS),
            plgpu.Barrier(num_arrivals=8 if geometry.tail else 5, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=SLOTS),
        ),
        grid=(geometry.blocks,),
        grid_names=("block",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*map(geometry.pad, operands), lse)
    return [result[:, : geometry.tokens] for result in results]


@dataclass(frozen=True)
class Block:
    """The work of a block of warpgroups, and the memory it works on.

    Attributes:
        inputs: queries, keys, values, the gradient by the result, and lse, in global memory.
        outputs: the gradients by queries, keys and values.
        boxes: the inputs of pairs in shared memory.
        tails: of queries, keys and the gradient by the result.
        staged: half of a tile on its way to global memory, of each worker.
        sums: lse of pairs.
        deltas: δ of pairs.
        copies: of a left or right side of each worker; in the interpreter only.
        full: says for each slot that a pair is loaded.
        free: says that all workers are done with it.
        ready: says that δ is there.
    """

    geometry: Geometry
    columns: int
    in_place: bool
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    boxes: tuple[Ref, ...]
    tails: tuple[Ref, ...]
    staged: Ref
    sums: Ref
    deltas: Ref
    copies: Ref
    full: Ref
    free: Ref
    ready: Ref


def _run_block(block: Block) -> None:
    warpgroup = lax.axis_index("warpgroup")
    decreased, increased = REGISTERS[WORKERS]

    @pl.when(warpgroup == WORKERS)
    def _() -> None:
        plgpu.set_max_registers(decreased, action="decrease")
        _load_pairs(block)

    @pl.when(warpgroup < WORKERS)
    def _() -> None:
        plgpu.set_max_registers(increased, action="increase")
        _compute_pairs(block, warpgroup)


def _load_pairs(block: Block) -> None:
    geometry, index = block.geometry, lax.axis_index("block")
    *tokens, lse = block.inputs

    def load_pair(i: Index, _: None) -> None:
        image, head = geometry.find_pair(index, i)
        slot = lax.rem(i, SLOTS)
        full = block.full.at[slot]
        pl.when(i >= SLOTS)(lambda: plgpu.barrier_wait(block.free.at[slot]))
        heads = [*(geometry.find_head(head, number) for number in range(3)), head]
        for source, own_head, target in zip(tokens, heads, block.boxes, strict=True):
            rows = pl.ds(0, geometry.tokens)
            plgpu.copy_gmem_to_smem(source.at[image, rows, own_head], target.at[slot, rows], full)
        plgpu.copy_gmem_to_smem(lse.at[image, head], block.sums.at[slot], full)
        if geometry.tail:
            for number, target in zip((0, 1, 3), block.tails, strict=True):
                place = image, geometry.select_tail(index * 0), heads[number]
                plgpu.copy_gmem_to_smem(tokens[number].at[place], target.at[slot], full)

    count = geometry.count_pairs(index)
    lax.fori_loop(0, count, load_pair, None)
    drain(count, block.free)


def _compute_pairs(block: Block, index: Index) -> None:
    geometry, pairs = block.geometry, lax.axis_index("block")

    def compute_pair(i: Index, _: None) -> None:
        pair = geometry.find_pair(pairs, i)
        slot = lax.rem(i, SLOTS)
        first, count = find_tiles(geometry, WORKERS, index, i)

        def visit_tiles(visit: Callable[["Worker"], None]) -> None:
            def visit_tile(j: Index, _: None) -> None:
                hidden = geometry.hide(pair[0]), geometry.hide(pair[1])
                visit(Worker(block, index, hidden, geometry.hide(slot), first + j * WORKERS))

            lax.fori_loop(0, count, visit_tile, None)

        plgpu.barrier_wait(block.full.at[slot])
        visit_tiles(Worker.compute_queries)
        plgpu.barrier_arrive(block.ready.at[slot])
        plgpu.barrier_wait(block.ready.at[slot])
        visit_tiles(Worker.compute_keys)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(block.free.at[slot])

    lax.fori_loop(0, geometry.count_pairs(pairs), compute_pair, None)
    plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class Worker:
    """A computing warpgroup at a tile of a pair of an image and a head."""

    block: Block
    index: Index
    pair: tuple[Index, Index]
    slot: Index
    tile: Index

    @property
    def rows(self) -> Slice:
        """The rows of the tile."""
        return pl.ds(self.tile * TILE, TILE)

    @property
    def copy(self) -> Ref:
        """Memory for a left or right side, in the interpreter."""
        return self.block.copies.at[self.index] if self.block.geometry.interpreted else None

    def compute_queries(self) -> None:
        """Compute dq and δ of 64 queries."""
        geometry = self.block.geometry
        _, keys, _, _ = (box.at[self.slot] for box in self.block.boxes)

        def compute_scores(scores: Ref, products: Ref) -> Float[Array, "64 tokens"]:
            s = geometry.mask_keys(self.multiply_tiles(scores, products, (0, 1), (3, 2), pl.ds(0, geometry.tokens)))
            lse = geometry.load(self.block.sums.at[self.slot, self.rows], plgpu.Layout.WGMMA.reduce(1))
            p = jnp.exp2(s * EXPONENT - lax.broadcast_in_dim(lse, s.shape, [0]))
            weighted = p * products[...]
            delta = weighted.sum(axis=1)
            self.block.deltas[self.slot, self.rows] = delta
            return (weighted - p * lax.broadcast_in_dim(delta, p.shape, [0])).astype(jnp.bfloat16)

        shape = (TILE, geometry.tokens)
        ds = pl.run_scoped(compute_scores, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))

        def multiply_keys(acc: Ref) -> Tile:
            geometry.multiply(acc, ds, keys.at[pl.ds(0, geometry.boxed)], self.get_tail(1), self.copy)
            return acc[...]

        dq = pl.run_scoped(multiply_keys, plgpu.ACC((TILE, DEPTH), jnp.float32))
        self.store_by_halves(dq * SCALE, 0)

    def compute_keys(self) -> None:
        """Compute dk and dv of 64 keys."""
        geometry, accumulator = self.block.geometry, plgpu.ACC((TILE, DEPTH), jnp.float32)

        def compute_gradients(dk: Ref, dv: Ref) -> tuple[Tile, Tile]:
            for start in range(0, geometry.boxed, self.block.columns):
                stop = start + self.block.columns
                self.add_queries(dk, dv, start, geometry.tokens if stop >= geometry.boxed else stop)
            return dk[...], dv[...]

        dk, dv = pl.run_scoped(compute_gradients, accumulator, accumulator)
        if geometry.padding:
            is_attended = geometry.number_elements(dk.shape, 0) < geometry.attended - self.tile * TILE
            dk, dv = jnp.where(is_attended, dk, 0.0), jnp.where(is_attended, dv, 0.0)
        self.store(dv, 2)
        self.store(dk * SCALE, 1)

    def add_queries(self, dk: Ref, dv: Ref, start: int, stop: int) -> None:
        """Add what the queries from `start` to `stop` contribute to dk and dv."""
        geometry, columns = self.block.geometry, pl.ds(start, stop - start)
        queries, _, _, gradient = (box.at[self.slot] for box in self.block.boxes)

        def compute_scores(scores: Ref, products: Ref) -> tuple[Array, Array]:
            s = self.multiply_tiles(scores, products, (1, 0), (2, 3), columns)
            lse = geometry.load(self.block.sums.at[self.slot, columns], plgpu.Layout.WGMMA.reduce(0))
            p = jnp.exp2(s * EXPONENT - lax.broadcast_in_dim(lse, s.shape, [1]))
            dp = products[...]
            delta = geometry.load(self.block.deltas.at[self.slot, columns], plgpu.Layout.WGMMA.reduce(0))
            ds = p * (dp - lax.broadcast_in_dim(delta, dp.shape, [1]))
            return p.astype(jnp.bfloat16), ds.astype(jnp.bfloat16)

        accumulator = plgpu.ACC((TILE, stop - start), jnp.float32)
        p, ds = pl.run_scoped(compute_scores, accumulator, accumulator)
        part = geometry.select(start, stop)
        boxed = pl.ds(start, part.boxed)
        part.multiply(dv, p, gradient.at[boxed], self.get_tail(2), self.copy)
        part.multiply(dk, ds, queries.at[boxed], self.get_tail(0), self.copy)

    def multiply_tiles(
        self, scores: Ref, products: Ref, first: tuple[int, int], second: tuple[int, int], columns: Slice
    ) -> Float[Array, "64 columns"]:
        """Start two products of the tile with rows `columns`, of boxes of these numbers, and return the first."""
        for acc, (i, j) in ((scores, first), (products, second)):
            left, right = self.block.boxes[i].at[self.slot, self.rows], self.block.boxes[j].at[self.slot, columns]
            plgpu.wgmma(acc, left, self.block.geometry.transpose(right, self.copy))
        return plgpu.wgmma_accumulator_load(scores, wait_n=1)

    def find_place(self, i: int) -> tuple[Index, Slice, Index]:
        """Return where the tile lies in the gradient by queries, keys or values."""
        image, head = self.pair
        return image, self.rows, self.block.geometry.find_head(head, i)

    def get_tail(self, i: int) -> Ref:
        """Return the tail of that number, if there is one."""
        return self.block.tails[i].at[self.slot] if self.block.geometry.tail else None

    def store(self, x: Tile, i: int) -> None:
        """Store a tile of the gradient by keys or values, through what they take in shared memory."""
        geometry = self.block.geometry
        if not self.block.in_place:
            self.store_by_halves(x, i)
            return

        def store_in_place() -> None:
            box = self.block.boxes[i].at[self.slot, self.rows]
            box[...] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(box, self.block.outputs[i].at[self.find_place(i)])

        if not geometry.tail or geometry.interpreted:
            store_in_place()
            return
        is_whole = self.tile < geometry.tiles - 1  # the last tile reaches past its pair
        pl.when(is_whole)(store_in_place)
        pl.when(jnp.logical_not(is_whole))(lambda: self.store_by_halves(x, i))

    def store_by_halves(self, x: Tile, i: int) -> None:
        """Store a tile of a gradient through memory of its own."""
        staged = self.block.staged.at[self.index]
        for start in range(0, DEPTH, HALF):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = x[:, start : start + HALF].astype(jnp.bfloat16)
            plgpu.commit_smem()
            place = (*self.find_place(i), pl.ds(start, HALF))
            plgpu.copy_smem_to_gmem(staged, self.block.outputs[i].at[place])
