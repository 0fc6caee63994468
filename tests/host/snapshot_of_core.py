"""Everything that a manager knows, as plain values that can be compared."""

from typing import Any

from jaxcache.host.core import Core
from jaxcache.prefixes.nodes import Node, Snapshot


def describe(core: Core) -> dict[str, Any]:
    """Returns what must be the same before and after a call that changes nothing."""
    residency = core.tree.residency
    groups = range(core.pages.num_groups)
    seats = core.seats
    return {
        "free pages": [core.pages.free_slots(group).tolist() for group in groups],
        "evictable pages": [residency.evictable_pages(group) for group in groups],
        "free rows": core.rows.free_slots(),
        "evictable rows": residency.evictable_rows,
        "free seats": seats.free_seats(),
        "tree": {
            scope: _describe_node(root) for scope, root in residency.roots.items()
        },
        "leaves": [_name(leaf) for leaf in core.tree.evictor.leaves],
        "requests": {
            request.id: (
                request.seat,
                request.row,
                request.reads,
                request.shared,
                request.is_decoding,
                request.wanted,
                request.found.lookup,
                request.hold and (_name(request.hold.node), request.hold.position),
                request.source and _name_snapshot(request.source),
            )
            for request in core.requests.values()
        },
        "seats": [
            getattr(seats, name).tolist()
            for name in ("history", "planned", "known", "capacity", "last_plan")
        ],
        "tables": (
            core.tables.page_table.tolist(),
            core.tables.row_index.tolist(),
            core.tables._first.tolist(),
            core.tables._stop.tolist(),
            core.tables._rows.tolist(),
        ),
        "plans": [plan.number for plan in core.in_flight],
    }


def _name(node: Node) -> tuple[object, bytes]:
    path = node.path()
    root = path[0].parent if path else node
    return getattr(root, "scope", None), b"".join(node.edge for node in path)


def _name_snapshot(snapshot: Snapshot) -> tuple[object, ...]:
    assert snapshot.node is not None
    return (_name(snapshot.node), snapshot.position, snapshot.row, snapshot.holds)


def _describe_node(node: Node) -> tuple[Any, ...]:
    return (
        node.edge,
        node.pages.tolist(),
        None if node.tail is None else node.tail.tolist(),
        [(s.position, s.row, s.kind, s.holds) for s in node.snapshots],
        sorted(hold.position for hold in node.holds),
        node.locked,
        node.live,
        node.residents,
        node.tail_end if node.tail is not None else 0,
        {key: _describe_node(child) for key, child in node.children.items()},
    )
