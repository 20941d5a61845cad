"""A residual sum and its layer norm in one pass over memory each way, as Pallas kernels for GPUs (through Triton).

Forward: s = x + y + bias, and h, the normalized s. Backward, from the gradients by s and h: the one gradient that x and
y share, and the sums over rows that are the gradients by the bias and by the norm's own parameters. XLA itself makes up
to nine passes of this, some of them over float32 values, and turns the rows around in memory between them.

A program of the grid takes blocks of rows, one 8-byte word of each row per thread and chunk. Rows are divided into
chunks because blocks of Triton have powers of two for sides.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from podscale.kernels.layer_spec import Kernels

Array = jax.Array
Arrays = tuple[Any, ...]
Rows = Float[Array, "*rows width"]
Vector = Float[Array, " width"]
WARPS = 4
ELEMENTS = 512  # of a chunk of a block: four per thread
MAX_CHUNK = 128
MAX_WIDTH = 1024  # of a row; more would not fit the registers
PROGRAMS = 4 * 132  # of the backward kernel, which loops: each writes sums of its own
MAX_ELEMENTS = 2**31  # offsets are 32-bit integers


def add_and_normalize(
    kernels: Kernels,
    x: Rows,
    y: Rows | None,
    bias: Vector | None,
    norm: tuple[Vector, Vector],
    epsilon: float,
    copies: int = 1,
) -> tuple[Rows, ...]:
    """Return s = x + y + bias, and the layer norm of s, once or several times.

    Args:
        kernels: who computes it; the reference does what the kernels cannot.
        x: rows.
        y: the same number of rows, or None, which counts as 0.
        bias: added to every row along with y; None counts as 0.
        norm: scale and bias of the layer norm.
        epsilon: added to the variance.
        copies: of the layer norm. They are one array; but their gradients are added where they are read, instead of in
            a pass of its own.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scale, shift = (parameter.astype(wide) for parameter in norm)
    offset = jnp.zeros_like(scale) if bias is None else bias.astype(wide)
    if not can_use_kernel(kernels, x):
        s, h = reference(x, y, offset, (scale, shift), epsilon)
        return s, *[h] * copies
    width = x.shape[-1]
    branch = None if y is None else y.reshape(-1, width)
    results = _add_and_normalize((kernels, epsilon, copies), x.reshape(-1, width), branch, offset, scale, shift)
    return tuple(result.reshape(x.shape) for result in results)


def reference(x: Rows, y: Rows | None, bias: Vector, norm: tuple[Vector, Vector], epsilon: float) -> tuple[Rows, Rows]:
    """Return what `add_and_normalize` does, step by step; XLA differentiates it."""
    s = x if y is None else (x.astype(bias.dtype) + y.astype(bias.dtype) + bias).astype(x.dtype)
    wide = s.astype(bias.dtype)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centered).mean(axis=-1, keepdims=True)
    return s, (centered * lax.rsqrt(variance + epsilon) * norm[0] + norm[1]).astype(x.dtype)


def can_use_kernel(kernels: Kernels, x: Array) -> bool:
    """Return whether rows of this width can be divided into chunks, and there is a block of them."""
    width = x.shape[-1]
    has_chunks = width % 32 == 0 and width <= MAX_WIDTH and x.size // width >= ELEMENTS // _choose_chunk(width)
    return kernels.are_pallas and x.dtype == jnp.bfloat16 and has_chunks and x.size < MAX_ELEMENTS


def _choose_chunk(width: int) -> int:
    return min(MAX_CHUNK, width & -width)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_and_normalize(static: Arrays, x: Array, y: Array | None, bias: Array, scale: Array, shift: Array) -> Arrays:
    return _save_for_backward(static, x, y, bias, scale, shift)[0]


def _save_for_backward(
    static: Arrays, x: Array, y: Array | None, bias: Array, scale: Array, shift: Array
) -> tuple[Arrays, Arrays]:
    kernels, epsilon, copies = static
    s, h, mean, deviation = _call_forward(kernels, epsilon, x, y, (bias, scale, shift))
    return (s, *[h] * copies), (s, mean, deviation, scale, None if y is None else ())


def _backward(static: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
    ds, *dh = cotangents
    *arrays, has_branch = residuals
    dx, (dbias, dscale, dshift) = _call_backward(static[0], ds, dh, tuple(arrays))
    return dx, dx if has_branch is not None else None, dbias, dscale, dshift


_add_and_normalize.defvjp(_save_for_backward, _backward)


# --- kernels -------------------------------------------------------------------------------------------------------


class _Blocks:
    """How a kernel divides rows into blocks, and blocks into chunks of columns."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width, self.chunk = rows, width, _choose_chunk(width)
        self.height = ELEMENTS // self.chunk
        self.count = -(-rows // self.height)
        self.chunks = range(width // self.chunk)

    def find(self, block: Any) -> tuple[Any, Any]:
        """Return the first row of a block, and which of its rows are its own: the last one overlaps the one before."""
        start = jnp.minimum(block * self.height, self.rows - self.height)
        row = start + lax.broadcasted_iota(jnp.int32, (self.height, self.chunk), 0)
        return start, (row >= block * self.height) & (row < self.rows)

    def load(self, ref: Any, start: Any) -> list[Array]:
        """Return the chunks of a block of rows, in float32."""
        return [ref[self._rows(start), self.columns(i)].astype(jnp.float32) for i in self.chunks]

    def store(self, ref: Any, start: Any, values: list[Array]) -> None:
        for i in self.chunks:
            ref[self._rows(start), self.columns(i)] = values[i].astype(ref.dtype)

    def columns(self, i: int) -> Any:
        return _pallas().ds(i * self.chunk, self.chunk)

    def _rows(self, start: Any) -> Any:
        return _pallas().ds(start, self.height)


def _pallas() -> Any:
    from jax.experimental import pallas  # takes a second

    return pallas


def _average(values: list[Array], width: int) -> Array:
    """Return the mean of each row: [height, 1]."""
    return sum(values[1:], values[0]).sum(axis=1)[:, None] / width


def _call_forward(kernels: Kernels, epsilon: float, x: Array, y: Array | None, vectors: Arrays) -> Arrays:
    """Return s, h, and the mean and the inverse standard deviation of each row of s."""
    blocks, inputs = _Blocks(*x.shape), (x,) if y is None else (x, y)

    def body(*refs: Any) -> None:
        *input_refs, bias, scale, shift, s_ref, h_ref, mean_ref, deviation_ref = refs
        start, _ = blocks.find(_pallas().program_id(0))
        s = blocks.load(input_refs[0], start)
        if y is not None:
            branch = blocks.load(input_refs[1], start)
            s = [s[i] + branch[i] + bias[blocks.columns(i)][None] for i in blocks.chunks]
            s = [value.astype(x.dtype).astype(jnp.float32) for value in s]  # as the backward pass will read it
        mean = _average(s, blocks.width)
        centered = [value - mean for value in s]
        deviation = lax.rsqrt(_average([value * value for value in centered], blocks.width) + epsilon)
        if y is not None:
            blocks.store(s_ref, start, s)
        place = blocks.columns
        h = [centered[i] * deviation * scale[place(i)][None] + shift[place(i)][None] for i in blocks.chunks]
        blocks.store(h_ref, start, h)
        for ref, value in ((mean_ref, mean), (deviation_ref, deviation)):
            ref[_pallas().ds(start, blocks.height)] = value.sum(axis=1)

    like, per_row = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((blocks.rows,), jnp.float32)
    empty = jax.ShapeDtypeStruct((1, 1), x.dtype)  # without a branch s is x
    shapes = (empty if y is None else like, like, per_row, per_row)
    s, *others = _call(kernels, body, shapes, blocks.count, "layer_norm")(*inputs, *vectors)
    return x if y is None else s, *others


def _call_backward(kernels: Kernels, ds: Array, dh: list[Array], residuals: Arrays) -> Arrays:
    """Return the gradient by s, and its sums over rows; those of dh times the normalized s, and of dh: [3, width]."""
    s = residuals[0]
    blocks = _Blocks(*s.shape)
    count = -(-blocks.count // PROGRAMS)  # of blocks per program
    programs = -(-blocks.count // count)

    def body(ds_ref: Any, *refs: Any) -> None:
        dh_refs, (s_ref, mean_ref, deviation_ref, scale_ref, dx_ref, sums_ref) = refs[: len(dh)], refs[len(dh) :]
        program = _pallas().program_id(0)
        factor = [scale_ref[blocks.columns(i)][None] for i in blocks.chunks]

        def add_block(number: Any, sums: Arrays) -> Arrays:
            start, own = blocks.find(program * count + number)
            row = _pallas().ds(start, blocks.height)
            center, inverse = mean_ref[row][:, None], deviation_ref[row][:, None]
            normal = [(value - center) * inverse for value in blocks.load(s_ref, start)]
            copies = zip(*(blocks.load(ref, start) for ref in dh_refs), strict=True)
            dh = [sum(chunks[1:], chunks[0]) for chunks in copies]
            g = [dh[i] * factor[i] for i in blocks.chunks]
            along = _average([g[i] * normal[i] for i in blocks.chunks], blocks.width)
            level = _average(g, blocks.width)
            ds = blocks.load(ds_ref, start)
            dx = [ds[i] + inverse * (g[i] - level - normal[i] * along) for i in blocks.chunks]
            blocks.store(dx_ref, start, dx)
            terms = [dx, [dh[i] * normal[i] for i in blocks.chunks], dh]
            flat = [jnp.where(own, value, 0.0) for term in terms for value in term]
            return tuple(map(jnp.add, sums, flat))

        zero = jnp.zeros((blocks.height, blocks.chunk), jnp.float32)
        sums = lax.fori_loop(0, count, add_block, (zero,) * (3 * len(blocks.chunks)))
        for number, value in enumerate(sums):
            term, i = divmod(number, len(blocks.chunks))
            sums_ref[program, term, blocks.columns(i)] = value.sum(axis=0)

    shapes = (jax.ShapeDtypeStruct(s.shape, s.dtype), jax.ShapeDtypeStruct((programs, 3, blocks.width), jnp.float32))
    dx, sums = _call(kernels, body, shapes, programs, "layer_norm_gradient")(ds, *dh, *residuals)
    return dx, sums.sum(axis=0)


def _call(kernels: Kernels, body: Any, shapes: Arrays, programs: int, name: str) -> Any:
    from jax.experimental.pallas import triton

    return _pallas().pallas_call(
        body,
        out_shape=shapes,
        grid=(programs,),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=kernels.are_interpreted,
        name=name,
    )
