"""What a client promises of requests: tokens, log-probabilities, parts, refusals, and what an engine that is gone or stands still says."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from millrace.connectors.engines.client import Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.prefill import PairingDispatcher
from millrace.core.errors import EngineError, EngineLostError, EngineStalledError
from tests.support.contract import LONG, PROMPT, SHORT, Contract
from tests.support.engine_process import EXACT


async def test_an_answer_holds_tokens_their_log_probabilities_and_its_account(on: Contract) -> None:
    answer = await on.ask(temperature=1.0, max_new_tokens=7)
    assert (answer.output_ids.dtype, answer.logprobs.dtype) == (np.int32, np.float64)
    assert len(answer.output_ids) == len(answer.logprobs) == 7
    assert (answer.finish, answer.engine_id) == ("length", "engine-0")
    assert answer.weight_versions == [(0, on.engine.version)]
    assert (answer.pieces, answer.cuts) == (1, ())
    assert answer.text
    assert on.is_of(on.engine.model, answer)
    assert on.client.in_flight == 0


async def test_a_stop_token_ends_the_answer_and_stays_in_it(on: Contract) -> None:
    free = await on.ask(max_new_tokens=20)
    stop = int(free.output_ids[4])
    first = free.output_ids.tolist().index(stop)
    answer = await on.ask(max_new_tokens=20, stop_token_ids=[stop], ignore_eos=False)
    assert answer.output_ids.tolist() == free.output_ids.tolist()[: first + 1]
    assert answer.finish == "stop"


async def test_an_answer_that_was_cut_goes_on_where_it_was_cut(on: Contract) -> None:
    whole = (await on.ask(max_new_tokens=12)).output_ids.tolist()
    for cut in (1, 7):
        rest = await on.ask(ids=[*PROMPT, *whole[:cut]], continued=cut, max_new_tokens=12 - cut)
        assert rest.output_ids.tolist() == whole[cut:] or not EXACT
        assert rest.weight_versions == [(0, on.engine.version)]


async def test_requests_at_once_get_their_own_answers(on: Contract) -> None:
    prompts = [[10 + n, 20, 30 + n] for n in range(12)]
    alone = [await on.ask(f"alone-{n}", ids) for n, ids in enumerate(prompts)]
    asking = [asyncio.create_task(on.ask(f"among-{n}", ids)) for n, ids in enumerate(prompts)]
    await asyncio.sleep(0)
    assert on.client.in_flight == 12
    for one, among in zip(alone, await asyncio.gather(*asking), strict=True):
        assert one.output_ids.tolist() == among.output_ids.tolist() or not EXACT


async def test_a_session_and_a_key_of_the_cache_change_no_answer(on: Contract) -> None:
    plain, named = await on.ask("plain"), await on.ask("named", session="s", cache_key="weights:7")
    assert plain.output_ids.tolist() == named.output_ids.tolist() or not EXACT


async def test_parts_come_while_the_answer_grows(on: Contract) -> None:
    parts: list[Generation] = []

    def take(part: Generation) -> bool:
        parts.append(part)
        return True

    answer = await on.ask(max_new_tokens=40, on_part=take, every=8)
    assert len(parts) >= 4
    lengths = [len(part.output_ids) for part in parts]
    assert lengths == sorted(set(lengths))
    for part, length in zip(parts, lengths, strict=True):
        assert part.output_ids.tolist() == answer.output_ids.tolist()[:length]
        assert part.logprobs.tolist() == answer.logprobs.tolist()[:length]
        assert part.weight_versions == [(0, on.engine.version)]
        assert part.finish == "abort"


async def test_a_part_that_is_refused_ends_the_request(on: Contract) -> None:
    answer = await on.ask(**LONG, on_part=lambda part: len(part.output_ids) < 16, every=4)
    assert answer.finish == "abort"
    assert 16 <= len(answer.output_ids) < LONG["max_new_tokens"]


async def test_a_request_that_is_cancelled_ends_at_the_engine(on: Contract) -> None:
    # SGLang also ends requests whose id starts with the cancelled one's
    stays, leaves = await on.begun("stays", "leaves", max_new_tokens=200)
    leaves.cancel()
    assert (await stays).finish == "length"
    assert on.client.in_flight == 0
    await on.idle()


@pytest.mark.parametrize(
    "params", [{"temperature": -1.0}, {"unheard_of": 1}], ids=lambda each: next(iter(each))
)
async def test_a_request_that_cannot_be_served_is_refused_and_hurts_no_other(
    on: Contract, params: dict[str, float]
) -> None:
    with pytest.raises(EngineError, match="engine-0"):
        await on.ask("wrong", **params)
    assert (await on.ask("right")).finish == "length"


async def test_a_grammar_is_refused_by_its_name_if_the_engine_has_none(on: Contract) -> None:
    if on.kind.has_grammar:
        pytest.skip("its backend keeps it")
    with pytest.raises(EngineError, match=r"engine-0.*sampling_params\.regex"):
        await on.ask(regex="[0-9]+")


async def test_a_client_that_is_closed_says_that_the_engine_is_lost(on: Contract) -> None:
    await on.client.close()
    with pytest.raises(EngineLostError, match="engine-0"):
        await on.ask()
    assert not await on.client.health()
    assert on.client.in_flight == 0


async def test_an_engine_that_stays_paused_is_given_up_but_not_as_stalled(on: Contract) -> None:
    await on.client.pause()
    with pytest.raises(EngineLostError, match="engine-0: no token for 0.4 s.*paused") as caught:
        await on.ask(progress_timeout_s=0.4)
    assert not isinstance(caught.value, EngineStalledError)


async def test_progress_is_seen_while_a_request_runs(on: Contract) -> None:
    (running,) = await on.begun("long")
    first, _ = await on.client.last_moved(0.0, 0.1)
    then, paused = first, True
    async with asyncio.timeout(30):
        while then == first:
            await asyncio.sleep(0.05)
            then, paused = await on.client.last_moved(0.0, 0.1)
    assert then > first
    assert not paused
    await on.client.abort()
    await running


async def test_an_engine_that_was_not_started_to_prefill_apart_is_named(on: Contract) -> None:
    await on.client.weight_version()
    assert on.client.part == "null"
    with pytest.raises(EngineError, match=r"engine-0 at .* is to prefill \(engines.prefill\)"):
        await _pair(on).generate(PROMPT, SHORT, rid="p", session=None)


def _pair(on: Contract) -> Dispatcher:
    async def recover(_: int) -> None:
        raise AssertionError("nothing was lost")

    version = on.engine.version
    engines = lambda: [on.client]  # noqa: E731
    return PairingDispatcher(
        engines, engines, recover, lambda *_: None, version=version, attempts=1, progress_timeout_s=60
    )
