"""Processes that run rollouts: every way in which a session's code can misbehave, and that its neighbours do not notice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from millrace.connectors.user_code import session_pool
from millrace.connectors.user_code.session_pool import SessionLostError, SessionPool
from millrace.core.config.rollout import SessionSection
from millrace.core.sessions.pipe import BranchStart, CallTool, End, Reply, Request, Start
from millrace.core.sessions.tree import BranchReward
from tests.support.session_driver import Driver, start
from tests.support.slow_members import slow_but

FUNCTIONS = "tests.support.session_functions"
TIMEOUT_S = 2.0
Make = Callable[..., SessionPool]


@pytest.fixture
async def make_pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr(session_pool, "GRACE_S", 0.5)
    made: list[SessionPool] = []

    def make(function: str | None = None, **settings: Any) -> SessionPool:
        if function:
            settings["function"] = {
                "function": f"{FUNCTIONS}:{function}",
                "options": settings.pop("options", {}),
            }
        tools = [f"{FUNCTIONS}:{name}" for name in settings.pop("tools", ())]
        pool = SessionPool(
            SessionSection.model_validate({"timeout_s": TIMEOUT_S, "tools": tools, **settings})
        )
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()


async def test_a_session_generates_and_returns_its_reward(make_pool: Make) -> None:
    driver = Driver()
    end = await make_pool("three_turns").run(start(), driver.handle)
    assert end == End("completed", rewards={0: BranchReward(3.0)}, cut=[])
    assert driver.shown == [
        [],
        [{"role": "user", "content": "again"}],
        [{"role": "user", "content": "again"}],
    ]


async def test_branches_say_where_they_began_and_what_they_are_worth(make_pool: Make) -> None:
    driver = Driver(["a solution", "good"])
    end = await make_pool("branches").run(start(), driver.handle)
    assert end.rewards == {
        1: BranchReward(0.25, {"kind": 1.0, "words": "Fine."}, "yes"),
        0: BranchReward(1.0),
    }
    first, second = driver.asked
    assert (first.branch, first.start) == (0, None)
    prompt = [{"role": "user", "content": "judge: a solution"}]
    assert (second.branch, second.start) == (1, BranchStart(0, 0, "critic", prompt))


ENDS = {
    # function: how its rollout ends, and whether its process does
    "raises": ("ValueError: no idea in session_functions.py", False),
    "gives_text": ("returned reward of type str", False),
    "hoards": ("MemoryError", False),
    "sleeps": ("no answer within rollout.session.timeout_s = 2 s", False),
    "spins": ("no answer within rollout.session.timeout_s = 2 s", True),
    "hangs_in_c": ("no answer within rollout.session.timeout_s = 2 s", True),
    "multiplies": ("it started more than rollout.session.max_processes = 64 processes", True),
    "names_a_branch_by_a_number": ("name: Input should be a valid string", False),
    "writes_to_the_driver": ("it sent the driver a line that is no message: there is no message Start", True),
    "exits": ("its process ended itself with exit code 3", True),
}


@pytest.mark.parametrize("function", slow_but(ENDS, "raises", "sleeps", "hangs_in_c", "multiplies", "exits"))
async def test_a_rollout_that_misbehaves_is_to_blame_and_nobody_else(make_pool: Make, function: str) -> None:
    reason, ends = ENDS[function]
    pool = make_pool("bad_or_good", workers=1, options={"bad": function})
    good = [
        asyncio.ensure_future(_until_it_ends(pool, start(metadata={"good": True}), Driver()))
        for _ in range(4)
    ]
    began = time.monotonic()
    if ends:
        with pytest.raises(SessionLostError, match=reason.replace("(", r"\(")) as lost:
            await pool.run(start(), Driver().handle)
        assert lost.value.blamed
    else:
        end = await pool.run(start(), Driver().handle)
        assert end.status == "failed"
        assert reason in end.reason
    assert time.monotonic() - began < 60
    assert [end.rewards[0].value for end in await asyncio.gather(*good)] == [3.0] * 4


async def _until_it_ends(pool: SessionPool, begin: Start, driver: Driver) -> End:
    """Run a session as often as another one takes its process with it."""
    for _ in range(5):
        try:
            return await pool.run(begin, driver.handle)
        except SessionLostError as error:
            if error.blamed:
                raise
            driver.asked.clear()
    raise AssertionError("it was lost five times")


ANSWERS: list[tuple[str, dict[str, Any], str]] = [
    # tool, arguments, how its answer starts
    ("add", {"a": 1, "b": 2}, "3"),
    ("wait", {"seconds": 0.01}, "waited"),
    ("fail", {}, "fail failed: KeyError: 'missing' in session_functions.py"),
    ("hoard", {}, "hoard failed: MemoryError"),
    ("give_bytes", {}, '{"odd": "b'),
    ("unknown", {}, "there is no tool unknown; there are add, "),
    (
        "add",
        {"a": "three", "b": 1},
        "add does not take these arguments: a: Input should be a valid integer, unable to parse string as an integer",
    ),
]


async def test_what_a_tool_gives_or_raises_is_an_answer(make_pool: Make) -> None:
    """In one rollout: it goes on after each of them."""
    driver = Driver()
    names = sorted({name for name, _, _ in ANSWERS} - {"unknown"})
    asked = [(tool, arguments) for tool, arguments, _ in ANSWERS]
    pool = make_pool("calls_in_order", tools=names)
    end = await pool.run(start(metadata={"calls": asked}), driver.handle)
    assert end.status == "completed"
    calls = [request for request in driver.asked if isinstance(request, CallTool)]
    assert [(call.tool, call.arguments) for call in calls] == asked
    for (_, _, answer), given in zip(ANSWERS, driver.answers, strict=True):
        assert given.startswith(answer)


async def test_a_slow_async_tool_is_ended_alone(make_pool: Make) -> None:
    driver = Driver()
    end = await make_pool("calls", options={"tool": "wait", "seconds": 60}, tools=["wait"]).run(
        start(), driver.handle
    )
    assert end.status == "completed"
    assert driver.answers == ["wait gave no answer within 2 s"]


@pytest.mark.parametrize("tool", slow_but(["spin", "spin_in_c", "crash"], "spin", "crash"))
async def test_a_tool_that_takes_its_process_with_it_is_to_blame(make_pool: Make, tool: str) -> None:
    driver = Driver()
    with pytest.raises(SessionLostError) as lost:
        await make_pool("calls", options={"tool": tool}, tools=[tool]).run(start(), driver.handle)
    if tool == "spin":  # it was answered first, in time
        assert driver.answers == ["spin gave no answer within 2 s"]
    else:
        assert lost.value.blamed
        assert isinstance(driver.asked[-1], CallTool)


async def test_a_killed_process_blames_nobody_and_the_next_session_gets_another(make_pool: Make) -> None:
    pool = make_pool("one_turn")
    driver = Driver()
    (await pool.run(start(), driver.handle))
    (process,) = pool._processes
    os.kill(process._process.pid or 0, 9)
    end = await _until_it_ends(pool, start(), Driver())
    assert end.status == "completed"


async def test_what_the_driver_raises_is_raised(make_pool: Make) -> None:
    async def handle(request: Request) -> Reply:
        raise RuntimeError("too many failed")

    with pytest.raises(RuntimeError, match="too many failed"):
        await make_pool("one_turn").run(start(), handle)


async def test_many_sessions_run_side_by_side(make_pool: Make) -> None:
    pool = make_pool("calls", options={"tool": "wait", "seconds": 0.5}, tools=["wait"], workers=1)
    await pool.run(start(), Driver().handle)
    began = time.monotonic()
    await asyncio.gather(*(pool.run(start(), Driver().handle) for _ in range(64)))
    assert time.monotonic() - began < 64 * 0.5 / 4


def test_a_process_of_rollouts_imports_neither_arrow_nor_numpy_nor_all_sections() -> None:
    """Each would take a tenth of a second in every such process, and the libraries thirty megabytes."""
    code = "import sys, millrace.connectors.user_code.session_worker; print([name for name in ('numpy', 'pyarrow', 'millrace.core.config.run_config') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
