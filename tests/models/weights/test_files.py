"""Weights files: the number types of safetensors."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy

from podscale.errors import UserError
from podscale.models.weights.files import read_tensors


def write_tensor(path, dtype, shape, data):
    """Write a safetensors file with one tensor of a type that NumPy may lack."""
    header = json.dumps({"conv1.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int8", "int64", "uint16", "bool"])
def test_tensors_of_numpys_types_are_read_as_they_are(tmp_path, name):
    tensors = {
        "a": np.arange(6).reshape(2, 3).astype(name),
        "scalar": np.ones((), name),
        "empty": np.ones((0, 2), name),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "w.safetensors")
    read = read_tensors(tmp_path / "w.safetensors")
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert read[key].dtype == tensor.dtype
        np.testing.assert_array_equal(read[key], tensor)


@pytest.mark.parametrize("shape", [[2, 3], [6], [1, 6]])
def test_bfloat16_is_read_as_float32_of_the_same_values(tmp_path, shape):
    values = np.array([1.5, -2, 0, np.inf, 2.0**-130, -3.140625], np.float32)  # each a bfloat16
    data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    (tensor,) = read_tensors(write_tensor(tmp_path / "w.safetensors", "BF16", shape, data)).values()
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor, values.reshape(shape))


def test_a_scalar_of_bfloat16_is_read(tmp_path):
    (tensor,) = read_tensors(write_tensor(tmp_path / "w.safetensors", "BF16", [], b"\xc0\x3f")).values()
    assert (tensor.shape, float(tensor)) == ((), 1.5)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_other_types_are_refused_with_the_tensors_name(tmp_path, dtype):
    path = write_tensor(tmp_path / "w.safetensors", dtype, [2], b"ab")
    with pytest.raises(UserError, match=rf"tensor conv1\.weight of .*w\.safetensors has type {dtype}; convert"):
        read_tensors(path)
