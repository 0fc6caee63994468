"""The combined convolution state, against one assembled and cut by hand."""

import numpy as np
import pytest

from jaxcache.layouts import (
    CacheLayout,
    ConvSection,
    ConvView,
    FullAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    Layer,
    LayerKind,
    Mamba1,
    Mamba2,
    ModelLayout,
    ShortConvolution,
    units_of_shard,
)


def layout_of(kind: LayerKind, num_shards: int = 1) -> CacheLayout:
    model = ModelLayout("m", (Layer(0, FullAttention(2, 16)), Layer(3, kind)))
    return CacheLayout(model, num_shards=num_shards)


def test_mamba_2_combines_x_then_b_then_c() -> None:
    view = layout_of(Mamba2(8, 16, 2, 32, 4)).conv_view(3)
    assert view == ConvView(
        sections=(
            ConvSection("conv_x", 0, 8, 16),
            ConvSection("conv_b", 128, 2, 32),
            ConvSection("conv_c", 192, 2, 32),
        ),
        columns=3,
        dtype="bfloat16",
    )
    assert view.num_channels == 8 * 16 + 2 * 2 * 32 == 256
    assert view.shape == (256, 3)


def test_gated_delta_net_combines_q_then_k_then_v() -> None:
    view = layout_of(GatedDeltaNet(2, 4, 16, 24, 4)).conv_view(3)
    assert [(s.role, s.start, s.stop) for s in view.sections] == [
        ("conv_q", 0, 32),
        ("conv_k", 32, 64),
        ("conv_v", 64, 160),
    ]


@pytest.mark.parametrize(
    ("kind", "channels", "columns"),
    [
        (KimiDeltaAttention(4, 16, 4), 192, 3),
        (Mamba1(64, 16, 4), 64, 3),
        (ShortConvolution(96, 3), 96, 2),
    ],
)
def test_the_combined_state_has_all_channels(
    kind: LayerKind, channels: int, columns: int
) -> None:
    assert layout_of(kind).conv_view(3).shape == (channels, columns)


def test_a_shard_combines_its_own_units() -> None:
    # Four shards of 8 heads and 2 groups: 2 heads and one (replicated) group each.
    layout = layout_of(Mamba2(8, 16, 2, 32, 4), num_shards=4)
    view = layout.conv_view(3, of_shard=True)
    assert [(s.role, s.start, s.stop) for s in view.sections] == [
        ("conv_x", 0, 32),
        ("conv_b", 32, 64),
        ("conv_c", 64, 96),
    ]
    assert layout.conv_view(3).num_channels == 256


def test_sections_put_together_are_the_state_that_was_cut() -> None:
    kind = Mamba2(8, 16, 2, 32, 4)
    rng = np.random.default_rng(0)
    combined = rng.normal(size=(256, 3))
    x, b, c = np.split(combined, [128, 192])
    sections = {
        "conv_x": x.reshape(8, 16, 3),
        "conv_b": b.reshape(2, 32, 3),
        "conv_c": c.reshape(2, 32, 3),
    }
    view = layout_of(kind).conv_view(3)
    again = np.empty(view.shape)
    for section in view.sections:
        channels = sections[section.role].reshape(section.num_channels, view.columns)
        again[section.start : section.stop] = channels
    np.testing.assert_array_equal(again, combined)

    # What a shard of four combines is the cut that tensor parallelism makes of each
    # section, not of the combined state.
    shard = layout_of(kind, 4).conv_view(3, of_shard=True)
    for rank in range(4):
        parts = []
        for section in shard.sections:
            whole = sections[section.role]
            held = units_of_shard(len(whole), 4, rank)
            assert len(held) == section.units
            parts.append(whole[held.start : held.stop].reshape(-1, 3))
        assert np.concatenate(parts).shape == shard.shape


@pytest.mark.parametrize("layer_id", [0, 1])
def test_a_layer_without_a_convolution_is_refused(layer_id: int) -> None:
    message = rf"^layer_id must be a layer with a convolution, got {layer_id}$"
    with pytest.raises(ValueError, match=message):
        layout_of(Mamba2(8, 16, 2, 32, 4)).conv_view(layer_id)
