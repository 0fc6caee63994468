"""The roster keeps requests in order and the reserved room in balance."""

import dataclasses

import numpy as np

from jaxcache.engine.request import Finish, Request
from jaxcache.engine.roster import Active, Roster
from jaxcache.engine.schedule import Limits, Need
from jaxcache.host.plans import Entry

ROOM = Need(seats=3, rows=3, pages=(10,))
LIMITS = Limits(token_budget=8, decode_seqs=2, prefill_seqs=4, prefill_tokens=8)


def active(name: str, prompt_tokens: int, pages: int, new_tokens: int = 3) -> Active:
    prompt = np.zeros(prompt_tokens, np.int32)
    return Active(
        request=Request(id=name, prompt=prompt, max_new_tokens=new_tokens),
        prompt=prompt,
        need=Need(1, 1, (pages,)),
        submitted_s=0.0,
        prompt_left=prompt_tokens,
        new_left=new_tokens,
    )


def start_all(roster: Roster) -> list[str]:
    step = roster.schedule()
    started = []
    while (one := roster.start_next(step)) is not None:
        step.take(one.request.id, one.prompt_left)
        started.append(str(one.request.id))
    return started


def run(roster: Roster, name: str, num_tokens: int, start: int = 0) -> None:
    roster.planned(Entry(name, num_tokens, start, samples=True))


def test_the_first_in_line_is_never_overtaken() -> None:
    roster = Roster(ROOM, LIMITS)
    for name, pages in (("a", 6), ("b", 6), ("c", 1)):
        roster.add(active(name, 2, pages))
    assert start_all(roster) == ["a"]
    assert roster.room == Need(2, 2, (4,))
    roster.remove(roster["a"])
    assert start_all(roster) == ["b", "c"]


def test_a_start_taken_back_is_first_in_line_and_reserves_nothing() -> None:
    roster = Roster(ROOM, LIMITS)
    for name in ("a", "b"):
        roster.add(active(name, 2, 4))
    assert start_all(roster) == ["a", "b"]
    roster.postpone(roster["b"])
    roster.postpone(roster["a"])
    assert roster.room == ROOM
    assert start_all(roster) == ["a", "b"]


def test_a_request_goes_from_its_prompt_to_decoding_to_nothing_left_to_plan() -> None:
    roster = Roster(ROOM, LIMITS)
    roster.add(active("a", 11, 4, new_tokens=2))
    assert start_all(roster) == ["a"]
    run(roster, "a", 8)
    assert roster.schedule().work == [("a", 3)]
    run(roster, "a", 3, start=8)
    assert roster.schedule().work == [("a", 1)]
    run(roster, "a", 1, start=11)
    assert roster.schedule().work == []
    assert roster["a"].steps_in_flight == 3


def test_more_decodes_than_a_step_holds_take_turns() -> None:
    roster = Roster(ROOM, LIMITS)
    for name in "abc":
        roster.add(active(name, 1, 2))
    start_all(roster)
    for name in "abc":
        run(roster, name, 1)
    served = []
    for _ in range(3):
        work = roster.schedule().work
        served.append("".join(str(name) for name, _ in work))
        for request_id, num_tokens in work:
            run(roster, str(request_id), num_tokens, start=1)
    assert served == ["ab", "ca", "bc"]


def test_removing_a_request_gives_back_what_it_reserved_and_only_that() -> None:
    roster = Roster(ROOM, LIMITS)
    for name, pages in (("a", 6), ("b", 6)):
        roster.add(active(name, 2, pages))
    start_all(roster)
    roster.remove(roster["b"])
    assert roster.room == Need(2, 2, (4,))
    roster.withdraw(roster["a"])
    assert roster.schedule().work == []
    assert roster.room == Need(2, 2, (4,))
    roster.remove(roster["a"])
    assert (len(roster), roster.room) == (0, ROOM)


def test_a_request_ends_at_its_length_or_at_an_end_token() -> None:
    one = active("a", 1, 1, new_tokens=2)
    one.sampled(5, 1.5)
    assert one.ending is None
    one.sampled(6, 2.0)
    assert one.ending is Finish.LENGTH
    result = one.result(3.0)
    assert result.tokens == (5, 6)
    assert (result.time_to_first_token_s, result.total_s) == (1.5, 3.0)
    other = active("b", 1, 1)
    other.request = dataclasses.replace(other.request, eos_ids=frozenset({7}))
    other.sampled(7, 1.0)
    assert other.ending is Finish.EOS


def test_what_the_first_plan_found_beyond_the_lookup_counts_as_reused() -> None:
    roster = Roster(ROOM, LIMITS)
    roster.add(active("a", 11, 4))
    start_all(roster)
    run(roster, "a", 2, start=8)
    assert (roster["a"].reused, roster["a"].computed) == (8, 2)
    assert roster.schedule().work == [("a", 1)]
    run(roster, "a", 1, start=10)
    assert (roster["a"].reused, roster["a"].computed) == (8, 3)
