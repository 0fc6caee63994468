"""The model: which layer keeps what."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxcache.layouts.arguments import integer, integers
from jaxcache.layouts.layer_kind import LayerKind
from jaxcache.layouts.roles import BufferSpec


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer with something to keep. A layer without a cache is simply not listed.

    Attributes:
        layer_id: Index of the layer in the whole model. Two `Layer`s may share it when
            a layer holds both attention and a recurrent state.
        kind: What the layer keeps.
    """

    layer_id: int
    kind: LayerKind

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_id", integer("layer_id", self.layer_id, 0))
        for name in ("retention", "buffers", "conv_roles", "extra"):
            if not hasattr(self.kind, name):
                raise ValueError(
                    f"kind of layer {self.layer_id} must be a layer kind such as "
                    f"FullAttention or Mamba2, got {self.kind!r} without {name!r}"
                )
        try:
            hash(self.kind)
        except TypeError:
            raise ValueError(
                f"kind of layer {self.layer_id} must be hashable, got {self.kind!r}"
            ) from None


@dataclasses.dataclass(frozen=True)
class ModelLayout:
    """All layers of a model, or of one pipeline stage, that keep something.

    Attributes:
        name: Name of the model; part of what transfer peers compare.
        layers: The layers this process holds, in order of their id, attention before
            recurrent where they share one.
        model_layers: The layers of the whole model. The same as `layers` unless this is
            a pipeline stage (`select`).
    """

    name: str
    layers: tuple[Layer, ...]
    model_layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a non-empty string, got {self.name!r}")
        layers = _ordered("layers", self.layers)
        whole = _ordered("model_layers", self.model_layers) or layers
        known = set(whole)
        if missing := [layer for layer in layers if layer not in known]:
            raise ValueError(
                f"model_layers must hold every layer of the stage, but layer "
                f"{missing[0].layer_id} is not among them"
            )
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "model_layers", whole)

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | str | os.PathLike[str],
        *,
        dtype: str | None = None,
        state_dtype: str | None = None,
        name: str | None = None,
    ) -> "ModelLayout":
        """Reads the layers from the config of a Hugging Face model.

        Args:
            config: The config as a mapping, or the path of a `config.json` or of the
                folder that holds it.
            dtype: Type of keys, values, latents and convolution inputs. Default: the
                config's `dtype` (or `torch_dtype`), else bfloat16.
            state_dtype: Type of the recurrent state. Default: what the config says of
                it, else float32.
            name: Name of the layout. Default: the config's `model_type`. Name the
                checkpoint where transfer must not mix two of one architecture.

        Raises:
            ValueError: if the architecture is unknown, or a field is missing or wrong.
        """
        from jaxcache.layouts.hf_config import read_hf_config

        architecture, layers = read_hf_config(config, dtype, state_dtype)
        return cls(architecture if name is None else name, layers)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Ids of the layers held, ascending, each once."""
        return tuple(sorted({layer.layer_id for layer in self.layers}))

    def select(self, layer_ids: Iterable[int]) -> "ModelLayout":
        """Returns the pipeline stage with these layers; it keeps the model's identity.

        Ids without a cache (feed-forward layers) are accepted and have nothing to give.

        Raises:
            ValueError: if none of the layers keeps anything.
        """
        wanted = set(integers("layer_ids", layer_ids, 0))
        layers = tuple(layer for layer in self.layers if layer.layer_id in wanted)
        if not layers:
            raise ValueError(
                f"layer_ids must name at least one of the layers {self.layer_ids}, "
                f"got {sorted(wanted)}"
            )
        return ModelLayout(self.name, layers, self.model_layers)

    def with_extra(
        self, extra: Callable[[LayerKind], Iterable[BufferSpec]]
    ) -> "ModelLayout":
        """Returns the model with buffers riding on its layers.

        Args:
            extra: Called with the kind of each layer, returns the buffers to add to it:
                the scales of a quantised cache, an index key, the replay history of
                speculative decoding. `jaxcache.layouts.layer_kind` has their shapes.
        """

        def ride(layer: Layer) -> Layer:
            kind: Any = layer.kind
            added = tuple(extra(layer.kind))
            if not added:
                return layer
            kind = dataclasses.replace(kind, extra=(*kind.extra, *added))
            return Layer(layer.layer_id, kind)

        return ModelLayout(
            self.name,
            tuple(ride(layer) for layer in self.layers),
            tuple(ride(layer) for layer in self.model_layers),
        )


def _ordered(name: str, layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Returns the layers in canonical order, each (layer, role) at most once."""
    layers = tuple(layers)
    for layer in layers:
        if not isinstance(layer, Layer):
            raise ValueError(f"{name} must hold Layer objects, got {layer!r}")
    if name == "layers" and not layers:
        raise ValueError("layers must hold at least one layer, got none")
    seen = set()
    for layer in layers:
        for spec in layer.kind.buffers(1):
            if (layer.layer_id, spec.role) in seen:
                raise ValueError(
                    f"{name} must name each (layer, role) once, but layer "
                    f"{layer.layer_id} has {spec.role!r} twice"
                )
            seen.add((layer.layer_id, spec.role))
    return tuple(
        sorted(
            layers,
            key=lambda layer: (layer.layer_id, layer.kind.retention.is_recurrent),
        )
    )
