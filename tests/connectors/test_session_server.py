"""Rollout functions that bring their own client: what it sends, over real HTTP, becomes turns and branches of a real session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from millrace.connectors.user_code import session_pool
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config.rollout import Sampling, SessionSection
from millrace.core.sessions.interface import Task, Turn
from millrace.core.sessions.pipe import End, ReachedLimit, Reply, Request, Start

FUNCTIONS = "tests.support.client_functions"
PROMPT = {"role": "user", "content": "1+1="}
Run = Callable[..., Any]
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Driver:
    """Answers as the driver does, from a list of texts; records the turns that were asked for."""

    def __init__(self, texts: list[Any] | None = None, delay: float = 0.0, most: int = 100) -> None:
        self.texts = texts or ["one", "two", "three", "four", "five", "six"]
        self.asked: list[Request] = []
        self._delay, self._most = delay, most

    async def handle(self, request: Request) -> Reply:
        self.asked.append(request)
        turn = self.texts[(len(self.asked) - 1) % len(self.texts)]
        await asyncio.sleep(self._delay)
        if len(self.asked) > self._most:
            return ReachedLimit("rollout.session.max_turns = 2")
        made = Turn("all of it", "", [7], "completed", prompt_tokens=3)
        return replace(made, **(turn if isinstance(turn, dict) else {"content": turn}))

    @property
    def turns(self) -> list[tuple[int, list[str]]]:
        """The branch of each turn, and the new messages' contents."""
        return [(each.branch, [new["content"] for new in each.new]) for each in self.asked]

    @property
    def begins(self) -> list[tuple[int, int, int, list[str] | None]]:
        """Branch, parent, turns of the parent, and contents of a prompt of its own."""
        return [
            (
                each.branch,
                each.start.parent,
                each.start.parent_turns,
                each.start.prompt and [message["content"] for message in each.start.prompt],
            )
            for each in self.asked
            if each.start
        ]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[SessionPool]:
    """One process for all functions: to start one takes a second."""
    settings = {
        "function": {"function": f"{FUNCTIONS}:chosen"},
        "tools": ["tests.support.session_functions:add"],
    }
    started = SessionPool(SessionSection.model_validate(settings))
    yield started
    started.close()


@pytest.fixture
def run(pool: SessionPool, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(session_pool, "GRACE_S", 0.5)

    async def to_end(function: str, driver: Driver, **options: Any) -> End:
        task = Task("1+1=", metadata={"function": function, "options": options})
        sampling = Sampling(temperature=0.5).model_dump(mode="json")
        return await pool.run(Start(task, [PROMPT], seed=7, sampling=sampling), driver.handle)

    return to_end


def value(end: End) -> float:
    assert end.status == "completed", end.reason
    return end.rewards[0].value


@pytest.mark.parametrize("function", ["two_turns", "in_a_thread"])
async def test_a_plain_loop_is_one_branch_that_grows_by_what_is_new(run: Run, function: str) -> None:
    driver = Driver()
    assert value(await run(function, driver)) == 2
    assert driver.turns == [(0, []), (0, ["again"])]
    assert driver.begins == []


async def test_calls_of_tools_are_answered_and_answered_to(run: Run) -> None:
    call = {"content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}], "thinking": "hm"}
    driver = Driver([call, "three"])
    assert value(await run("uses_tools", driver)) == 1
    assert driver.turns == [(0, []), (0, ["3"])]
    assert driver.asked[1].new == [{"role": "tool", "tool_call_id": "call-0-0-0", "content": "3"}]


async def test_a_stream_gives_the_same_turns_and_the_usage_if_asked(run: Run) -> None:
    driver = Driver()
    assert value(await run("streams", driver)) == 1
    assert driver.turns == [(0, []), (0, ["again"])]


async def test_the_same_request_gets_the_recorded_turn_at_once_and_later(run: Run) -> None:
    driver = Driver(delay=0.1)
    assert value(await run("repeats", driver)) == 2
    assert driver.turns == [(0, []), (0, ["again"])]


async def test_a_client_that_hangs_up_and_asks_again_makes_one_turn(run: Run) -> None:
    driver = Driver(delay=1.0)
    assert value(await run("hangs_up", driver)) == 1
    assert driver.turns == [(0, [])]


async def test_compaction_and_another_way_on_are_branches(run: Run) -> None:
    driver = Driver()
    assert value(await run("compacts", driver)) == 1
    assert driver.turns == [(0, []), (0, ["again"]), (1, []), (1, ["go on"]), (2, ["otherwise"])]
    assert driver.begins == [(1, 0, 0, ["in short: 2"]), (2, 0, 1, None)]


async def test_different_requests_at_once_are_a_branch_each_but_one(run: Run) -> None:
    driver = Driver(delay=0.1)
    assert value(await run("in_parallel", driver)) == 2
    assert sorted(number for number, _ in driver.turns) == [0, 0, 1]
    assert driver.begins == [(1, 0, 1, None)]


async def test_a_branch_has_a_door_of_its_own_and_clients_branches_have_its_reward(run: Run) -> None:
    driver = Driver()
    end = await run("two_roles", driver)
    assert {number: each.value for number, each in end.rewards.items()} == {0: 1.0, 1: 0.5}
    assert driver.turns == [(0, []), (1, [])]
    assert driver.asked[1].start.name == "critic"


async def test_a_client_goes_on_from_the_functions_own_turns(run: Run) -> None:
    driver = Driver()
    assert value(await run("talks_and_serves", driver)) == 3
    assert driver.turns == [(0, []), (0, ["again"]), (0, ["and again"])]


async def test_a_limit_ends_the_rollout_as_truncated(run: Run) -> None:
    end = await run("for_ever", Driver(most=2))
    assert (end.status, end.reason) == ("truncated", "rollout.session.max_turns = 2")


async def test_the_models_are_listed(run: Run) -> None:
    assert value(await run("lists_models", Driver())) == 1


JSON = {"Content-Type": "application/json"}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    # what is sent: fields of the body, headers, the answer
    "wrong key": ({}, {"Authorization": "Bearer sk-x", **JSON}, "401 the header Authorization wants the api_key of a session"),
    "no key": ({}, {"Authorization": "", **JSON}, "401 the header Authorization wants the api_key"),
    "a page": ({}, {"Origin": "http://evil.example", **JSON}, "403 Origin: web pages may not ask"),
    "another host": ({}, {"Host": "evil.example:80", **JSON}, "403 Host: it names another machine"),
    "a form": ({}, {"Content-Type": "text/plain"}, "415 Content-Type: application/json is wanted"),
    "temperature": ({"temperature": 1.0}, JSON, "400 temperature: it is 1.0, the run samples with 0.5. Leave it out, or set rollout.sampling.temperature"),
    "n": ({"n": 2}, JSON, "400 n: it can only be 1 here, not 2"),
    "logprobs": ({"logprobs": True}, JSON, "400 logprobs: it can only be False here"),
    "other tools": ({"tools": [{"type": "function", "function": {"name": "other"}}]}, JSON, "400 tools: they are not those of rollout.session.tools"),
    "an unknown field": ({"prefix": 1}, JSON, "400 prefix: it is not known here"),
    "no messages": ({"messages": []}, JSON, "400 messages: a list of messages is wanted"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_names_the_field(run: Run, case: str) -> None:
    body, headers, reason = REFUSED[case]
    driver = Driver()
    end = await run("posts", driver, body=body, headers=headers, path="/chat/completions")
    assert end.reason.startswith(f"ValueError: {reason}"), end.reason
    assert driver.asked == []


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("depth", [900, 20_000])
async def test_deep_json_is_refused(run: Run, depth: int, inside: bool) -> None:
    driver = Driver()
    end = await run("posts_deep", driver, depth=depth, inside=inside)
    assert end.reason.startswith("ValueError: 400"), end.reason
    assert driver.asked == []


async def test_an_unknown_path_is_not_found(run: Run) -> None:
    end = await run("posts", Driver(), body={}, headers=JSON, path="/completions")
    assert end.reason.startswith("ValueError: 404"), end.reason


async def test_the_runs_own_sampling_is_accepted(run: Run) -> None:
    body = {"temperature": 0.5, "top_p": 1, "n": 1, "seed": None, "max_tokens": 5, "stop": "x"}
    driver = Driver()
    end = await run("posts", driver, body=body, headers=JSON, path="/chat/completions")
    assert end.reason.startswith("ValueError: 200"), end.reason
    assert (driver.asked[0].max_new_tokens, driver.asked[0].stop) == (5, ["x"])
