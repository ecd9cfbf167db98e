"""Many samples at once in one process: fast, and none pays for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from millrace.connectors.user_code.pool import Outcome
from millrace.core.config import RunConfig
from millrace.core.contracts.sample import Scorable
from millrace.tasks.runtime.scoring import Scoring

Make = Callable[..., RunConfig]


def sample(response: str) -> Scorable:
    return {
        "prompt": '"?"',
        "label": None,
        "metadata": None,
        "response": response,
        "response_length": 1,
        "status": "completed",
        "dialogue": None,
        "session_reward": None,
        "session_parts": None,
        "session_texts": None,
        "session_answer": None,
    }


async def outcomes(config: RunConfig, responses: list[str]) -> list[Outcome]:
    scoring = Scoring(config)
    try:
        samples: list[Any] = [sample(response) for response in responses]
        await scoring.score(scoring.selected(samples[0], None), sample("first"))
        calls = [scoring.score(scoring.selected(each, None), each) for each in samples]
        return await asyncio.gather(*calls)
    finally:
        scoring.close()


async def test_samples_that_wait_do_so_together(make_config: Make) -> None:
    reward = {"function": "tests.support.reward_forms:waits", "concurrency": 32, "timeout_s": 60}
    started = time.monotonic()
    found = await outcomes(make_config(reward=reward), ["ok"] * 64)
    assert [each.value["reward"] for each in found] == [2.0] * 64
    assert time.monotonic() - started < 0.3 * 64, "one after the other takes longer"


async def test_groups_that_wait_do_so_together(make_config: Make) -> None:
    """Each call waits until as many as may run at once have begun: one after the other they would be late."""
    path = "tests.support.reward_forms:all_have_begun"
    options = {"function": path, "options": {"count": 6}, "group": True, "concurrency": 6, "timeout_s": 60}
    scoring = Scoring(make_config(reward=options))
    groups: list[list[Any]] = [[sample("a"), sample("bc")] for _ in range(6)]
    try:
        selected = scoring.selected(groups[0][0], None)
        assert (await scoring.score(selected, sample("alone"))).kind == "failed"  # workers have started now
        found = await asyncio.gather(*(scoring.score(selected, group) for group in groups))
    finally:
        scoring.close()
    assert [[row["reward"] for row in each.value] for each in found] == [[1.0, 2.0]] * 6


@pytest.mark.parametrize(
    ("response", "kind", "reason"),
    [
        ("exits", "died", "ended itself with exit code 3"),
        pytest.param(
            "hangs in C", "timed_out", "no answer within 2 s (reward.timeout_s)", marks=pytest.mark.slow
        ),
        ("never", "timed_out", "no answer within 2 s (reward.timeout_s)"),
        ("raises", "failed", "KeyError: 'points'"),
    ],
)
async def test_a_hostile_sample_costs_no_other_of_its_batch(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, response: str, kind: str, reason: str
) -> None:
    monkeypatch.setattr("millrace.tasks.scoring.scoring_batches.GRACE_S", 0.5)
    reward = {"function": "tests.support.reward_forms:waits", "concurrency": 8, "timeout_s": 2}
    found = await outcomes(make_config(reward=reward), ["ok", response, "fine", "ok"])
    assert [each.value and each.value["reward"] for each in found] == [2.0, None, 4.0, 2.0], found
    assert found[1].kind == kind
    assert reason in str(found[1].reason)


async def test_a_batch_that_nobody_waits_for_is_ended(make_config: Make) -> None:
    reward = {"function": "tests.support.reward_forms:waits", "concurrency": 8, "timeout_s": 600}
    scoring = Scoring(make_config(reward=reward))
    try:
        chosen = scoring.selected(sample(""), None)
        await scoring.score(chosen, sample("first"))
        calls = [asyncio.ensure_future(scoring.score(chosen, sample("never"))) for _ in range(4)]
        await asyncio.sleep(0.5)
        for call in calls:
            call.cancel()
        started = time.monotonic()
        assert (await scoring.score(chosen, sample("fine"))).value["reward"] == 4.0
        assert time.monotonic() - started < 60
    finally:
        scoring.close()
