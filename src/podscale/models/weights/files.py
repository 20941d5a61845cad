"""Read weights files: safetensors, and torch state dicts without executing what they hold."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors

from podscale.errors import UserError


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a `.safetensors` file, or of a `.pth` or `.pt` file with a torch state dict.

    Raises:
        UserError: there is no such file, or it cannot be read as what its suffix says.
    """
    if not path.is_file():
        raise UserError(f"there is no weights file {path}")
    if path.suffix not in _READERS:
        raise UserError(f"weights {path} must be one of {', '.join(_READERS)}")
    return _READERS[path.suffix](path)


def read_labels(path: Path) -> tuple[str, ...] | None:
    """Return the names of the classes that a `.safetensors` file of ours holds; None if it does not name them."""
    if path.suffix != ".safetensors":
        return None
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    try:
        labels = json.loads(metadata.get("labels", "null"))
    except ValueError:
        return None
    is_list = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    return tuple(labels) if is_list else None


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        tensors = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from None
    return {name: _decode_tensor(path, name, **tensor) for name, tensor in tensors}


def _decode_tensor(path: Path, name: str, shape: list[int], dtype: str, data: bytearray) -> np.ndarray:
    """Return a tensor of a safetensors file; bfloat16, which NumPy itself lacks, as float32 of the same values."""
    if dtype == "BF16":
        bits = np.ndarray(shape, np.uint16, data).astype(np.uint32) << 16
        return np.asarray(bits).view(np.float32)
    if dtype not in _DTYPES:
        raise UserError(f"tensor {name} of {path} has type {dtype}; convert the file to float32, float16 or bfloat16")
    return np.ndarray(shape, _DTYPES[dtype], data)


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    try:
        import torch
    except ImportError:
        raise UserError(
            f"reading {path} needs PyTorch, which is not installed; install torch or convert the file to safetensors"
        ) from None
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common base class for the errors of damaged and refused files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is not a readable torch state dict: {reason}") from None
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UserError(f"{path} must hold a state dict alone, names to tensors")
    return {name: _to_numpy(tensor, torch) for name, tensor in tensors.items()}


def _to_numpy(tensor: Any, torch: Any) -> np.ndarray:
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy itself has no bfloat16
    return wide.detach().numpy()


_DTYPES: Mapping[str, str] = MappingProxyType(
    {"BOOL": "bool"}
    | {f"F{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)}
    | {f"I{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)}
    | {f"U{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)}
)
_READERS: Mapping[str, Callable[[Path], dict[str, np.ndarray]]] = MappingProxyType(
    {
        ".safetensors": _read_safetensors,
        ".pth": _read_torch,
        ".pt": _read_torch,
    }
)
