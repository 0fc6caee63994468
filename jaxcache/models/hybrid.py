"""The model: an embedding, a run of residual layers, a norm and a head."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxcache.device.state import CacheState
from jaxcache.device.step_inputs import StepInputs
from jaxcache.layouts import ModelLayout
from jaxcache.layouts.arguments import integer
from jaxcache.models.contractions import contract
from jaxcache.models.normalization import RMSNorm
from jaxcache.models.parameters import parameter
from jaxcache.models.step_context import StepContext, prepare_step

Mixer = Callable[[CacheState, StepContext, jax.Array], tuple[CacheState, jax.Array]]


class Residual(nnx.Module):
    """`x + mixer(norm(x))`: what every layer of every architecture here is made of."""

    def __init__(self, norm: RMSNorm, mixer: Mixer) -> None:
        """Takes the normalization and an attention, recurrent or feed-forward layer."""
        self.norm = norm
        self.mixer = mixer

    def __call__(
        self, state: CacheState, step: StepContext, hidden: jax.Array
    ) -> tuple[CacheState, jax.Array]:
        """Adds what the mixer makes of `f32[T, dim]`."""
        state, mixed = self.mixer(state, step, self.norm(hidden))
        return state, hidden + mixed


class HybridModel(nnx.Module):
    """A language model whose layers keep their past in a `CacheState`.

    Attributes:
        layout: What the layers keep: what a `CacheLayout` for this model is made from.
    """

    def __init__(
        self,
        layout: ModelLayout,
        *,
        embedding: np.ndarray[Any, Any],
        layers: Sequence[Residual],
        norm: RMSNorm,
        head: np.ndarray[Any, Any] | None,
        chunk_size: int,
    ) -> None:
        """Takes the parts.

        Args:
            layout: What the layers keep.
            embedding: `f32[vocab, dim]`.
            layers: The residual layers in order.
            norm: The last normalization.
            head: `f32[vocab, dim]`; None for a head tied to the embedding.
            chunk_size: Tokens a chunk of the recurrent scans holds, a power of two.
        """
        chunk_size = integer("chunk_size", chunk_size)
        if chunk_size < 1 or chunk_size & (chunk_size - 1):
            raise ValueError(f"chunk_size must be a power of two, got {chunk_size}")
        self.layout = layout
        self.embedding = parameter(embedding)
        self.layers = nnx.List(layers)
        self.norm = norm
        self.head = None if head is None else parameter(head, split_axis=0)
        self.chunk_size = chunk_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return int(self.embedding.shape[0])

    def __call__(
        self, state: CacheState, inputs: StepInputs
    ) -> tuple[CacheState, jax.Array]:
        """Runs the tokens of one step.

        Args:
            state: The cache; its keys, values and rows of these tokens are written.
            inputs: The step's inputs.

        Returns:
            The state, and `f32[T, dim]`: the last hidden state of each token.
        """
        step = prepare_step(inputs, self.chunk_size)
        hidden = self.embedding[...][inputs.token_ids]
        for layer in self.layers:
            state, hidden = layer(state, step, hidden)
        return state, self.norm(hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the scores of the next token, `f32[..., vocab]`."""
        head = self.embedding if self.head is None else self.head
        return contract("...d,vd->...v", hidden, head[...])
