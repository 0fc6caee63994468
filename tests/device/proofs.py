"""In-place proofs on both targets: this machine's CPU, and an H200 that is not here.

Compiling for the H200 takes the wheel of the dependency group `h200` and is marked
`h200`; a proof for it is the same call with another device.
"""

import functools
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxcache.device.proof import StepReport
from jaxcache.device.state import CacheState, abstract_cache
from jaxcache.device.step import explain_step
from jaxcache.layouts import CacheLayout, CacheSize

GIB = 2**30
TEXT = pathlib.Path(__file__).parents[1] / "data" / "gpu_targets" / "h200.txtpb"

# Parameters of a test that proves something on both targets.
TARGETS = ("cpu", pytest.param("h200", marks=pytest.mark.h200))


@functools.cache
def devices(target: str, count: int = 1) -> tuple[jax.Device, ...]:
    if target == "cpu":
        return tuple(jax.devices("cpu")[:count])
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=TEXT.read_text(),
        topology=f"1x{count}x1",
    )
    return tuple(topology.devices)


def mesh(target: str, count: int) -> Mesh:
    return Mesh(np.array(devices(target, count)), ("tensor",))


def large_cache(
    layout: CacheLayout,
    mesh: Mesh | None = None,
    *,
    max_seqs: int = 64,
    max_tokens: int = 4096,
    num_bytes: int = GIB,
) -> CacheState:
    """An abstract cache of at least `num_bytes`, half pages and half rows."""
    groups = [layout.slot_bytes(group.group_id) for group in layout.groups]
    each = num_bytes // len(groups)
    slots = [max(-(-each // slot), max_seqs) for slot in groups]
    pages = slots[: layout.num_page_groups]
    rows = slots[-1] if layout.has_recurrent else 0
    size = CacheSize.create(
        layout, pages, rows, max_seqs=max_seqs, max_tokens=max_tokens
    )
    return abstract_cache(layout, size, mesh)


def prove(fn: Any, *args: Any, target: str, **options: Any) -> StepReport:
    """Compiles a step or mover for a target and checks that it works in place.

    Args are those of `explain_step`; the state is one of `large_cache`. Arguments on a
    mesh are compiled for that mesh.
    """
    at = options.get("state_argnum", 1)
    on_mesh = args[at].mesh is not None
    device = None if on_mesh else devices(target)[0]
    report = explain_step(fn, *args, device=device, **options)
    check(report)
    return report


def check(report: StepReport) -> None:
    """Alias full, temporaries below 5 % of the pools, no copy of any pool."""
    assert report.in_place, report
    assert report.alias_bytes == report.state_bytes, report
    assert report.temp_share < 0.05, report
    assert [leaf.copies for leaf in report.leaves] == [()] * len(report.leaves), report
