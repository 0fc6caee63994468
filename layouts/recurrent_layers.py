"""Recurrent layers: what they keep of all tokens together, in rows.

A convolution keeps its last `conv_kernel - 1` inputs, from the oldest to the newest, in
one buffer per section (x, B, C or q, k, v): no section is ever cut at the wrong place.
"""

import dataclasses
import math

from jaxcache.layouts.layer_kind import (
    check_buffers,
    check_multiple,
    set_default,
    set_integers,
)
from jaxcache.layouts.retention import Recurrent
from jaxcache.layouts.roles import (
    CONV,
    CONV_B,
    CONV_C,
    CONV_K,
    CONV_Q,
    CONV_V,
    CONV_X,
    SSM,
    BufferSpec,
)

# Layers without heads are cut into units of this many channels (or the largest power of
# two below it that divides them): small enough for any usual tensor parallelism, large
# enough for a unit to be a readable run.
UNIT_CHANNELS = 32


class _RowKind:
    """What the kinds share: their slots are rows."""

    @property
    def retention(self) -> Recurrent:
        """One state stands for all past tokens."""
        return Recurrent()


@dataclasses.dataclass(frozen=True)
class Mamba1(_RowKind):
    """A selective state space without heads: every channel has its own state.

    Attributes:
        num_channels: Inner channels (expand times the hidden size).
        state_dim: State elements of one channel.
        conv_kernel: Taps of the convolution, the current input included.
        conv_dtype: Type of the convolution's inputs.
        ssm_dtype: Type of the state.
        unit_channels: Channels of one unit; `None` picks at most `UNIT_CHANNELS`.
        extra: Riding buffers, with the unit shape of one row.
    """

    num_channels: int
    state_dim: int
    conv_kernel: int
    conv_dtype: str = "bfloat16"
    ssm_dtype: str = "float32"
    unit_channels: int | None = None
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        set_integers(self, "num_channels", "state_dim", "conv_kernel")
        _set_unit_channels(self)
        check_buffers(self, "conv_dtype", "ssm_dtype")

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """The one section, x."""
        return (CONV_X,)

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the buffers of one row."""
        del tokens_per_page
        conv = _channels(CONV_X, self)
        units, size = conv.units, conv.unit_shape[0]
        ssm = BufferSpec(SSM, units, (size, self.state_dim), self.ssm_dtype)
        return (conv, ssm, *self.extra)


@dataclasses.dataclass(frozen=True)
class Mamba2(_RowKind):
    """A selective state space with heads, and groups that share B and C.

    Attributes:
        num_heads: SSM heads of the whole model.
        head_dim: Channels of one head.
        num_groups: B/C groups of the whole model.
        state_dim: State elements of one channel.
        conv_kernel: Taps of the convolution, the current input included.
        conv_dtype: Type of the convolution's inputs.
        ssm_dtype: Type of the state.
        extra: Riding buffers, with the unit shape of one row.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    conv_dtype: str = "bfloat16"
    ssm_dtype: str = "float32"
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        set_integers(
            self, "num_heads", "head_dim", "num_groups", "state_dim", "conv_kernel"
        )
        check_multiple(self, "num_heads", "num_groups")
        check_buffers(self, "conv_dtype", "ssm_dtype")

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Sections x, B, C."""
        return (CONV_X, CONV_B, CONV_C)

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the buffers of one row."""
        del tokens_per_page
        taps = self.conv_kernel - 1
        group = (self.state_dim, taps)
        state = (self.head_dim, self.state_dim)
        return (
            BufferSpec(CONV_X, self.num_heads, (self.head_dim, taps), self.conv_dtype),
            BufferSpec(CONV_B, self.num_groups, group, self.conv_dtype),
            BufferSpec(CONV_C, self.num_groups, group, self.conv_dtype),
            BufferSpec(SSM, self.num_heads, state, self.ssm_dtype),
            *self.extra,
        )


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet(_RowKind):
    """Linear attention with a gated delta rule; key heads are shared by value heads.

    Attributes:
        num_key_heads: Heads of queries and keys, of the whole model.
        num_value_heads: Heads of values and states, of the whole model.
        key_head_dim: Elements of one key.
        value_head_dim: Elements of one value.
        conv_kernel: Taps of the convolution, the current input included.
        conv_dtype: Type of the convolution's inputs.
        ssm_dtype: Type of the state.
        extra: Riding buffers, with the unit shape of one row.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    conv_dtype: str = "bfloat16"
    ssm_dtype: str = "float32"
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        set_integers(
            self,
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel",
        )
        check_multiple(self, "num_value_heads", "num_key_heads")
        check_buffers(self, "conv_dtype", "ssm_dtype")

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Sections q, k, v."""
        return (CONV_Q, CONV_K, CONV_V)

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the buffers of one row."""
        del tokens_per_page
        taps = self.conv_kernel - 1
        key = (self.key_head_dim, taps)
        value = (self.value_head_dim, taps)
        state = (self.key_head_dim, self.value_head_dim)
        return (
            BufferSpec(CONV_Q, self.num_key_heads, key, self.conv_dtype),
            BufferSpec(CONV_K, self.num_key_heads, key, self.conv_dtype),
            BufferSpec(CONV_V, self.num_value_heads, value, self.conv_dtype),
            BufferSpec(SSM, self.num_value_heads, state, self.ssm_dtype),
            *self.extra,
        )


@dataclasses.dataclass(frozen=True)
class KimiDeltaAttention(_RowKind):
    """Linear attention with a delta rule gated per channel; one head count for all.

    Attributes:
        num_heads: Heads of queries, keys, values and states, of the whole model.
        head_dim: Elements of one key.
        conv_kernel: Taps of the convolutions, the current input included.
        value_head_dim: Elements of one value; `None` means `head_dim`.
        conv_dtype: Type of the convolutions' inputs.
        ssm_dtype: Type of the state.
        extra: Riding buffers, with the unit shape of one row.
    """

    num_heads: int
    head_dim: int
    conv_kernel: int
    value_head_dim: int | None = None
    conv_dtype: str = "bfloat16"
    ssm_dtype: str = "float32"
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        set_default(self, "value_head_dim", self.head_dim)
        set_integers(self, "num_heads", "head_dim", "value_head_dim", "conv_kernel")
        check_buffers(self, "conv_dtype", "ssm_dtype")

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Sections q, k, v."""
        return (CONV_Q, CONV_K, CONV_V)

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the buffers of one row."""
        del tokens_per_page
        value_dim = self.value_head_dim or self.head_dim
        key = (self.head_dim, self.conv_kernel - 1)
        value = (value_dim, self.conv_kernel - 1)
        state = (self.head_dim, value_dim)
        return (
            BufferSpec(CONV_Q, self.num_heads, key, self.conv_dtype),
            BufferSpec(CONV_K, self.num_heads, key, self.conv_dtype),
            BufferSpec(CONV_V, self.num_heads, value, self.conv_dtype),
            BufferSpec(SSM, self.num_heads, state, self.ssm_dtype),
            *self.extra,
        )


@dataclasses.dataclass(frozen=True)
class ShortConvolution(_RowKind):
    """A gated convolution over a few tokens, without any other state.

    Attributes:
        num_channels: Channels of the convolution.
        conv_kernel: Taps of the convolution, the current input included.
        conv_dtype: Type of the convolution's inputs.
        unit_channels: Channels of one unit; `None` picks at most `UNIT_CHANNELS`.
        extra: Riding buffers, with the unit shape of one row.
    """

    num_channels: int
    conv_kernel: int
    conv_dtype: str = "bfloat16"
    unit_channels: int | None = None
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        set_integers(self, "num_channels", "conv_kernel")
        _set_unit_channels(self)
        check_buffers(self, "conv_dtype")

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """The one section."""
        return (CONV,)

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the buffers of one row."""
        del tokens_per_page
        return (_channels(CONV, self), *self.extra)


def _set_unit_channels(kind: Mamba1 | ShortConvolution) -> None:
    """Chooses the channels of a unit where `None`, and checks that units are equal."""
    set_default(kind, "unit_channels", math.gcd(kind.num_channels, UNIT_CHANNELS))
    set_integers(kind, "unit_channels")
    check_multiple(kind, "num_channels", "unit_channels")


def _channels(role: str, kind: Mamba1 | ShortConvolution) -> BufferSpec:
    """Returns the past inputs of a convolution over channels without heads."""
    size = kind.unit_channels or kind.num_channels
    shape = (size, kind.conv_kernel - 1)
    return BufferSpec(role, kind.num_channels // size, shape, kind.conv_dtype)
