"""Claim: with another Gram matrix every three iterations, Muon's iterations lose less than they do in bfloat16.

Errors of five Newton-Schulz iterations in several precisions, relative to the Frobenius norm of float64's result. The
matrices have singular values spread evenly, in logarithm, over some powers of ten, or those of Gaussian noise. The
float32 of a GPU's tensor cores (TF32) is emulated: operands are rounded to 10 bits. No GPU is needed.

    python benchmarks/newton_schulz.py [--side 256] [--lengths 256,2304] [--decades 0,2,4]
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from podscale.optim.newton_schulz import COEFFICIENTS, split_steps

Matrix = NDArray
Multiply = Callable[[Matrix, Matrix], Matrix]
STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--lengths", default="256,2304")
    parser.add_argument("--decades", default="0,2,4")
    arguments = parser.parse_args()
    for length in map(int, arguments.lengths.split(",")):
        for decades in map(int, arguments.decades.split(",")):
            matrix = make_matrix(arguments.side, length, decades)
            expected = iterate(matrix.astype(np.float64), np.matmul)
            print(f"{arguments.side} x {length}, {f'{decades} decades' if decades else 'Gaussian noise'}")
            for name, function in WAYS.items():
                print(f"    {name:50} {np.linalg.norm(function(matrix) - expected) / np.linalg.norm(expected):.4f}")


def make_matrix(side: int, length: int, decades: int) -> Matrix:
    random = np.random.default_rng(0)
    if not decades:
        return random.normal(size=(side, length)).astype(np.float32)
    left, right = (np.linalg.qr(random.normal(size=(size, side)))[0] for size in (side, length))
    return ((left * np.logspace(0, -decades, side)) @ right.T).astype(np.float32)


# --- precisions ------------------------------------------------------------------------------------------------------


def keep_bits(x: Matrix, bits: int) -> Matrix:
    """Round float32 to this many bits after the leading one, to nearest even."""
    dropped = 23 - bits
    integers = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = integers + (1 << (dropped - 1)) - 1 + ((integers >> dropped) & 1)
    return (rounded >> dropped << dropped).astype(np.uint32).view(np.float32)


def to_bfloat16(x: Matrix) -> Matrix:
    return keep_bits(x, 7)


def multiply_tf32(x: Matrix, y: Matrix) -> Matrix:
    return np.asarray(keep_bits(x, 10) @ keep_bits(y, 10))


def multiply_bfloat16(x: Matrix, y: Matrix) -> Matrix:
    return np.asarray(to_bfloat16(x) @ to_bfloat16(y))


def multiply_three_bfloat16(x: Matrix, y: Matrix) -> Matrix:
    """Multiply by three products of bfloat16, as `Precision.HIGH` does on TPUs."""
    (x_high, y_high) = parts = to_bfloat16(x), to_bfloat16(y)
    x_low, y_low = (to_bfloat16(whole - part) for whole, part in zip((x, y), parts, strict=True))
    return np.asarray(x_high @ y_high + (x_high @ y_low + x_low @ y_high))


# --- iterations ------------------------------------------------------------------------------------------------------


def iterate(x: Matrix, multiply: Multiply, finish: Callable[[Matrix], Matrix] = np.asarray) -> Matrix:
    """Iterate on X; `finish` rounds every result."""
    a, b, c = COEFFICIENTS
    x = finish(finish(x) / np.linalg.norm(x))
    for _ in range(STEPS):
        gram = finish(multiply(x, x.T))
        x = finish(a * x + finish(multiply(finish(b * gram + c * finish(multiply(gram, gram))), x)))
    return x


def iterate_on_gram(x: Matrix, phases: Sequence[int], multiply: Multiply) -> Matrix:
    """Iterate on A, from X in bfloat16, which is multiplied after each phase."""
    a, b, c = COEFFICIENTS
    x, norm = to_bfloat16(x), np.float32(np.linalg.norm(to_bfloat16(x)))
    for phase in phases:
        gram = np.asarray(x @ x.T / norm**2, np.float32)
        identity = np.eye(len(gram), dtype=np.float32)
        product = identity / norm
        for step in range(phase):
            factor = np.float32(a) * identity + np.float32(b) * gram + np.float32(c) * multiply(gram, gram)
            product = factor / norm if step == 0 else multiply(factor, product)
            gram = multiply(multiply(gram, factor), factor)
        last, norm = multiply_bfloat16(product, x), np.float32(1)
        x = to_bfloat16(last)
    return last


WAYS: dict[str, Callable[[Matrix], Matrix]] = {
    "on X, bfloat16": lambda x: iterate(x, multiply_bfloat16, to_bfloat16),
    "on X, TF32": lambda x: iterate(x, multiply_tf32),
    "on A, once, float32": lambda x: iterate_on_gram(x, [STEPS], np.matmul),
    "on A, once, three products of bfloat16": lambda x: iterate_on_gram(x, [STEPS], multiply_three_bfloat16),
    "on A, once, TF32": lambda x: iterate_on_gram(x, [STEPS], multiply_tf32),
    "on A, again after three, bfloat16": lambda x: iterate_on_gram(x, split_steps(STEPS), multiply_bfloat16),
    "on A, again after three, TF32 (ours)": lambda x: iterate_on_gram(x, split_steps(STEPS), multiply_tf32),
}

if __name__ == "__main__":
    main()
