"""Where in a prompt a snapshot may pay.

    0 ........ reused ........ matched ................................... prompt
                 |  known, but   |   new
                 |  no snapshot  |     ladder 50 %, 75 %, 90 %   grid    boundary
                              branch

`branch` is where the prompt leaves what the tree knows: others that leave there too can
start from it. `boundary` is the last page boundary that the same prompt, and any that
goes on from it, can use. Where a later prompt will leave this one is not known; the
ladder and the grid are guesses at it, each with a kind of its own, so that each is
judged by what it earned.
"""

from collections.abc import Collection

from jaxcache.policies.policy import (
    BOUNDARY,
    BRANCH,
    GRID,
    KINDS,
    LADDER_50,
    LADDER_75,
    LADDER_90,
)

GRID_TOKENS = 512
LADDER = ((LADDER_50, 0.5), (LADDER_75, 0.75), (LADDER_90, 0.9))


def candidates(
    prompt_tokens: int,
    reused: int,
    matched: int,
    tokens_per_page: int,
    allowed: Collection[str] = KINDS,
) -> dict[int, str]:
    """Returns the kind of each candidate by position, in order of position.

    Args:
        prompt_tokens: Length of the prompt.
        reused: Tokens that are reused; candidates lie behind them.
        matched: Tokens that the tree knows.
        tokens_per_page: Tokens of one page.
        allowed: The kinds that may be candidates.
    """
    page = tokens_per_page
    places = [(prompt_tokens // GRID_TOKENS * GRID_TOKENS, GRID)]
    for kind, share in LADDER:
        places.append((int(prompt_tokens * share) // page * page, kind))
    places.append((prompt_tokens // page * page, BOUNDARY))
    places.append(((prompt_tokens - 1) // page * page, BOUNDARY))
    if matched > reused:
        places.append((matched // page * page, BRANCH))
    # Of two on one position the later, more telling one counts.
    kinds = {
        position: kind
        for position, kind in places
        if position > reused and kind in allowed
    }
    return {position: kinds[position] for position in sorted(kinds)}
