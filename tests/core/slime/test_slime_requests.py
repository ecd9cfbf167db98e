"""What a function that was written for slime asks /generate: numbers beyond their bounds are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.hooks.slime.generate import OF_SAMPLING, read_ends, read_ids
from millrace.core.sessions.completions import BadRequestError

NOT_LENGTHS = (0, -1, 1.5, True, "7", 2**31, 10**400, float("inf"), float("nan"))
NOT_STOPS = (1, [1], [""], {"a": 1})
WRONG: dict[str, tuple[Any, ...]] = {"max_new_tokens": NOT_LENGTHS, "stop": NOT_STOPS}


@pytest.mark.parametrize("field", WRONG)
def test_a_field_of_sampling_params_has_bounds(field: str) -> None:
    for value in WRONG[field]:
        with pytest.raises(BadRequestError, match=rf"^sampling_params\.{field}: "):
            read_ends({field: value})


def test_every_field_that_acts_has_a_row() -> None:
    assert set(WRONG) == set(OF_SAMPLING)


def test_what_is_within_them_is_read() -> None:
    assert read_ends({"max_new_tokens": 2**31 - 1, "stop": "x"}) == (2**31 - 1, ["x"])
    assert read_ends({"max_new_tokens": None, "stop": None}) == (None, [])
    assert read_ids([0, 2**31 - 1]) == [0, 2**31 - 1]
    with pytest.raises(BadRequestError, match="sampling_params: an object"):
        read_ends("hot")


@pytest.mark.parametrize("given", [[-1], [2**31], [10**400], [1.0], [True], ["1"], "12", {"1": 2}], ids=repr)
def test_what_is_no_token_id_is_refused(given: Any) -> None:
    with pytest.raises(BadRequestError, match="^input_ids: "):
        read_ids(given)
