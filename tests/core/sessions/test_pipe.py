"""Every message between driver and a session's process arrives as it was sent, and nothing else is made of a line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

import pytest

from millrace.core.sessions.interface import Task, ToolCall, Turn
from millrace.core.sessions.pipe import (
    FROM_PROCESS,
    TO_PROCESS,
    BranchStart,
    Called,
    CallStuck,
    CallTool,
    Cancel,
    End,
    Envelope,
    FromProcess,
    Generate,
    MakeCall,
    Noted,
    Ping,
    Pong,
    ReachedLimit,
    Ready,
    RecordedAnswer,
    Refused,
    SlimeStart,
    Start,
    ToProcess,
)
from millrace.core.sessions.tree import BranchReward

MESSAGES: tuple[Any, ...] = (
    Ready(),
    Pong(),
    CallStuck(),
    Generate([{"role": "user", "content": "é\ud800"}, {"ids": [1, 2]}], 5, ["x"], True, branch=2),
    CallTool(
        "add", {"a": 10**30, "type": "Call"}, branch=1, start=BranchStart(0, 3, "critic", [{"ids": [7]}])
    ),
    Called(4, "3", True),
    End("failed", "why", {0: BranchReward(-0.1, {"kind": 1.0, "words": "x"}, "yes")}, {1: [2, 3]}, [1]),
    Start(Task([{"role": "user", "content": "x"}], 3, {"a": None}, "s", 2, True), [], 7, {"top_p": 0.1}),
    Start(Task("x"), [], 7, {}, SlimeStart({"hf_checkpoint": "here"}, [1, 2])),
    Cancel(),
    Ping(),
    Turn("t", "c", [1], "truncated", "th", [ToolCall("f", {"x": [1]})], "p", 3, [-math.inf, -1e-300]),
    RecordedAnswer("3", False),
    MakeCall(5),
    Noted(),
    ReachedLimit("rollout.session.max_turns = 2", True),
    Refused("the template refuses it"),
)


def test_every_message_has_a_row() -> None:
    assert {type(message) for message in MESSAGES} == {*get_args(ToProcess), *get_args(FromProcess)}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    direction = FROM_PROCESS if isinstance(message, get_args(FromProcess)) else TO_PROCESS
    sent = Envelope(message, 3, 9)
    assert sent.line().count(b"\n") == 1
    assert direction.read(sent.line()) == sent


HOSTILE: dict[str, Any] = {
    "no JSON": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "no list": {"do": "generate"},
    "too short": [1, 2, "Ready"],
    "a class of the driver's messages": [1, 2, "Start", {"task": {"prompt": ""}, "messages": [], "seed": 1}],
    "a class of another module": [1, 2, "subprocess.Popen", {"args": ["true"]}],
    "a session that is no number": [[1], 2, "Ready", {}],
    "a missing field": [1, 2, "Called", {"event": 1, "answer": "x"}],
    "a field of another type": [1, 2, "Called", {"event": 1, "answer": {"x": 1}, "failed": False}],
    "an inner class of another type": [1, 2, "Generate", {"new": [], "start": {"parent": 0}}],
    "an unknown end": [1, 2, "End", {"status": "trained"}],
    "a reward that is no number": [1, 2, "End", {"status": "completed", "rewards": {"0": {"value": "x"}}}],
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_any_other_line_is_refused_with_a_short_reason(what: str) -> None:
    line = HOSTILE[what]
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - its text is looked at
        FROM_PROCESS.read(line if isinstance(line, bytes) else json.dumps(line).encode())
    assert len(str(refused.value)) < 200


def test_a_value_that_json_does_not_have_is_not_sent() -> None:
    with pytest.raises(TypeError, match="Object of type bytes is not JSON serializable"):
        Envelope(CallTool("add", {"a": b"x"})).line()
    with pytest.raises(ValueError, match="name: Input should be a valid string"):
        FROM_PROCESS.read(Envelope(replace(Generate([]), start=BranchStart(0, 0, 3))).line())  # type: ignore[arg-type]
