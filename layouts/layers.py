"""Layer kinds: what a layer of each sort keeps per page or per row.

Every kind is frozen and says two things: its `retention` and its `buffers`. `extra`
buffers ride along after the kind's own. On an attention kind their `unit_shape` is that
of one token (`()` for one scale a head and token) and the page adds `tokens_per_page`
in front; on a recurrent kind it is that of one row, which is where the `replay_*` roles
of speculative decoding go.
"""

import dataclasses
import math
from typing import Protocol

from jaxcache.layouts.arguments import integer
from jaxcache.layouts.retention import Full, Recurrent, Retention, Window
from jaxcache.layouts.roles import (
    CONV,
    CONV_B,
    CONV_C,
    CONV_K,
    CONV_Q,
    CONV_V,
    CONV_X,
    KEY,
    LATENT,
    SSM,
    VALUE,
    BufferSpec,
    check_dtype,
)

# Layers without heads are cut into units of this many channels (or the largest power of
# two below it that divides them): small enough for any usual tensor parallelism, large
# enough for a unit to be a readable run.
UNIT_CHANNELS = 32


class LayerKind(Protocol):
    """What a layout asks of a layer; any frozen object that answers will do."""

    @property
    def extra(self) -> tuple[BufferSpec, ...]:
        """Buffers that ride along after the kind's own."""
        ...

    @property
    def retention(self) -> Retention:
        """Which past tokens the layer needs; decides its layer group."""
        ...

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Roles that make up the combined convolution state, in channel order."""
        ...

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the buffers of one slot (a page, or a row)."""
        ...


class _Attention:
    """What the page kinds share: no convolution, and buffers with a token axis."""

    extra: tuple[BufferSpec, ...]

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Empty: attention has no convolution state."""
        return ()

    def _token_buffers(self) -> tuple[BufferSpec, ...]:
        raise AssertionError("a page kind names the buffers of one token")

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the buffers of one page: each token buffer, `tokens_per_page` times.

        Args:
            tokens_per_page: Tokens of one page.
        """
        return tuple(
            dataclasses.replace(spec, unit_shape=(tokens_per_page, *spec.unit_shape))
            for spec in self._token_buffers() + self.extra
        )


@dataclasses.dataclass(frozen=True)
class FullAttention(_Attention):
    """Attention that sees every past token.

    Attributes:
        kv_heads: Heads of keys and values, of the whole model.
        head_dim: Elements of one key.
        value_head_dim: Elements of one value; `None` means `head_dim`.
        dtype: Type of keys and values.
        extra: Riding buffers, with the unit shape of one token.
    """

    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    dtype: str = "bfloat16"
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        _default(self, "value_head_dim", self.head_dim)
        _canonical(self, "kv_heads", "head_dim", "value_head_dim")

    @property
    def retention(self) -> Retention:
        """Every past token."""
        return Full()

    def _token_buffers(self) -> tuple[BufferSpec, ...]:
        return _key_and_value(
            self.kv_heads, self.head_dim, self.value_head_dim, self.dtype
        )


@dataclasses.dataclass(frozen=True)
class SlidingWindowAttention(_Attention):
    """Attention that sees the last `window` tokens and the first `sink_tokens`.

    Attributes:
        kv_heads: Heads of keys and values, of the whole model.
        head_dim: Elements of one key.
        window: Tokens a query sees, itself included.
        sink_tokens: First tokens of the sequence that are always seen.
        value_head_dim: Elements of one value; `None` means `head_dim`.
        dtype: Type of keys and values.
        extra: Riding buffers, with the unit shape of one token.
    """

    kv_heads: int
    head_dim: int
    window: int
    sink_tokens: int = 0
    value_head_dim: int | None = None
    dtype: str = "bfloat16"
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        _default(self, "value_head_dim", self.head_dim)
        object.__setattr__(self, "window", self.retention.window)
        object.__setattr__(self, "sink_tokens", self.retention.sink_tokens)
        _canonical(self, "kv_heads", "head_dim", "value_head_dim")

    @property
    def retention(self) -> Window:
        """The window and its sinks."""
        return Window(self.window, self.sink_tokens)

    def _token_buffers(self) -> tuple[BufferSpec, ...]:
        return _key_and_value(
            self.kv_heads, self.head_dim, self.value_head_dim, self.dtype
        )


@dataclasses.dataclass(frozen=True)
class LatentAttention(_Attention):
    """Attention whose keys and values are one compressed vector a token.

    The vector is not split over tensor parallelism, so it is one unit.

    Attributes:
        latent_dim: Elements of one token: the compressed rank and the rotary part.
        dtype: Type of the vector.
        extra: Riding buffers, with the unit shape of one token.
    """

    latent_dim: int
    dtype: str = "bfloat16"
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        _canonical(self, "latent_dim")

    @property
    def retention(self) -> Retention:
        """Every past token."""
        return Full()

    def _token_buffers(self) -> tuple[BufferSpec, ...]:
        return (BufferSpec(LATENT, 1, (self.latent_dim,), self.dtype),)


class _Recurrent:
    """What the row kinds share."""

    @property
    def retention(self) -> Retention:
        """One state stands for all past tokens."""
        return Recurrent()


@dataclasses.dataclass(frozen=True)
class Mamba1(_Recurrent):
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
        _canonical(self, "num_channels", "state_dim", "conv_kernel", "unit_channels")

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
class Mamba2(_Recurrent):
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
        _canonical(
            self, "num_heads", "head_dim", "num_groups", "state_dim", "conv_kernel"
        )
        _check_multiple(self, "num_heads", "num_groups")

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
class GatedDeltaNet(_Recurrent):
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
        _canonical(
            self,
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel",
        )
        _check_multiple(self, "num_value_heads", "num_key_heads")

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
class KimiDeltaAttention(_Recurrent):
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
        _default(self, "value_head_dim", self.head_dim)
        _canonical(self, "num_heads", "head_dim", "value_head_dim", "conv_kernel")

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
class ShortConvolution(_Recurrent):
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
        _canonical(self, "num_channels", "conv_kernel", "unit_channels")

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """The one section."""
        return (CONV,)

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the buffers of one row."""
        del tokens_per_page
        return (_channels(CONV, self), *self.extra)


def _default(kind: object, field: str, value: object) -> None:
    if getattr(kind, field) is None:
        object.__setattr__(kind, field, value)


def _canonical(kind: LayerKind, *integer_fields: str) -> None:
    """Checks the fields of a kind and puts them into their one canonical form."""
    name = type(kind).__name__
    for field in integer_fields:
        if field == "unit_channels":
            channels = getattr(kind, "num_channels")  # noqa: B009
            _default(kind, field, math.gcd(channels, UNIT_CHANNELS))
        minimum = 2 if field == "conv_kernel" else 1
        value = integer(f"{name}.{field}", getattr(kind, field), minimum)
        object.__setattr__(kind, field, value)
        if field == "unit_channels" and channels % value:
            raise ValueError(
                f"{name}.unit_channels must divide num_channels = {channels}, "
                f"got {value}"
            )
    for field in ("dtype", "conv_dtype", "ssm_dtype"):
        if hasattr(kind, field):
            check_dtype(f"{name}.{field}", getattr(kind, field))
    extra = tuple(kind.extra)
    for spec in extra:
        if not isinstance(spec, BufferSpec):
            raise ValueError(f"{name}.extra must hold BufferSpec, got {spec!r}")
    object.__setattr__(kind, "extra", extra)
    roles = [spec.role for spec in kind.buffers(1)]
    if twice := sorted({role for role in roles if roles.count(role) > 1}):
        raise ValueError(f"{name}.extra repeats the role {twice[0]!r}")


def _check_multiple(kind: object, field: str, of: str) -> None:
    value, divisor = getattr(kind, field), getattr(kind, of)
    if value % divisor:
        raise ValueError(
            f"{type(kind).__name__}.{field} must be a multiple of {of} = {divisor}, "
            f"got {value}"
        )


def _key_and_value(
    kv_heads: int, head_dim: int, value_head_dim: int | None, dtype: str
) -> tuple[BufferSpec, ...]:
    return (
        BufferSpec(KEY, kv_heads, (head_dim,), dtype),
        BufferSpec(VALUE, kv_heads, (value_head_dim or head_dim,), dtype),
    )


def _channels(role: str, kind: Mamba1 | ShortConvolution) -> BufferSpec:
    """Returns the inputs of a convolution over channels that have no heads."""
    size = kind.unit_channels or kind.num_channels
    shape = (size, kind.conv_kernel - 1)
    return BufferSpec(role, kind.num_channels // size, shape, kind.conv_dtype)
