"""What every layer of a model needs to know about the step."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcache.device.step_inputs import StepInputs
from jaxcache.models.chunks import ChunkTable, build_chunk_table


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepContext:
    """The step's inputs and what all layers derive from them, computed once.

    Tokens are laid out as D decode tokens, one an entry, then N prefill tokens. Row
    states are laid out as D decode entries, P prefill entries, then M snapshots.

    Attributes:
        inputs: The step's inputs.
        chunks: The chunk table of the prefill section; None if the bucket has none.
    """

    inputs: StepInputs
    chunks: ChunkTable | None

    @property
    def num_decode(self) -> int:
        """D, the decode entries of the bucket."""
        return self.inputs.bucket.decode

    @property
    def rows_written(self) -> jax.Array:
        """`i32[D + P + M]`: the live row of each entry, then the snapshots' rows."""
        inputs = self.inputs
        return jnp.concatenate([inputs.state_write, inputs.snapshot_slot])


def prepare_step(inputs: StepInputs, chunk_size: int) -> StepContext:
    """Derives what the layers share.

    Args:
        inputs: The step's inputs.
        chunk_size: Tokens a chunk of the prefill section holds at most.
    """
    has_prefill = inputs.bucket.prefill_tokens > 0
    chunks = build_chunk_table(inputs, chunk_size) if has_prefill else None
    return StepContext(inputs=inputs, chunks=chunks)


def last_tokens(inputs: StepInputs) -> jax.Array:
    """Returns `i32[E]`, the index of each entry's last token in the step.

    That is where the logits of the entry's next token come from. A padding entry gets
    some index within the step.
    """
    last = inputs.query_starts + inputs.query_lens - 1
    return jnp.clip(last, 0, inputs.token_ids.shape[0] - 1)
