"""Repeats: notices prompts that were served before and now reuse nothing.

Silently losing all reuse is the fault that users of prefix caches meet most. A prompt
is remembered by its length, its beginning and its end, which is enough for a warning
and costs no hash of the whole; what is reused is never decided by this.
"""

import collections
import logging
from collections.abc import Hashable

from jaxcache.prefixes.lookup import Lookup

_REMEMBERED = 4096
_HEAD_BYTES, _TAIL_BYTES = 64, 256

_LOGGER = logging.getLogger(__name__)


class Repeats:
    """The prompts that were served, the newest ones."""

    def __init__(self) -> None:
        self._served: collections.OrderedDict[Hashable, None] = (
            collections.OrderedDict()
        )
        self._has_warned = False

    def note(self, scope: Hashable, data: bytes, lookup: Lookup) -> bool:
        """Notes a prompt that begins to run.

        Returns:
            Whether it was served before and now reuses nothing.
        """
        key = (scope, len(data), data[:_HEAD_BYTES], data[-_TAIL_BYTES:])
        missed = False
        if key in self._served:
            missed = lookup.reused_tokens == 0
            self._served.move_to_end(key)
        else:
            self._served[key] = None
            if len(self._served) > _REMEMBERED:
                self._served.popitem(last=False)
        if missed and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "a prompt of %d tokens that was served before reuses none of them: %s. "
                "Later ones are only counted, in Stats.repeats_missed",
                lookup.prompt_tokens,
                lookup.why,
            )
        return missed
