"""Models and stages: what a list of layers may be."""

import dataclasses
import re
from typing import Any

import pytest

from jaxcache.layouts import (
    BufferSpec,
    FullAttention,
    LatentAttention,
    Layer,
    Mamba2,
    ModelLayout,
    Recurrent,
    Retention,
    ShortConvolution,
)

ATTENTION = FullAttention(2, 16)
MAMBA = Mamba2(8, 16, 2, 32, 4)


def test_layers_stand_in_order_with_attention_before_the_row_of_the_same_layer() -> (
    None
):
    model = ModelLayout("m", (Layer(1, MAMBA), Layer(0, MAMBA), Layer(1, ATTENTION)))
    assert model.layers == (Layer(0, MAMBA), Layer(1, ATTENTION), Layer(1, MAMBA))
    assert model.layer_ids == (0, 1)
    assert model.model_layers == model.layers


def test_a_stage_knows_its_model() -> None:
    model = ModelLayout("m", (Layer(0, MAMBA), Layer(2, ATTENTION), Layer(3, MAMBA)))
    stage = model.select([1, 2])
    assert stage.layers == (Layer(2, ATTENTION),)
    assert stage.model_layers == model.layers
    assert stage != ModelLayout("m", stage.layers)
    assert model.select(range(4)) == model


def test_what_rides_on_a_stage_rides_on_its_model() -> None:
    model = ModelLayout("m", (Layer(0, MAMBA), Layer(2, ATTENTION)))
    scale = BufferSpec("key_scale", 2, (), "float32")

    def extra(kind: Any) -> tuple[BufferSpec, ...]:
        return (scale,) if isinstance(kind, FullAttention) else ()

    assert model.with_extra(extra).select([0]) == model.select([0]).with_extra(extra)


@dataclasses.dataclass(frozen=True)
class TokenShift:
    """A kind that the library does not know: the last input of a layer."""

    width: int

    @property
    def extra(self) -> tuple[BufferSpec, ...]:
        return ()

    @property
    def retention(self) -> Retention:
        return Recurrent()

    @property
    def conv_roles(self) -> tuple[str, ...]:
        return ()

    def buffers(self, tokens_per_page: int) -> tuple[BufferSpec, ...]:
        return (BufferSpec("shift", 1, (self.width,), "bfloat16"),)


def test_a_layer_kind_of_ones_own_will_do() -> None:
    layer = Layer(0, TokenShift(64))
    model = ModelLayout("m", (layer,))
    assert model.layers == (layer,)
    assert model.with_extra(lambda kind: ()) == model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", (Layer(0, MAMBA),)), "name must be a non-empty string, got ''"),
        ((3, (Layer(0, MAMBA),)), "name must be a non-empty string, got 3"),
        (("m", ()), "layers must hold at least one layer, got none"),
        (("m", (MAMBA,)), f"layers must hold Layer objects, got {MAMBA!r}"),
        (
            ("m", (Layer(3, MAMBA), Layer(3, MAMBA))),
            "layers must name each (layer, role) once, but layer 3 has 'conv_x' twice",
        ),
        (
            ("m", (Layer(3, MAMBA),), (Layer(4, MAMBA),)),
            "model_layers must hold every layer of the stage, but layer 3 is not among "
            "them",
        ),
        (
            ("m", (Layer(3, MAMBA),), (Layer(3, MAMBA), Layer(3, MAMBA))),
            "model_layers must name each (layer, role) once, but layer 3 has 'conv_x' "
            "twice",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ModelLayout(*arguments)


def test_two_attentions_with_different_roles_may_share_a_layer() -> None:
    layers = (Layer(0, ATTENTION), Layer(0, LatentAttention(40)))
    assert ModelLayout("m", layers).layer_ids == (0,)


def test_a_negative_layer_id_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^layer_id must be an integer >= 0, got -1$"):
        Layer(-1, MAMBA)


def test_something_that_is_no_layer_kind_is_refused() -> None:
    message = (
        r"^kind of layer 2 must be a layer kind such as FullAttention or Mamba2, got "
        r"'mamba' without 'retention'$"
    )
    with pytest.raises(ValueError, match=message):
        Layer(2, "mamba")  # type: ignore[arg-type]


def test_a_kind_that_cannot_be_hashed_is_refused() -> None:
    kind = ShortConvolution(64, 3)
    object.__setattr__(kind, "num_channels", [64])
    with pytest.raises(
        ValueError, match=r"^kind of layer 2 must be hashable, got Short"
    ):
        Layer(2, kind)


def test_a_stage_without_a_cache_is_refused() -> None:
    model = ModelLayout("m", (Layer(0, MAMBA), Layer(2, ATTENTION)))
    message = r"^layer_ids must name at least one of the layers \(0, 2\), got \[1, 3\]$"
    with pytest.raises(ValueError, match=message):
        model.select([3, 1])
    with pytest.raises(ValueError, match=r"^layer_ids\[0\] must be an integer >= 0"):
        model.select([-1])
