"""What the tree tells a listener: which pages and snapshots come, and which go.

Without a listener each of these costs one comparison with `None`. A listener is called
while the tree changes, so it must neither change it nor fail. The tokens of what it is
told of are in the tree during the call.
"""

from typing import Protocol

from jaxcache.prefixes.nodes import Int32s, Node, Snapshot


class Listener(Protocol):
    """Who wants to know what becomes resident and what ceases to be."""

    def pages_stored(self, node: Node, first: int, columns: Int32s) -> None:
        """Notes whole pages that a node has got.

        Args:
            node: The node in which the last token of each lies.
            first: Which page of the whole prefix the first one is.
            columns: `i32[groups, n]`; `NULL_SLOT` where a group has got none.
        """
        ...

    def pages_removed(self, node: Node, first: int, columns: Int32s) -> None:
        """Notes whole pages that a node loses; the arguments are as above."""
        ...

    def begun_stored(self, node: Node, tail: Int32s) -> None:
        """Notes a begun page that a node has got, for the tokens to `tail_end`."""
        ...

    def begun_removed(self, node: Node, tail: Int32s) -> None:
        """Notes a begun page that a node loses, with the tokens to `tail_end`."""
        ...

    def snapshot_stored(self, snapshot: Snapshot) -> None:
        """Notes a snapshot that has got a row."""
        ...

    def snapshot_removed(self, snapshot: Snapshot) -> None:
        """Notes a snapshot that has lost its row."""
        ...
