"""The forward pass of `attention.py`: the kernel, and what it shares with the backward pass.

A block of warpgroups walks over pairs of an image and a head. One warpgroup loads queries, keys and values of the next
pair while the others, the workers, compute on this one. A worker takes 64 queries at a time: a row of scores fits its
registers, so softmax needs no second pass.

    s = q kᵀ,  m = max s,  p = exp2((s - m) · c),  l = sum p,  out = p v / l,  lse = m · c + log2 l;  c = log2(e) / √d

Scores go from one product to the next in registers. The inner side of the second product is the tokens. What does not
fill boxes of 64 of them, the tail, is loaded a second time, in boxes of 16.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from podscale.kernels.attention_limits import DEPTH, TILE
from podscale.kernels.matmul import Interpreter
from podscale.kernels.matmul_memory import Layout, Ref

Tokens: TypeAlias = Float[Array, "images tokens heads 64"]
Index: TypeAlias = Int[Array, ""] | int
Slice: TypeAlias = slice | pl.Slice

STEP = 16  # what a product takes of its inner side at once
BLOCKS = 132  # blocks that run at the same time: one per multiprocessor
SLOTS = 2  # pairs in shared memory
WORKERS = 3
BOXES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TAILS = (plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(32))
# Of the loading warpgroup's threads and of a worker's, by number of workers.
REGISTERS = MappingProxyType({2: (24, 240), 3: (24, 160)})
EXPONENT = math.log2(math.e) / math.sqrt(DEPTH)


@dataclass(frozen=True)
class Geometry:
    """Sizes, and how tokens are divided.

    Attributes:
        padding: tokens at the end that no token attends to.
        is_packed: whether queries, keys and values are the first, second and last third of the heads of one array, and
            so are the gradients by them.
        interpreted: whether the kernel runs in the interpreter, which has no rows past the last of an array: there,
            arrays are padded to whole tiles.
        most_blocks: of the grid.
    """

    images: int
    tokens: int
    heads: int
    padding: int
    is_packed: bool = False
    interpreted: bool = False
    most_blocks: int = BLOCKS

    @property
    def attended(self) -> int:
        """Tokens that others attend to."""
        return self.tokens - self.padding

    @property
    def tiles(self) -> int:
        """Tiles of a pair; the last may reach past the last token."""
        return -(-self.tokens // TILE)

    @property
    def rows(self) -> int:
        """Tokens of whole tiles."""
        return self.tiles * TILE

    @property
    def boxed(self) -> int:
        """Tokens before the tail."""
        return self.tokens // TILE * TILE

    @property
    def tail(self) -> int:
        """Rows of the tail, in steps; those past the last token are zeros."""
        return -(-(self.tokens - self.boxed) // STEP) * STEP

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return min(self.most_blocks, self.images * self.heads)

    def count_pairs(self, block: Index) -> Int[Array, ""]:
        """Return how many pairs a block computes."""
        return lax.div(self.images * self.heads - block + self.blocks - 1, self.blocks)

    def find_pair(self, block: Index, i: Index) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Return image and head of a block's i-th pair."""
        pair = block + i * self.blocks
        return lax.div(pair, self.heads), lax.rem(pair, self.heads)

    def select_tail(self, zero: Index) -> Slice:
        """Return the rows of the tail; `zero` is one that the compiler does not know, or it would refuse the last."""
        return pl.ds(zero + self.boxed, self.tail)

    def select(self, start: int, stop: int) -> "Geometry":
        """Return the same for a part of the tokens that starts with a box."""
        return replace(self, tokens=stop - start)

    def pad(self, x: Tokens) -> Tokens:
        """Return the array that the kernel reads."""
        return jnp.pad(x, ((0, 0), (0, self.rows - self.tokens), (0, 0), (0, 0))) if self.interpreted else x

    def describe_tokens(self, heads: int = 0) -> jax.ShapeDtypeStruct:
        """Return what a kernel writes of each token, of so many heads; 0: as queries have."""
        rows = self.rows if self.interpreted else self.tokens
        return jax.ShapeDtypeStruct((self.images, rows, heads or self.heads, DEPTH), jnp.bfloat16)

    def find_head(self, head: Index, i: int) -> Index:
        """Return the head of queries (0), keys (1) or values (2) in their array."""
        return head + i * self.heads if self.is_packed else head

    def describe_row_values(self) -> jax.ShapeDtypeStruct:
        """Return an array with a value per query."""
        return jax.ShapeDtypeStruct((self.images, self.heads, self.rows), jnp.float32)

    def describe_tail(self) -> Ref:
        """Return the shared memory of tails."""
        return plgpu.SMEM((SLOTS, self.tail, DEPTH), jnp.bfloat16, transforms=TAILS) if self.tail else None

    # --- in a kernel -----------------------------------------------------------------------------------------------

    def cast_layout(self, x: Float[Array, "..."], layout: Layout) -> Float[Array, "..."]:
        """Return the same values, distributed over a warpgroup's threads by `layout`."""
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def number_elements(self, shape: tuple[int, ...], axis: int) -> Int[Array, "rows columns"]:
        """Return the row or column of each element."""
        if self.interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def load(self, ref: Ref, layout: Layout) -> Float[Array, " values"]:
        """Load values in a layout."""
        return ref[...] if self.interpreted else plgpu.load(ref, (), layout=layout)

    def hide(self, x: Index) -> Index:
        """Return the same number, from which the compiler takes nothing out of the loop: that fills the registers."""
        return x if self.interpreted else lax.optimization_barrier(x)

    def mask_keys(self, scores: Float[Array, "64 tokens"]) -> Float[Array, "64 tokens"]:
        """Return scores that are -inf for padding."""
        if not self.padding:
            return scores
        edge = self.attended // 8 * 8
        last = scores[:, edge:]
        is_attended = self.number_elements(last.shape, 1) < self.attended - edge
        last = jnp.where(is_attended, last, -jnp.inf)
        return jnp.concatenate([scores[:, :edge], last], axis=1) if edge else last

    def multiply(self, acc: Ref, x: Float[Array, "64 tokens"], y: Ref, tail: Ref, copy: Ref = None) -> None:
        """Add x @ y to `acc`, where y is in boxes and a tail, and x in registers; in the interpreter, in `copy`."""

        def add(x: Float[Array, "64 tokens"], y: Ref) -> None:
            if copy is not None:
                copy[:, : x.shape[1]] = x
            plgpu.wgmma(acc, x if copy is None else copy.at[:, pl.ds(0, x.shape[1])], y)

        add(x[:, : self.boxed], y)
        if self.tail:
            last = x[:, self.boxed :]
            missing = self.tail - last.shape[1]
            if missing:
                zeros = self.cast_layout(jnp.zeros((TILE, missing), x.dtype), plgpu.Layout.WGMMA)
                last = jnp.concatenate([last, zeros], axis=1)
            add(last, tail)

    def transpose(self, ref: Ref, copy: Ref) -> Ref:
        """Return rows of a head as columns; the interpreter of jax 0.10 needs a copy of them."""
        if self.interpreted:
            place = copy.at[:, pl.ds(0, ref.shape[0])]
            place[...] = ref[...].T
            return place
        return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))

    def describe_copies(self, workers: int) -> Ref:
        """Return memory for a left or right side of each worker, where the interpreter's products need a copy."""
        return plgpu.SMEM((workers, TILE, self.rows), jnp.bfloat16) if self.interpreted else None


def find_tiles(geometry: Geometry, workers: int, worker: Index, i: Index) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the first tile of a worker in the i-th pair, and how many: every `workers`-th over all pairs."""
    first = lax.rem(worker + i * ((workers - 1) * geometry.tiles), workers)
    return first, lax.div(geometry.tiles - first + workers - 1, workers)


def drain(count: Index, free: Ref) -> None:
    """Wait for the last pairs: no barrier may be freed before every arrival at it."""
    for i in range(SLOTS):
        barrier = free.at[lax.rem(count + SLOTS - 1 - i, SLOTS)]
        pl.when(count > i)(partial(plgpu.barrier_wait, barrier))


def run_forward(
    geometry: Geometry, q: Tokens, k: Tokens, v: Tokens, interpret: Interpreter | None = None, workers: int = WORKERS
) -> tuple[Tokens, Float[Array, "images heads rows"]]:
    """Return the result of attention, and log2 of the sums of exp2 of scaled scores."""
    out, lse = plgpu.kernel(
        lambda *refs: _run_block(geometry, workers, *refs),
        out_type=(geometry.describe_tokens(), geometry.describe_row_values()),
        scratch_types=(
            plgpu.SMEM((SLOTS, geometry.rows, DEPTH), q.dtype, transforms=BOXES),
            plgpu.SMEM((SLOTS, geometry.tokens, DEPTH), q.dtype, transforms=BOXES),
            plgpu.SMEM((SLOTS, geometry.boxed, DEPTH), q.dtype, transforms=BOXES),
            geometry.describe_tail(),
            plgpu.SMEM((SLOTS, geometry.rows), jnp.float32),
            geometry.describe_copies(workers),
            plgpu.Barrier(num_arrivals=4 if geometry.tail else 3, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=workers, num_barriers=SLOTS),
        ),
        grid=(geometry.blocks,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*map(geometry.pad, (q, k, v)))
    return out[:, : geometry.tokens], lse


def _run_block(geometry: Geometry, workers: int, *refs: Ref) -> None:
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    decreased, increased = REGISTERS[workers]

    @pl.when(warpgroup == workers)
    def _() -> None:
        plgpu.set_max_registers(decreased, action="decrease")
        _load_pairs(geometry, block, *refs)

    @pl.when(warpgroup < workers)
    def _() -> None:
        plgpu.set_max_registers(increased, action="increase")
        _compute_pairs(geometry, workers, warpgroup, block, *refs)


def _load_pairs(geometry: Geometry, block: Index, q: Ref, k: Ref, v: Ref, *refs: Ref) -> None:
    _, _, queries, keys, values, tails, _, _, full, free = refs
    zero = block * 0

    def load_pair(i: Index, _: None) -> None:
        image, head = geometry.find_pair(block, i)
        slot = lax.rem(i, SLOTS)
        pl.when(i >= SLOTS)(lambda: plgpu.barrier_wait(free.at[slot]))
        copies = [
            (q, 0, pl.ds(zero, geometry.rows), queries),
            (k, 1, pl.ds(0, geometry.tokens), keys),
            (v, 2, pl.ds(0, geometry.boxed), values),
        ]
        copies += [(v, 2, geometry.select_tail(zero), tails)] if geometry.tail else []
        for source, number, rows, target in copies:
            place = image, rows, geometry.find_head(head, number)
            plgpu.copy_gmem_to_smem(source.at[place], target.at[slot], full.at[slot])

    count = geometry.count_pairs(block)
    lax.fori_loop(0, count, load_pair, None)
    drain(count, free)


def _compute_pairs(geometry: Geometry, workers: int, worker: Index, block: Index, *refs: Ref) -> None:
    _, _, _, out, lse, queries, keys, values, tails, sums, copies, full, free = refs

    def compute_pair(i: Index, _: None) -> None:
        image, head = geometry.find_pair(block, i)
        slot = lax.rem(i, SLOTS)
        first, count = find_tiles(geometry, workers, worker, i)
        copy = copies.at[worker] if geometry.interpreted else None
        plgpu.barrier_wait(full.at[slot])

        def compute_tile(j: Index, _: None) -> None:
            rows = pl.ds((first + j * workers) * TILE, TILE)
            tile, total = queries.at[slot, rows], sums.at[slot, rows]

            def multiply_keys(acc: Ref) -> Float[Array, "64 tokens"]:
                plgpu.wgmma(acc, tile, geometry.transpose(keys.at[slot], copy))
                return acc[...]

            scores = pl.run_scoped(multiply_keys, plgpu.ACC((TILE, geometry.tokens), jnp.float32))
            scores = geometry.mask_keys(scores)
            largest = scores.max(axis=1) * EXPONENT
            weights = jnp.exp2(scores * EXPONENT - lax.broadcast_in_dim(largest, scores.shape, [0]))
            divisor = weights.sum(axis=1)
            total[...] = largest + jnp.log2(divisor)

            def multiply_values(acc: Ref) -> Float[Array, "64 64"]:
                tail = tails.at[slot] if geometry.tail else None
                geometry.multiply(acc, weights.astype(jnp.bfloat16), values.at[slot], tail, copy)
                return acc[...]

            result = pl.run_scoped(multiply_values, plgpu.ACC((TILE, DEPTH), jnp.float32))
            result = result * lax.broadcast_in_dim(1 / divisor, result.shape, [0])
            tile[...] = result.astype(jnp.bfloat16)  # in place of the queries
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, out.at[image, rows, head])
            plgpu.copy_smem_to_gmem(total, lse.at[image, head, rows])

        lax.fori_loop(0, count, compute_tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(free.at[slot])

    lax.fori_loop(0, geometry.count_pairs(block), compute_pair, None)
    plgpu.wait_smem_to_gmem(0)
