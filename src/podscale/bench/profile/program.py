"""Program: an optimized XLA program, read from its text into instructions that know their kind, bytes and FLOPs.

Only what runs as one piece has a time of its own: an instruction of the entry computation or of a loop's body, be it
one operation, a fusion of many, or a call into a library. Its kind is found in what it is made of.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from podscale.parallel import batch_norm
from podscale.training import step

CONVOLUTIONS = ("convolution forward", "data gradient", "weight gradient")
KINDS = (
    *CONVOLUTIONS,
    "matrix product",
    "normalization",
    "reduction",
    "elementwise",
    "pooling",
    "optimizer",
    "summation",
    "copy",
)
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_MOVES = {
    "copy",
    "transpose",
    "bitcast",
    "parameter",
    "reshape",
    "slice",
    "concatenate",
    "pad",
    "broadcast",
    "constant",
}
_LIBRARY = {
    "__cudnn$convForward": CONVOLUTIONS[0],
    "__cudnn$convBiasActivationForward": CONVOLUTIONS[0],
    "__cudnn$convBackwardInput": CONVOLUTIONS[1],
    "__cudnn$convBackwardFilter": CONVOLUTIONS[2],
}
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b(pred|bf16|c64|c128|[suf]\d+(?:e\w+)?)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a program: `shapes` are those of its result, (bytes of an element, sides)."""

    name: str
    opcode: str
    shapes: tuple[tuple[int, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    rest: str  # what stands behind the operands
    program: "Program" = field(repr=False)

    @cached_property
    def inside(self) -> tuple["Instruction", ...]:
        """What it is made of: the instructions of a fusion, or only itself."""
        called = re.search(r"\bcalls=%?([\w.\-]+)", self.rest)
        body = self.program.computations.get(called[1], ()) if called else ()
        return tuple(inner for one in body for inner in one.inside) or (self,)

    def attribute(self, name: str) -> str:
        """The text of an attribute, such as dim_labels; empty if there is none."""
        found = re.search(rf'\b{name}="?([^\s,"}}]+)', self.rest)
        return found[1] if found else ""

    @cached_property
    def kind(self) -> str:
        """One of KINDS: the first whose mark it has."""
        opcodes = {one.opcode for one in self.inside}
        names = " ".join(one.attribute("op_name") for one in (self, *self.inside))
        scopes = set(re.findall(r"\w+", names))  # also the one in transpose(jvp(batch_norm))
        library = self.attribute("custom_call_target")
        marks = {
            next(filter(None, map(_convolution, self.inside)), ""): True,
            "matrix product": "dot" in opcodes or library.startswith("__cublas"),
            "summation": any(opcode.startswith(_COLLECTIVES) for opcode in opcodes),
            "pooling": bool(opcodes & {"select-and-scatter", "reduce-window"}),
            "optimizer": step.OPTIMIZER in scopes,
            "reduction": bool(opcodes & {"reduce", "scatter"}),
            "normalization": batch_norm.SCOPE in scopes,
            "copy": opcodes <= _MOVES,
        }
        return next((kind for kind, has in marks.items() if kind and has), "elementwise")

    @cached_property
    def bytes(self) -> int:
        """What it must read and write at least: every operand once, and the result."""
        read = {name: self.program.instructions[name] for name in self.operands if name in self.program.instructions}
        return sum(map(_size, self.shapes)) + sum(_size(shape) for one in read.values() for shape in one.shapes)

    @cached_property
    def flops(self) -> float:
        """Of convolutions and matrix products; other work is limited by bytes."""
        return float(sum(map(_flops, self.inside)))


class Program:
    """A program by its text (`compiled.as_text()`)."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.instructions: dict[str, Instruction] = {}
        for computation, instruction in self._read(text):
            self.computations.setdefault(computation, []).append(instruction)
            self.instructions[instruction.name] = instruction

    def _read(self, text: str) -> Iterator[tuple[str, Instruction]]:
        computation = ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                computation = head[1]
            elif found := _LINE.match(line):
                name, result, opcode, behind = found.groups()
                operands, rest = _split(behind)
                shapes = tuple(_shapes(result))
                yield computation, Instruction(name, opcode, shapes, tuple(_OPERAND.findall(operands)), rest, self)


def _split(behind: str) -> tuple[str, str]:
    """Operands, up to the bracket that closes them, and the rest of the line."""
    depth = 1
    for place, character in enumerate(behind):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return behind[:place], behind[place + 1 :]
    return behind, ""


def _shapes(text: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    for kind, sides in _SHAPE.findall(text):
        width = _BYTES.get(kind) or max(1, int(re.sub(r"\D.*", "", kind[1:])) // 8)
        yield width, tuple(int(side) for side in sides.split(",") if side)


def _size(shape: tuple[int, tuple[int, ...]]) -> int:
    return shape[0] * math.prod(shape[1])


def _convolution(one: Instruction) -> str:
    """Which of the three it is; empty if it is none."""
    target = one.attribute("custom_call_target")
    if target in _LIBRARY:
        return _LIBRARY[target]
    if one.opcode != "convolution":
        return ""
    if one.attribute("dim_labels").startswith("f"):  # the batch is what is summed over
        return CONVOLUTIONS[2]
    return CONVOLUTIONS[1] if "transpose(" in one.attribute("op_name") else CONVOLUTIONS[0]


def _flops(one: Instruction) -> float:
    if one.opcode == "dot":
        listed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
        sums = [int(side) for side in listed[1].split(",") if side] if listed else []
        left = one.program.instructions[one.operands[0]].shapes[0][1]
        return 2.0 * math.prod(one.shapes[0][1]) * math.prod(left[side] for side in sums)
    kind = _convolution(one)
    labels = re.match(r"(\w+)_(\w+)->(\w+)", one.attribute("dim_labels"))
    if not kind or not labels:
        return 0.0
    left, right = (one.program.instructions[name].shapes[0][1] for name in one.operands[:2])
    if one.opcode == "convolution":
        return 2.0 * math.prod(one.shapes[0][1]) * math.prod(right) / right[labels[2].index("o")]
    # A library's: image, kernel and result have their own roles, whichever of them is computed.
    result = one.shapes[0][1]
    image, kernel = {
        CONVOLUTIONS[0]: (result, right),
        CONVOLUTIONS[1]: (left, right),
        CONVOLUTIONS[2]: (right, result),
    }[kind]
    return 2.0 * math.prod(image) * math.prod(kernel) / kernel[labels[2].index("o")]
