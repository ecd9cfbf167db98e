"""What a rollout of your own is written against is a promise: a change shows here, as a difference."""

from __future__ import annotations

import inspect
from dataclasses import fields

from millrace.core.sessions import interface
from millrace.core.sessions.live import LiveSession

METHODS = {
    "generate": "(new: Content | None = None, *, max_new_tokens: int | None = None, stop: Sequence[str] = (), logprobs: bool = False) -> Turn",
    "observe": "(content: Content, role: str = tool) -> None",
    "call": "(tool: str, /, **arguments: Any) -> str",
    "branch": "(name: str | None = None, prompt: Content | None = None) -> Session",
    "reward": "(value: float, **parts: float | str) -> None",
}
PROPERTIES = {"task", "rng", "turns", "messages", "base_url", "api_key"}
ENVIRONMENT = {
    "reset": "(task: Task) -> Observation | None",
    "step": "(turn: Turn) -> Observation | Done",
    "close": "() -> None",
}
FIELDS = {
    interface.Task: "prompt label metadata source index evaluation",
    interface.ToolCall: "name arguments id",
    interface.Turn: "text content output_ids status thinking tool_calls problem prompt_tokens logprobs",
    interface.Observation: "content role",
    interface.Done: "reward parts answer",
}


def signature(function: object) -> str:
    shown = str(inspect.signature(function)).replace("'", "")  # type: ignore[arg-type]
    return shown.replace("(self, ", "(").replace("(self)", "()")


def public(protocol: type) -> set[str]:
    return {name for name in vars(protocol) if not name.startswith("_")}


def test_a_session_is_this() -> None:
    assert {name: signature(getattr(interface.Session, name)) for name in METHODS} == METHODS
    assert public(interface.Session) == METHODS.keys() | PROPERTIES
    assert all(isinstance(vars(interface.Session)[name], property) for name in PROPERTIES)


def test_an_environment_is_this() -> None:
    assert {name: signature(getattr(interface.Environment, name)) for name in ENVIRONMENT} == ENVIRONMENT
    assert public(interface.Environment) - {"recovery"} == ENVIRONMENT.keys()
    assert (
        signature(interface.RolloutFunction.__call__)
        == "(session: Session, **options: Any) -> Awaitable[Score | None]"
    )


def test_what_a_rollout_sees_is_this() -> None:
    assert {kind: " ".join(item.name for item in fields(kind)) for kind in FIELDS} == FIELDS


def test_the_session_of_a_run_is_one() -> None:
    missing = public(interface.Session) - set(dir(LiveSession))
    assert not missing
    for name, shown in METHODS.items():
        assert signature(getattr(LiveSession, name)).replace("LiveSession", "Session") == shown
