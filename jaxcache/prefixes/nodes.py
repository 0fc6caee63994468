"""Nodes of the prefix tree: runs of tokens, their pages, the snapshots on them.

Tokens are known further than they have pages: once a snapshot is evicted, it stays as a
*ghost*, a position without a row, and the tokens up to it stay known without pages. So
along a path there are pages up to some token, and none after it.

A node's edge may begin and end at any token. A page belongs to the node in which its
last token lies, and the tokens after a node's last whole page may lie in a partial tail
page:

    tokens     start                                              end
    edge       |---------------------------------------------------|
    pages   ...|..page k..|..page k + 1..|                               owned whole
    tail                                 |..page k + 2     owned up to its `tail_end`
    known                                                 ...            without pages

Page k began in the parent. If two prompts part inside page k, each of the two children
has its own page k. So the first tokens of a page, which are all that a reader of a
prefix that ends inside the page needs, are found in any node below it too.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

# How many nodes are asked for the begun page. The first one nearly always has it.
_MAX_ASKED = 32


# The row of a ghost.
NO_ROW = -1


class Snapshot:
    """A row that holds the state at one token position; it is never written again.

    Attributes:
        node: The node in whose edge the position lies, `None` once it is forgotten.
        position: Tokens that the row has absorbed.
        row: The row; `NO_ROW` of a ghost.
        kind: Why it was taken.
        holds: How many requests still need the row.
        record: What the policy knows of it; only the policy reads or writes it.
    """

    __slots__ = ("holds", "kind", "node", "position", "record", "row")

    def __init__(self, node: "Node", position: int, row: int, kind: str) -> None:
        self.node: Node | None = node
        self.position = position
        self.row = row
        self.kind = kind
        self.holds = 0
        self.record: Any = None

    @property
    def is_resident(self) -> bool:
        """Whether it has a row, and so can be restored."""
        return self.row >= 0


class Hold:
    """What a request needs of the tree: the pages of its first `position` tokens.

    Attributes:
        node: The node in whose edge the position lies; kept true when nodes are split.
        position: Tokens whose pages must stay, a begun page included.
    """

    __slots__ = ("node", "position")

    def __init__(self, node: "Node", position: int) -> None:
        self.node = node
        self.position = position


class Node:
    """Tokens `start` to `end` of one prefix.

    Attributes:
        parent: The node before it, `None` for a root and for a node that was evicted.
        edge: The tokens, as the bytes of int32.
        start: Position of the first token.
        end: Position after the last token.
        children: By the bytes of their first token.
        pages: `i32[groups, n]`, the first of the whole pages that end in `start + 1` to
            `end`; `NULL_SLOT` where a group has none (its window has passed).
        tail: `i32[groups]`, the page that holds the tokens after those.
        tail_end: Position up to which the tail holds the tokens.
        snapshots: In order of position, each after `start` and at most at `end`.
        residents: How many of them have a row.
        holds: What requests hold that ends in this node.
        locked: Children of which they, or a node below, have a hold.
        live: Children that are live.
        loose: Columns of pages that eviction may free, as the tree has counted them.
        loose_holes: Pages missing in those, by group.
        digests: Chained hashes of its first whole pages, with pages or not, as far as a
            listener has asked for them; only the listener adds to them.
    """

    __slots__ = (
        "children",
        "digests",
        "edge",
        "end",
        "holds",
        "live",
        "locked",
        "loose",
        "loose_holes",
        "pages",
        "parent",
        "residents",
        "snapshots",
        "start",
        "tail",
        "tail_end",
    )

    def __init__(
        self, parent: "Node | None", edge: bytes, start: int, pages: Int32s
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.start = start
        self.end = start + len(edge) // 4
        # One shared empty dict for all leaves: few objects for the collector to visit.
        self.children: dict[bytes, Node] = NO_CHILDREN
        self.pages = pages
        self.tail: Int32s | None = None
        self.tail_end = 0
        self.snapshots: list[Snapshot] = NO_SNAPSHOTS
        self.residents = 0
        self.holds: list[Hold] = NO_HOLDS
        self.locked = 0
        self.live = 0
        self.loose = 0
        self.loose_holes: npt.NDArray[np.int64] | None = None
        self.digests: list[bytes] = NO_DIGESTS

    @property
    def extent(self) -> int:
        """Tokens up to which the node is held directly; 0 if it is not."""
        holds = self.holds
        if not holds:
            return 0
        if len(holds) == 1:
            return holds[0].position
        return max(hold.position for hold in holds)

    @property
    def is_pinned(self) -> bool:
        """Whether a request holds this node or one below it."""
        return bool(self.holds) or self.locked > 0

    @property
    def is_live(self) -> bool:
        """Whether a request or a resident snapshot needs this node or one below it."""
        return bool(self.holds) or self.residents > 0 or self.live > 0

    @property
    def tokens(self) -> Int32s:
        """The edge, `i32[end - start]`."""
        return np.frombuffer(self.edge, np.int32)

    def walk(self) -> Iterator["Node"]:
        """Yields the node and all below it."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield node
            nodes.extend(node.children.values())

    def path(self) -> list["Node"]:
        """Returns the nodes from below the root to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Root(Node):
    """The empty prefix of one scope.

    Attributes:
        scope: The scope.
    """

    __slots__ = ("scope",)

    def __init__(self, scope: object, num_groups: int) -> None:
        super().__init__(None, b"", 0, np.zeros((num_groups, 0), np.int32))
        self.scope = scope


# Shared by all nodes that have none of theirs; never written.
NO_CHILDREN: dict[bytes, Node] = {}
NO_SNAPSHOTS: list[Snapshot] = []
NO_HOLDS: list[Hold] = []
NO_DIGESTS: list[bytes] = []


def common_tokens(edge: bytes, edge_at: int, data: bytes, at: int) -> int:
    """Returns how many tokens agree from two byte offsets on."""
    count = min(len(edge) - edge_at, len(data) - at) // 4
    ours = np.frombuffer(edge, np.int32, count, edge_at)
    theirs = np.frombuffer(data, np.int32, count, at)
    differs = ours != theirs
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


def find_partial_page(
    node: Node, position: int, tokens_per_page: int
) -> tuple[Node, Int32s] | None:
    """Returns a page that begins with the last tokens before `position`, and its owner.

    Args:
        node: The node in which `position` lies.
        position: Not a multiple of `tokens_per_page`.
        tokens_per_page: Tokens of one page.

    Returns:
        The node that owns the page, and the page of each group; `None` if there is
        none.
    """
    page = position // tokens_per_page
    stop = (page + 1) * tokens_per_page
    nodes = [node]
    for _ in range(_MAX_ASKED):
        if not nodes:
            break
        owner = nodes.pop()
        index, count = page - owner.start // tokens_per_page, owner.pages.shape[1]
        if index < count:
            column = owner.pages[:, index]
            if column.all():
                return owner, column
        elif index == count and owner.tail is not None and owner.tail_end >= position:
            if owner.tail.all():
                return owner, owner.tail
        if owner.end < stop:
            nodes.extend(itertools.islice(owner.children.values(), _MAX_ASKED))
    return None
