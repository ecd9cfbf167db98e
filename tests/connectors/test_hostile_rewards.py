"""What hostile code in a reward of each form does: its own sample fails with a reason, and the next is scored."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import psutil
import pytest

from millrace.connectors.user_code.pool import WorkerPool
from millrace.connectors.user_code.process import Limits
from millrace.core.rewards.scoring import score_group, score_sample
from tests.support.slow_members import slow_but

FORMS = ("hostile", "hostile_awaited", "Hostile", "hostile_group")
DEADLINE_S, PLENTY_S = 2.0, 60.0
ENDS: dict[str, tuple[str, str, float]] = {  # by response: kind, a part of the reason, and the deadline
    "loops": ("timed_out", "no answer within 2 s", DEADLINE_S),
    "memory": ("failed", "MemoryError", PLENTY_S),
    "forks": ("died", "it started more than 8 processes (reward.max_processes)", PLENTY_S),
    "forks into sessions": ("died", "it started more than 8 processes (reward.max_processes)", PLENTY_S),
    "power": ("timed_out", "no answer within 2 s", DEADLINE_S),
    "regex": ("timed_out", "no answer within 2 s", DEADLINE_S),
    "raises": ("failed", "KeyError: 'points' in reward_forms.py", PLENTY_S),
    "words": ("failed", "of type str", PLENTY_S),
    "hangs in C": ("timed_out", "no answer within 2 s", DEADLINE_S),
    "exits": ("died", "ended itself with exit code 3", PLENTY_S),
    "cancelled": ("failed", "CancelledError: closed", PLENTY_S),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(1, Limits(memory_mb=2048, max_processes=8))
    yield made
    made.close()


def row(response: str) -> dict[str, Any]:
    given = {"prompt": '"?"', "response": response, "label": None, "metadata": None}
    return {**given, "response_length": 1, "status": "completed"}


async def scored(pool: WorkerPool, form: str, response: str, timeout_s: float) -> Any:
    path = f"tests.support.reward_forms:{form}"
    if form.endswith("group"):
        rows = [row("ok"), row(response)]
        return await pool.call(score_group, path, {}, rows, timeout_s=timeout_s, again=1)
    return await pool.call(score_sample, path, {}, row(response), timeout_s=timeout_s, again=1)


# each response once, each form some times
QUICK = [(response, FORMS[number % len(FORMS)]) for number, response in enumerate(ENDS)]


@pytest.mark.parametrize(("response", "form"), slow_but(product(ENDS, FORMS), *QUICK))
async def test_hostile_code_costs_its_own_call_alone(pool: WorkerPool, response: str, form: str) -> None:
    kind, reason, deadline_s = ENDS[response]
    outcome = await scored(pool, form, response, deadline_s)
    assert outcome.kind == kind, outcome
    assert reason in outcome.reason
    after = await scored(pool, form, "fine", PLENTY_S)
    assert after.kind == "done", after
    left = [child for child in psutil.Process().children(recursive=True) if child.name() == "sleep"]
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
