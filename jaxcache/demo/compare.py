"""Serving the same dialogues without and with reuse, and what came of it."""

import dataclasses
import functools
import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxcache.demo.conversations import BadInput
from jaxcache.demo.dialogues import Dialogue, hold_dialogues, total_tokens
from jaxcache.demo.memory import check_memory
from jaxcache.engine import Engine, ModelStep, Result
from jaxcache.layouts import CacheLayout, CacheSize
from jaxcache.layouts.arguments import MAX_SIZE

#: The most memory that the demo takes for pages, and again for rows, if not told.
DEFAULT_POOL_BYTES = 1 << 30

# The library's arguments, as the command line calls them.
_OPTIONS = {
    "num_pages": "--pages",
    "num_rows": "--rows",
    "num_shards": "--tensor-parallel",
    "max_seqs": "--max-seqs",
    "max_new_tokens": "--max-new-tokens",
    "tokens_per_page": "--tokens-per-page",
    "token_budget": "--token-budget",
}
_ARGUMENTS = re.compile(rf"\b({'|'.join(_OPTIONS)})\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How the demo serves.

    Attributes:
        max_new_tokens: The most tokens of an answer.
        max_seqs: The most requests that run at once.
        num_pages: Pages of each page group. Default: enough to keep everything, up to
            `DEFAULT_POOL_BYTES`.
        num_rows: Rows of recurrent state. Default: likewise.
        tokens_per_page: Tokens of a page.
        token_budget: The most tokens that a step computes.
        eos_ids: Tokens that end an answer.
    """

    max_new_tokens: int = 32
    max_seqs: int = 8
    num_pages: int | None = None
    num_rows: int | None = None
    tokens_per_page: int = 16
    token_budget: int = 256
    eos_ids: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All dialogues, held once.

    Attributes:
        results: By dialogue, then by turn.
        snapshots: Snapshots taken, by kind.
        snapshots_skipped: Snapshots that were wanted and not taken, by reason.
        bytes_copied_for_snapshots: Bytes of rows that were moved to make a snapshot or
            to read one.
        bytes_copied_for_pages: Bytes of pages that were copied since a prefix ended
            inside them.
    """

    results: tuple[Result, ...]
    snapshots: Mapping[str, int]
    snapshots_skipped: Mapping[str, int]
    bytes_copied_for_snapshots: int
    bytes_copied_for_pages: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(result.prompt_tokens for result in self.results)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return sum(result.computed_tokens for result in self.results)

    @property
    def median_ttft_ms(self) -> float:
        """Median time from asking to the first token, waiting in line included."""
        times = (result.time_to_first_token_s for result in self.results)
        return 1e3 * statistics.median(time for time in times if time is not None)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token that reuse changed.

    Attributes:
        request_id: The request.
        position: Index among the tokens of the answer.
        cold: The token without reuse; None if the answer had ended.
        cached: The token with reuse; None if the answer had ended.
    """

    request_id: str
    position: int
    cold: int | None
    cached: int | None

    def __str__(self) -> str:
        cold, cached = (
            "the end" if token is None else f"token {token}"
            for token in (self.cold, self.cached)
        )
        return (
            f"request {self.request_id!r} differs at position {self.position} of its "
            f"answer: {cold} without reuse, {cached} with it"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same dialogues without and with reuse.

    Attributes:
        cold: The run in which every prompt was computed whole.
        cached: The run in which prompts used what earlier ones left.
        compilations: Step shapes compiled for both.
    """

    cold: Run
    cached: Run
    compilations: int

    @property
    def difference(self) -> Difference | None:
        """The first difference, by dialogue and turn; None if there is none."""
        for one, other in zip(self.cold.results, self.cached.results, strict=True):
            if one.tokens != other.tokens:
                return _first_difference(one, other)
        return None

    @property
    def reuse_ratio(self) -> float:
        """Share of the prompt tokens that was not computed, thanks to reuse."""
        return 1 - self.cached.computed_tokens / self.cached.prompt_tokens

    def summary(self) -> dict[str, bool | int | float]:
        """The numbers, as `jaxcache demo --json` prints them."""
        return {
            "tokens_identical": self.difference is None,
            "requests": len(self.cached.results),
            "prompt_tokens": self.cached.prompt_tokens,
            "computed_tokens_cold": self.cold.computed_tokens,
            "computed_tokens_cached": self.cached.computed_tokens,
            "reuse_ratio": self.reuse_ratio,
            "ttft_ms_cold_median": self.cold.median_ttft_ms,
            "ttft_ms_cached_median": self.cached.median_ttft_ms,
            "snapshots": sum(self.cached.snapshots.values()),
            "snapshots_skipped": sum(self.cached.snapshots_skipped.values()),
            "bytes_copied_for_snapshots": self.cached.bytes_copied_for_snapshots,
            "bytes_copied_for_pages": self.cached.bytes_copied_for_pages,
            "compilations": self.compilations,
        }


def _first_difference(one: Result, other: Result) -> Difference:
    length = max(len(one.tokens), len(other.tokens))
    padded = (
        result.tokens + (None,) * (length - len(result.tokens))
        for result in (one, other)
    )
    for position, (cold, cached) in enumerate(zip(*padded, strict=True)):
        if cold != cached:
            return Difference(str(one.id), position, cold, cached)
    raise AssertionError("the answers are the same")


def compare(
    model: ModelStep,
    dialogues: Sequence[Dialogue],
    settings: Settings,
    *,
    mesh: jax.sharding.Mesh | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Holds the dialogues without reuse, then with it, each time from an empty cache.

    Steps are compiled and run once beforehand, so that no time includes a compilation.

    Args:
        model: The model's steps; both runs share them.
        dialogues: What to say; at least one.
        settings: How to serve.
        mesh: Devices to split the model and the cache over.
        progress: Called with what is going on, how much of it is done, and of how much.

    Raises:
        BadInput: if the settings cannot serve the dialogues.
    """
    num_requests = sum(len(dialogue.pieces) for dialogue in dialogues)
    before = model.compilations

    def tell(name: str, done: int, total: int) -> None:
        if progress is not None:
            progress(name, done, total)

    def hold(name: str, reuse: bool) -> Run:
        engine = make_engine(model, dialogues, settings, mesh)
        engine.warm_up(functools.partial(tell, "compiling and warming up"))
        tell(name, 0, num_requests)
        finished = itertools.count(1)
        results = hold_dialogues(
            engine,
            dialogues,
            max_new_tokens=settings.max_new_tokens,
            eos_ids=settings.eos_ids,
            reuse=reuse,
            on_finish=lambda _: tell(name, next(finished), num_requests),
        )
        engine.check()
        stats = engine.manager.stats
        return Run(
            results=tuple(results),
            snapshots=stats.snapshots,
            snapshots_skipped=stats.snapshots_skipped,
            bytes_copied_for_snapshots=engine.bytes_copied_for_snapshots,
            bytes_copied_for_pages=stats.bytes_copied_for_pages,
        )

    return Comparison(
        cold=hold("without reuse", reuse=False),
        cached=hold("with reuse", reuse=True),
        compilations=model.compilations - before,
    )


def make_engine(
    model: ModelStep,
    dialogues: Sequence[Dialogue],
    settings: Settings,
    mesh: jax.sharding.Mesh | None,
) -> Engine:
    """Makes an engine with an empty cache, if its sizes work and it fits into memory.

    Raises:
        BadInput: naming the option that has to be another, or the bytes wanted.
    """
    try:
        sizes = cache_sizes(model, dialogues, settings, mesh)
        layout = cache_layout(model, settings, mesh)
        names = ("num_pages", "num_rows", "max_seqs", "max_tokens")
        size = CacheSize.create(layout, **{name: sizes[name] for name in names})
        check_memory(layout, size, mesh)
        return Engine(model, mesh=mesh, token_budget=settings.token_budget, **sizes)
    except BadInput:
        raise
    except (ValueError, OverflowError) as error:
        raise BadInput(as_options(str(error))) from error


def as_options(message: str) -> str:
    """Returns an error of the library with its arguments as the options they are."""
    return _ARGUMENTS.sub(lambda found: _OPTIONS[found[0]], message)


def cache_layout(
    model: ModelStep, settings: Settings, mesh: jax.sharding.Mesh | None
) -> CacheLayout:
    """What bytes of the cache lie where."""
    num_shards = 1 if mesh is None else mesh.shape.get("tensor", 1)
    return CacheLayout(model.layout, settings.tokens_per_page, num_shards)


def cache_sizes(
    model: ModelStep,
    dialogues: Sequence[Dialogue],
    settings: Settings,
    mesh: jax.sharding.Mesh | None,
) -> dict[str, Any]:
    """The engine's sizes: room for all that the dialogues leave, if memory allows."""
    tokens_per_page = settings.tokens_per_page
    totals = [total_tokens(d, settings.max_new_tokens) for d in dialogues]
    turns = sum(len(dialogue.pieces) for dialogue in dialogues)
    max_tokens = max(totals)
    if tokens_per_page > max_tokens:
        raise BadInput(
            f"--tokens-per-page must be at most {max_tokens}, the tokens of the "
            f"longest conversation with its answers, got {tokens_per_page}"
        )
    layout = cache_layout(model, settings, mesh)
    num_pages, num_rows = settings.num_pages, settings.num_rows
    if num_pages is None:
        # A turn that continues within a page gets a copy of that page.
        wanted = sum(-(-total // tokens_per_page) for total in totals) + turns
        page_bytes = sum(layout.bytes_per_page(g.group_id) for g in layout.page_groups)
        affordable = DEFAULT_POOL_BYTES // max(1, page_bytes)
        least = settings.max_seqs * -(-max_tokens // tokens_per_page)
        num_pages = min(MAX_SIZE, max(least, min(wanted, affordable)))
    if num_rows is None and layout.has_recurrent:
        # A live row each, and up to three snapshots a turn: the last page boundary of
        # the prompt, the branch, the response.
        wanted = settings.max_seqs + 3 * turns
        affordable = DEFAULT_POOL_BYTES // layout.bytes_per_row
        num_rows = min(MAX_SIZE, max(settings.max_seqs, min(wanted, affordable)))
    return {
        "num_pages": num_pages,
        "num_rows": num_rows or 0,
        "max_seqs": settings.max_seqs,
        "max_tokens": max_tokens,
        "tokens_per_page": tokens_per_page,
    }
