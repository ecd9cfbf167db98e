"""Answers that are stored while they are under way: whatever ends them, their segments meet, and little is generated again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.connectors.engines.client import GenerateRequest, Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.dispatching.pieces import Flush
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.contracts.ids import tokens_hash
from millrace.core.contracts.turns import TurnRow
from millrace.core.errors import EngineLostError
from millrace.tasks.generation.answer_segments import AnswerSegments, Made
from millrace.tasks.generation.single_samples import Answer
from tests.support.stored_samples import drawn_group

GROUP = drawn_group(0)
SAMPLE = "g0-0000"
FLUSH = 16
VERSIONS = range(3, 9)


def token(position: int) -> int:
    return 100 + position


class Scene:
    """One answer of some length, an engine that makes it and is cut now and then, and storage that a kill leaves behind."""

    def __init__(self, rng: random.Random, length: int) -> None:
        self.rng, self.length = rng, length
        self.stored: list[TurnRow] = []
        self.version = VERSIONS[0]
        self.generated = 0  # tokens
        self.lost = 0  # times that what an engine or the driver had was lost
        self.cut = False  # the iteration's cut ends the answer

    def logprob(self, position: int) -> float:
        return -float(position)


class ScriptedEngine(SglangClient):
    """Makes the answer's tokens one by one, and reports them as a real one does."""

    def __init__(self, scene: Scene, dispatcher: Callable[[], Dispatcher]) -> None:
        super().__init__("http://nowhere", "engine-0")
        self._scene, self._dispatcher = scene, dispatcher

    async def generate(self, request: GenerateRequest) -> Generation:
        scene, first, on_part = self._scene, request.continued, request.on_part
        assert on_part is not None
        rng, made, spans = scene.rng, 0, list[tuple[int, int]]()
        assert list(request.input_ids) == [*GROUP.prompt_tokens, *map(token, range(first))]
        assert request.sampling_params["max_new_tokens"] == scene.length - first

        def part(finish: Any) -> Generation:
            ids = np.arange(first, first + made, dtype=np.int32) + 100
            logprobs = np.array([scene.logprob(at) for at in range(first, first + made)])
            return Generation(ids, logprobs, "", finish, list(spans), "engine-0", 0)

        stops_after = rng.randint(1, 60)
        while first + made < scene.length:
            if rng.random() < 0.02 and scene.version < VERSIONS[-1]:  # amid the request
                scene.version += 1
            if not spans or spans[-1][1] != scene.version:
                spans.append((made, scene.version))
            made += 1
            scene.generated += 1
            await asyncio.sleep(0)  # storage and the rest of the driver go on
            if first + made == scene.length:
                break
            if made % request.every == 1 % request.every and not on_part(part("abort")):
                return part("abort")
            if made == stops_after:
                return await self._end(part)
        return part("length")

    async def _end(self, part: Callable[[Any], Generation]) -> Generation:
        """An engine that dies, an update that cuts, the iteration's cut, or a driver that dies."""
        scene, how = self._scene, self._scene.rng.choice(("loss", "update", "cut", "kill"))
        if how == "loss":
            scene.lost += 1
            raise EngineLostError("engine-0: died")
        if how == "kill":
            raise KilledError
        if how == "cut":
            scene.cut = True
            self._dispatcher()._stopped = True
        self.note_refit()
        scene.version = min(scene.version + 1, VERSIONS[-1])
        return part("abort")


class KilledError(Exception):
    """The driver died: nothing of it is left but what is stored."""


class Writer:
    """Stores rows in their order, some time after they were put, as a PartWriter does."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._queue: list[list[TurnRow]] = []
        self._put = self._written = 0
        self._writing = asyncio.create_task(self._write())

    def put(self, rows: Sequence[TurnRow]) -> Callable[[], bool]:
        self._put += 1
        number = self._put
        self._queue.append(list(rows))
        return lambda: self._written >= number

    async def settled(self, at_once: bool = False) -> None:
        while self._written < self._put:  # noqa: ASYNC110 - storage takes its time
            await asyncio.sleep(0)

    async def _write(self) -> None:
        while True:
            for _ in range(self._scene.rng.randint(1, 40)):  # tokens that pass meanwhile
                await asyncio.sleep(0)
            if self._queue:
                self._scene.stored += self._queue.pop(0)
                self._written += 1

    def die(self) -> None:
        self._writing.cancel()


async def attempt(scene: Scene, before: Made) -> Generation | None:
    """A driver's life: it goes on from what is stored. None: it was killed."""
    writer = Writer(scene)
    segments = AnswerSegments(GROUP, SAMPLE, 7, before, scene.stored, writer, lambda ids: "")  # type: ignore[arg-type]
    made = segments.made
    assert made.output_ids.tolist() == [token(at) for at in range(len(made.output_ids))]

    async def recover(_: int) -> None: ...

    dispatcher = Dispatcher(
        lambda: [engine],
        recover,
        lambda *_: None,
        version=VERSIONS[0],
        newest=VERSIONS[-1],
        attempts=10_000,
        progress_timeout_s=60,
    )
    engine = ScriptedEngine(scene, lambda: dispatcher)
    known = len(made.output_ids)
    try:
        new = await dispatcher.generate(
            [*GROUP.prompt_tokens, *made.output_ids.tolist()],
            {"max_new_tokens": scene.length - known},
            rid=SAMPLE,
            session=None,
            continued=known,
            flush=Flush(FLUSH, segments),
        )
        if scene.cut:
            await writer.settled()
    except KilledError:
        scene.lost += 1
        if scene.rng.random() < 0.3 and scene.stored:  # and a part is broken
            del scene.stored[scene.rng.randrange(len(scene.stored))]
            scene.lost = 10**6
        return None
    finally:
        writer.die()
    whole = made.then(Answer(new, None, 0.0, 0.0), lambda ids: "").generation
    assert whole is not None
    return whole


async def live(scene: Scene) -> Generation:
    """Drivers one after the other, and iterations to which the answer is deferred, until it is whole."""
    before = Made()
    while True:
        whole = await attempt(scene, before)
        if whole is None:
            continue
        if whole.finish != "abort":
            return whole
        before = Made(whole.output_ids, whole.logprobs, whole.weight_versions, whole.engine_id)
        scene.stored, scene.cut = [], False  # the next iteration has a folder of its own


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 200))
def test_segments_have_no_gap_and_no_overlap_and_little_is_made_twice(
    rng: random.Random, length: int
) -> None:
    scene = Scene(rng, length)
    whole = asyncio.run(live(scene))
    assert whole.output_ids.tolist() == [token(at) for at in range(length)]
    assert whole.logprobs.tolist() == [scene.logprob(at) for at in range(length)]
    starts = [first for first, _ in whole.weight_versions]
    versions = [version for _, version in whole.weight_versions]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert all(one != other for one, other in zip(versions, versions[1:], strict=False))
    assert scene.generated - length <= FLUSH * scene.lost


def rows_of(*pieces: tuple[int, int]) -> list[TurnRow]:
    """Rows of segments, each of the tokens from one position to another."""
    rows: list[TurnRow] = []
    for order, (start, end) in enumerate(pieces):
        made = [*GROUP.prompt_tokens, *map(token, range(start))]
        row = TurnRow(
            rollout_id=SAMPLE,
            group_id=GROUP.group_id,
            order=order,
            branch=0,
            parent=None,
            parent_turns=None,
            name=None,
            event=0,
            kind="answer",
            segment=order,
            prompt=tokens_hash(made),
            new_ids=[],
            output_ids=[token(at) for at in range(start, end)],
            rollout_logprobs=[-float(at) for at in range(start, end)],
            policy_versions=[{"first_token": 0, "version": 3}],
            engine_id="engine-0",
            seed=7,
            ended="abort",
            new=None,
            text="",
            tool=None,
            arguments=None,
            failed=False,
            timings=[],
        )
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("pieces", "counts"),
    [
        ([(0, 5), (5, 9)], 9),
        ([(0, 5), (6, 9)], 5),  # a gap
        ([(0, 5), (4, 9)], 5),  # an overlap
        ([(0, 5), (0, 5), (5, 9)], 5),  # one that is there twice
        ([(3, 5)], 0),
    ],
)
def test_what_does_not_follow_on_what_is_stored_is_left_out(
    pieces: list[tuple[int, int]], counts: int
) -> None:
    written: list[TurnRow] = []

    class Noted:
        def put(self, rows: Sequence[TurnRow]) -> Callable[[], bool]:
            written.extend(rows)
            return lambda: True

    stored = rows_of(*pieces)
    segments = AnswerSegments(GROUP, SAMPLE, 7, Made(), stored, Noted(), lambda ids: "")  # type: ignore[arg-type]
    assert segments.made.output_ids.tolist() == [token(at) for at in range(counts)]
    new = np.arange(counts, counts + 4, dtype=np.int32) + 100
    segments.put(Generation(new, -new.astype(float), "", "abort", [(0, 3)], "engine-0", 0))
    again = AnswerSegments(GROUP, SAMPLE, 7, Made(), [*stored, *written], Noted(), lambda ids: "")  # type: ignore[arg-type]
    assert again.made.output_ids.tolist() == [token(at) for at in range(counts + 4)]
