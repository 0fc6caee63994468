"""Requests of a wrong form are refused before anyone else could suffer from them."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from jaxcache.engine import Request


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("id", [], "id of a request must be hashable, got []"),
        ("scope", {}, "scope of a request must be hashable, got {}"),
        ("max_new_tokens", 2.5, "max_new_tokens of request 'a' must be an integer"),
        ("max_new_tokens", True, "max_new_tokens of request 'a' must be an integer"),
        ("max_new_tokens", "3", "max_new_tokens of request 'a' must be an integer"),
        ("max_new_tokens", None, "max_new_tokens of request 'a' must be an integer"),
        ("eos_ids", None, "eos_ids of request 'a' must be a sequence of integers"),
        ("eos_ids", 5, "eos_ids of request 'a' must be a sequence of integers"),
        ("eos_ids", [1.5], "eos_ids of request 'a' must be an integer, got 1.5"),
        ("points", None, "points of request 'a' must be a sequence of integers"),
        ("points", (True,), "points of request 'a' must be an integer, got True"),
        ("reuse", "x", "reuse of request 'a' must be True or False, got 'x'"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(field: str, value: Any, message: str) -> None:
    good = Request(id="a", prompt=[1])
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(good, **{field: value})


def test_integers_of_numpy_are_integers() -> None:
    request = Request(
        id="a",
        prompt=[1],
        max_new_tokens=np.int64(3),  # type: ignore[arg-type]
        eos_ids=[np.int32(2)],  # type: ignore[arg-type]
        points=np.array([4, 5]),  # type: ignore[arg-type]
    )
    assert request.max_new_tokens == 3
    assert request.eos_ids == {2}
    assert request.points == (4, 5)
