"""Invariants: every slot has one owner, and all counts are true.

Walks over everything, so it is for tests and for debugging, never for the step path.
"""

import collections
from collections.abc import Iterable

import numpy as np

from jaxcache.host.core import Core
from jaxcache.host.requests import Request
from jaxcache.prefixes.nodes import (
    NO_ROW,
    Hold,
    Node,
    Root,
    Snapshot,
    find_partial_page,
)


def check(core: Core) -> None:
    """Checks every invariant.

    Raises:
        RuntimeError: naming the first that does not hold, with the numbers.
    """
    requests = _requests(core)
    nodes = [
        node for root in core.tree.residency.roots.values() for node in root.walk()
    ]
    _check_pages(core, nodes, requests)
    _check_rows(core, nodes, requests)
    for node in nodes:
        _check_node(core, node)
    _check_holds(core, nodes, requests)
    _check_counts(core, nodes)
    _check_seats(core, requests)


def _require(holds: object, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _requests(core: Core) -> list[Request]:
    """All that own anything: those with an id, and those that end with a plan."""
    requests = set(core.requests.values())
    requests.update(owner for owner in core.seats.owners if owner is not None)
    return list(requests)


def _check_owners(
    what: str, total: int, first: int, owned: dict[str, list[int]]
) -> None:
    numbers = {owner: len(slots) for owner, slots in owned.items()}
    slots = [slot for some in owned.values() for slot in some]
    _require(len(slots) == total, f"{what}: {total} exist, but are owned by {numbers}")
    twice = [slot for slot, n in collections.Counter(slots).items() if n > 1]
    _require(not twice, f"{what}: {twice} have two owners; the numbers are {numbers}")
    _require(
        not slots or (min(slots) == first and max(slots) == first + total - 1),
        f"{what}: owned are {min(slots, default=0)} to {max(slots, default=0)}, "
        f"there are {first} to {first + total - 1}",
    )


def _check_pages(core: Core, nodes: list[Node], requests: list[Request]) -> None:
    page = core.size.tokens_per_page
    for group in range(core.pages.num_groups):
        tree: list[int] = []
        for node in nodes:
            tree += node.pages[group].tolist()
            if node.tail is not None:
                tree.append(int(node.tail[group]))
        own: list[int] = []
        for request in requests:
            if request.seat < 0:
                continue
            pages = core.seats.num_pages(request.seat)
            table = core.tables.page_table[group, request.seat]
            own += table[request.shared : pages].tolist()
            _require(
                int(core.seats.planned[request.seat]) <= pages * page,
                f"request {request.id!r} has {pages} pages for "
                f"{core.seats.planned[request.seat]} tokens",
            )
        owned = {
            "nobody": core.pages.free_slots(group).tolist(),
            "the tree": [slot for slot in tree if slot],
            "requests": own,
        }
        total = core.pages.num_pages[group]
        _check_owners(f"pages of group {group}", total, core.size.first_slot, owned)


def _check_rows(core: Core, nodes: list[Node], requests: list[Request]) -> None:
    plans: list[int] = []
    for plan in core.in_flight:
        for chunk in plan.chunks:
            plans += [row for _, row in chunk.emitted]
            if chunk.handed_point is not None:
                plans.append(chunk.handed_row)
    owned = {
        "nobody": core.rows.free_slots(),
        "snapshots": [s.row for n in nodes for s in n.snapshots if s.is_resident],
        "requests": [r.row for r in requests if r.row != NO_ROW],
        "plans": plans,
    }
    _check_owners("rows", core.rows.num_rows, core.size.first_slot, owned)


def _check_node(core: Core, node: Node) -> None:
    page, groups = core.size.tokens_per_page, core.pages.num_groups
    where = f"node of tokens {node.start} to {node.end}"
    if isinstance(node, Root):
        _require(node.end == 0 and node.parent is None, f"{where} is no root")
    else:
        parent = node.parent
        _require(
            parent is not None and parent.end == node.start, f"{where} hangs loose"
        )
        _require(node.end > node.start, f"{where} is empty")
        if not core.has_rows:
            is_leaf = node in core.tree.evictor.leaves
            _require(
                is_leaf != bool(node.children),
                f"{where} has {len(node.children)} children, queued as leaf: {is_leaf}",
            )
    _require(len(node.edge) == 4 * (node.end - node.start), f"{where} has another edge")
    shape, most = node.pages.shape, node.end // page - node.start // page
    _require(
        shape[0] == groups and shape[1] <= most,
        f"{where} has pages of shape {shape}, at most {(groups, most)} are possible",
    )
    is_full = shape[1] == most
    _require(
        is_full or not any(child.pages.size for child in node.children.values()),
        f"{where} has {shape[1]} of {most} pages, and nodes below have some too",
    )
    begun = (node.start // page + shape[1]) * page
    _require(
        node.tail is None or begun < node.tail_end <= min(node.end, begun + page - 1),
        f"{where} has a tail page for tokens {begun} to {node.tail_end}",
    )
    _check_need(core, node, where)
    for key, child in node.children.items():
        _require(
            child.parent is node and child.edge[:4] == key,
            f"{where} has a child of tokens {child.start} that is another's",
        )
    positions = [snapshot.position for snapshot in node.snapshots]
    _require(
        positions == sorted(set(positions))
        and all(node.start < position <= node.end for position in positions)
        and all(snapshot.node is node for snapshot in node.snapshots),
        f"{where} has snapshots at {positions}",
    )


def _check_need(core: Core, node: Node, where: str) -> None:
    """Nothing is kept that nobody could ever use."""
    page = core.size.tokens_per_page
    if node.tail is not None and node.extent <= node.tail_end - node.tail_end % page:
        tail, node.tail = node.tail, None
        is_covered = find_partial_page(node, node.tail_end, page) is not None
        node.tail = tail
        _require(not is_covered, f"{where} has a tail page that a node below has too")
    if not core.has_rows or isinstance(node, Root):
        return
    needed = core.tree.residency.needed(node)
    last = node.snapshots[-1].position if node.snapshots else node.start
    _require(
        node.children or node.end == max(needed, last),
        f"{where} has tokens after {max(needed, last)}, which nobody needs",
    )
    _require(
        node.tail is None
        or node.live
        or needed > max(node.start, node.tail_end - node.tail_end % page),
        f"{where} has a tail page, but only tokens up to {needed} are needed",
    )
    _require(
        node.pages.shape[1] <= needed // page - node.start // page,
        f"{where} has {node.pages.shape[1]} pages, but only tokens up to {needed} are "
        f"needed",
    )


def _check_holds(core: Core, nodes: list[Node], requests: list[Request]) -> None:
    held: list[Hold] = [hold for node in nodes for hold in node.holds]
    wanted = [request.hold for request in requests if request.hold is not None]
    _require(
        len(held) == len(wanted) and {id(h) for h in held} == {id(h) for h in wanted},
        f"the tree has {len(held)} holds, requests have {len(wanted)}",
    )
    for node in nodes:
        for hold in node.holds:
            _require(
                hold.node is node and node.start < hold.position <= node.end,
                f"a hold of {hold.position} tokens is in the node of tokens "
                f"{node.start} to {node.end}",
            )
        locked = sum(child.is_pinned for child in node.children.values())
        _require(
            node.locked == locked,
            f"the node of tokens {node.start} to {node.end} is locked by {node.locked} "
            f"children, but {locked} are held",
        )
        live = sum(child.is_live for child in node.children.values())
        residents = sum(snapshot.is_resident for snapshot in node.snapshots)
        _require(
            (node.live, node.residents) == (live, residents),
            f"the node of tokens {node.start} to {node.end} counts {node.live} live "
            f"children and {node.residents} snapshots; there are {live} and "
            f"{residents}",
        )
    sources = collections.Counter(r.source for r in requests if r.source is not None)
    for node in nodes:
        for snapshot in node.snapshots:
            _require(
                snapshot.holds == sources.pop(snapshot, 0),
                f"the snapshot at {snapshot.position} has {snapshot.holds} holds",
            )
            _require(
                snapshot.holds == 0 or _is_held(node, snapshot),
                f"the held snapshot at {snapshot.position} is under no hold",
            )
    _require(not sources, f"{len(sources)} snapshots are held that were evicted")
    for request in requests:
        if request.seat >= 0 and request.shared:
            _check_shared(core, request)


def _is_held(node: Node, snapshot: Snapshot) -> bool:
    return node.locked > 0 or node.extent >= snapshot.position


def _check_shared(core: Core, request: Request) -> None:
    """The shared part of a page table is what the tree has for these tokens."""
    page = core.size.tokens_per_page
    hold = request.hold
    _require(hold is not None, f"request {request.id!r} shares pages and holds none")
    assert hold is not None
    path = hold.node.path()
    columns = np.concatenate([node.pages for node in path], axis=1)[:, : request.shared]
    table = core.tables.page_table[:, request.seat, : request.shared]
    _require(
        not core.pages.num_groups or np.array_equal(columns, table),
        f"request {request.id!r} shares pages {table.tolist()}, the tree has "
        f"{columns.tolist()}",
    )
    tokens = b"".join(node.edge for node in path)[: 4 * request.shared * page]
    _require(
        tokens == core.seats.data(request.seat, 0, request.shared * page),
        f"request {request.id!r} shares pages of other tokens",
    )


def _check_counts(core: Core, nodes: list[Node]) -> None:
    residency = core.tree.residency
    for group in range(core.pages.num_groups):
        loose = sum(_loose_pages(core, node, group) for node in nodes)
        _require(
            loose == residency.evictable_pages(group),
            f"{residency.evictable_pages(group)} pages of group {group} are counted as "
            f"evictable, {loose} are",
        )
    snapshots = [s for node in nodes for s in node.snapshots if s.is_resident]
    held = sum(snapshot.holds > 0 for snapshot in snapshots)
    _require(
        (residency.num_snapshots, residency.num_held) == (len(snapshots), held),
        f"{residency.num_snapshots} snapshots, {residency.num_held} held, are counted; "
        f"there are {len(snapshots)}, {held} held",
    )
    leaves = sum(not isinstance(n, Root) and not n.children for n in nodes)
    queued = len(core.tree.evictor.leaves)
    _require(
        core.has_rows or queued == leaves,
        f"{queued} leaves are queued for eviction, there are {leaves}",
    )


def _loose_pages(core: Core, node: Node, group: int) -> int:
    loose = core.tree.residency.loose_from(node)
    if loose is None:
        return 0
    count = int(np.count_nonzero(node.pages[group, loose[0] :]))
    if loose[1] and node.tail is not None:
        count += int(node.tail[group] != 0)
    return count


def _check_seats(core: Core, requests: Iterable[Request]) -> None:
    seats = core.seats
    taken = [seat for seat, owner in enumerate(seats.owners) if owner is not None]
    _check_owners(
        "seats",
        core.size.max_seqs,
        0,
        {"nobody": seats.free_seats(), "requests": taken},
    )
    for request in requests:
        seat = request.seat
        if seat < 0:
            _require(
                request.row == NO_ROW and not request.shared,
                f"request {request.id!r} waits and owns row {request.row}",
            )
            continue
        _require(
            seats.owners[seat] is request,
            f"request {request.id!r} has not the seat {seat} it was given",
        )
        history, planned = int(seats.history[seat]), int(seats.planned[seat])
        known = int(seats.known[seat])
        _require(
            request.shared * core.size.tokens_per_page <= history <= planned
            and history <= known,
            f"request {request.id!r} shares {request.shared} pages, has computed "
            f"{history} tokens, planned {planned} and knows {known}",
        )
        _require(
            core.has_rows == (request.row != NO_ROW),
            f"request {request.id!r} runs with row {request.row}",
        )
    for seat in seats.free_seats():
        rows = core.tables.rows(seat)
        sink = core.size.sink_slot
        _require(rows == (sink, sink), f"the free seat {seat} points at rows {rows}")
