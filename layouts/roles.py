"""Roles and buffers: what one layer keeps in one slot, in units that can be split."""

import dataclasses
import functools
import math
import re

import ml_dtypes
import numpy as np

from jaxcache.layouts.arguments import MAX_SIZE, integer, integers

# Pages of attention layers.
KEY = "key"
VALUE = "value"
LATENT = "latent"
KEY_SCALE = "key_scale"
VALUE_SCALE = "value_scale"
INDEX_KEY = "index_key"

# Rows of recurrent layers. A convolution's inputs are one role per section, never one
# combined buffer: a depthwise convolution does not mix channels, so nothing is lost.
CONV = "conv"
CONV_X = "conv_x"
CONV_B = "conv_b"
CONV_C = "conv_c"
CONV_Q = "conv_q"
CONV_K = "conv_k"
CONV_V = "conv_v"
SSM = "ssm"

# Rows again: the history that a speculative step replays on top of `ssm`. They ride on
# a recurrent layer kind as `extra` buffers.
REPLAY_X = "replay_x"
REPLAY_B = "replay_b"
REPLAY_K = "replay_k"
REPLAY_V = "replay_v"
REPLAY_BETA = "replay_beta"
REPLAY_DT = "replay_dt"
REPLAY_DECAY = "replay_decay"
REPLAY_CONV = "replay_conv"
REPLAY_LENGTH = "replay_length"
REPLAY_BUFFER = "replay_buffer"

# 64-bit types are left out: JAX narrows them without a word unless x64 is enabled.
DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int16",
    "int32",
    "int8",
    "uint16",
    "uint32",
    "uint8",
)

_ROLE = re.compile(r"[a-z][a-z0-9_]*")


def check_dtype(name: str, dtype: object) -> str:
    """Returns `dtype` if it is the name of a type that a pool can have.

    Raises:
        ValueError: naming the argument `name` and the types there are.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """Returns the NumPy type of a dtype name, ml_dtypes included."""
    check_dtype("dtype", dtype)
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


@dataclasses.dataclass(frozen=True)
class BufferSpec:
    """One role of one layer in one slot: `units` times `dtype[unit_shape]`.

    A unit is the smallest thing that tensor parallelism splits (a KV head, an SSM head,
    a B/C group), so the number of units is also the split rule: a buffer that must stay
    whole on every shard is declared as one unit.

    Attributes:
        role: What the buffer holds; one of the names above or one's own.
        units: Units of the whole model, before any splitting or replication.
        unit_shape: Shape of one unit; `()` is a scalar.
        dtype: Name of the element type, one of `DTYPES`.
    """

    role: str
    units: int
    unit_shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.role, str) or not _ROLE.fullmatch(self.role):
            raise ValueError(
                "role must be a name of lower-case letters, digits and underscores, "
                f"got {self.role!r}"
            )
        units = integer(f"units of {self.role}", self.units, 1, MAX_SIZE)
        name = f"unit_shape of {self.role}"
        shape = integers(name, self.unit_shape, 1, MAX_SIZE)
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "unit_shape", shape)
        check_dtype(f"dtype of {self.role}", self.dtype)

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The element type as NumPy (with ml_dtypes) knows it."""
        return numpy_dtype(self.dtype)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit."""
        return math.prod(self.unit_shape) * self.numpy_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all units, without replicas."""
        return self.units * self.unit_bytes
