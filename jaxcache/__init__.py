"""The inference cache for hybrid language models in JAX.

The device side (`init_cache`, `jit_step` and the pure functions on a `CacheState`), the
host side (`CacheManager`) and what passes between them (`Buckets`, `PackedInputs`).
What bytes lie where is `jaxcache.layouts`; reference models are `jaxcache.models`; a
small serving loop is `jaxcache.engine`.
"""

from jaxcache.device.movers import Mover, Movers, jit_mover
from jaxcache.device.pools import (
    after_read,
    clear_pages,
    clear_rows,
    copy_pages,
    copy_rows,
    emit_snapshots,
    read_pages,
    read_rows,
    update_tables,
    write_rows,
    write_tokens,
)
from jaxcache.device.proof import PoolCopied, StepReport, explain_compiled
from jaxcache.device.state import CacheState, abstract_cache, init_cache
from jaxcache.device.step import Step, explain_step, jit_step
from jaxcache.device.step_inputs import StepInputs, begin_step, fill_next_tokens
from jaxcache.host.errors import (
    OutOfPages,
    OutOfRows,
    OutOfSeats,
    Refused,
    StalePlan,
    UnknownRequest,
)
from jaxcache.host.manager import CacheManager
from jaxcache.host.plans import StepPlan
from jaxcache.host.stats import SlotUse, Stats
from jaxcache.inputs.buckets import Bucket, Buckets
from jaxcache.inputs.packing import NEXT_TOKEN, PackedInputs, Packer, StepWork
from jaxcache.policies.fixed_points import (
    FixedPoints,
    branch,
    from_end,
    from_start,
    periodic,
    response,
)
from jaxcache.policies.learned import Learned
from jaxcache.policies.lru import Lru
from jaxcache.policies.policy import Arrival, Policy, PolicyMaker, Wish
from jaxcache.policies.snapshots import Auto, Emission, Point, SnapshotPolicy, auto
from jaxcache.prefixes.lookup import Lookup
from jaxcache.prefixes.nodes import Snapshot
from jaxcache.prefixes.order import Geometry

__all__ = [
    "NEXT_TOKEN",
    "Arrival",
    "Auto",
    "Bucket",
    "Buckets",
    "CacheManager",
    "CacheState",
    "Emission",
    "FixedPoints",
    "Geometry",
    "Learned",
    "Lookup",
    "Lru",
    "Mover",
    "Movers",
    "OutOfPages",
    "OutOfRows",
    "OutOfSeats",
    "PackedInputs",
    "Packer",
    "Point",
    "Policy",
    "PolicyMaker",
    "PoolCopied",
    "Refused",
    "SlotUse",
    "Snapshot",
    "SnapshotPolicy",
    "StalePlan",
    "Stats",
    "Step",
    "StepInputs",
    "StepPlan",
    "StepReport",
    "StepWork",
    "UnknownRequest",
    "Wish",
    "abstract_cache",
    "after_read",
    "auto",
    "begin_step",
    "branch",
    "clear_pages",
    "clear_rows",
    "copy_pages",
    "copy_rows",
    "emit_snapshots",
    "explain_compiled",
    "explain_step",
    "fill_next_tokens",
    "from_end",
    "from_start",
    "init_cache",
    "jit_mover",
    "jit_step",
    "periodic",
    "read_pages",
    "read_rows",
    "response",
    "update_tables",
    "write_rows",
    "write_tokens",
]
