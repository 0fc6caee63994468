"""Where a prompt's candidates lie, and which kind keeps a position."""

import pytest

from jaxcache.policies.candidates import candidates


def test_positions_of_a_long_prompt() -> None:
    assert candidates(10_000, reused=0, matched=0, tokens_per_page=16) == {
        4992: "ladder_50",
        7488: "ladder_75",
        8992: "ladder_90",
        9728: "grid",
        9984: "boundary",
        10_000: "boundary",
    }


def test_all_lie_behind_what_is_reused() -> None:
    kinds = candidates(10_000, reused=8000, matched=9100, tokens_per_page=16)
    assert kinds == {
        8992: "ladder_90",
        9088: "branch",
        9728: "grid",
        9984: "boundary",
        10_000: "boundary",
    }


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 33, 400, 2040, 2048])
def test_the_last_page_boundary_that_the_same_prompt_can_use(
    tokens: int, page: int
) -> None:
    kinds = candidates(tokens, reused=0, matched=0, tokens_per_page=page)
    last = (tokens - 1) // page * page
    if last:
        assert kinds[last] == "boundary"
    assert all(0 < position <= tokens for position in kinds)
    assert list(kinds) == sorted(kinds)


def test_the_more_telling_kind_keeps_a_position() -> None:
    # 1,024 is half of the prompt, on the grid, and where it leaves what is known.
    kinds = candidates(2048, reused=0, matched=1030, tokens_per_page=16)
    assert kinds[1024] == "branch"
    assert candidates(2048, 0, 0, 16)[2048] == "boundary"
    assert candidates(1024, 0, 0, 16)[512] == "ladder_50"
