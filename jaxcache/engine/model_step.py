"""The device side of a step: a model, greedy sampling, tokens that stay there.

The engine plans step n + 1 while step n still runs, so it does not know the tokens that
step n samples. It writes `NEXT_TOKEN` in their place, and the step takes them from
`last_tokens`, a small vector with the last token of each seat that goes from step to
step without ever visiting the host.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcache.device.state import CacheState
from jaxcache.device.step import Step, jit_step
from jaxcache.device.step_inputs import StepInputs, fill_next_tokens
from jaxcache.inputs.packing import PackedInputs
from jaxcache.layouts import ModelLayout
from jaxcache.models.parameters import parameter_shardings
from jaxcache.models.step_context import last_tokens as last_token_indices


class CachedModel(Protocol):
    """What the engine asks of a model, which is also a Flax NNX module."""

    @property
    def layout(self) -> ModelLayout:
        """What the model keeps of a sequence."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    def __call__(
        self, state: CacheState, inputs: StepInputs
    ) -> tuple[CacheState, jax.Array]:
        """Runs the tokens of a step; returns `[T, hidden]` of them."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The logits `[n, vocab]` of hidden states `[n, hidden]`."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """What a step hands out beside the cache.

    Attributes:
        tokens: `i32[E]`, the token sampled after the last token of each entry. It means
            nothing for padding and for a prompt that goes on in a later step.
        last_tokens: `i32[num_seats]`, for the next step.
    """

    tokens: jax.Array
    last_tokens: jax.Array


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each entry: `i32[E]` from `[E, vocab]`."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


class ModelStep:
    """A model's compiled steps, to be shared by any number of engines.

    Engines with caches of the same size share compilations too.

    Args:
        model: A reference model, or any Flax NNX module with the same three members.
        mesh: Devices with an axis `tensor` to split the weights over. Default: one
            device.
        sample: Turns logits `[E, vocab]` into tokens `i32[E]`, on the device.
    """

    def __init__(
        self,
        model: CachedModel,
        *,
        mesh: jax.sharding.Mesh | None = None,
        sample: Callable[[jax.Array], jax.Array] = greedy,
    ) -> None:
        module = cast(nnx.Module, model)
        graph, weights = nnx.split(module)
        if mesh is None:
            weights = jax.device_put(weights)
        else:
            weights = jax.device_put(weights, parameter_shardings(module, mesh))
        # A flat tuple of arrays crosses into the compiled step at 0.3 us a leaf; a nest
        # of dictionaries is walked in Python at every call.
        leaves, structure = jax.tree.flatten(weights)

        def run(
            leaves: tuple[jax.Array, ...],
            state: CacheState,
            inputs: StepInputs,
            last_tokens: jax.Array,
        ) -> tuple[CacheState, Sampled]:
            merged: Any = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            inputs = fill_next_tokens(inputs, last_tokens)
            state, hidden = merged(state, inputs)
            tokens = sample(merged.logits(hidden[last_token_indices(inputs)]))
            last_tokens = last_tokens.at[inputs.seat].set(tokens)
            if state.replicated is not None:
                # Left to itself, the compiler may split them, and the next step would
                # be compiled again for what it got.
                tokens, last_tokens = jax.lax.with_sharding_constraint(
                    (tokens, last_tokens), state.replicated
                )
            return state, Sampled(tokens=tokens, last_tokens=last_tokens)

        self.layout = model.layout
        self.vocab_size = model.vocab_size
        self.weights = tuple(leaves)
        self._step: Step = jit_step(run)

    def __call__(
        self, state: CacheState, packed: PackedInputs, last_tokens: jax.Array
    ) -> tuple[CacheState, Sampled]:
        """Runs one step. `state` is donated; only the returned one is alive then."""
        return self._step(self.weights, state, packed, last_tokens)

    def copied_bytes(self, pools: Sequence[int]) -> int:
        """The most bytes of these pools that a compiled step copies beside its work."""
        return max(
            sum(
                len(report.leaves[pool].copies) * report.leaves[pool].num_bytes
                for pool in pools
            )
            for report in self._step.reports
        )

    @property
    def compilations(self) -> int:
        """Step shapes compiled so far."""
        return self._step.compilations
