"""Whole histories against the turns of a rollout: a table of cases, and that any mixture of requests keeps the promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.sessions.history import Again, Begin, GoOn, History, TurnKey, compared
from millrace.core.sessions.interface import Message, ToolCall, Turn

PROMPT: Message = {"role": "user", "content": "1+1="}
NEXT: Message = {"role": "user", "content": "again"}


class Rollout:
    """Asks as sessions do, and answers at once unless it is told to wait. Keeps what each turn was generated after."""

    def __init__(self, turns: Sequence[Turn] = ()) -> None:
        self.history = History()
        self.history.begin(0, 0, compared([PROMPT]))
        self.places: list[TurnKey] = []
        self.branches = 1
        self._turns = list(turns)

    def ask(self, *messages: Message, options: str = "", wait: bool = False) -> tuple[str, TurnKey]:
        said = compared(messages)
        found = self.history.decide(0, said, options)
        if isinstance(found, Again):
            return "again", found.place
        if isinstance(found, Begin):
            branch = self.branches
            self.branches += 1
            self.history.begin(branch, 0, after=found.after)
        else:
            branch = found.branch
        place = self.history.ask(branch, said[found.known :], options)
        self.places.append(place)
        if not wait:
            self.answer(place)
        return "go on" if isinstance(found, GoOn) else "begin", place

    def answer(self, place: TurnKey) -> None:
        number = self.places.index(place)
        turn = self._turns[number] if number < len(self._turns) else spoken(f"turn {number}")
        self.history.answered(place, turn)


def spoken(text: str, **more: Any) -> Turn:
    return Turn(text=text, content=text, output_ids=[1], status="completed", **more)


def said(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Any, name: str = "add", number: str = "call-0-0-0") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


THINKS = spoken("2", thinking="one and one")
CALLS = spoken("", tool_calls=[ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4})])
BOTH = [call('{"b": 2, "a": 1}', number="x"), call({"a": 3, "b": 4}, number="y")]
FIRST, SECOND = ({"role": "tool", "tool_call_id": each, "content": "3"} for each in "xy")

# after one turn on the prompt: the turn, the next history, what it is, and how many of its messages are known
CASES: dict[str, tuple[Turn, list[Message], str, int]] = {
    "goes on": (spoken("2"), [PROMPT, said("2"), NEXT], "go on", 2),
    "several messages": (spoken("2"), [PROMPT, said("2"), NEXT, NEXT], "go on", 2),
    "thinking is not sent": (THINKS, [PROMPT, said("2"), NEXT], "go on", 2),
    "thinking is sent": (THINKS, [PROMPT, said("2", reasoning_content="one and one"), NEXT], "go on", 2),
    "thinking is stripped": (THINKS, [PROMPT, said("2", reasoning_content=""), NEXT], "begin", 0),
    "thinking is other": (THINKS, [PROMPT, said("2", reasoning_content="well"), NEXT], "begin", 0),
    "rewritten": (spoken("2"), [PROMPT, said("two"), NEXT], "begin", 0),
    "white space": (spoken("2 "), [PROMPT, said("2"), NEXT], "begin", 0),
    "another prompt": (spoken("2"), [NEXT], "begin", 0),
    "a system message before": (spoken("2"), [{"role": "system", "content": "x"}, PROMPT], "begin", 0),
    "another role": (spoken("2"), [{**PROMPT, "role": "system"}, said("2"), NEXT], "begin", 0),
    "a key more": (spoken("2"), [PROMPT, said("2", name="a"), NEXT], "begin", 0),
    "empty keys more": (spoken("2"), [PROMPT, said("2", refusal=None, annotations=[]), NEXT], "go on", 2),
    "only the end": (spoken("2"), [said("2"), NEXT], "begin", 0),
    "twice the prompt": (spoken("2"), [PROMPT, PROMPT], "begin", 0),
    "calls, as text and object": (CALLS, [PROMPT, said(None, tool_calls=BOTH), FIRST, SECOND], "go on", 2),
    "calls in another order": (CALLS, [PROMPT, said(None, tool_calls=BOTH[::-1]), FIRST, SECOND], "begin", 0),
    "a call less": (CALLS, [PROMPT, said(None, tool_calls=BOTH[:1]), FIRST], "begin", 0),
    "other arguments": (CALLS, [PROMPT, said("", tool_calls=[call("{}"), BOTH[1]]), FIRST], "begin", 0),
    "broken arguments": (CALLS, [PROMPT, said("", tool_calls=[call("{"), BOTH[1]]), FIRST], "begin", 0),
    "calls as text": (CALLS, [PROMPT, said("add(1, 2)"), NEXT], "begin", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_where_a_history_stands_after_one_turn(case: str) -> None:
    turn, history, kind, known = CASES[case]
    rollout = Rollout([turn])
    assert rollout.ask(PROMPT) == ("go on", rollout.places[0])
    found, place = rollout.ask(*history)
    assert (found, len(history) - len(place.new)) == (kind, known)
    assert place.branch == (0 if kind == "go on" else 1)


def test_the_task_may_open_with_more_than_its_prompt() -> None:
    found, place = Rollout().ask(PROMPT, said("a shot"), NEXT)
    assert (found, place.branch, len(place.new)) == ("go on", 0, 3)


def test_another_first_history_leaves_the_first_branch_for_the_prompt() -> None:
    rollout = Rollout()
    assert rollout.ask(NEXT)[1].branch == 1
    assert rollout.ask(PROMPT)[1].branch == 0


def test_a_branch_begins_after_the_turns_that_match() -> None:
    rollout = Rollout()
    dialogue = [PROMPT]
    for number in range(3):
        rollout.ask(*dialogue)
        dialogue += [said(f"turn {number}"), NEXT]
    found, place = rollout.ask(*dialogue[:3], said("rewritten"), NEXT)
    assert (found, place.branch, place.before) == ("begin", 1, rollout.places[0])
    assert len(place.new) == 3
    found, place = rollout.ask(*dialogue[:4], NEXT, NEXT)
    assert (found, place.branch, place.before) == ("begin", 2, rollout.places[1])
    assert rollout.ask(*dialogue)[1].branch == 0


def test_the_same_is_one_turn_and_other_options_are_another() -> None:
    rollout = Rollout()
    assert rollout.ask(PROMPT, wait=True)[1] is rollout.ask(PROMPT)[1]
    found, place = rollout.ask(PROMPT, options="short")
    assert (found, place.branch) == ("begin", 1)
    assert rollout.ask(PROMPT, options="short") == ("again", place)


def test_a_branch_with_a_turn_under_way_or_failed_does_not_go_on() -> None:
    rollout = Rollout()
    _, first = rollout.ask(PROMPT)
    _, waits = rollout.ask(PROMPT, said("turn 0"), NEXT, wait=True)
    found, other = rollout.ask(PROMPT, said("turn 0"), PROMPT)
    assert (found, other.branch, other.before) == ("begin", 1, first)
    assert waits.branch == 0


def test_answers_to_calls_are_known_by_the_calls_place_and_not_by_its_id() -> None:
    rollout = Rollout([CALLS])
    rollout.ask(PROMPT)
    begun = [PROMPT, said("", tool_calls=BOTH)]
    _, place = rollout.ask(*begun, FIRST, SECOND)
    renamed = [call('{"a": 1, "b": 2}', number="p"), call('{"a": 3, "b": 4}', number="q")]
    answers = [{"role": "tool", "tool_call_id": each, "content": "3"} for each in "pq"]
    assert rollout.ask(PROMPT, said("", tool_calls=renamed), *answers) == ("again", place)
    assert rollout.ask(*begun, SECOND, FIRST)[0] == "begin"


def test_of_two_branches_that_said_the_same_the_one_that_can_go_on_does() -> None:
    rollout = Rollout([spoken("2"), spoken("2")])
    rollout.ask(PROMPT)
    rollout.ask(PROMPT, options="short")
    dialogue = [PROMPT, said("2")]
    assert rollout.ask(*dialogue, NEXT)[1].branch == 0
    assert rollout.ask(*dialogue, PROMPT)[1].branch == 1


def test_a_door_shows_what_its_branch_began_with_and_no_more() -> None:
    rollout = Rollout()
    rollout.ask(PROMPT)
    history = rollout.history
    history.fork(1, 0)
    rollout.ask(PROMPT, said("turn 0"), NEXT)
    dialogue = compared([PROMPT, said("turn 0"), NEXT])
    assert isinstance(history.decide(0, dialogue, ""), Again)
    assert history.decide(1, dialogue, "") == GoOn(1, 2)
    assert isinstance(history.decide(1, dialogue[:1], ""), Again)


def test_what_the_function_adds_itself_is_unknown_to_a_client() -> None:
    rollout = Rollout()
    rollout.ask(PROMPT)
    rollout.history.touch(0)
    assert rollout.ask(PROMPT, said("turn 0"), NEXT)[0] == "begin"


# any mixture: go on from a dialogue that was answered, ask again, cut, rewrite

ACTS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "again", "cut", "rewrite", "prompt"]),
        st.integers(0, 50),
        st.integers(0, 50),
        st.sampled_from(["", "short"]),
    ),
    max_size=14,
)


def dialogues(
    acts: Sequence[tuple[str, int, int, str]],
) -> tuple[Rollout, list[tuple[list[Message], str, str, TurnKey]]]:
    """The requests that follow from the acts: messages, options, what each was, and its place."""
    rollout = Rollout()
    sent: list[tuple[list[Message], str, str, TurnKey]] = []
    for act, which, where, options in acts:
        messages: list[Message] = [PROMPT]
        if sent and act != "prompt":
            messages, before, _, place = sent[which % len(sent)]
            messages = list(messages)
            assert place.turn
            if act == "again":
                options = before
            elif act == "go on":
                messages += [said(place.turn.content), {"role": "user", "content": str(where % 2)}]
            elif act == "cut":
                messages = [*messages[: where % len(messages)], NEXT]
            else:
                at = where % len(messages)
                messages[at] = {**messages[at], "content": f"{messages[at]['content']}!"}
        sent.append((messages, options, *rollout.ask(*messages, options=options)))
    return rollout, sent


@given(ACTS)
def test_a_turn_follows_exactly_what_its_client_sent(acts: list[tuple[str, int, int, str]]) -> None:
    _, sent = dialogues(acts)
    for messages, options, _, place in sent:
        path: list[Message] = []
        for each in place.path:
            path += [{"role": message.role, "content": message.content} for message in each.new]
            if each is not place and each.turn:
                path.append(said(each.turn.content))
        assert path == messages
        assert place.options == options


@given(ACTS)
def test_a_branch_is_its_turns_in_order_and_none_is_in_two(acts: list[tuple[str, int, int, str]]) -> None:
    rollout, _ = dialogues(acts)
    turns = [(place.branch, place.index) for place in rollout.places]
    assert len(set(turns)) == len(turns)
    for place in rollout.places:
        if place.index:
            assert place.before is not None
            assert (place.before.branch, place.before.index) == (place.branch, place.index - 1)


@given(ACTS)
def test_asking_again_makes_no_turn_and_replaying_makes_the_same(
    acts: list[tuple[str, int, int, str]],
) -> None:
    rollout, sent = dialogues(acts)
    turns = len(rollout.places)
    for messages, options, _, place in sent:
        assert rollout.ask(*messages, options=options) == ("again", place)
    assert len(rollout.places) == turns
    _, replayed = dialogues(acts)
    assert [(kind, place.branch, place.index) for _, _, kind, place in sent] == [
        (kind, place.branch, place.index) for _, _, kind, place in replayed
    ]
