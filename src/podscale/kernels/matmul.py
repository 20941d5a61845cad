"""A matrix product on Hopper GPUs whose left side is computed, and whose result is finished, inside one kernel.

    u = p · A + q · B + C, rectified where wanted    [rows, depth], kept as an output; A, B, C by group and channel
    v = u @ kernel + add, zero where mask is not above zero    [rows, columns]
    sums of v and of v · v, or of v · other, over each group's rows
    inputs^T @ u where wanted, for which u itself need not be kept: the gradient by a convolution's kernel

That is a 1x1 convolution with what stands before and after it, forward (p the raw output of the layer before, q the
shortcut) as well as backward (p and q the gradient and the values that batch norm's own gradient is made of). Each
large array is read once and written once.

The kernel is a Pallas kernel for Mosaic GPU. A block of three warpgroups walks over tiles of 128 rows of one group: the
third loads boxes of 64 channels ahead of time, the other two compute 64 rows each. All boxes pass through rings in
shared memory, each with a barrier that says it is full and one that says it is free again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from podscale.kernels.blocking import BOX, HALF, ROWS, SCRATCH_BYTES, Cut

Array = jax.Array
Refs = dict[str, Any]  # arrays in a GPU's memory, by name
# How a warpgroup holds a box that it sums over rows: 16 columns a warp, a pair of them and every fourth row a lane.
# Most of the sum is then within a lane, and nothing goes from warp to warp.
SUMMED = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 64), (64, 16), (8, 16), (2, 16), (2,))), warp_dims=(-8,), lane_dims=(-5, -2), vector_dim=-1
)


@partial(jax.jit, static_argnames=("cut", "rectify", "interpret"))
def product(
    cut: Cut,
    left: tuple[Array, ...],
    vectors: tuple[Array, ...],
    kernel: Array,
    *,
    rectify: bool = False,
    add: Array | None = None,
    mask: Array | None = None,
    others: tuple[Array, ...] = (),
    inputs: Array | None = None,
    interpret: Any = None,
) -> tuple[Array | None, Array, Array | None, Array | None]:
    """u (None if it is p itself), v, the sums [kinds, groups, columns], and inputs^T @ u (None what is not wanted).

    Without others, the sums are those of v and of its squares. The inputs may be the mask.
    """
    rows, depth = left[0].shape
    columns = kernel.shape[1]
    dtype = left[0].dtype
    beside = {"add": add, "mask": mask, "input": inputs if cut.weighed and mask is None else None}
    extras = {name: value for name, value in beside.items() if value is not None}
    extras |= {f"other{i}": value for i, value in enumerate(others)}
    boxed = [v.reshape(cut.groups, cut.steps, BOX) for v in vectors]
    given = {f"left{i}": value for i, value in enumerate(left)} | {"kernel": kernel}
    given |= {f"vector{i}": value for i, value in enumerate(boxed)} | extras
    blocks = cut.groups * cut.blocks
    outputs = {"v": jax.ShapeDtypeStruct((rows, columns), dtype)}
    if cut.weighed:
        outputs["weights"] = jax.ShapeDtypeStruct((blocks, 2, BOX, depth * columns // BOX), jnp.float32)
    elif cut.computed:
        outputs["u"] = jax.ShapeDtypeStruct((rows, depth), dtype)
    if cut.sums:
        outputs["sums"] = jax.ShapeDtypeStruct((blocks, 2, cut.sums, columns // BOX, BOX), jnp.float32)
    names = (*given, *outputs)

    def body(*refs: Any, **shared: Any) -> None:
        _body(Block(cut, rectify, dict(zip(names, refs, strict=True)), shared, interpret is not None))

    found = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=_shared(cut, len(boxed), len(left), list(extras), dtype, interpret is not None),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=SCRATCH_BYTES, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )(*given.values())
    named = dict(zip(outputs, found, strict=True))
    sums = weights = None
    if cut.sums:
        by_block = named["sums"].reshape(cut.groups, cut.blocks * 2, cut.sums, columns)
        sums = by_block.sum(axis=1).swapaxes(0, 1)
    if cut.weighed:  # from boxes of the columns, side by side
        weights = named["weights"].sum(axis=(0, 1)).reshape(BOX, columns // BOX, depth).swapaxes(0, 1)
    return named.get("u"), named["v"], sums, weights


def _shared(cut: Cut, vectors: int, lefts: int, extras: list[str], dtype: Any, interpreted: bool) -> Refs:
    """What lies in shared memory: boxes as the matrix units want them, vectors, sums and barriers."""
    swizzled = (plgpu.TilingTransform((8, BOX)), plgpu.SwizzleTransform(2 * BOX))

    def ring(name: str, number: int, arrays: list[str], *shape: int) -> Refs:
        """Boxes, with a barrier for each that says it is full and one for when both warpgroups are done with it."""
        boxes = {array: plgpu.SMEM((number, *shape), dtype, transforms=swizzled) for array in arrays}
        full = plgpu.Barrier(num_arrivals=len(arrays), num_barriers=number)
        return boxes | {f"{name}_full": full, f"{name}_free": plgpu.Barrier(num_arrivals=2, num_barriers=number)}

    found = ring("left", cut.left_ring, [f"left{i}" for i in range(lefts)], ROWS, BOX)
    found |= ring("kernel", cut.kernel_ring, ["kernel"], BOX, cut.part)
    found |= ring("extra", cut.extra_ring, extras, ROWS, BOX) if extras else {}
    found["result"] = plgpu.SMEM((2, cut.result_ring, HALF, BOX), dtype, transforms=swizzled)
    if cut.computed:
        found["kept"] = plgpu.SMEM((2, cut.kept, HALF, BOX), dtype, transforms=swizzled)
    if cut.weighed and interpreted:
        found["turned"] = plgpu.SMEM((2, BOX, HALF), dtype)
    if vectors:
        found |= {f"vector{i}": plgpu.SMEM((cut.steps, BOX), jnp.float32) for i in range(vectors)}
        found["vectors_full"] = plgpu.Barrier(num_arrivals=vectors, num_barriers=1)
    if cut.sums:
        found["sums"] = plgpu.SMEM((2, cut.sums, cut.parts * cut.part // BOX, BOX), jnp.float32)
    return found


@dataclass(frozen=True)
class Block:
    """What a block of warpgroups has to do, and with what."""

    cut: Cut
    rectify: bool
    at: Refs  # in the GPU's memory
    shared: Refs
    interpreted: bool

    @property
    def extras(self) -> list[str]:
        return [name for name in self.at if name in ("add", "mask", "input") or name.startswith("other")]

    @property
    def group(self) -> Any:
        """The batch-norm group whose rows it works on."""
        return lax.div(lax.axis_index("block"), self.cut.blocks)

    @property
    def tiles(self) -> Any:
        """How many of the group's tiles are its own."""
        return lax.div(self.cut.tiles - self._first + self.cut.blocks - 1, self.cut.blocks)

    def row(self, tile: Any) -> Any:
        return (self.group * self.cut.tiles + self._first + tile * self.cut.blocks) * ROWS

    @property
    def _first(self) -> Any:
        return lax.rem(lax.axis_index("block"), self.cut.blocks)

    def held(self, x: Array, layout: Any) -> Array:
        """The same numbers, spread over a warpgroup's threads in this way."""
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def box(self, ring: str, count: Any) -> Any:
        """Where in a ring the count-th box lies."""
        return lax.rem(count, jnp.int32(getattr(self.cut, f"{ring}_ring")))

    def full(self, ring: str, count: Any) -> Any:
        return self.shared[f"{ring}_full"].at[self.box(ring, count)]

    def free(self, ring: str, count: Any) -> Any:
        return self.shared[f"{ring}_free"].at[self.box(ring, count)]


def _body(block: Block) -> None:
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _load(block)

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        Worker(block, warpgroup).work()


# --- the warpgroup that loads --------------------------------------------------------------------------------------


def _load(block: Block) -> None:
    cut, at, shared = block.cut, block.at, block.shared
    lefts = [name for name in at if name.startswith("left")]
    for name in at:
        if name.startswith("vector"):
            plgpu.copy_gmem_to_smem(at[name].at[block.group], shared[name], shared["vectors_full"].at[0])

    def load(ring: str, count: Any, names: list[str], *where: Any) -> None:
        """Loads a box of each of these arrays, as soon as the one that it takes the place of is done with."""
        number = getattr(cut, f"{ring}_ring")
        _when(count >= number, plgpu.barrier_wait, block.free(ring, count))
        for name in names:
            place = shared[name].at[block.box(ring, count)]
            plgpu.copy_gmem_to_smem(at[name].at[where], place, block.full(ring, count))

    def tile(t: Any, _: None) -> None:
        rows = pl.ds(block.row(t), ROWS)

        def part(n: Any, _: None) -> None:
            def step(k: Any, _: None) -> None:
                depth = pl.ds(k * BOX, BOX)
                pl.when(n == 0)(lambda: load("left", t * cut.steps + k, lefts, rows, depth))
                count = (t * cut.parts + n) * cut.steps + k
                load("kernel", count, ["kernel"], depth, pl.ds(n * cut.part, cut.part))

            lax.fori_loop(0, cut.steps, step, None)
            for j in range(cut.part // BOX if block.extras else 0):
                count = (t * cut.parts + n) * (cut.part // BOX) + j
                load("extra", count, block.extras, rows, pl.ds(n * cut.part + j * BOX, BOX))

        lax.fori_loop(0, cut.parts, part, None)

    def drained(ring: str, count: Any) -> None:
        """No barrier may go while somebody is still to arrive at it."""
        for i in range(getattr(cut, f"{ring}_ring")):
            _when(count > i, plgpu.barrier_wait, block.free(ring, count - 1 - i))

    lax.fori_loop(0, block.tiles, tile, None)
    drained("left", block.tiles * cut.steps)
    drained("kernel", block.tiles * cut.parts * cut.steps)
    if block.extras:
        drained("extra", block.tiles * cut.parts * (cut.part // BOX))


# --- the two that compute ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    """One of the two, which computes its half of every tile."""

    block: Block
    warpgroup: Any

    def work(self) -> None:
        cut, at, shared = self.block.cut, self.block.at, self.block.shared
        zero = self.block.held(jnp.zeros((BOX,), jnp.float32), SUMMED.reduce(0))
        for kind in range(cut.sums):
            for j in range(cut.parts * cut.part // BOX):
                shared["sums"][self.warpgroup, kind, j] = zero
        if "vectors_full" in shared:
            plgpu.barrier_wait(shared["vectors_full"].at[0])

        if cut.weighed:
            pl.run_scoped(self.weigh, plgpu.ACC((BOX, cut.steps * cut.parts * cut.part), jnp.float32))
        else:

            def tile(t: Any, _: None) -> None:
                lax.fori_loop(0, cut.parts, lambda n, _: self.part(t, n), None)

            lax.fori_loop(0, self.block.tiles, tile, None)
        if cut.sums:
            plgpu.commit_smem()
            place = at["sums"].at[lax.axis_index("block"), self.warpgroup]
            plgpu.copy_smem_to_gmem(shared["sums"].at[self.warpgroup], place)
        plgpu.wait_smem_to_gmem(0)

    def weigh(self, weights: Any) -> None:
        """All tiles, adding up the gradient by the kernel, whose place must be known when this is compiled."""
        cut = self.block.cut

        def tile(t: Any, _: None) -> None:
            for n in range(cut.parts):
                self.part(t, n, weights)

        lax.fori_loop(0, self.block.tiles, tile, None)
        place = self.block.at["weights"].at[lax.axis_index("block"), self.warpgroup]
        place[...] = weights[...]

    def part(self, t: Any, n: Any, weights: Any = None) -> None:
        """Some columns of a tile: the product, box by box of its depth, and what finishes it."""
        block, cut, shared = self.block, self.block.cut, self.block.shared
        first = (t * cut.parts + n) * cut.steps

        def multiplied(acc: Any) -> Array:
            def step(k: Any, _: None) -> None:
                if cut.parts == 1:
                    left = self.left_box(t, k)
                else:
                    pl.when(n == 0)(lambda: self.left_box(t, k) and None)
                    left = shared["kept"].at[self.warpgroup, k]
                plgpu.barrier_wait(block.full("kernel", first + k))
                plgpu.wgmma(acc, left, shared["kernel"].at[block.box("kernel", first + k)])
                plgpu.wgmma_wait(1)  # the product before this one is done, and its boxes are free
                pl.when(k > 0)(lambda: self.release(first + k - 1))

            lax.fori_loop(0, cut.steps, step, None)
            whole = acc[...]
            self.release(first + cut.steps - 1)
            return whole

        result = pl.run_scoped(multiplied, plgpu.ACC((HALF, cut.part), jnp.float32))
        for j in range(cut.part // BOX):
            self.finish(t, n, j, result[:, j * BOX : (j + 1) * BOX], weights)

    def left_box(self, t: Any, k: Any) -> Any:
        """The left side's next box: as it came, or computed, which is then stored for good as well."""
        block, cut, shared = self.block, self.block.cut, self.block.shared
        count = t * cut.steps + k
        box = block.box("left", count)
        plgpu.barrier_wait(block.full("left", count))
        if not cut.computed:
            return shared["left0"].at[box, self.half]
        u = self.wide(shared["left0"].at[box, self.half]) * self.vector(0, k) + self.vector(1, k)
        if "left1" in shared:
            u += self.wide(shared["left1"].at[box, self.half]) * self.vector(2, k)
        u = jnp.maximum(u, 0) if block.rectify else u
        plgpu.barrier_arrive(block.free("left", count))
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        kept = shared["kept"].at[self.warpgroup, k if cut.kept == cut.steps else lax.rem(k, jnp.int32(2))]
        kept[...] = u.astype(block.at["v"].dtype)
        plgpu.commit_smem()
        if not cut.weighed:
            plgpu.copy_smem_to_gmem(kept, block.at["u"].at[self.rows(t), pl.ds(k * BOX, BOX)])
        return kept

    def release(self, count: Any) -> None:
        plgpu.barrier_arrive(self.block.free("kernel", count))
        if not self.block.cut.computed:
            plgpu.barrier_arrive(self.block.free("left", count))

    def finish(self, t: Any, n: Any, j: int, v: Array, weights: Any) -> None:
        """Adds, masks, stores and counts a box of the result, and multiplies the left side with what it belongs to."""
        block, cut, shared = self.block, self.block.cut, self.block.shared
        column = n * (cut.part // BOX) + j
        count = t * cut.parts * (cut.part // BOX) + column
        extra = block.box("extra", count)
        if block.extras:
            plgpu.barrier_wait(block.full("extra", count))
        if cut.weighed:
            inputs = self.turned(shared["mask" if "mask" in shared else "input"].at[extra, self.half])
            for k in range(cut.steps):
                first = (n * cut.steps + k) * BOX
                plgpu.wgmma(weights.at[:, first : first + BOX], inputs, shared["kept"].at[self.warpgroup, k])
        if "add" in shared:
            v += self.wide(shared["add"].at[extra, self.half])
        if "mask" in shared:
            v = jnp.where(self.wide(shared["mask"].at[extra, self.half]) > 0, v, 0.0)
        plgpu.wait_smem_to_gmem(cut.leaving, wait_read_only=True)
        box = shared["result"].at[self.warpgroup, j % cut.result_ring]
        box[...] = v.astype(block.at["v"].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(box, block.at["v"].at[self.rows(t), pl.ds(column * BOX, BOX)])
        if cut.sums:
            v = self.wide(box, SUMMED)
            others = [shared[name].at[extra, self.half] for name in block.extras if name.startswith("other")]
            terms = [v, *(v * self.wide(other, SUMMED) for other in others)] if others else [v, v * v]
            for kind, term in enumerate(terms):
                place = shared["sums"].at[self.warpgroup, kind, column]
                place[...] = block.held(place[...], SUMMED.reduce(0)) + term.sum(axis=0)
        if cut.weighed:
            plgpu.wgmma_wait(0)
        if block.extras:
            plgpu.barrier_arrive(block.free("extra", count))

    @property
    def half(self) -> Any:
        """Its rows of a box."""
        return pl.ds(self.warpgroup * HALF, HALF)

    def rows(self, t: Any) -> Any:
        """Its rows of all."""
        return pl.ds(self.block.row(t) + self.warpgroup * HALF, HALF)

    def wide(self, ref: Any, layout: Any = plgpu.Layout.WGMMA) -> Array:
        return self.block.held(ref[...], layout).astype(jnp.float32)

    def turned(self, ref: Any) -> Any:
        """A box with rows as columns, as it lies in memory; jax 0.10's interpreter wants it to lie that way."""
        if self.block.interpreted:
            place = self.block.shared["turned"].at[self.warpgroup]
            place[...] = ref[...].T
            return place
        return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))

    def vector(self, i: int, k: Any) -> Array:
        values = self.block.held(self.block.shared[f"vector{i}"][k], plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(values, (HALF, BOX), [1])


def _when(condition: Any, what: Callable[[Any], None], ref: Any) -> None:
    pl.when(condition)(lambda: what(ref))


def interpreter() -> Any:
    """The kernel on a machine without such a GPU, slowly."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # not public in every version yet

    return InterpretGPUParams()
