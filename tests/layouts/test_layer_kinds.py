"""What each layer kind keeps, with shapes worked out by hand."""

import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxcache.layouts import (
    BufferSpec,
    Full,
    FullAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    LayerKind,
    Mamba1,
    Mamba2,
    Recurrent,
    ShortConvolution,
    SlidingWindowAttention,
    Window,
)

KINDS: list[LayerKind] = [
    FullAttention(2, 16),
    SlidingWindowAttention(2, 16, 32, 3),
    LatentAttention(40),
    Mamba1(64, 16, 4),
    Mamba2(8, 16, 2, 24, 4),
    GatedDeltaNet(2, 4, 16, 24, 4),
    KimiDeltaAttention(4, 16, 4),
    ShortConvolution(64, 3),
]


def test_full_attention_keeps_key_and_value_of_each_head() -> None:
    kind = FullAttention(kv_heads=8, head_dim=128)
    assert kind.buffers(16) == (
        BufferSpec("key", 8, (16, 128), "bfloat16"),
        BufferSpec("value", 8, (16, 128), "bfloat16"),
    )
    assert kind.retention == Full()
    assert kind.conv_roles == ()


def test_values_may_be_narrower_than_keys() -> None:
    kind = FullAttention(4, 192, value_head_dim=128, dtype="float8_e4m3fn")
    assert kind.buffers(32) == (
        BufferSpec("key", 4, (32, 192), "float8_e4m3fn"),
        BufferSpec("value", 4, (32, 128), "float8_e4m3fn"),
    )


def test_sliding_window_attention_keeps_the_same_and_forgets() -> None:
    kind = SlidingWindowAttention(
        4, 192, window=1024, sink_tokens=4, value_head_dim=128, dtype="float16"
    )
    assert kind.buffers(32) == (
        BufferSpec("key", 4, (32, 192), "float16"),
        BufferSpec("value", 4, (32, 128), "float16"),
    )
    assert kind.retention == Window(1024, 4)
    assert kind.conv_roles == ()


def test_latent_attention_keeps_one_vector_a_token() -> None:
    kind = LatentAttention(576)
    assert kind.buffers(64) == (BufferSpec("latent", 1, (64, 576), "bfloat16"),)
    assert kind.retention == Full()
    assert kind.conv_roles == ()


def test_mamba_1_keeps_units_of_channels() -> None:
    kind = Mamba1(num_channels=8192, state_dim=16, conv_kernel=4)
    assert kind.buffers(16) == (
        BufferSpec("conv_x", 256, (32, 3), "bfloat16"),
        BufferSpec("ssm", 256, (32, 16), "float32"),
    )
    assert kind.retention == Recurrent()
    assert kind.conv_roles == ("conv_x",)


@pytest.mark.parametrize(
    ("num_channels", "unit_channels", "units", "size"),
    [(64, None, 2, 32), (48, None, 3, 16), (7, None, 7, 1), (64, 64, 1, 64)],
)
def test_units_of_channels_are_equal(
    num_channels: int, unit_channels: int | None, units: int, size: int
) -> None:
    mamba = Mamba1(num_channels, 16, 4, unit_channels=unit_channels)
    assert mamba.buffers(16)[0] == BufferSpec("conv_x", units, (size, 3), "bfloat16")
    conv = ShortConvolution(num_channels, 4, unit_channels=unit_channels)
    assert conv.buffers(16) == (BufferSpec("conv", units, (size, 3), "bfloat16"),)


def test_mamba_2_keeps_x_b_and_c_apart() -> None:
    kind = Mamba2(
        num_heads=128,
        head_dim=64,
        num_groups=8,
        state_dim=256,
        conv_kernel=4,
        conv_dtype="float16",
        ssm_dtype="bfloat16",
    )
    assert kind.buffers(16) == (
        BufferSpec("conv_x", 128, (64, 3), "float16"),
        BufferSpec("conv_b", 8, (256, 3), "float16"),
        BufferSpec("conv_c", 8, (256, 3), "float16"),
        BufferSpec("ssm", 128, (64, 256), "bfloat16"),
    )
    assert kind.retention == Recurrent()
    assert kind.conv_roles == ("conv_x", "conv_b", "conv_c")


def test_gated_delta_net_keeps_q_k_and_v_apart() -> None:
    kind = GatedDeltaNet(
        num_key_heads=16,
        num_value_heads=32,
        key_head_dim=128,
        value_head_dim=96,
        conv_kernel=4,
    )
    assert kind.buffers(16) == (
        BufferSpec("conv_q", 16, (128, 3), "bfloat16"),
        BufferSpec("conv_k", 16, (128, 3), "bfloat16"),
        BufferSpec("conv_v", 32, (96, 3), "bfloat16"),
        BufferSpec("ssm", 32, (128, 96), "float32"),
    )
    assert kind.retention == Recurrent()
    assert kind.conv_roles == ("conv_q", "conv_k", "conv_v")


def test_kimi_delta_attention_has_one_head_count() -> None:
    kind = KimiDeltaAttention(num_heads=32, head_dim=128, conv_kernel=4)
    assert kind.buffers(16) == (
        BufferSpec("conv_q", 32, (128, 3), "bfloat16"),
        BufferSpec("conv_k", 32, (128, 3), "bfloat16"),
        BufferSpec("conv_v", 32, (128, 3), "bfloat16"),
        BufferSpec("ssm", 32, (128, 128), "float32"),
    )
    assert kind.retention == Recurrent()
    assert kind.conv_roles == ("conv_q", "conv_k", "conv_v")
    wide = dataclasses.replace(kind, value_head_dim=256)
    assert wide.buffers(16)[2:] == (
        BufferSpec("conv_v", 32, (256, 3), "bfloat16"),
        BufferSpec("ssm", 32, (128, 256), "float32"),
    )


def test_a_short_convolution_keeps_only_its_inputs() -> None:
    kind = ShortConvolution(num_channels=2560, conv_kernel=3)
    assert kind.buffers(16) == (BufferSpec("conv", 80, (32, 2), "bfloat16"),)
    assert kind.retention == Recurrent()
    assert kind.conv_roles == ("conv",)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_rows_do_not_depend_on_the_page_size(kind: LayerKind) -> None:
    if kind.retention.is_recurrent:
        assert kind.buffers(16) == kind.buffers(64)
    else:
        assert all(spec.unit_shape[0] == 64 for spec in kind.buffers(64))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_kind_is_a_value(kind: Any) -> None:
    same = dataclasses.replace(kind)
    assert same is not kind
    assert same == kind
    assert hash(same) == hash(kind)
    assert pickle.loads(pickle.dumps(kind)) == kind
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind.extra = ()


def test_a_default_that_is_written_out_is_the_same_value() -> None:
    assert FullAttention(2, 16) == FullAttention(2, 16, 16)
    assert KimiDeltaAttention(2, 16, 4) == KimiDeltaAttention(2, 16, 4, 16)
    assert Mamba1(64, 16, 4) == Mamba1(64, 16, 4, unit_channels=32)
    window = SlidingWindowAttention(2, 16, 8, value_head_dim=16)
    assert SlidingWindowAttention(2, 16, 8) == window


def test_page_like_roles_ride_along_by_token() -> None:
    scale = BufferSpec("key_scale", 8, (), "float32")
    index = BufferSpec("index_key", 1, (128,), "float8_e4m3fn")
    for kind in (
        FullAttention(8, 128, extra=(scale, index)),
        SlidingWindowAttention(8, 128, 64, extra=(scale, index)),
        LatentAttention(576, extra=(scale, index)),
    ):
        assert kind.buffers(16)[-2:] == (
            BufferSpec("key_scale", 8, (16,), "float32"),
            BufferSpec("index_key", 1, (16, 128), "float8_e4m3fn"),
        )


def test_replay_roles_ride_along_by_row() -> None:
    replay = BufferSpec("replay_x", 8, (2, 16, 16), "bfloat16")
    length = BufferSpec("replay_length", 1, (), "int32")
    for kind in KINDS:
        if kind.retention.is_recurrent:
            riding: Any = kind
            riding = dataclasses.replace(riding, extra=(replay, length))
            assert riding.buffers(16) == (*kind.buffers(16), replay, length)


INTEGERS: list[tuple[Callable[..., Any], dict[str, int]]] = [
    (FullAttention, {"kv_heads": 2, "head_dim": 16, "value_head_dim": 16}),
    (SlidingWindowAttention, {"kv_heads": 2, "head_dim": 16, "window": 4}),
    (LatentAttention, {"latent_dim": 40}),
    (Mamba1, {"num_channels": 64, "state_dim": 16, "unit_channels": 32}),
    (Mamba2, {"num_heads": 8, "head_dim": 16, "num_groups": 2, "state_dim": 24}),
    (
        GatedDeltaNet,
        {
            "num_key_heads": 2,
            "num_value_heads": 4,
            "key_head_dim": 16,
            "value_head_dim": 24,
        },
    ),
    (KimiDeltaAttention, {"num_heads": 4, "head_dim": 16, "value_head_dim": 16}),
    (ShortConvolution, {"num_channels": 64, "unit_channels": 32}),
]
CONVOLUTIONS = [kind for kind, _ in INTEGERS[3:]]


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, fields in INTEGERS for field in fields]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_a_size_that_is_not_positive_is_refused_by_name(
    kind: type, field: str, value: Any
) -> None:
    fields = dict(INTEGERS)[kind] | {field: value}
    if kind in CONVOLUTIONS:
        fields["conv_kernel"] = 4
    owner = "" if field == "window" else f"{kind.__name__}."
    message = f"{owner}{field} must be an integer >= 1, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        kind(**fields)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("value", [0, 1, 4.0])
def test_a_convolution_of_one_tap_is_refused(kind: type, value: Any) -> None:
    message = f"{kind.__name__}.conv_kernel must be an integer >= 2, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        kind(**dict(INTEGERS)[kind], conv_kernel=value)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (FullAttention, "dtype"),
        (SlidingWindowAttention, "dtype"),
        (LatentAttention, "dtype"),
        *((kind, "conv_dtype") for kind in CONVOLUTIONS),
        *((kind, "ssm_dtype") for kind in CONVOLUTIONS if kind is not ShortConvolution),
    ],
)
def test_an_unknown_dtype_is_refused_by_name(kind: type, field: str) -> None:
    fields: dict[str, Any] = dict(INTEGERS)[kind] | {field: "float12"}
    if kind in CONVOLUTIONS:
        fields["conv_kernel"] = 4
    message = rf"^{kind.__name__}\.{field} must be one of bfloat16, .*, got 'float12'$"
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_heads_that_groups_do_not_divide_are_refused() -> None:
    message = r"^Mamba2.num_heads must be a multiple of num_groups = 3, got 8$"
    with pytest.raises(ValueError, match=message):
        Mamba2(8, 16, 3, 24, 4)


def test_value_heads_that_key_heads_do_not_divide_are_refused() -> None:
    message = "GatedDeltaNet.num_value_heads must be a multiple of num_key_heads = 3"
    with pytest.raises(ValueError, match=message):
        GatedDeltaNet(3, 4, 16, 24, 4)


@pytest.mark.parametrize("kind", [Mamba1, ShortConvolution])
def test_units_that_do_not_divide_the_channels_are_refused(kind: type) -> None:
    message = rf"^{kind.__name__}.num_channels must be a multiple of unit_channels = 24"
    with pytest.raises(ValueError, match=message):
        kind(**dict(INTEGERS)[kind] | {"unit_channels": 24}, conv_kernel=4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_riding_role_that_is_there_already_is_refused(kind: Any) -> None:
    role = kind.buffers(1)[0].role
    message = rf"^{type(kind).__name__}.extra repeats the role '{role}'$"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(kind, extra=(BufferSpec(role, 1, (1,), "int8"),))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_only_buffers_may_ride_along(kind: Any) -> None:
    message = (
        rf"^{type(kind).__name__}.extra must hold BufferSpec objects, got 'scale'$"
    )
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(kind, extra=("scale",))
