"""What can be served at all, and the most of the cache that it will ever need."""

from collections.abc import Callable

import numpy as np

from jaxcache.engine.request import Request
from jaxcache.engine.schedule import Need
from jaxcache.host.admission import read_points, read_prompt
from jaxcache.layouts import CacheLayout, CacheSize


class Admission:
    """Refuses at once, with the numbers, what could never run.

    Attributes:
        capacity: What the cache can hold.
    """

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        vocab_size: int,
        worst_case_pages: Callable[[int], tuple[int, ...]],
    ) -> None:
        """Takes what decides.

        Args:
            layout: Layout of the cache.
            size: Size of the cache.
            vocab_size: Token ids that the model knows.
            worst_case_pages: Pages of each group, of a request of so many tokens.
        """
        self.capacity = Need(size.max_seqs, size.num_rows, size.num_pages)
        self._max_tokens = size.max_tokens
        self._num_rows = int(layout.has_recurrent)
        self._vocab_size = vocab_size
        self._worst_case_pages = worst_case_pages

    def examine(self, request: Request) -> tuple[np.ndarray, Need]:
        """Returns the prompt as `i32[tokens]` and the most that the request ever holds.

        Raises:
            ValueError: naming the request, the argument, what was needed and what came.
        """
        where = f"of request {request.id!r}"
        data = read_prompt(request.id, request.prompt, self._max_tokens)
        prompt = np.frombuffer(data, np.int32)
        if prompt.max() >= self._vocab_size:
            raise ValueError(
                f"prompt {where} must have token ids from 0 to {self._vocab_size - 1}, "
                f"got {prompt.min()} to {prompt.max()}"
            )
        if request.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens {where} must be at least 1, got "
                f"{request.max_new_tokens}"
            )
        # The last token that is sampled is never written.
        history = len(prompt) + request.max_new_tokens - 1
        if history > self._max_tokens:
            raise ValueError(
                f"prompt and max_new_tokens {where} are {len(prompt)} and "
                f"{request.max_new_tokens} tokens and need room for {history}; "
                f"max_tokens is {self._max_tokens}"
            )
        if read_points(request.id, request.points, len(prompt)) and not request.reuse:
            raise ValueError(
                f"points {where} must be empty without reuse, got {request.points}"
            )
        need = Need(1, self._num_rows, self._worst_case_pages(history))
        if not need.fits(self.capacity):
            raise ValueError(
                f"request {request.id!r} may hold {list(need.pages)} pages, one number "
                f"a page group, and the cache has {list(self.capacity.pages)}"
            )
        return prompt, need
