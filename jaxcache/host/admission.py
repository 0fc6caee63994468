"""What may be added: checks of a cache's size, of a prompt and its marked points."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcache.inputs.buckets import Buckets
from jaxcache.layouts import CacheLayout, CacheSize
from jaxcache.layouts.arguments import integer
from jaxcache.policies.fixed_points import FixedPoints
from jaxcache.policies.policy import Policy, PolicyMaker
from jaxcache.policies.snapshots import Emission, SnapshotPolicy
from jaxcache.prefixes.order import EvictionOrder

_INT32 = np.dtype(np.int32)

# What an eviction policy must be able to do.
_POLICY = tuple(
    sorted(
        name
        for protocol in (EvictionOrder, Policy)
        for name in vars(protocol)
        if not name.startswith("_")
    )
)


def read_prompt(request_id: Hashable, prompt: npt.ArrayLike, max_tokens: int) -> bytes:
    """Returns a prompt as the bytes of int32.

    Args:
        request_id: For the messages.
        prompt: Token ids; an `i32[tokens]` array is by far the fastest.
        max_tokens: The longest history of a request.

    Raises:
        ValueError: saying what is wrong with it.
    """
    try:
        tokens = np.asarray(prompt)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"prompt of request {request_id!r} must be an array of shape (n,): {error}"
        ) from error
    if tokens.ndim != 1 or not tokens.size:
        raise ValueError(
            f"prompt of request {request_id!r} must have shape (n,), n at least 1, "
            f"got {tokens.shape}"
        )
    if tokens.size > max_tokens:
        raise ValueError(
            f"prompt of request {request_id!r} must have at most max_tokens = "
            f"{max_tokens} tokens, got {tokens.size}: it can never fit"
        )
    if tokens.dtype != _INT32:
        if tokens.dtype.kind not in "iu":
            raise ValueError(
                f"prompt of request {request_id!r} must hold integers, "
                f"got {tokens.dtype}"
            )
        if int(tokens.max()) > np.iinfo(np.int32).max:
            raise ValueError(
                f"prompt of request {request_id!r} must hold int32 token ids, "
                f"got {tokens.max()}"
            )
        if int(tokens.min()) >= 0:
            tokens = tokens.astype(np.int32)
    if tokens.dtype != _INT32 or _has_negative(tokens):
        raise ValueError(
            f"prompt of request {request_id!r} must hold token ids >= 0, "
            f"got {tokens.min()}"
        )
    return tokens.tobytes()


def _has_negative(tokens: npt.NDArray[Any]) -> bool:
    # To find where the least is takes half the time of finding the least.
    return bool(tokens.item(tokens.argmin()) < 0)


def read_points(
    request_id: Hashable, points: Sequence[int], prompt_tokens: int
) -> tuple[int, ...]:
    """Returns the marked points of a prompt.

    Raises:
        ValueError: if they are not ascending positions inside the prompt.
    """
    try:
        if not len(points):
            return ()
        positions = tuple(integer("points", position) for position in points)
    except (TypeError, ValueError):
        raise ValueError(
            f"points of request {request_id!r} must be integers in a sequence, "
            f"got {points!r}"
        ) from None
    ordered = sorted(set(positions))
    if list(positions) != ordered or ordered[0] < 1 or ordered[-1] > prompt_tokens:
        raise ValueError(
            f"points of request {request_id!r} must be ascending positions from 1 to "
            f"the {prompt_tokens} tokens of its prompt, each once, got {positions}"
        )
    return positions


def check_options(
    layout: CacheLayout,
    buckets: Buckets,
    policy: SnapshotPolicy,
    emission: Emission,
    max_tokens: int,
) -> None:
    """Refuses options that would fail when they are used, or never take a snapshot.

    A policy that fails when a request ends fails too late: its id is forgotten then.

    Raises:
        ValueError: naming the option, with what would work.
    """
    if not isinstance(buckets, Buckets):
        raise ValueError(f"buckets must be a Buckets, got {buckets!r}")
    if not isinstance(emission, Emission):
        raise ValueError(f"emission must be an Emission, got {emission!r}")
    if not callable(getattr(policy, "points", None)):
        raise ValueError(f"policy must have a method points, got {policy!r}")
    if isinstance(policy, type) or not isinstance(
        getattr(policy, "response", None), bool
    ):
        raise ValueError(
            f"policy must be an object whose response is True or False, got {policy!r}"
        )
    if layout.has_recurrent and isinstance(policy, FixedPoints):
        if reason := policy.never_hits(max_tokens):
            raise ValueError(f"policy can never hit: {reason}, got {policy!r}")
    if layout.has_recurrent and emission.grid and not buckets.max_snapshots:
        raise ValueError(
            "buckets.max_snapshots must be at least 2 where states are emitted inside "
            "chunks, got 0; or end chunks at the points: emission=Emission.chunk_end()"
        )


def make_policy(
    layout: CacheLayout, eviction: PolicyMaker, kinds: Sequence[str]
) -> Policy[Any]:
    """Returns the eviction policy for a cache, which may suggest snapshots of `kinds`.

    Raises:
        ValueError: if `eviction` makes none.
    """
    if not callable(eviction):
        raise ValueError(
            f"eviction must be Learned, Lru or another callable that makes a Policy, "
            f"got {eviction!r}"
        )
    groups = range(layout.num_page_groups)
    order = eviction(
        row_bytes=layout.bytes_per_row if layout.has_recurrent else 0,
        page_bytes=sum(layout.bytes_per_page(group) for group in groups),
        tokens_per_page=layout.tokens_per_page,
        kinds=kinds,
    )
    missing = [name for name in _POLICY if not callable(getattr(order, name, None))]
    if missing:
        raise ValueError(
            f"eviction must make an object with the methods {', '.join(_POLICY)}, "
            f"got {order!r}"
        )
    return order


def check_size(layout: CacheLayout, size: CacheSize) -> None:
    """Refuses a size that does not belong to a layout, or is too small for a request.

    Raises:
        ValueError: naming the field, with the smallest value that would work.
    """
    if not isinstance(layout, CacheLayout) or not isinstance(size, CacheSize):
        raise ValueError(
            f"layout and size must be a CacheLayout and a CacheSize, got {layout!r} "
            f"and {size!r}"
        )
    # Everything that a size made by hand could get wrong.
    CacheSize.create(
        layout,
        size.num_pages,
        size.num_rows,
        max_seqs=size.max_seqs,
        max_tokens=size.max_tokens,
        num_sinks=size.num_sinks,
    )
    if size.tokens_per_page != layout.tokens_per_page:
        raise ValueError(
            f"size.tokens_per_page must be {layout.tokens_per_page}, that of the "
            f"layout, got {size.tokens_per_page}"
        )
    for group, num_pages in enumerate(size.num_pages):
        if num_pages < size.max_pages:
            raise ValueError(
                f"size.num_pages of group {group} must be at least {size.max_pages}, "
                f"what a request of max_tokens = {size.max_tokens} holds, "
                f"got {num_pages}"
            )
