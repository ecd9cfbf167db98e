"""Finds the place of a whole message history among a rollout's turns: a repeated request, the next turn, or a new branch. Pure.

Owns what counts as the same message. A client over HTTP sends all messages with each request. They are compared with earlier
requests and answers, message by message. A difference starts a new branch, and nothing is ever repaired. The result depends
only on the order of the requests. Knows nothing of HTTP, tokens or processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.plain_text import json_text
from millrace.core.sessions.interface import Message, Turn

KNOWN = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")


@dataclass(frozen=True)
class HistoryMessage:
    """A message in the form that is compared."""

    role: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments
    # which call of which assistant message a tool answers, by position, since the client chooses ids
    answers: str = ""
    thinking: str | None = None  # None: not sent
    more: str = ""  # other keys, as JSON

    def repeats(self, turn: HistoryMessage) -> bool:
        """Whether the message repeats a turn. Thinking counts if it was sent."""
        thinking = turn.thinking if self.thinking is None else self.thinking
        return HistoryMessage(self.role, self.content, self.calls, self.answers, thinking, self.more) == turn


def compared(messages: Sequence[Message]) -> tuple[HistoryMessage, ...]:
    """All messages in the form that is compared. Contents are text."""
    calls: dict[str, str] = {}  # position of a call by its id
    found: list[HistoryMessage] = []
    for number, message in enumerate(messages):
        # token ids equal no message
        if "ids" in message:
            found.append(HistoryMessage("", json.dumps(message["ids"])))
            continue
        asked = message.get("tool_calls") or ()
        calls |= {call["id"]: f"{number}.{at}" for at, call in enumerate(asked) if call.get("id")}
        answered = message.get("tool_call_id") or ""
        more = {
            key: value for key, value in message.items() if key not in KNOWN and value not in (None, [], {})
        }
        found.append(
            HistoryMessage(
                role=str(message["role"]),
                content=str(message.get("content") or ""),
                calls=tuple((call["function"]["name"], _arguments(call["function"])) for call in asked),
                answers=calls.get(answered, answered),
                thinking=message.get("reasoning_content"),
                more=_text(more) if more else "",
            )
        )
    return tuple(found)


def said_by(turn: Turn) -> HistoryMessage:
    """A turn in the form that is compared."""
    calls = tuple((call.name, _text(call.arguments)) for call in turn.tool_calls)
    return HistoryMessage("assistant", turn.content, calls, thinking=turn.thinking)


def _arguments(function: Mapping[str, Any]) -> str:
    given = function.get("arguments") or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return given
    return _text(given)


def _text(value: Any) -> str:
    return json_text(value, sort_keys=True, default=str)


@dataclass(eq=False)
class TurnKey:
    """A turn that was asked for: after the previous turn and some messages, with some options."""

    branch: int
    index: int  # number among the turns of its branch
    endpoint: int
    before: TurnKey | None
    new: tuple[HistoryMessage, ...]
    options: str
    turn: Turn | None = None  # None until the turn is generated
    after: list[TurnKey] = field(default_factory=list)

    @property
    def path(self) -> list[TurnKey]:
        """The turns up to this one, included."""
        place: TurnKey | None = self
        found: list[TurnKey] = []
        while place is not None:
            found.append(place)
            place = place.before
        return found[::-1]


@dataclass(frozen=True)
class Again:
    """The same request was made before."""

    place: TurnKey


@dataclass(frozen=True)
class GoOn:
    """The next turn of a branch. The messages before `known` are in it."""

    branch: int
    known: int


@dataclass(frozen=True)
class Begin:
    """A new branch after a turn, with the messages from `known` on. None: the whole history is its own prompt."""

    after: TurnKey | None
    known: int


@dataclass
class _Line:
    """The state of a branch."""

    endpoint: int
    tip: TurnKey | None  # its newest turn, or the turn that it started after
    opening: tuple[HistoryMessage, ...]  # messages before its first turn
    open: bool = True  # whether it can continue: no turn is running, none failed, and its function observed nothing itself


class History:
    """The turns of one rollout, and the endpoints to them.

    An endpoint is a branch that the rollout's function made, by its number. A client behind it sees the turns that its branch
    started with and the turns made through it, no others: the same messages from two agents are two branches.
    """

    def __init__(self) -> None:
        self._first: list[TurnKey] = []
        self._lines: dict[int, _Line] = {}
        self._before: dict[int, list[TurnKey]] = {}  # turns that an endpoint's branch started with

    def begin(
        self, branch: int, endpoint: int, opening: Sequence[HistoryMessage] = (), after: TurnKey | None = None
    ) -> None:
        """Note a new branch: with a prompt, after a turn, or both."""
        self._lines[branch] = _Line(endpoint, after, tuple(opening))
        if branch == endpoint:
            self._before[endpoint] = after.path if after else []

    def fork(self, branch: int, parent: int) -> None:
        """Note a new branch that is an endpoint, after its parent's newest turn."""
        line = self._lines[parent]
        tip = line.tip.before if line.tip and line.tip.turn is None else line.tip
        self.begin(branch, branch, line.opening, tip)

    def touch(self, branch: int) -> None:
        """Note that the function itself adds to a branch: no client can know its state."""
        self._lines[branch].open = False

    def ask(self, branch: int, new: Sequence[HistoryMessage], options: str) -> TurnKey:
        """Note that a turn of a branch is asked for, after new messages."""
        line = self._lines[branch]
        index = line.tip.index + 1 if line.tip and line.tip.branch == branch else 0
        place = TurnKey(branch, index, line.endpoint, line.tip, (*line.opening, *new), options)
        (line.tip.after if line.tip else self._first).append(place)
        line.tip, line.opening, line.open = place, (), False
        return place

    def answered(self, place: TurnKey, turn: Turn) -> None:
        """Note a generated turn, so that its branch can continue."""
        place.turn = turn
        self._lines[place.branch].open = True

    def decide(self, endpoint: int, history: Sequence[HistoryMessage], options: str) -> Again | GoOn | Begin:
        """Classify a request by its history and options."""
        reached = list(self._reached(endpoint, history))
        for known, before in reached:
            for place in self._visible(endpoint, before):
                if place.new == tuple(history[known:]) and place.options == options:
                    return Again(place)
        farthest = max(known for known, _ in reached)
        ends = [before for known, before in reached if known == farthest]
        for number, line in self._lines.items():
            if line.open and line.endpoint == endpoint and line.tip in ends and (line.tip or line.opening):
                known = farthest + len(line.opening)
                if tuple(history[farthest:known]) == line.opening:
                    return GoOn(number, known)
        return Begin(ends[0], farthest)

    def _reached(
        self, endpoint: int, history: Sequence[HistoryMessage]
    ) -> Iterator[tuple[int, TurnKey | None]]:
        """The turns that the history contains, each with the number of messages up to it; the oldest of equal turns first."""
        waiting: list[tuple[int, TurnKey | None]] = [(0, None)]
        while waiting:
            known, before = waiting.pop()
            yield known, before
            found: list[tuple[int, TurnKey | None]] = []
            for place in self._visible(endpoint, before):
                end = known + len(place.new)
                same = end < len(history) and place.new == tuple(history[known:end])
                if same and place.turn and history[end].repeats(said_by(place.turn)):
                    found.append((end + 1, place))
            waiting += found[::-1]

    def _visible(self, endpoint: int, before: TurnKey | None) -> list[TurnKey]:
        places = before.after if before else self._first
        return [place for place in places if place.endpoint == endpoint or place in self._before[endpoint]]
