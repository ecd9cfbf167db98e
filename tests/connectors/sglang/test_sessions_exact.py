"""What a session trains is what the engine saw and made: on every way in which a prompt grows, the engine is asked for all of it again.

Engines, processes, dialogues and records are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.config.pipeline import OnUpdate
from tests.support.engine_process import embedded_engine, reference_logprobs
from tests.support.fleets import MakeFleet
from tests.support.session_engines import (
    EXACT,
    TEMPERATURE,
    EnginePlace,
    assert_exact,
    dispatcher_of,
)
from tests.support.slow_members import slow_but

OWN = "tests.support.session_functions"
CLIENTS = "tests.support.client_functions"
GROWS = "tests.support.exact_functions"
ADD = f"{OWN}:add"
PATHS: dict[str, tuple[dict[str, Any], int, int]] = {
    # way: the section, samples of a rollout, turns of all its samples
    "level 1": ({"function": f"{OWN}:three_turns"}, 1, 3),
    "every content": ({"function": f"{GROWS}:grows", "tools": [ADD]}, 1, 4),
    "roles": ({"function": f"{GROWS}:roles"}, 4, 8),
    "environment, stateless": ({"environment": f"{OWN}:Echo", "max_turns": 3}, 1, 0),
    "environment, snapshot": ({"environment": f"{OWN}:SavedCountdown"}, 1, 3),
    "environment, restart": ({"environment": f"{OWN}:Countdown"}, 1, 3),
    "a client": ({"function": f"{CLIENTS}:in_a_thread"}, 1, 2),
    "a client's stream": ({"function": f"{CLIENTS}:streams"}, 1, 2),
    "a client that hangs up": ({"function": f"{GROWS}:hangs_up_in_a_stream"}, 1, 2),
    "a client's retries": ({"function": f"{CLIENTS}:repeats"}, 1, 2),
    "a client's compaction": ({"function": f"{CLIENTS}:compacts"}, 3, 5),
    "clients side by side": ({"function": f"{CLIENTS}:in_parallel"}, 2, 3),
    "clients of roles": ({"function": f"{CLIENTS}:two_roles"}, 2, 2),
    "a client after the function": ({"function": f"{CLIENTS}:talks_and_serves"}, 1, 3),
    "slime": ({"function": f"slime:{GROWS}.by_ids"}, 2, 3),
    "slime's retries": ({"function": "slime:tests.support.slime_functions.retries"}, 1, 1),
}
ENDED: dict[str, Any] = {
    "new_tokens": 60,
    "stop": list("aeiouAEIOU13579"),
}  # an episode ends with a turn that is cut
Make = Callable[..., EnginePlace]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded_engine(tiny_model, log=tmp_path_factory.mktemp("exact") / "log") as (url, _):
        yield url


# one of each kind of session
QUICK = (
    "level 1",
    "every content",
    "environment, snapshot",
    "a client",
    "a client's compaction",
    "clients of roles",
)


@pytest.mark.parametrize("way", slow_but(PATHS, *QUICK))
async def test_the_engine_gives_what_was_trained_when_it_is_asked_for_the_whole_again(
    client: SglangClient, places: Make, tiny_model: Path, way: str
) -> None:
    session, samples, turns = PATHS[way]
    ended = ENDED if "environment" in session else {}
    place = places(tiny_model, dispatcher_of(client), session, **ended)
    for number in range(2):
        made = await place.run(number)
        rows = [row for row in place.rows if row.rollout_id == f"g-{number:04d}"]
        await assert_exact(client, made, rows)
        assert len(made) == samples
        segments = [row for row in rows if row.kind == "segment"]
        assert len(segments) == (turns or len(segments))
    # taken up in the midst, it is the same; nothing that is recorded is generated again
    half = rows[: len(rows) // 2 + 1]
    place.rows.clear()
    assert await place.run(number, half) == made
    asked = [row for row in place.rows if row.kind == "segment"]
    assert len(asked) == len(segments) - sum(row.kind == "segment" for row in half)


@pytest.mark.slow
async def test_requests_that_another_process_ends_go_on_where_they_were(
    client: SglangClient, places: Make, tiny_model: Path
) -> None:
    place = places(tiny_model, dispatcher_of(client, attempts=200), PATHS["roles"][0], new_tokens=60)
    wanted = await asyncio.gather(*(place.run(number) for number in range(4)))
    place.rows.clear()

    calm = asyncio.Event()

    async def disturb() -> None:
        while not calm.is_set():
            await client.abort()
            await asyncio.sleep(0.05)

    disturbing = asyncio.create_task(disturb())
    made = await asyncio.gather(*(place.run(number) for number in range(4)))
    calm.set()
    await disturbing  # an abort that is cancelled on its way would still end what the check asks for
    await assert_exact(client, [sample for samples in made for sample in samples], place.rows)
    for found, expected in zip(made, wanted, strict=True):
        assert [sample.response_ids for sample in found] == [sample.response_ids for sample in expected]


WAYS = ["level 1", "roles", "environment, snapshot", "a client's compaction"]
ALWAYS = {("level 1", "retract"), ("environment, snapshot", "resend")}


@pytest.mark.parametrize(
    ("way", "on_update"),
    [
        pytest.param(way, on_update, marks=() if (way, on_update) in ALWAYS else pytest.mark.slow)
        for way in WAYS
        for on_update in ("resend", "retract")
    ],
)
async def test_each_token_has_the_version_that_made_it_where_weights_change_amid_turns(
    make_fleet: MakeFleet, places: Make, tiny_model: Path, other_model: Path, way: str, on_update: OnUpdate
) -> None:
    models = {version: other_model if version % 2 else tiny_model for version in range(40)}
    fleet = make_fleet(pipeline={"on_update": on_update})
    await fleet.ensure(str(tiny_model))
    await fleet.update_weights(str(tiny_model), 0)

    async def serving(_: int) -> None:
        while not dispatcher._engines():  # noqa: ASYNC110 - the fleet has no event for it
            await asyncio.sleep(0.01)

    dispatcher = fleet.dispatcher(0, serving, oldest=0, newest=39)
    session = PATHS[way][0]
    ended = ENDED if "environment" in session else {"new_tokens": 60}
    place = places(tiny_model, dispatcher, session, **ended)
    running = [asyncio.create_task(place.run(number)) for number in range(6)]
    for version in range(1, 40):  # each after a turn that was made since
        made = len(place.rows)
        while len(place.rows) == made and not all(task.done() for task in running):  # noqa: ASYNC110 - rows have no event
            await asyncio.sleep(0.01)
        if all(task.done() for task in running):
            break
        await fleet.update_weights(str(models[version]), version, on_update=on_update)
    found = set()
    trained = []
    for sample in [sample for task in running for sample in await task]:
        assert sample.status in ("completed", "truncated"), sample.reason
        by_model = {
            model: reference_logprobs(model, sample.prompt_ids, sample.response_ids, TEMPERATURE)
            for model in (tiny_model, other_model)
        }
        starts = [span["first_token"] for span in sample.policy_versions]
        assert starts == sorted(set(starts))
        for at, mask in enumerate(sample.loss_mask):
            if mask:
                made_by = max(span["version"] for span in sample.policy_versions if span["first_token"] <= at)
                found.add(made_by)
                assert sample.logprobs[at] == pytest.approx(by_model[models[made_by]][at], abs=EXACT)
                trained.append(sample.response_ids[at])
    assert len(found) > 1, "no update came amid a rollout"
    segments = [row for row in place.rows if row.kind == "segment"]
    assert sorted(trained) == sorted(token for row in segments for token in row.output_ids)
    assert {span["version"] for row in segments for span in row.policy_versions} == found
