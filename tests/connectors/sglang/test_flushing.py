"""Answers that are stored while engines make them: what is lost with an engine is little, and each token keeps its version."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.engines.client import Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.dispatching.pieces import NOTHING, Flush, joined
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.engines.sglang.wire.answer_body import StreamedAnswer
from millrace.core.config.pipeline import OnUpdate
from tests.connectors.sglang.test_updates_amid_requests import assert_made_by, open_dispatcher, params
from tests.support.engine_process import CLOSE
from tests.support.fleets import PROMPT, MakeFleet, serving
from tests.support.local_handle import LocalHandle
from tests.support.slow_members import slow_but

FLUSH = 32
LENGTH = 240
REQUESTS = 3


class Stored:
    """Keeps the segments of one answer. late: storage has none of them before it is waited for."""

    def __init__(self, late: bool = False) -> None:
        self.segments: list[Generation] = []
        self.waits = self._settled = 0
        self._late = late

    def put(self, segment: Generation) -> Callable[[], bool]:
        self.segments.append(segment)
        number = len(self.segments)
        return lambda: not self._late or number <= self._settled

    async def settled(self) -> None:
        self.waits += 1
        self._settled = len(self.segments)

    def joined(self) -> Generation:
        whole = NOTHING
        for segment in self.segments:
            whole = joined(whole, segment)
        return whole


def begin(dispatcher: Dispatcher, stores: list[Stored]) -> list[asyncio.Task[Generation]]:
    return [
        asyncio.create_task(
            dispatcher.generate(
                PROMPT, params(seed, LENGTH), rid=f"flush-{seed}", session=None, flush=Flush(FLUSH, store)
            )
        )
        for seed, store in enumerate(stores)
    ]


async def undisturbed(dispatcher: Dispatcher) -> list[Generation]:
    return await asyncio.gather(
        *(
            dispatcher.generate(PROMPT, params(seed, LENGTH), rid=f"whole-{seed}", session=None)
            for seed in range(REQUESTS)
        )
    )


async def until_stored(stores: list[Stored], tokens: int) -> None:
    async with asyncio.timeout(60):
        while any(len(store.joined().output_ids) < tokens for store in stores):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


def assert_is_the_beginning(stored: Generation, answer: Generation) -> None:
    count = len(stored.output_ids)
    assert stored.output_ids.tolist() == answer.output_ids[:count].tolist()
    assert stored.logprobs.tolist() == answer.logprobs[:count].tolist()
    assert stored.weight_versions == [span for span in answer.weight_versions if span[0] < count]


@pytest.mark.parametrize("late", slow_but([False, True], True))
async def test_what_is_stored_is_the_answer_up_to_its_last_tokens(
    make_fleet: MakeFleet, tiny_model: Path, late: bool
) -> None:
    dispatcher = await serving(make_fleet(), tiny_model, 2)
    wanted = await undisturbed(dispatcher)
    stores = [Stored(late) for _ in range(REQUESTS)]
    answers = await asyncio.gather(*begin(dispatcher, stores))
    for store, answer, whole in zip(stores, answers, wanted, strict=True):
        assert answer.output_ids.tolist() == whole.output_ids.tolist()
        assert answer.logprobs == pytest.approx(whole.logprobs, abs=CLOSE)
        assert answer.finish == whole.finish
        stored = store.joined()
        assert_is_the_beginning(stored, answer)
        assert len(answer.output_ids) - len(stored.output_ids) <= FLUSH
        assert bool(store.waits) == late  # an engine that is far ahead of storage is halted
    assert dispatcher.retries == 0


async def test_of_an_engine_that_dies_little_is_generated_again(
    make_fleet: MakeFleet, tiny_model: Path, handles: list[LocalHandle]
) -> None:
    dispatcher = await serving(make_fleet(), tiny_model, 3)
    wanted = await undisturbed(dispatcher)
    engines = {engine.engine_id: engine for engine in dispatcher._engines()}
    before = {name: await tokens_of(engine) for name, engine in engines.items()}
    stores = [Stored() for _ in range(REQUESTS)]
    running = begin(dispatcher, stores)
    await until_stored(stores, 2 * FLUSH)
    dying = engines["engine-1"]
    await dying.pause("in_place")  # so that it can be counted what it made
    made = await tokens_of(dying) - before["engine-1"]
    handles[1].signal(signal.SIGKILL)
    answers = await asyncio.gather(*running)
    for answer, whole in zip(answers, wanted, strict=True):
        assert answer.output_ids.tolist() == whole.output_ids.tolist()
        assert answer.logprobs == pytest.approx(whole.logprobs, abs=CLOSE)
    living = {engine.engine_id: engine for engine in dispatcher._engines()}
    made += await tokens_of(living["engine-0"]) - before["engine-0"]
    if "engine-1" in living:  # a new process, which counts from 0
        made += await tokens_of(living["engine-1"])
    twice = made - sum(len(answer.output_ids) for answer in answers)
    assert 0 <= twice <= FLUSH * REQUESTS
    assert dispatcher.retries


async def tokens_of(engine: SglangClient) -> int:
    """Tokens that it generated in its life."""
    count: int = (await engine.server_info())["counters"]["tokens"]
    return count


@pytest.mark.parametrize(
    ("on_update", "reported"),
    [
        ("resend", "at the end"),
        pytest.param("retract", "in each event", marks=pytest.mark.slow),
        ("retract", "at the end"),
        pytest.param("keep", "at the end", marks=pytest.mark.slow),
    ],
)
async def test_segments_tell_which_weights_made_which_token(
    make_fleet: MakeFleet,
    tiny_model: Path,
    other_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_update: OnUpdate,
    reported: str,
) -> None:
    """SGLang tells only at the end: a request whose weights changed is ended, and goes on as another."""
    if reported == "at the end":
        real = SglangClient.events

        async def events(self: SglangClient, *arguments: Any) -> AsyncGenerator[Any, None]:
            async for answer in real(self, *arguments):
                if answer["meta_info"]["finish_reason"] is None:
                    del answer["meta_info"]["weight_versions"]
                yield answer

        monkeypatch.setattr(SglangClient, "events", events)
    fleet = make_fleet(pipeline={"on_update": on_update})
    dispatcher = await open_dispatcher(fleet, tiny_model, 4, 5)
    stores = [Stored() for _ in range(REQUESTS)]
    running = begin(dispatcher, stores)
    await until_stored(stores, FLUSH)
    await fleet.update_weights(str(other_model), 5, on_update=on_update)
    for answer, store in zip(await asyncio.gather(*running), stores, strict=True):
        assert [version for _, version in answer.weight_versions] == [4, 5]
        assert_made_by({4: tiny_model, 5: other_model}, answer, exact=on_update != "keep")
        stored = store.joined()
        assert_is_the_beginning(stored, answer)
        assert len(answer.output_ids) - len(stored.output_ids) <= FLUSH
    assert dispatcher.retries == 0


def event(ids: list[int], completion: int, text: str) -> bytes:
    pairs = ", ".join(f"[-{token}.5, {token}, null]" for token in ids)
    tokens = ", ".join(map(str, ids))
    return (
        f'{{"text": "{text}", "output_ids": [{tokens}], "meta_info": {{"finish_reason": null, '
        f'"completion_tokens": {completion}, "output_token_logprobs": [{pairs}]}}}}'
    ).encode()


@pytest.mark.parametrize(
    "events",
    [
        [event([1, 2], 2, "a"), event([1, 2, 3], 3, "ab"), event([1, 2, 3], 3, "ab")],
        [event([1, 2], 2, "a"), event([3], 3, "b"), event([], 3, "")],
    ],
    ids=["all tokens", "new tokens"],
)
def test_an_answer_grows_by_events_of_all_tokens_and_of_new_ones(events: list[bytes]) -> None:
    answer = StreamedAnswer()
    for data in events:
        found = answer.add(data)
    assert found["meta_info"]["output_token_logprobs"].ids.tolist() == [1, 2, 3]
    assert found["meta_info"]["output_token_logprobs"].logprobs.tolist() == [-1.5, -2.5, -3.5]
    assert found["text"] == "ab"
    with pytest.raises(ValueError, match="1 tokens came after 3"):
        answer.add(event([9], 7, "c"))
