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
from jax.sharding import NamedSharding

from jaxcache.device.proof import StepReport
from jaxcache.device.state import CacheState
from jaxcache.device.step import Step, explain_step, jit_step
from jaxcache.device.step_inputs import StepInputs, fill_next_tokens
from jaxcache.inputs.buckets import Bucket
from jaxcache.inputs.packing import PackedInputs
from jaxcache.layouts import ModelLayout
from jaxcache.layouts.arguments import check_callable, check_kind, integer
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


# Name of the step in reports and errors.
_NAME = "model_step"


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
        _check_model(model)
        check_callable("sample", sample)
        module = cast(nnx.Module, model)
        graph, weights = nnx.split(module)
        if mesh is None:
            weights = jax.device_put(weights)
        else:
            weights = jax.device_put(weights, parameter_shardings(module, mesh))
        # A flat tuple of arrays crosses into the compiled step at 0.3 us a leaf; a nest
        # of dictionaries is walked in Python at every call.
        leaves, structure = jax.tree.flatten(weights)
        self.layout = model.layout
        self.vocab_size = model.vocab_size
        self.weights: tuple[jax.Array, ...] = tuple(leaves)
        self._graph = graph
        self._structure = structure
        self._sample = sample
        self._step: Step = jit_step(self._run, name=_NAME)

    def _run(
        self,
        weights: tuple[jax.Array, ...],
        state: CacheState,
        inputs: StepInputs,
        last_tokens: jax.Array,
    ) -> tuple[CacheState, Sampled]:
        """The step: a pure function of its arguments."""
        tree = jax.tree.unflatten(self._structure, weights)
        model: Any = nnx.merge(self._graph, tree)
        inputs = fill_next_tokens(inputs, last_tokens)
        state, hidden = model(state, inputs)
        tokens = self._sample(model.logits(hidden[last_token_indices(inputs)]))
        last_tokens = last_tokens.at[inputs.seat].set(tokens)
        if state.replicated is not None:
            # Left to itself, the compiler may split them, and the next step would be
            # compiled again for what it got.
            tokens, last_tokens = jax.lax.with_sharding_constraint(
                (tokens, last_tokens), state.replicated
            )
        return state, Sampled(tokens=tokens, last_tokens=last_tokens)

    def __call__(
        self, state: CacheState, packed: PackedInputs, last_tokens: jax.Array
    ) -> tuple[CacheState, Sampled]:
        """Runs one step. `state` is donated; only the returned one is alive then."""
        return self._step(self.weights, state, packed, last_tokens)

    def explain(
        self, state: CacheState, bucket: Bucket, *, device: jax.Device | None = None
    ) -> StepReport:
        """Compiles one shape of the step and reports what it does with the pools.

        Nothing is run or kept. For example, whether an engine's step works in place in
        a cache that this machine has no memory for:

            ModelStep(model).explain(abstract_cache(layout, size), bucket)

        Args:
            state: A cache, maybe abstract (`abstract_cache`). One on a mesh is compiled
                for that mesh, with the weights split as they are.
            bucket: The shape of the step.
            device: Device to compile for, also one that is not attached; `None` is
                where the cache is.

        Returns:
            The report; `print` shows it as a table.
        """
        weights: tuple[Any, ...] = self.weights
        if state.mesh is not None:
            weights = tuple(_moved(weight, state.mesh) for weight in weights)
        last_tokens = jax.ShapeDtypeStruct(
            (state.size.num_seats,), jnp.int32, sharding=state.replicated
        )
        return explain_step(
            self._run, weights, state, bucket, last_tokens, device=device, name=_NAME
        )

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


def _check_model(model: object) -> None:
    check_kind("model", model, nnx.Module, "jaxcache.models has some")
    check_kind("model.layout", getattr(model, "layout", None), ModelLayout)
    integer("model.vocab_size", getattr(model, "vocab_size", None), 1)
    check_callable("model", model)
    check_callable("model.logits", getattr(model, "logits", None))


def _moved(weight: jax.Array, mesh: jax.sharding.Mesh) -> jax.ShapeDtypeStruct:
    """The shape of a weight, split over another mesh as it is over its own."""
    if not isinstance(weight.sharding, NamedSharding):
        raise ValueError(
            "state must be on one device, like the weights, got one on a mesh"
        )
    sharding = NamedSharding(mesh, weight.sharding.spec)
    return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=sharding)
