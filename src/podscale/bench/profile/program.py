"""Parse the text of an optimized XLA program into instructions with their kind, bytes and FLOPs.

Only what runs as one unit has a time of its own: an instruction of the entry computation or of a loop's body, be it one
operation, a fusion of many, or a call into a library. Its kind follows from the operations it contains.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

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
_MOVES = frozenset(
    {
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
)
_LIBRARY = MappingProxyType(
    {
        "__cudnn$convForward": CONVOLUTIONS[0],
        "__cudnn$convBiasActivationForward": CONVOLUTIONS[0],
        "__cudnn$convBackwardInput": CONVOLUTIONS[1],
        "__cudnn$convBackwardFilter": CONVOLUTIONS[2],
    }
)
_BYTES = MappingProxyType({"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16})
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b(pred|bf16|c64|c128|[suf]\d+(?:e\w+)?)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a program; `shapes` are those of its result, as (bytes of an element, dimensions)."""

    name: str
    opcode: str
    shapes: tuple[tuple[int, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    attributes: str  # the text after the operands
    program: "Program" = field(repr=False)

    @cached_property
    def inside(self) -> tuple["Instruction", ...]:
        """The instructions of a fusion, or only itself."""
        callee = re.search(r"\bcalls=%?([\w.\-]+)", self.attributes)
        body = self.program.computations.get(callee[1], ()) if callee else ()
        return tuple(inner for instruction in body for inner in instruction.inside) or (self,)

    def get_attribute(self, name: str) -> str:
        """Return the text of an attribute, such as dim_labels; empty if there is none."""
        match = re.search(rf'\b{name}="?([^\s,"}}]+)', self.attributes)
        return match[1] if match else ""

    @cached_property
    def kind(self) -> str:
        """One of KINDS: the first whose condition holds."""
        opcodes = {inner.opcode for inner in self.inside}
        names = " ".join(inner.get_attribute("op_name") for inner in (self, *self.inside))
        scopes = set(re.findall(r"\w+", names))  # also the scope in transpose(jvp(batch_norm))
        library = self.get_attribute("custom_call_target")
        conditions = {
            next(filter(None, map(_classify_convolution, self.inside)), ""): True,
            "matrix product": "dot" in opcodes or library.startswith("__cublas"),
            "summation": any(opcode.startswith(_COLLECTIVES) for opcode in opcodes),
            "pooling": bool(opcodes & {"select-and-scatter", "reduce-window"}),
            "optimizer": step.OPTIMIZER in scopes,
            "reduction": bool(opcodes & {"reduce", "scatter"}),
            "normalization": batch_norm.SCOPE in scopes,
            "copy": opcodes <= _MOVES,
        }
        return next((kind for kind, holds in conditions.items() if kind and holds), "elementwise")

    @cached_property
    def bytes(self) -> int:
        """The least bytes it must read and write: every operand once, and the result."""
        operands = {
            name: self.program.instructions[name] for name in self.operands if name in self.program.instructions
        }
        return sum(map(_count_bytes, self.shapes)) + sum(
            _count_bytes(shape) for operand in operands.values() for shape in operand.shapes
        )

    @cached_property
    def flops(self) -> float:
        """FLOPs of convolutions and matrix products; other work is limited by bytes."""
        return float(sum(map(_count_flops, self.inside)))


class Program:
    """A program, parsed from its text (`compiled.as_text()`)."""

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
            elif match := _LINE.match(line):
                name, result, opcode, remainder = match.groups()
                operands, attributes = _split_operands(remainder)
                shapes, names = tuple(_parse_shapes(result)), tuple(_OPERAND.findall(operands))
                yield computation, Instruction(name, opcode, shapes, names, attributes, self)


def _split_operands(text: str) -> tuple[str, str]:
    """Split the text after an opcode into the operands, up to their closing bracket, and the attributes."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def _parse_shapes(text: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    for kind, sides in _SHAPE.findall(text):
        width = _BYTES.get(kind) or max(1, int(re.sub(r"\D.*", "", kind[1:])) // 8)
        yield width, tuple(int(side) for side in sides.split(",") if side)


def _count_bytes(shape: tuple[int, tuple[int, ...]]) -> int:
    return shape[0] * math.prod(shape[1])


def _classify_convolution(instruction: Instruction) -> str:
    """Return which of CONVOLUTIONS an instruction is; empty if it is none."""
    target = instruction.get_attribute("custom_call_target")
    if target in _LIBRARY:
        return _LIBRARY[target]
    if instruction.opcode != "convolution":
        return ""
    if instruction.get_attribute("dim_labels").startswith("f"):  # the sum runs over the batch
        return CONVOLUTIONS[2]
    return CONVOLUTIONS[1] if "transpose(" in instruction.get_attribute("op_name") else CONVOLUTIONS[0]


def _count_flops(instruction: Instruction) -> float:
    if instruction.opcode == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        sums = [int(side) for side in match[1].split(",") if side] if match else []
        left = instruction.program.instructions[instruction.operands[0]].shapes[0][1]
        return 2.0 * math.prod(instruction.shapes[0][1]) * math.prod(left[side] for side in sums)
    kind = _classify_convolution(instruction)
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.get_attribute("dim_labels"))
    if not kind or not labels:
        return 0.0
    left, right = (instruction.program.instructions[name].shapes[0][1] for name in instruction.operands[:2])
    if instruction.opcode == "convolution":
        return 2.0 * math.prod(instruction.shapes[0][1]) * math.prod(right) / right[labels[2].index("o")]
    # In a library call, image, kernel and result keep their roles, whichever of them is computed.
    result = instruction.shapes[0][1]
    image, kernel = {
        CONVOLUTIONS[0]: (result, right),
        CONVOLUTIONS[1]: (left, right),
        CONVOLUTIONS[2]: (right, result),
    }[kind]
    return 2.0 * math.prod(image) * math.prod(kernel) / kernel[labels[2].index("o")]
