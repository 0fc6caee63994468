"""Conversations: how many turns of one keep the state at their end.

A conversation goes on from its newest turn, now and then from the one before it, if the
user takes a message back. Older turns only cost rows.
"""

import collections
from collections.abc import Hashable

from jaxcache.prefixes.nodes import Snapshot

# How many conversations are remembered, the newest ones.
_REMEMBERED = 4096


class Conversations:
    """The response snapshots of each conversation, oldest turn first.

    Args:
        max_turns: How many of one conversation stay.
    """

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._turns: collections.OrderedDict[Hashable, list[Snapshot]]
        self._turns = collections.OrderedDict()

    def answered(self, conversation: Hashable, snapshot: Snapshot) -> list[Snapshot]:
        """Notes the state at the end of a turn.

        Args:
            conversation: Whose turn it was, scope included.
            snapshot: The state.

        Returns:
            Snapshots of older turns that are to be evicted. One that a request holds is
            left for a later turn.
        """
        turns = [s for s in self._turns.pop(conversation, ()) if s.is_resident]
        turns.append(snapshot)
        older = turns[: -self._max_turns]
        self._turns[conversation] = [
            turn for turn in turns if turn not in older or turn.holds
        ]
        if len(self._turns) > _REMEMBERED:
            self._turns.popitem(last=False)
        return [turn for turn in older if not turn.holds]
