"""Attention layers: what they keep for every token, in pages."""

import dataclasses

from jaxcache.layouts.layer_kind import check_buffers, set_default, set_integers
from jaxcache.layouts.retention import Full, Window
from jaxcache.layouts.roles import KEY, LATENT, VALUE, BufferSpec


@dataclasses.dataclass(frozen=True)
class FullAttention:
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
        set_default(self, "value_head_dim", self.head_dim)
        set_integers(self, "kv_heads", "head_dim", "value_head_dim")
        check_buffers(self, "dtype")

    @property
    def retention(self) -> Full:
        """Every past token."""
        return Full()

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Empty: there is no convolution."""
        return ()

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns key, value and what rides along, of one page."""
        return _of_page(_key_and_value(self) + self.extra, tokens_per_page)


@dataclasses.dataclass(frozen=True)
class SlidingWindowAttention:
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
        retention = self.retention
        object.__setattr__(self, "window", retention.window)
        object.__setattr__(self, "sink_tokens", retention.sink_tokens)
        set_default(self, "value_head_dim", self.head_dim)
        set_integers(self, "kv_heads", "head_dim", "value_head_dim")
        check_buffers(self, "dtype")

    @property
    def retention(self) -> Window:
        """The window and its sinks."""
        return Window(self.window, self.sink_tokens)

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Empty: there is no convolution."""
        return ()

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns key, value and what rides along, of one page."""
        return _of_page(_key_and_value(self) + self.extra, tokens_per_page)


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Attention whose keys and values are one compressed vector a token.

    All heads read the whole vector, so tensor parallelism does not split it: it is one
    unit, replicated.

    Attributes:
        latent_dim: Elements of one token: the compressed rank and the rotary part.
        dtype: Type of the vector.
        extra: Riding buffers, with the unit shape of one token.
    """

    latent_dim: int
    dtype: str = "bfloat16"
    extra: tuple[BufferSpec, ...] = ()

    def __post_init__(self) -> None:
        set_integers(self, "latent_dim")
        check_buffers(self, "dtype")

    @property
    def retention(self) -> Full:
        """Every past token."""
        return Full()

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Empty: there is no convolution."""
        return ()

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        """Returns the latent and what rides along, of one page."""
        own = (BufferSpec(LATENT, 1, (self.latent_dim,), self.dtype),)
        return _of_page(own + self.extra, tokens_per_page)


def _key_and_value(
    kind: FullAttention | SlidingWindowAttention,
) -> tuple[BufferSpec, BufferSpec]:
    """Returns the buffers of one token."""
    value_dim = kind.value_head_dim or kind.head_dim
    return (
        BufferSpec(KEY, kind.kv_heads, (kind.head_dim,), kind.dtype),
        BufferSpec(VALUE, kind.kv_heads, (value_dim,), kind.dtype),
    )


def _of_page(
    of_token: tuple[BufferSpec, ...], tokens_per_page: int
) -> tuple[BufferSpec, ...]:
    """Returns the buffers of a page: each unit holds `tokens_per_page` tokens."""
    return tuple(
        dataclasses.replace(spec, unit_shape=(tokens_per_page, *spec.unit_shape))
        for spec in of_token
    )
