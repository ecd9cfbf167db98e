"""The hostile table of tools and environments: whatever one does, its rollout ends with what it did, and its neighbours go on.

Processes, dialogues and records are real; engines alone are scripted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from millrace.core.contracts.turns import TurnRow
from millrace.tasks.generation.sessions.runner import MadeSample, session_task
from millrace.tasks.generation.sessions.session_rollout import Opening
from tests.support.session_place import CALL, TOKENIZER, Place, shown
from tests.support.slow_members import slow_but

MODULE = "tests.support.hostile_code"
TIMEOUT_S = 2
DEADLINE_S = 60  # of the whole batch, on a busy machine
GOOD = 3  # neighbours
SLOW = f"gave no answer within {TIMEOUT_S} s"
HANGS = f"no answer within rollout.session.timeout_s = {TIMEOUT_S} s"
MANY = "it started more than rollout.session.max_processes = 64 processes"  # in two seconds, unless the machine is busy
TOOLS: dict[str, tuple[str, str | tuple[str, ...]]] = {
    # what a tool does: the end of its rollout, and what the policy is shown, or the reason
    "raises": ("completed", "tool failed: KeyError in hostile_code.py"),
    "no_text": ("completed", '{"odd": "b'),
    "takes_memory": ("completed", "tool failed: MemoryError in hostile_code.py"),
    # on a busy machine the process is ended before it answers
    "loops_for_ever": ("completed", (f"tool {SLOW}", f"tool failed: {HANGS}")),
    "hangs_in_c": ("completed", f"tool failed: {HANGS}"),
    "forks": ("completed", (f"tool failed: {MANY}", f"tool failed: {HANGS}")),
    "ends_the_process": ("completed", "tool failed: its process ended itself with exit code 5"),
}
ENVIRONMENTS = {
    # what an environment does: the reason why its rollout failed
    "raises": "KeyError in hostile_code.py",
    "takes_memory": "MemoryError in hostile_code.py",
    "loops_for_ever": HANGS,
    "hangs_in_c": HANGS,
    "sleeps": f"no answer within|{SLOW}",
    "forks": f"{MANY}|{HANGS}",
    "ends_the_process": "its process ended itself with exit code 5",
    "no_text": "TypeError: an environment returns an Observation, text or Done, not bytes",
}
QUICK = ("raises", "hangs_in_c", "forks", "ends_the_process")
PLACES = [
    (where, recovery)
    for where in ("reset", "step", "close")
    for recovery in ("stateless", "snapshot", "restart")
]
CASES = [
    pytest.param(what, *at, marks=[] if at == ("step", "snapshot") and what in QUICK else [pytest.mark.slow])
    for what in ENVIRONMENTS
    for at in PLACES
    if (what, at[0]) != ("no_text", "close")  # what it returns is nothing to anyone
]


async def rollout(place: Place, number: int, good: bool, longest: int = 2048) -> MadeSample:
    """One rollout of the group; a good one if the row says so."""
    prompt = [{"role": "user", "content": "1+1="}]
    ids = TOKENIZER.encode_prompts([prompt], chat=True)[0]
    opening = Opening(f"g-{number:04d}", "g", prompt, ids, seed=7, chat=True, longest=longest)
    task = session_task('"1+1="', None, json.dumps({"good": good}), "s", number)
    rows: list[TurnRow] = []

    async def write(row: TurnRow) -> None:
        rows.append(row)

    (sample,), _, _ = await place.runner.run(opening, task, rows, write)
    place.rows += rows
    return sample


async def batch(place: Place) -> tuple[MadeSample, list[MadeSample]]:
    """A bad rollout among good ones that began before it, all in one process."""
    began = time.monotonic()
    good = [asyncio.ensure_future(rollout(place, number + 1, True)) for number in range(GOOD)]
    await asyncio.sleep(0.2)
    bad = await rollout(place, 0, False)
    neighbours = await asyncio.gather(*good)
    assert time.monotonic() - began < DEADLINE_S
    return bad, neighbours


def assert_unhurt(samples: list[MadeSample], turns: int) -> None:
    for sample in samples:
        assert (sample.status, sample.reason, sample.turns) == ("completed", None, turns)
        assert sample.reward is not None
        assert sample.reward > 0
        trained = [t for t, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
        assert shown(trained) == "one<|im_end|>" * turns


@pytest.mark.parametrize("what", slow_but(TOOLS, "raises", "loops_for_ever", "ends_the_process"))
async def test_whatever_a_tool_does_is_its_answer_and_the_rest_of_the_batch_is_unhurt(
    make_place: Callable[..., Place], what: str
) -> None:
    status, answer = TOOLS[what]
    options = {"tool": "tool", "what": what}
    place = make_place("one", **of_module(function=("calls_or_is_good", options), tools=["tool"]))
    bad, neighbours = await batch(place)
    assert (bad.status, bad.reason) == (status, None)
    (call,) = [row for row in place.rows if row.kind == "call"]
    assert call.text.startswith(answer), call.text
    assert call.text in shown(bad.response_ids)
    assert_unhurt(neighbours, 3)


async def test_a_slow_tool_is_given_up_alone(make_place: Callable[..., Place]) -> None:
    options = {"tool": "slow_tool", "what": "x"}
    place = make_place("one", **of_module(function=("calls_or_is_good", options), tools=["slow_tool"]))
    bad, neighbours = await batch(place)
    assert bad.status == "completed"
    assert f"slow_tool {SLOW}" in shown(bad.response_ids)
    assert_unhurt(neighbours, 3)


@pytest.mark.parametrize(("what", "where", "recovery"), CASES)
async def test_whatever_an_environment_does_is_the_reason_of_its_rollout_and_the_rest_of_the_batch_is_unhurt(
    make_place: Callable[..., Place], what: str, where: str, recovery: str
) -> None:
    options = {"what": what, "where": where, "recovery": recovery}
    place = make_place("one", **of_module(environment=("Hostile", options)))
    bad, neighbours = await batch(place)
    assert bad.status == "failed"
    assert any(reason in (bad.reason or "") for reason in ENVIRONMENTS[what].split("|")), bad.reason
    assert bad.response_ids == []  # never a reward of 0
    assert bad.reward is None
    assert_unhurt(neighbours, 3)


def of_module(tools: list[str] | None = None, **forms: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Settings whose functions are of the module of hostile ones."""
    made = {
        form: {"function": f"{MODULE}:{function}", "options": options}
        for form, (function, options) in forms.items()
    }
    return {"module_tools": [f"{MODULE}:{name}" for name in tools or ()], "memory_mb": 2048, **made}


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("tools", marks=pytest.mark.slow), "environment"])
async def test_a_thousand_turns_end_at_the_limit_while_the_rest_of_the_batch_goes_on(
    make_place: Callable[..., Place], form: str
) -> None:
    # 200,000 tokens take minutes, and on a busy machine a process that others wait for is silent for more than two seconds
    longest = {"max_turns": 1000, "max_tokens": 200_000, "timeout_s": 60}
    if form == "tools":  # the policy calls and calls
        place = make_place(CALL % ("add", '{"a": 1, "b": 2}'), tools=["add"], **longest)
    else:
        place = make_place("one", environment=("Countdown", {"steps": 10_000}), **longest)
    bad, *others = await asyncio.gather(*(rollout(place, number, False, 200_000) for number in range(3)))
    assert (bad.turns, bad.status) == (1000, "truncated")
    assert bad.reason == "rollout.session.max_turns = 1000"
    assert [other.turns for other in others] == [1000, 1000]
    calls = [row for row in place.rows if row.kind == "call" and row.rollout_id == "g-0000"]
    assert len(calls) == (1000 if form == "tools" else 0)
