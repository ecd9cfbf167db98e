"""Weights that change while requests run: each token keeps the version that made it, and none is made twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.engines.client import Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.fleet import Fleet
from millrace.core.config.pipeline import OnUpdate
from tests.support.engine_process import CLOSE, reference_logprobs
from tests.support.fleets import LONG, PROMPT, MakeFleet

LENGTH = 600  # far from over when the weights come, also on a busy machine
AMID: list[OnUpdate] = ["resend", "retract", "keep"]
DIRECT: dict[str, Any] = {}
ROUTED: dict[str, Any] = {"engines": {"router": {"policy": "round_robin"}}}
SENT = pytest.mark.parametrize(
    "sent", [pytest.param(DIRECT, id="direct"), pytest.param(ROUTED, id="routed", marks=pytest.mark.slow)]
)


def params(seed: int, length: int = LENGTH) -> dict[str, Any]:
    return {**LONG, "sampling_seed": seed, "max_new_tokens": length}


async def open_dispatcher(
    fleet: Fleet, model: Path, oldest: int, newest: int, at: int | None = None
) -> Dispatcher:
    """A dispatcher over engines at version `at`, the oldest by default, which accepts a range."""
    start = oldest if at is None else at
    await fleet.ensure(str(model))
    await fleet.update_weights(str(model), start)

    async def serving(_: int) -> None:  # an update brings the version; only what is lost needs the model
        while not dispatcher._engines():  # noqa: ASYNC110 - the fleet has no event for it
            await asyncio.sleep(0.01)

    dispatcher = fleet.dispatcher(start, serving, oldest=oldest, newest=newest)
    return dispatcher


def begin(dispatcher: Dispatcher, seeds: range, length: int = LENGTH) -> list[asyncio.Task[Generation]]:
    return [
        asyncio.create_task(
            dispatcher.generate(PROMPT, params(seed, length), rid=f"amid-{seed}", session=None)
        )
        for seed in seeds
    ]


async def until_all_generate(dispatcher: Dispatcher, count: int) -> None:
    """Wait until engines have made a token of each request."""
    async with asyncio.timeout(60):
        while True:
            infos = [await engine.server_info() for engine in dispatcher._engines()]
            if sum(info["load"]["running"] for info in infos) == count:
                return
            await asyncio.sleep(0.01)


def assert_made_by(models: dict[int, Path], answer: Generation, *, exact: bool = True) -> None:
    """Each span's log-probabilities are those of its version's weights; the spans cover the answer in order."""
    starts = [first for first, _ in answer.weight_versions]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert len(answer.output_ids) == len(answer.logprobs)
    ends = [*starts[1:], len(answer.output_ids)]
    for (first, version), end in zip(answer.weight_versions, ends, strict=True):
        if exact or first == 0:
            expected = reference_logprobs(models[version], PROMPT, answer.output_ids.tolist())[first:end]
            assert answer.logprobs[first:end] == pytest.approx(expected, abs=CLOSE)


@SENT
@pytest.mark.parametrize("on_update", AMID)
async def test_requests_go_on_under_new_weights_and_say_which_made_what(
    make_fleet: MakeFleet, tiny_model: Path, other_model: Path, on_update: OnUpdate, sent: dict[str, Any]
) -> None:
    fleet = make_fleet(**sent, pipeline={"on_update": on_update})
    dispatcher = await open_dispatcher(fleet, tiny_model, 4, 5)
    running = begin(dispatcher, range(6))
    await until_all_generate(dispatcher, 6)
    await fleet.update_weights(str(other_model), 5, on_update=on_update)
    answers = await asyncio.gather(*running)
    assert dispatcher.retries == 0, "an update is no failure"
    for answer in answers:
        assert len(answer.output_ids) == LENGTH
        assert [version for _, version in answer.weight_versions] == [4, 5]
        # with keep, later tokens see keys and values of the older weights
        assert_made_by({4: tiny_model, 5: other_model}, answer, exact=on_update != "keep")


@SENT
async def test_no_prefix_of_older_weights_is_shared_where_caches_outlive_an_update(
    make_fleet: MakeFleet, tiny_model: Path, other_model: Path, sent: dict[str, Any]
) -> None:
    fleet = make_fleet(**sent, pipeline={"on_update": "keep"})
    prompt = [*range(1, 90), *range(1, 90)]  # pages that a cache holds
    dispatcher = await open_dispatcher(fleet, tiny_model, 1, 2)
    for version, model in ((1, tiny_model), (2, other_model)):
        if version == 2:
            await fleet.update_weights(str(model), 2, on_update="keep")
        for seed in range(4):  # on both engines, twice
            answer = await dispatcher.generate(prompt, params(seed, 8), rid=f"p-{seed}", session=None)
            expected = reference_logprobs(model, prompt, answer.output_ids.tolist())
            assert answer.logprobs == pytest.approx(expected, abs=CLOSE)
        assert answer.cached_tokens > 0, "those of its own version are"


@SENT
async def test_what_is_sent_again_is_as_if_it_had_not_been_cut(
    make_fleet: MakeFleet, tiny_model: Path, sent: dict[str, Any]
) -> None:
    """The same weights under a new version: the answer is that of an engine that nobody disturbed."""
    fleet = make_fleet(**sent)
    whole = await open_dispatcher(fleet, tiny_model, 1, 1)
    wanted = await asyncio.gather(*begin(whole, range(4)))
    dispatcher = await open_dispatcher(fleet, tiny_model, 1, 4)
    running = begin(dispatcher, range(4))
    for version in (2, 3, 4):
        await until_all_generate(dispatcher, 4)
        await fleet.update_weights(str(tiny_model), version, on_update="resend")
    for got, expected in zip(await asyncio.gather(*running), wanted, strict=True):
        assert got.output_ids.tolist() == expected.output_ids.tolist()
        assert got.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)
        assert got.pieces == len(got.weight_versions) > 1


@SENT
async def test_a_token_of_a_version_out_of_range_is_never_returned(
    make_fleet: MakeFleet, tiny_model: Path, other_model: Path, sent: dict[str, Any]
) -> None:
    fleet = make_fleet(**sent)
    dispatcher = await open_dispatcher(fleet, tiny_model, 1, 1)
    running = begin(dispatcher, range(2))
    await until_all_generate(dispatcher, 2)
    await fleet.update_weights(str(other_model), 2, on_update="resend")
    assert not dispatcher._engines(), "none serves what is allowed"
    assert not any(task.done() for task in running)
    await fleet.update_weights(str(tiny_model), 1, on_update="resend")
    for answer in await asyncio.gather(*running):
        assert answer.weight_versions == [(0, 1)]
        assert_made_by({1: tiny_model}, answer)


@SENT
async def test_stopped_requests_answer_with_what_they_have_and_go_on_elsewhere(
    make_fleet: MakeFleet, tiny_model: Path, sent: dict[str, Any]
) -> None:
    fleet = make_fleet(**sent)
    dispatcher = await open_dispatcher(fleet, tiny_model, 1, 1)
    (wanted,) = await asyncio.gather(*begin(dispatcher, range(7, 8)))
    first = await open_dispatcher(fleet, tiny_model, 1, 1)
    running = begin(first, range(7, 9))
    await until_all_generate(first, 2)
    await first.stop()
    cut, _ = await asyncio.gather(*running)
    assert cut.finish == "abort"
    assert 0 < len(cut.output_ids) < LENGTH
    assert not len((await first.generate(PROMPT, params(0), rid="late", session=None)).output_ids)
    second = await open_dispatcher(fleet, tiny_model, 2, 2)
    made = len(cut.output_ids)
    rest = await second.generate(
        [*PROMPT, *cut.output_ids.tolist()],
        params(7, LENGTH - made),
        rid="amid-7",
        session=None,
        continued=made,
    )
    assert [*cut.output_ids, *rest.output_ids] == wanted.output_ids.tolist()
    assert [*cut.logprobs, *rest.logprobs] == pytest.approx(wanted.logprobs, abs=CLOSE)
    assert rest.weight_versions == [(0, 2)]


async def test_an_engine_that_does_not_say_which_weights_made_what_is_refused(
    make_fleet: MakeFleet, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.connectors.engines.sglang.client import SglangClient
    from millrace.core.errors import EngineError

    fleet = make_fleet()
    dispatcher = await open_dispatcher(fleet, tiny_model, 1, 2)
    real = SglangClient.server_info

    async def as_sglang(self: SglangClient, timeout_s: float = 30.0) -> dict[str, Any]:
        info = await real(self, timeout_s)
        info.pop("counters", None)
        return {**info, "version": "0.5.17"}

    monkeypatch.setattr(SglangClient, "server_info", as_sglang)
    with pytest.raises(EngineError, match=r"SGLang 0\.5\.17.*set it to resend"):
        await fleet.update_weights(str(tiny_model), 2, on_update="retract")
    assert dispatcher
