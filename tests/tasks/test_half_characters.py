"""Half a character from user code: the rollout is made, or fails alone with a reason, and all of it can be stored and shown.

Once a run ended where it was stored, and again at each start.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from millrace.connectors.storage import tables
from millrace.core.contracts import schema
from millrace.core.contracts.sample import ScoredSample
from tests.support.half_characters import SHOWN
from tests.support.session_place import CALL, Place

MODULE = "tests.support.half_characters"
TOOLS = [f"{MODULE}:{name}" for name in ("echo", "odd_answer", "odd_fields", "odd_failure")]
PLACES = {
    # where the text is: how the rollout ends
    "arguments": "completed",
    "answer": "completed",
    "fields": "completed",
    "failure of a tool": "completed",
    "message": "completed",
    "role of a message": "completed",
    "reason": "failed",
    "name of an error": "failed",
    "branch": "completed",
    "part": "completed",
}


def stored(rows: list[object], kind: str) -> list[dict[str, object]]:
    """Rows as they are read from a file."""
    return tables.decode(tables.encode(schema.to_table(rows, kind), kind), kind, "x").to_pylist()


async def test_what_a_rollout_hands_over_is_stored_with_its_escape(make_place: Callable[..., Place]) -> None:
    """In each place, by rollouts of one process."""
    place = make_place("one", function={"function": f"{MODULE}:hands_over"}, module_tools=TOOLS)
    for where, status in PLACES.items():
        await hold(place, where, status)


async def hold(place: Place, where: str, status: str) -> None:
    """A rollout ends as it is to, can be stored, and is found again in its record."""
    task: dict[str, Any] = {"rollout": f"g-{list(PLACES).index(where):04d}", "metadata": {"where": where}}
    place.rows.clear()
    samples = await place.run(**task)
    assert {sample.status for sample in samples} == {status}, where
    rows = stored(place.rows, "turns")
    texts = json.dumps([[dataclasses.asdict(sample) for sample in samples], rows])
    assert json.dumps(SHOWN)[1:-1] in texts or where == "name of an error", texts
    for sample in samples:
        parts = sample.parts or []
        score = ScoredSample(
            sample_id=sample.sample_id, group_id="g", reward=sample.reward, reward_parts=parts, scoring="scored",
            reason=sample.reason, scoring_s=0.0, role=sample.role,
        )  # fmt: skip
        assert len(stored([score], "rewards")[0]["reward_parts"]) == len(parts)  # type: ignore[arg-type]
    made = len(place.engines.requests)
    again = await place.run(list(place.rows), **task)
    assert [sample.dialogue for sample in again] == [sample.dialogue for sample in samples], where
    if status == "completed":  # what was generated and answered is found in the record
        assert len(place.engines.requests) == made, where


async def test_a_policy_that_writes_half_a_character_in_a_call_goes_on(
    make_place: Callable[..., Place],
) -> None:
    place = make_place(CALL % ("echo", r'{"text": "\ud83d"}'), "done", module_tools=TOOLS, tools=[])
    (sample,) = await place.run()
    assert (sample.status, sample.turns) == ("completed", 2)
    (call,) = [row for row in stored(place.rows, "turns") if row["kind"] == "call"]
    assert (call["arguments"], call["text"]) == ('{"text": "\\ud83d"}', "\\ud83d")
