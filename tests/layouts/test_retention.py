"""Which pages go stale, against a mask over single tokens."""

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxcache.layouts import Full, Recurrent, Window

SIZES = st.integers(1, 9)


def needed_tokens(window: Window, history: int, tokens_per_page: int) -> set[int]:
    """The past tokens that some token from position `history` on will see.

    Sinks are kept by whole pages: a page that holds a sink token is needed.
    """
    sink_pages = {t // tokens_per_page for t in range(window.sink_tokens)}
    return {
        past
        for past in range(history)
        if past // tokens_per_page in sink_pages
        # The next token, at position `history`, sees itself and window - 1 before it;
        # all later ones see less of the past.
        or history - past <= window.window - 1
    }


def stale_by_mask(window: Window, history: int, tokens_per_page: int) -> set[int]:
    """Whole pages of past tokens none of which is needed."""
    needed = needed_tokens(window, history, tokens_per_page)
    return {
        page
        for page in range(history // tokens_per_page)
        if not any(
            page * tokens_per_page + offset in needed
            for offset in range(tokens_per_page)
        )
    }


@pytest.mark.parametrize("tokens_per_page", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("sink_tokens", [0, 1, 4, 5, 17])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 16, 17, 40])
def test_stale_pages_equal_the_pages_that_no_token_sees(
    window: int, sink_tokens: int, tokens_per_page: int
) -> None:
    retention = Window(window, sink_tokens)
    for history in range(100):
        stale = retention.stale_pages(history, tokens_per_page)
        assert set(stale) == stale_by_mask(retention, history, tokens_per_page)


@hypothesis.given(
    window=st.integers(1, 300),
    sink_tokens=st.integers(0, 80),
    tokens_per_page=st.integers(1, 64),
    history=st.integers(0, 600),
)
def test_stale_pages_follow_the_published_formula(
    window: int, sink_tokens: int, tokens_per_page: int, history: int
) -> None:
    sinks = -(-sink_tokens // tokens_per_page)
    start = min(-(-history // tokens_per_page), sinks)
    stop = max(start, (history + 1 - window) // tokens_per_page)
    stale = Window(window, sink_tokens).stale_pages(history, tokens_per_page)
    assert (stale.start, stale.stop, stale.step) == (start, stop, 1)


def test_stale_pages_of_a_worked_example() -> None:
    # 4 tokens a page, a window of 10, 2 sink tokens. With 30 tokens in the cache, token
    # 30 sees 21 .. 30: pages 1 to 4 (tokens 4 .. 19) are stale, page 5 holds token 21.
    assert Window(10, 2).stale_pages(30, 4) == range(1, 5)


@hypothesis.given(window=SIZES, sink_tokens=SIZES, tokens_per_page=SIZES)
def test_stale_pages_never_come_back(
    window: int, sink_tokens: int, tokens_per_page: int
) -> None:
    retention = Window(window, sink_tokens)
    stale: set[int] = set()
    for history in range(60):
        now = set(retention.stale_pages(history, tokens_per_page))
        assert stale <= now
        stale = now


def most_live_pages(
    retention: Window, max_tokens: int, tokens_per_page: int, step_tokens: int
) -> int:
    """The most pages held at once on the way to `max_tokens`, by simulation."""
    most = 0
    for start in range(step_tokens):
        history = start
        while history < max_tokens:
            # Pages go stale before the step takes the pages of its new tokens.
            after = min(history + step_tokens, max_tokens)
            pages = set(range(-(-after // tokens_per_page)))
            live = pages - set(retention.stale_pages(history, tokens_per_page))
            most = max(most, len(live))
            history = after
    return most


@pytest.mark.parametrize("tokens_per_page", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("sink_tokens", [0, 1, 4, 9])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 16, 33])
def test_peak_pages_are_reached_and_never_exceeded(
    window: int, sink_tokens: int, tokens_per_page: int
) -> None:
    retention = Window(window, sink_tokens)
    sinks = -(-sink_tokens // tokens_per_page)
    formula = sinks + -(-(window - 1) // tokens_per_page) + 1
    longest = 8 * (window + sink_tokens + tokens_per_page)
    assert retention.peak_pages(longest, tokens_per_page) == formula
    assert most_live_pages(retention, longest, tokens_per_page, 1) == formula


@pytest.mark.parametrize("step_tokens", [2, 3, 7, 16])
@pytest.mark.parametrize("tokens_per_page", [1, 4, 5])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_peak_pages_count_the_tokens_of_a_long_step(
    window: int, tokens_per_page: int, step_tokens: int
) -> None:
    retention = Window(window, 3)
    longest = 20 * tokens_per_page * step_tokens
    peak = retention.peak_pages(longest, tokens_per_page, step_tokens)
    assert peak == most_live_pages(retention, longest, tokens_per_page, step_tokens)


def test_peak_pages_of_a_short_request_are_all_its_pages() -> None:
    assert Window(1000, 4).peak_pages(33, 16) == 3


def test_full_attention_keeps_everything() -> None:
    assert not Full().stale_pages(10_000, 16)
    assert Full().peak_pages(10_000, 16) == 625
    assert Full().peak_pages(10_001, 16, step_tokens=512) == 626
    assert not Full().is_recurrent


def test_a_recurrent_group_has_no_pages() -> None:
    assert not Recurrent().stale_pages(10_000, 16)
    assert Recurrent().peak_pages(10_000, 16) == 0
    assert Recurrent().is_recurrent


def test_equal_rules_are_one_key() -> None:
    assert {Window(8, 2): "a", Full(): "b", Recurrent(): "c"}[Window(8, 2)] == "a"
    assert len({Window(8, 2), Window(8), Window(8, 0), Window(9), Full(), Full()}) == 4


def test_a_window_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^window must be an integer >= 1, got 0$"):
        Window(0)


def test_negative_sinks_are_refused() -> None:
    message = r"^sink_tokens must be an integer >= 0, got -1$"
    with pytest.raises(ValueError, match=message):
        Window(4, -1)


@pytest.mark.parametrize("retention", [Full(), Window(4), Recurrent()])
def test_a_negative_history_is_refused(retention: Full | Window | Recurrent) -> None:
    message = r"^number of tokens must be an integer >= 0, got -1$"
    with pytest.raises(ValueError, match=message):
        retention.stale_pages(-1, 16)
    with pytest.raises(ValueError, match=message):
        retention.peak_pages(-1, 16)


@pytest.mark.parametrize("retention", [Full(), Window(4), Recurrent()])
def test_pages_without_tokens_are_refused(retention: Full | Window | Recurrent) -> None:
    message = r"^tokens_per_page must be an integer >= 1, got 0$"
    with pytest.raises(ValueError, match=message):
        retention.stale_pages(0, 0)
    with pytest.raises(ValueError, match=message):
        retention.peak_pages(0, 0)


def test_a_step_without_tokens_is_refused() -> None:
    message = r"^step_tokens must be an integer >= 1, got 0$"
    with pytest.raises(ValueError, match=message):
        Window(4).peak_pages(10, 4, step_tokens=0)
