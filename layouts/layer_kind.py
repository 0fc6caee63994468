"""What a layout asks of a layer, and the checks that all layer kinds share.

Every kind is frozen and says two things: its `retention` and its `buffers`. `extra`
buffers ride along after the kind's own. On an attention kind their `unit_shape` is that
of one token (`()` for one scale a head and token) and the page puts `tokens_per_page`
in front; on a recurrent kind it is that of one row, which is where the `replay_*` roles
of speculative decoding go.
"""

from typing import Protocol

from jaxcache.layouts.arguments import MAX_SIZE, integer
from jaxcache.layouts.retention import Retention
from jaxcache.layouts.roles import BufferSpec, check_dtype


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


def set_default(kind: object, field: str, value: object) -> None:
    """Sets a field of a frozen kind where it is `None`."""
    if getattr(kind, field) is None:
        object.__setattr__(kind, field, value)


def set_integers(kind: object, *fields: str) -> None:
    """Checks that fields of a frozen kind are integers that are large enough."""
    for field in fields:
        # A convolution of one tap remembers nothing: there would be no state to keep.
        minimum = 2 if field == "conv_kernel" else 1
        name = f"{type(kind).__name__}.{field}"
        value = integer(name, getattr(kind, field), minimum, MAX_SIZE)
        object.__setattr__(kind, field, value)


def check_buffers(kind: LayerKind, *dtype_fields: str) -> None:
    """Checks the dtypes of a kind and what rides on it."""
    name = type(kind).__name__
    for field in dtype_fields:
        check_dtype(f"{name}.{field}", getattr(kind, field))
    object.__setattr__(kind, "extra", tuple(kind.extra))
    for spec in kind.extra:
        if not isinstance(spec, BufferSpec):
            raise ValueError(f"{name}.extra must hold BufferSpec objects, got {spec!r}")
    roles = [spec.role for spec in kind.buffers(1)]
    for role in roles:
        if roles.count(role) > 1:
            raise ValueError(f"{name}.extra repeats the role {role!r}")


def check_multiple(kind: object, field: str, of: str) -> None:
    """Checks that one field of a kind is a multiple of another."""
    value, divisor = getattr(kind, field), getattr(kind, of)
    if value % divisor:
        raise ValueError(
            f"{type(kind).__name__}.{field} must be a multiple of {of} = {divisor}, "
            f"got {value}"
        )
