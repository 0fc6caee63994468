"""Buffers: sizes, value semantics, and what is refused."""

import dataclasses
import pickle
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxcache.layouts import DTYPES, BufferSpec, numpy_dtype


def test_bytes_of_a_buffer() -> None:
    spec = BufferSpec("key", 8, (16, 128), "bfloat16")
    assert spec.unit_bytes == 16 * 128 * 2 == 4096
    assert spec.num_bytes == 32768
    assert spec.numpy_dtype == np.dtype(ml_dtypes.bfloat16)


def test_a_unit_may_be_a_scalar() -> None:
    assert BufferSpec("replay_length", 1, (), "int32").num_bytes == 4


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_a_numpy_type_of_its_name(name: str) -> None:
    dtype = numpy_dtype(name)
    assert dtype.name == name
    assert np.zeros(3, dtype).nbytes == 3 * dtype.itemsize


def test_a_buffer_is_a_value() -> None:
    spec = BufferSpec("key", 8, (16, 128), "bfloat16")
    same = BufferSpec("key", np.int64(8), [16, np.int32(128)], "bfloat16")  # type: ignore[arg-type]
    assert spec == same
    assert hash(spec) == hash(same)
    assert type(same.units) is int
    assert same.unit_shape == (16, 128)
    assert all(type(size) is int for size in same.unit_shape)
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.units = 4  # type: ignore[misc]


def test_a_shape_list_that_is_changed_later_changes_nothing() -> None:
    shape = [16, 128]
    spec = BufferSpec("key", 8, shape, "bfloat16")  # type: ignore[arg-type]
    shape[0] = 32
    assert spec.unit_shape == (16, 128)


GOOD: dict[str, Any] = {
    "role": "key",
    "units": 8,
    "unit_shape": (16, 128),
    "dtype": "bfloat16",
}
ROLE = "role must be a name of lower-case letters, digits and underscores, got "
DTYPE = "dtype of key must be one of bfloat16, float16, float32, "


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("role", "Key", ROLE + "'Key'"),
        ("role", "", ROLE + "''"),
        ("role", "key value", ROLE + "'key value'"),
        ("role", 3, ROLE + "3"),
        ("units", 0, "units of key must be an integer >= 1, got 0"),
        ("units", 2.0, "units of key must be an integer >= 1, got 2.0"),
        ("units", True, "units of key must be an integer >= 1, got True"),
        ("units", None, "units of key must be an integer >= 1, got None"),
        ("unit_shape", 16, "unit_shape of key must be a tuple of integers, got 16"),
        ("unit_shape", "16", "unit_shape of key must be a tuple of integers, got '16'"),
        ("unit_shape", (16, 0), "unit_shape of key[1] must be an integer >= 1, got 0"),
        ("dtype", "bf16", DTYPE),
        ("dtype", "float64", DTYPE),
        ("dtype", np.float32, DTYPE),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BufferSpec(**{**GOOD, field: value})


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dtype must be one of .*, got 'int7'$"):
        numpy_dtype("int7")
