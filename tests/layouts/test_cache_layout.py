"""Groups, coalesced pools, names, sizes and value semantics of a cache layout."""

import copy
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest

from jaxcache.layouts import (
    BufferLocation,
    BufferSpec,
    CacheLayout,
    Full,
    FullAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Layer,
    LayerGroup,
    LayerKind,
    Mamba2,
    ModelLayout,
    Placement,
    Recurrent,
    SlidingWindowAttention,
    Window,
)

MAMBA = Mamba2(8, 16, 2, 32, 4)
ATTENTION = FullAttention(2, 16)
# A layer with both kinds (2), a feed-forward layer in between (3), two windows.
MODEL = ModelLayout(
    "mixed",
    (
        Layer(0, MAMBA),
        Layer(1, SlidingWindowAttention(4, 16, window=64, sink_tokens=4)),
        Layer(2, ATTENTION),
        Layer(2, MAMBA),
        Layer(4, SlidingWindowAttention(2, 16, window=32)),
        Layer(5, ATTENTION),
        Layer(6, SlidingWindowAttention(4, 16, window=64, sink_tokens=4)),
    ),
)


def test_groups_are_layers_of_equal_retention_with_the_recurrent_group_last() -> None:
    layout = CacheLayout(MODEL)
    assert layout.groups == (
        LayerGroup(0, Window(64, 4), (1, 6), (0,)),
        LayerGroup(1, Full(), (2, 5), (1,)),
        LayerGroup(2, Window(32), (4,), (2,)),
        LayerGroup(3, Recurrent(), (0, 2), (3, 4, 5)),
    )
    assert layout.page_groups == layout.groups[:3]
    assert layout.num_page_groups == 3
    assert layout.recurrent_group == layout.groups[3]
    assert layout.has_recurrent
    assert [group.is_recurrent for group in layout.groups] == [False] * 3 + [True]


def test_pools_hold_equal_buffers_by_layer_then_by_role() -> None:
    layout = CacheLayout(MODEL)
    assert [(pool.name, pool.group_id, pool.buffers) for pool in layout.pools] == [
        (
            "attention0.key+value",
            0,
            ((1, "key"), (1, "value"), (6, "key"), (6, "value")),
        ),
        (
            "attention1.key+value",
            1,
            ((2, "key"), (2, "value"), (5, "key"), (5, "value")),
        ),
        ("attention2.key+value", 2, ((4, "key"), (4, "value"))),
        ("recurrent.conv_x", 3, ((0, "conv_x"), (2, "conv_x"))),
        (
            "recurrent.conv_b+conv_c",
            3,
            ((0, "conv_b"), (0, "conv_c"), (2, "conv_b"), (2, "conv_c")),
        ),
        ("recurrent.ssm", 3, ((0, "ssm"), (2, "ssm"))),
    ]
    assert [pool.shape(9) for pool in layout.pools] == [
        (9, 4, 4, 16, 16),
        (9, 2, 4, 16, 16),
        (9, 2, 2, 16, 16),
        (9, 8, 2, 16, 3),
        (9, 2, 4, 32, 3),
        (9, 8, 2, 16, 32),
    ]


def test_order_buffers_swaps_units_and_buffers() -> None:
    units, buffers = CacheLayout(MODEL), CacheLayout(MODEL, order="buffers")
    assert [(p.unit_axis, p.buffer_axis) for p in units.pools] == [(1, 2)] * 6
    assert [(p.unit_axis, p.buffer_axis) for p in buffers.pools] == [(2, 1)] * 6
    assert [pool.shape(9) for pool in buffers.pools] == [
        (9, 4, 4, 16, 16),
        (9, 4, 2, 16, 16),
        (9, 2, 2, 16, 16),
        (9, 2, 8, 16, 3),
        (9, 4, 2, 32, 3),
        (9, 2, 8, 16, 32),
    ]
    assert units.groups == buffers.groups
    for layer_id, role in [(1, "value"), (2, "conv_c")]:
        assert units.locate(layer_id, role) == buffers.locate(layer_id, role)


def test_a_layer_may_hold_pages_and_a_row() -> None:
    layout = CacheLayout(MODEL)
    assert layout.page_roles(2) == ("key", "value")
    assert layout.row_roles(2) == ("conv_x", "conv_b", "conv_c", "ssm")
    assert layout.group_of(2, "key") == 1
    assert layout.group_of(2, "ssm") == 3
    assert layout.page_roles(3) == layout.row_roles(3) == ()


def test_locate_finds_pool_and_buffer() -> None:
    layout = CacheLayout(MODEL)
    assert layout.locate(6, "value") == BufferLocation(pool=0, buffer=3)
    assert layout.locate(2, "conv_b") == BufferLocation(pool=4, buffer=2)
    assert layout.pool_of(2, "conv_b") is layout.pools[4]
    assert layout.buffer_spec(2, "conv_b") == BufferSpec(
        "conv_b", 2, (32, 3), "bfloat16"
    )


def test_every_layer_and_role_has_one_place() -> None:
    layout = CacheLayout(MODEL)
    named = [
        (layer.layer_id, spec.role)
        for layer in MODEL.layers
        for spec in layer.kind.buffers(16)
    ]
    held = [buffer for pool in layout.pools for buffer in pool.buffers]
    assert sorted(held) == sorted(named)
    for layer_id, role in named:
        place = layout.locate(layer_id, role)
        assert layout.pools[place.pool].buffers[place.buffer] == (layer_id, role)


def test_keys_and_values_of_different_width_have_pools_of_their_own() -> None:
    model = ModelLayout("m", (Layer(0, FullAttention(4, 192, 128)),))
    layout = CacheLayout(model, tokens_per_page=32)
    assert [(p.name, p.shape(5)) for p in layout.pools] == [
        ("attention0.key", (5, 4, 1, 32, 192)),
        ("attention0.value", (5, 4, 1, 32, 128)),
    ]
    assert layout.groups[0].pools == (0, 1)
    assert layout.bytes_per_page(0) == 4 * 32 * (192 + 128) * 2


def test_layers_of_different_shape_in_one_group_have_pools_with_distinct_names() -> (
    None
):
    kinds: tuple[LayerKind, ...] = (
        FullAttention(4, 64),
        FullAttention(2, 64),
        FullAttention(4, 64, dtype="float8_e4m3fn"),
        LatentAttention(576),
    )
    model = ModelLayout("m", tuple(Layer(i, kind) for i, kind in enumerate(kinds)))
    layout = CacheLayout(model)
    assert [pool.name for pool in layout.pools] == [
        "attention0.key+value[4x(16,64) bfloat16]",
        "attention0.key+value[2x(16,64) bfloat16]",
        "attention0.key+value[4x(16,64) float8_e4m3fn]",
        "attention0.latent",
    ]
    assert layout.groups[0].pools == (0, 1, 2, 3)


def test_convolution_and_state_share_a_pool_where_a_model_makes_them_equal() -> None:
    # q and k of 4 heads x [8, 3]; v of 4 heads x [3, 3] is not equal; the state of
    # 4 heads x [8, 3] is.
    delta = GatedDeltaNet(4, 4, 8, 3, 4, ssm_dtype="bfloat16")
    layout = CacheLayout(ModelLayout("m", (Layer(0, delta), Layer(7, delta))))
    assert [(pool.name, pool.buffers) for pool in layout.pools] == [
        (
            "recurrent.conv_q+conv_k+ssm",
            (
                (0, "conv_q"),
                (0, "conv_k"),
                (0, "ssm"),
                (7, "conv_q"),
                (7, "conv_k"),
                (7, "ssm"),
            ),
        ),
        ("recurrent.conv_v", ((0, "conv_v"), (7, "conv_v"))),
    ]
    # The same shapes in another type are not equal.
    apart = GatedDeltaNet(4, 4, 8, 3, 4, ssm_dtype="float32")
    names = [p.name for p in CacheLayout(ModelLayout("m", (Layer(0, apart),))).pools]
    assert names == ["recurrent.conv_q+conv_k", "recurrent.conv_v", "recurrent.ssm"]


def test_all_convolutions_of_kimi_delta_attention_share_a_pool() -> None:
    model = ModelLayout("m", (Layer(0, KimiDeltaAttention(4, 16, 4)),))
    assert [(p.name, p.shape(3)) for p in CacheLayout(model).pools] == [
        ("recurrent.conv_q+conv_k+conv_v", (3, 4, 3, 16, 3)),
        ("recurrent.ssm", (3, 4, 1, 16, 16)),
    ]


def test_buffers_of_equal_shape_in_different_groups_do_not_share() -> None:
    window = SlidingWindowAttention(2, 16, window=64)
    layout = CacheLayout(ModelLayout("m", (Layer(0, ATTENTION), Layer(1, window))))
    assert [pool.buffers for pool in layout.pools] == [
        ((0, "key"), (0, "value")),
        ((1, "key"), (1, "value")),
    ]


def test_units_that_replication_makes_equally_long_do_not_share() -> None:
    # 2 and 4 units both take 4 places on 4 shards, but are placed differently.
    layers = (Layer(0, FullAttention(2, 16)), Layer(1, FullAttention(4, 16)))
    layout = CacheLayout(ModelLayout("m", layers), num_shards=4)
    assert [pool.units for pool in layout.pools] == [4, 4]
    assert [pool.model_units for pool in layout.pools] == [2, 4]
    assert [pool.repeats for pool in layout.pools] == [2, 1]


def test_riding_roles_coalesce_like_others() -> None:
    scales = (
        BufferSpec("key_scale", 2, (), "float32"),
        BufferSpec("value_scale", 2, (), "float32"),
    )
    kind = FullAttention(2, 16, dtype="float8_e4m3fn", extra=scales)
    layout = CacheLayout(ModelLayout("m", (Layer(0, kind), Layer(1, kind))))
    assert [(p.name, p.shape(3)) for p in layout.pools] == [
        ("attention0.key+value", (3, 2, 4, 16, 16)),
        ("attention0.key_scale+value_scale", (3, 2, 4, 16)),
    ]
    assert layout.bytes_per_token == 2 * (2 * 2 * 16 * 1 + 2 * 2 * 4)


def test_with_extra_rides_on_the_layers_that_ask_for_it() -> None:
    def replay(kind: Any) -> list[BufferSpec]:
        if not isinstance(kind, Mamba2):
            return []
        shape = (2, 16, kind.head_dim)
        return [BufferSpec("replay_x", kind.num_heads, shape, kind.conv_dtype)]

    layout = CacheLayout(MODEL.with_extra(replay))
    assert layout.row_roles(0) == ("conv_x", "conv_b", "conv_c", "ssm", "replay_x")
    assert layout.page_roles(5) == ("key", "value")
    assert layout.pool_of(0, "replay_x").shape(3) == (3, 8, 2, 2, 16, 16)
    assert layout.bytes_per_row == CacheLayout(MODEL).bytes_per_row + 2 * 8192


def test_sizes_in_bytes() -> None:
    layout = CacheLayout(MODEL)
    # Pages of 16 tokens, keys and values of 16 elements, 2 bytes each.
    assert layout.bytes_per_page(0) == 2 * 2 * 4 * (16 * 16 * 2) == 8192
    assert layout.bytes_per_page(1) == 2 * 2 * 2 * (16 * 16 * 2) == 4096
    assert layout.bytes_per_page(2) == 1 * 2 * 2 * (16 * 16 * 2) == 2048
    # Two layers: conv_x 8 x 16 x 3 and conv_b, conv_c 2 x 32 x 3 in bfloat16; ssm
    # 8 x 16 x 32 in float32.
    assert layout.bytes_per_row == 2 * (768 + 384 + 384 + 16384) == 35840
    assert layout.bytes_per_token == (8192 + 4096 + 2048) // 16
    assert [layout.slot_bytes(g) for g in range(4)] == [8192, 4096, 2048, 35840]


def test_replicas_count_in_sizes() -> None:
    layout = CacheLayout(MODEL, num_shards=8)
    assert layout.bytes_per_page(0) == 2 * 8192
    assert layout.bytes_per_page(1) == 4 * 4096
    assert layout.bytes_per_row == 2 * (768 + 4 * (384 + 384) + 16384)
    assert all(pool.shard.units == 1 for pool in layout.pools)
    assert sum(p.shard.slot_bytes for p in layout.pools) * 8 == sum(
        p.slot_bytes for p in layout.pools
    )


def test_units_and_placement_of_a_role() -> None:
    layout = CacheLayout(MODEL, num_shards=4)
    assert layout.units(5, "key") == 2
    assert layout.cache_units(5, "key") == 4
    assert layout.placement(5, "key", 3) == Placement(2, 1, 2, 1)
    assert layout.units(0, "ssm") == layout.cache_units(0, "ssm") == 8
    assert layout.placement(0, "ssm", 3) == Placement(4, 3, 1, 0)


def test_attention_only_is_an_ordinary_model() -> None:
    layout = CacheLayout(ModelLayout("m", (Layer(3, ATTENTION),)))
    assert layout.recurrent_group is None
    assert not layout.has_recurrent
    assert layout.bytes_per_row == 0
    assert layout.bytes_per_token == 2 * 2 * 16 * 2


def test_recurrent_only_is_an_ordinary_model() -> None:
    layout = CacheLayout(ModelLayout("m", (Layer(3, MAMBA),)))
    assert layout.page_groups == ()
    assert layout.num_page_groups == 0
    assert layout.recurrent_group == LayerGroup(0, Recurrent(), (3,), (0, 1, 2))
    assert layout.bytes_per_token == 0


def test_a_stage_holds_its_layers_under_their_own_ids() -> None:
    stage = CacheLayout(MODEL.select(range(4, 7)))
    assert stage.model.layer_ids == (4, 5, 6)
    assert not stage.has_recurrent
    assert [group.retention for group in stage.groups] == [
        Window(32),
        Full(),
        Window(64, 4),
    ]
    assert stage.locate(5, "value") == BufferLocation(1, 1)


def test_the_order_in_which_layers_are_declared_does_not_matter() -> None:
    backwards = ModelLayout("mixed", MODEL.layers[::-1])
    assert backwards == MODEL
    assert hash(CacheLayout(backwards)) == hash(CacheLayout(MODEL))


def test_a_layout_is_a_value() -> None:
    one, two = CacheLayout(MODEL), CacheLayout(ModelLayout("mixed", MODEL.layers))
    assert one is not two
    assert one == two
    assert hash(one) == hash(two)
    assert {one: "x"}[two] == "x"
    different = [
        CacheLayout(MODEL, tokens_per_page=32),
        CacheLayout(MODEL, num_shards=2),
        CacheLayout(MODEL, order="buffers"),
        CacheLayout(ModelLayout("other", MODEL.layers)),
        CacheLayout(ModelLayout("mixed", MODEL.layers[:-1])),
        CacheLayout(MODEL.select(MODEL.layer_ids[:-1])),
    ]
    assert len({one, two, *different}) == 7
    assert all(one != other for other in different)
    assert one != MODEL


def test_a_layout_survives_copies_and_pickles() -> None:
    layout = CacheLayout(MODEL, 32, 2, "buffers")
    assert layout.pools
    for again in (
        copy.copy(layout),
        copy.deepcopy(layout),
        pickle.loads(pickle.dumps(layout)),
    ):
        assert again == layout
        assert again.pools == layout.pools
    # The hash of a string differs between processes: a pickled layout must not bring
    # its hash along.
    script = (
        "import pickle, sys; layout = pickle.loads(sys.stdin.buffer.read()); "
        "fresh = pickle.loads(pickle.dumps(layout)); "
        "assert hash(layout) == hash(layout._fields()) == hash(fresh)"
    )
    hash(layout)
    subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(layout), check=True
    )


def test_a_layout_is_deeply_immutable() -> None:
    layers = list(MODEL.layers)
    model = ModelLayout("mixed", layers)  # type: ignore[arg-type]
    layers.clear()
    assert model == MODEL
    layout = CacheLayout(model)
    for owner, field in [
        (layout, "order"),
        (layout, "pools"),
        (layout, "groups"),
        (layout.pools[0], "units"),
        (layout.groups[0], "pools"),
        (model, "layers"),
        (model.layers[0], "kind"),
    ]:
        with pytest.raises(AttributeError):
            setattr(owner, field, None)


LAYERS = (Layer(0, ATTENTION), Layer(1, MAMBA))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mixed",), "model must be a ModelLayout, got 'mixed'"),
        ((MODEL, 0), "tokens_per_page must be an integer >= 1, got 0"),
        ((MODEL, 16.0), "tokens_per_page must be an integer >= 1, got 16.0"),
        ((MODEL, 16, 0), "num_shards must be an integer >= 1, got 0"),
        ((MODEL, 16, 1, "heads"), "order must be 'units' or 'buffers', got 'heads'"),
        (
            (MODEL, 16, 3),
            "num_shards must divide the 8 units of 'conv_x' of layer 0 or be a "
            "multiple of them, got 3; every layer of mixed works with 1, 2, 4, 8, 16, "
            "24, 32, 40, 48, 56, 64",
        ),
        (
            (ModelLayout("m", (Layer(4, FullAttention(6, 16)),)), 16, 4),
            "num_shards must divide the 6 units of 'key' of layer 4 or be a multiple "
            "of them, got 4; every layer of m works with 1, 2, 3, 6, 12, 18, 24, 30, "
            "36, 42, 48, 54, 60",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CacheLayout(*arguments)


def test_an_unknown_layer_is_refused_with_those_there_are() -> None:
    message = re.escape(
        "layer_id must be one of the layers with a cache, (0, 1, 2, 4, 5, 6), got 3"
    )
    layout = CacheLayout(MODEL)
    with pytest.raises(ValueError, match=message):
        layout.locate(3, "key")
    with pytest.raises(ValueError, match=message):
        layout.layer_fingerprint(3)


def test_an_unknown_role_is_refused_with_those_of_the_layer() -> None:
    layout = CacheLayout(MODEL)
    message = (
        r"^role must be one of key, value, conv_x, conv_b, conv_c, ssm for layer 2, "
        r"got 'latent'$"
    )
    for ask in (layout.locate, layout.units, layout.strides, layout.group_of):
        with pytest.raises(ValueError, match=message):
            ask(2, "latent")


def test_a_group_that_does_not_exist_is_refused() -> None:
    layout = CacheLayout(MODEL)
    with pytest.raises(ValueError, match=r"^group_id must be below 4, got 4$"):
        layout.slot_bytes(4)
    with pytest.raises(ValueError, match=r"^group_id must be an integer >= 0, got -1$"):
        layout.bytes_per_page(-1)


def test_the_recurrent_group_has_no_pages() -> None:
    message = (
        r"^group_id must be an attention group, below 3, got 3: the recurrent group "
        r"has rows \(bytes_per_row\)$"
    )
    with pytest.raises(ValueError, match=message):
        CacheLayout(MODEL).bytes_per_page(3)


def test_a_negative_number_of_slots_is_refused() -> None:
    message = r"^num_slots must be an integer >= 0, got -1$"
    with pytest.raises(ValueError, match=message):
        CacheLayout(MODEL).pools[0].shape(-1)
