"""The in-place proof: what a compiled step does with the memory of the pools.

Alias bytes alone prove nothing: they are full even when the step copies a pool to a
temporary and back. What proves it is memory that is not there: temporaries, and results
other than the state, that are too small for a part of a layer hold no copy. Where
activations make them larger, the program is searched for instructions that give an
array like a pool, and a finding is confirmed by compiling the same step for a cache so
large that none of the first program's memory could hold a layer of it: a copy grows
with the cache, an activation of the same shape does not.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxcache.device.hlo import PART, HloArray, Program, hlo_dtype, pools_like
from jaxcache.device.state import CacheState


class PoolCopied(RuntimeError):
    """A step would copy a pool, or give up its memory, at every call.

    Attributes:
        pools: Names of those pools.
        report: The whole report.
    """

    def __init__(self, report: "StepReport") -> None:
        self.report = report
        self.pools = tuple(leaf.name for leaf in report.leaves if not leaf.in_place)
        super().__init__(_explain(report))


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """What a compiled step does with one array of the state, on one device.

    Attributes:
        name: Name of the pool, or `page_table`, or `row_index`.
        dtype: Element type.
        shape: Shape on one device.
        num_bytes: Bytes on one device.
        aliased: Whether the result takes over the argument's memory.
        copies: Instructions that copy it, or many slots of one of its layers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    aliased: bool
    copies: tuple[str, ...]

    @property
    def in_place(self) -> bool:
        """Whether the array keeps its memory and is not copied."""
        return self.aliased and not self.copies


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What a compiled step does with the memory of the state, on one device.

    Printed, it is a table.

    Attributes:
        name: Name of the step.
        platform: What it is compiled for.
        leaves: The arrays of the state.
        argument_bytes: Bytes of all arguments.
        alias_bytes: Bytes of arguments whose memory the results take over.
        temp_bytes: Bytes of temporaries.
        output_bytes: Bytes of results beside those.
        compile_seconds: Time to trace, lower and compile.
        temp_growth: Growth of temporaries and results in a larger cache, as a share of
            the growth of the layer that seemed copied; `None` if nothing seemed copied.
    """

    name: str
    platform: str
    leaves: tuple[LeafReport, ...]
    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    output_bytes: int
    compile_seconds: float
    temp_growth: float | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return sum(leaf.num_bytes for leaf in self.leaves)

    @property
    def room_bytes(self) -> int:
        """Bytes that could hold a copy: temporaries and results beside the state."""
        return self.temp_bytes + self.output_bytes

    @property
    def temp_share(self) -> float:
        """Temporaries as a share of the state."""
        return self.temp_bytes / self.state_bytes

    @property
    def in_place(self) -> bool:
        """Whether every array of the state keeps its memory and none is copied."""
        return all(leaf.in_place for leaf in self.leaves)

    def __str__(self) -> str:
        rows = [("", "bytes", "alias", "copies", "verdict")]
        for leaf in self.leaves:
            shape = ",".join(map(str, leaf.shape))
            rows.append(
                (
                    f"{leaf.name}  {leaf.dtype}[{shape}]",
                    _bytes(leaf.num_bytes),
                    "full" if leaf.aliased else "none",
                    str(len(leaf.copies)),
                    "in place" if leaf.in_place else "COPIED",
                )
            )
        verdict = "in place" if self.in_place else "COPIED"
        alias = "full" if all(leaf.aliased for leaf in self.leaves) else "part"
        copies = str(sum(len(leaf.copies) for leaf in self.leaves))
        rows.append(("state", _bytes(self.state_bytes), alias, copies, verdict))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            f"{self.name}, compiled for {self.platform} in {self.compile_seconds:.2f} s"
        ]
        for name, *rest in rows:
            cells = [cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells]))
        share = f"{self.temp_share:.2%} of the state"
        results = f"results beside the state {_bytes(self.output_bytes)}"
        lines.append(f"temporaries {_bytes(self.temp_bytes)}, {share}; {results}")
        return "\n".join(lines)


def _bytes(num_bytes: int) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def _explain(report: StepReport) -> str:
    lines = []
    for leaf in report.leaves:
        if leaf.copies:
            lines.append(
                f"{report.name} would copy pool {leaf.name!r}, "
                f"{_bytes(leaf.num_bytes)}, at every call: {', '.join(leaf.copies)}"
            )
        elif not leaf.aliased:
            lines.append(
                f"{report.name} would not give back pool {leaf.name!r} in the memory "
                "it came in: the state it returns holds another array in its place"
            )
    return "\n".join(
        (
            *lines,
            "Read and write pools only by jaxcache.read_rows, write_tokens and the "
            "other functions of jaxcache.device.pools. Pass what was read, or what a "
            "kernel made of a pool, through jaxcache.after_read(state, value) before "
            "the same pool is written. Carry "
            "the state through lax.scan, never one pool a layer as xs -> ys. "
            "jaxcache.explain_step shows the whole report:",
            str(report),
        )
    )


def explain_compiled(
    compiled: jax.stages.Compiled,
    state: CacheState,
    *,
    name: str = "step",
    platform: str | None = None,
    compile_seconds: float = 0.0,
) -> StepReport:
    """Reports what any compiled function does with the memory of a state.

    Args:
        compiled: The result of `jax.jit(f, donate_argnums=...).lower(...).compile()`.
        state: The state it was compiled for, concrete or abstract.
        name: Name in the report.
        platform: Platform in the report; `None` is that of JAX's default device.
        compile_seconds: Time in the report.

    Returns:
        The report. It trusts what the program says: `jit_step` and `explain_step` also
        confirm a copy, so they are right about an activation shaped like a pool.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError(
            "compiled must have a memory analysis, got none on this device"
        )
    # What takes over an argument's memory counts as a result too.
    outputs = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    room = memory.temp_size_in_bytes + outputs
    names = [spec.name for spec in state.layout.pools] + ["page_table", "row_index"]
    arrays = [*state.pools, state.page_table, state.row_index]
    shapes = [_shard_shape(array) for array in arrays]
    dtypes = [np.dtype(array.dtype).name for array in arrays]
    hlo = [HloArray(hlo_dtype(d), s) for d, s in zip(dtypes, shapes, strict=True)]
    sizes = [
        array.size * np.dtype(d).itemsize for array, d in zip(hlo, dtypes, strict=True)
    ]
    program = Program(compiled.as_text() or "")
    aliased = pools_like(program.aliased(), hlo)
    leaves = []
    for index, array in enumerate(hlo):
        copies: list[str] = []
        if index < len(state.pools):
            spec = state.layout.pools[index]
            # Less than this cannot hold even a part of one layer of the pool.
            if PART * room * spec.num_buffers >= sizes[index]:
                copies = program.copies(array, spec.num_buffers)
        leaves.append(
            LeafReport(
                names[index],
                dtypes[index],
                shapes[index],
                sizes[index],
                aliased[index],
                tuple(dict.fromkeys(copies)),
            )
        )
    return StepReport(
        name=name,
        platform=platform or jax.default_backend(),
        leaves=tuple(leaves),
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=outputs,
        compile_seconds=compile_seconds,
    )


def _shard_shape(array: Any) -> tuple[int, ...]:
    sharding = array.sharding
    shape = tuple(array.shape)
    return shape if sharding is None else tuple(sharding.shard_shape(shape))


def layer_bytes(report: StepReport, state: CacheState) -> dict[int, int]:
    """Returns the bytes of one layer of each pool that seems copied, on one device."""
    return {
        index: report.leaves[index].num_bytes // spec.num_buffers
        for index, spec in enumerate(state.layout.pools)
        if report.leaves[index].copies
    }


def confirmed(report: StepReport, larger: StepReport, growth: float) -> StepReport:
    """Returns a report without the suspicions that a larger cache does not confirm.

    Args:
        report: The report.
        larger: That of the same step for a larger cache.
        growth: Its `temp_growth`.
    """
    report = dataclasses.replace(report, temp_growth=growth)
    pairs = list(zip(report.leaves, larger.leaves, strict=True))
    # Memory that grows with the cache and that no instruction explains clears nothing.
    if growth >= 0.5 and not any(a.copies and b.copies for a, b in pairs):
        return report
    leaves = tuple(
        a if b.copies else dataclasses.replace(a, copies=()) for a, b in pairs
    )
    return dataclasses.replace(report, leaves=leaves)
