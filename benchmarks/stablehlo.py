"""Normalize lowered StableHLO modules, so that two versions of a program can be compared by digest.

* strict: SHA-256 of the module's text, without locations, without jax.arg_info and jax.result_info, with all functions,
  meshes, mesh axes and the module renamed in order of appearance, and without mesh axes of one device. Mosaic GPU
  kernels are embedded in the module as MLIR bytecode that holds Python names and line numbers; they are parsed, printed
  without locations and renamed likewise.
* loose: SHA-256 of the graph from arguments to results, independent of the order of operations, with calls of functions
  inlined and equal operations merged. Where only the strict digests differ, something moved into or out of a function
  or is listed in another order: what is computed is the same.
"""

import hashlib
import io
import re
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton

BYTECODE = b"ML\xefR"  # the first bytes of MLIR bytecode
CONFIG = "mhlo.backend_config"
INFO = r'jax\.(?:arg|result)_info = "(?:[^"\\]|\\.)*"'
DEFINED = re.compile(r'(?:\bmodule|\bfunc\.func(?: public| private)?|\bsdy\.mesh) @([\w$.-]+|"[^"]*")')
KERNEL_DEFINED = re.compile(r'\bmodule @([\w$.-]+)|sym_name = "(?!mosaic_gpu_|nvshmem)([\w$.-]+)"')
SYMBOL = re.compile(r'@([\w$.-]+|"[^"]*")')


def normalize(lowered: Any) -> tuple[str, str]:
    """Return the module's text without names and locations, and the digest of its graph."""
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(write_bytecode(module))
        replace_kernels(copy)
        text = normalize_text(print_module(copy))
        return text, Graph(ir.Module.parse(text)).digest()


def write_bytecode(module: Any) -> bytes:
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


def print_module(module: Any) -> str:
    text = module.operation.get_asm(enable_debug_info=False)
    if re.search(r"\bloc\(|__elided__", text):  # not the name of an operation such as memref.alloc
        raise SystemExit("a printed module has locations, or constants that are left out")
    return text


def replace_kernels(module: Any) -> None:
    """Put a digest of its normalized text in the place of every serialized kernel, and drop hashes of its bytes."""

    def visit(op: Any) -> Any:
        if CONFIG in op.attributes and isinstance(op.attributes[CONFIG], ir.DictAttr):
            config = {entry.name: entry.attr for entry in op.attributes[CONFIG]}
            if any(is_bytecode(value) for value in config.values()):
                config.pop("kernel_hash", None)
                digests = {k: ir.StringAttr.get(digest_kernel(v)) for k, v in config.items() if is_bytecode(v)}
                op.attributes[CONFIG] = ir.DictAttr.get(config | digests)
        elif op.name == "stablehlo.custom_call" and r"ML\EFR" in attributes_of(op):
            raise SystemExit("a serialized kernel is where replace_kernels does not look for it: extend it")
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


def is_bytecode(value: Any) -> bool:
    return isinstance(value, ir.StringAttr) and value.value_bytes.startswith(BYTECODE)


def digest_kernel(payload: Any) -> str:
    context = ir.Context.current
    triton.register_dialect(context)  # else the properties of its operations are misread
    before = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        text = print_module(ir.Module.parse(payload.value_bytes))
    finally:
        context.allow_unregistered_dialects = before
    names = [first or second for first, second in KERNEL_DEFINED.findall(text)]
    new = {name: f"k{number}" for number, name in enumerate(dict.fromkeys(names))}
    text = re.sub(r'@([\w$.-]+)|(?<=sym_name = ")([\w$.-]+)', lambda m: _rename_in_kernel(m, new), text)
    KERNELS[digest(text)] = text
    return digest(text)


KERNELS: dict[str, str] = {}  # normalized texts by digest, for --dump


def _rename_in_kernel(match: re.Match[str], new: dict[str, str]) -> str:
    symbol, name = match.groups()
    return f"@{new.get(symbol, symbol)}" if symbol else new.get(name, name)


def normalize_text(text: str) -> str:
    """Rename what a module defines by order of appearance; targets of custom calls keep their names."""
    text = re.sub(rf" \{{{INFO}\}}", "", text)
    text = re.sub(rf", {INFO}|{INFO}, ", "", text)
    symbols = {name: f"@s{number}" for number, name in enumerate(dict.fromkeys(DEFINED.findall(text)))}
    symbols = {name: "@main" if name == "main" else new for name, new in symbols.items()}
    text = re.sub(
        r"(custom_call )?" + SYMBOL.pattern,
        lambda m: m[0] if m[1] else symbols.get(m[2], m[0]),
        text,
    )
    text = drop_trivial_axes(text)
    meshes = re.findall(r"sdy\.mesh @s\d+ = <\[([^\]]*)\]", text)
    axes = {name: f"a{number}" for number, name in enumerate(re.findall(r'"([^"]*)"=', ",".join(meshes)))}
    return re.sub(r'"([\w-]+)"', lambda m: f'"{axes.get(m[1], m[1])}"', text)


def drop_trivial_axes(text: str) -> str:
    """Leave out mesh axes of one device, which divide nothing."""
    sizes = dict(re.findall(r'"([^"]*)"=(\d+)', ",".join(re.findall(r"sdy\.mesh @s\d+ = <\[([^\]]*)\]", text))))
    trivial = "|".join(re.escape(name) for name, size in sizes.items() if size == "1")
    if not trivial or len(set(sizes.values())) == 1:  # a mesh of one device keeps its first axis
        trivial = "|".join(re.escape(name) for name in list(sizes)[1:] if sizes[name] == "1")
    for item in (rf'\{{name = "(?:{trivial})", size = 1 : i64\}}', rf'"(?:{trivial})"(?:=1)?'):
        for pattern in (rf", {item}", rf"{item}, ", rf"{item}(?=[\]}}])") if trivial else ():
            text = re.sub(pattern, "", text)
    return text


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Graph:
    """The operations of a module, each identified by a digest of its kind, attributes and operands."""

    def __init__(self, module: Any) -> None:
        self.module = module  # its operations do not keep it alive
        self.functions = {op.attributes["sym_name"].value: op for op in functions_of(module)}
        self.others = sorted(str(op) for op in module.body.operations if op.operation.name != "func.func")
        self.calls: dict[tuple[Any, ...], list[str]] = {}

    def digest(self) -> str:
        main = self.functions["main"]
        (block,) = main.regions[0].blocks
        results = self.block(block, [f"argument {i}" for i in range(len(block.arguments))], {}, 0)
        return digest("\n".join([attributes_of(main), *self.others, *results]))

    def block(self, block: Any, arguments: list[str], known: dict[Any, str], depth: int) -> list[str]:
        """Return the digests of what the block's terminator returns; `known` has those of outer values."""
        known |= dict(zip(block.arguments, arguments, strict=True))
        operands: list[str] = []
        for op in (view.operation for view in block.operations):
            operands = [known[operand] for operand in op.operands]
            if op.name == "func.call":
                results = self.call(op.attributes["callee"].value, operands, depth)
            else:
                whole = digest("|".join([op.name, attributes_of(op), *operands, *self.regions(op, known, depth)]))
                results = [f"{whole} {i} {result.type}" for i, result in enumerate(op.results)]
            known |= dict(zip(op.results, results, strict=True))
        return operands

    def regions(self, op: Any, known: dict[Any, str], depth: int) -> Iterator[str]:
        for region in op.regions:
            for block in region.blocks:
                arguments = [f"{depth}.{i} {argument.type}" for i, argument in enumerate(block.arguments)]
                yield " ".join(self.block(block, arguments, dict(known), depth + 1))

    def call(self, callee: str, operands: list[str], depth: int) -> list[str]:
        key = (callee, depth, *operands)
        if key not in self.calls:
            (block,) = self.functions[callee].regions[0].blocks
            self.calls[key] = self.block(block, operands, {}, depth)
        return self.calls[key]


def functions_of(module: Any) -> Iterator[Any]:
    return (op.operation for op in module.body.operations if op.operation.name == "func.func")


def attributes_of(op: Any) -> str:
    if op.name == "stablehlo.constant" and "complex<" in str(op.results[0].type):
        return op.get_asm(enable_debug_info=False)  # jaxlib has no Python type for the value, and would end the process
    return " ".join(sorted(f"{attribute.name}={attribute.attr}" for attribute in iterate_attributes(op)))


def iterate_attributes(op: Any) -> Iterator[Any]:
    return (op.attributes[i] for i in range(len(op.attributes)))
