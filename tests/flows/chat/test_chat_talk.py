"""A conversation of `millrace chat`: exact in tokens, with tools; a turn that fails leaves no trace. The model is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from millrace.connectors.engines.embedded.sampling import SamplingParams
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.user_code.mcp_tools import WorkerTools, tool_schemas
from millrace.core.config.rollout import SessionSection
from millrace.core.errors import ConfigError
from millrace.flows.chat.speaker import OnText, Said, settled
from millrace.flows.chat.talk import ChatTools, Talk
from millrace.flows.commands.chat import _answer
from tests.support.session_place import CALL, TOKENIZER

FUNCTIONS = "tests.support.chat_tools"


@dataclass
class Scripted:
    """Says texts in turn; "" raises."""

    texts: Sequence[str]
    truncated: bool = False
    asked: list[list[int]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    async def answer(
        self, prompt: Sequence[int], params: SamplingParams, seed: int | None, on_text: OnText
    ) -> Said:
        text = self.texts[len(self.asked)]
        self.asked.append(list(prompt))
        self.seeds.append(seed)
        if not text:
            raise ConfigError("does not fit")
        on_text(text)
        ids = TOKENIZER.tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
        return Said(ids, text, self.truncated)

    def close(self) -> None:
        pass


@dataclass
class Kept:
    """What a person sees."""

    said: list[str] = field(default_factory=list)

    def text(self, piece: str) -> None:
        self.said.append(piece)

    def event(self, line: str) -> None:
        self.said.append(line)


def talk_of(
    *texts: str, tools: Sequence[str] = (), max_turns: int = 4, **changes: object
) -> tuple[Talk, Scripted]:
    session = SessionSection.model_validate({"tools": [f"{FUNCTIONS}:{name}" for name in tools]})
    schemas = tool_schemas(session.tools)
    called = ChatTools(WorkerTools(session.tools), 0.2, max_turns) if tools else None
    model = Scripted(texts)
    talk = Talk(
        model,
        Dialogues(TOKENIZER, schemas),
        SamplingParams(),
        chat=True,
        called=called,
        **changes,  # type: ignore[arg-type]
    )
    return talk, model


def shown(ids: Sequence[int]) -> str:
    text: str = TOKENIZER.tokenizer.decode(list(ids))
    return text


async def test_a_conversation_grows_by_what_was_said_and_by_new_messages_alone() -> None:
    talk, model = talk_of("It is 2.", "It is 4.", system="Be brief.", seed=7)
    for text in ("1+1=", "2+2="):
        await talk.say(text, Kept())
    first, second = model.asked
    said = TOKENIZER.tokenizer("It is 2.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert second[: len(first) + len(said)] == [*first, *said]
    assert shown(first).startswith("<|im_start|>system\nBe brief.")
    assert shown(second[len(first) + len(said) :]).split("\n")[1:3] == ["<|im_start|>user", "2+2=<|im_end|>"]
    assert model.seeds == [7, 8]
    talk.restart()
    assert talk.ids == []


async def test_a_call_is_made_and_its_answer_goes_to_the_model() -> None:
    talk, model = talk_of(CALL % ("add", '{"a": 2, "b": 3}'), "It is 5.", tools=["add"])
    seen = Kept()
    await talk.say("2+3=", seen)
    assert "<tool_response>\n5\n</tool_response>" in shown(model.asked[1])
    assert seen.said[1:] == ['[calls add {"a": 2, "b": 3}]', "[answer: 5]", "It is 5."]
    assert "# Tools" in shown(model.asked[0])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fail", "fail failed: ValueError: no"),
        ("wait", "wait failed: no answer after 0.2 s"),
        ("gone", "there is no tool gone; there are add, fail, wait"),
    ],
)
async def test_a_call_that_fails_is_an_answer(name: str, says: str) -> None:
    talk, model = talk_of(CALL % (name, "{}"), "So.", tools=["add", "fail", "wait"])
    await talk.say("go", Kept())
    assert says in shown(model.asked[1])


async def test_a_call_that_cannot_be_read_is_said_to_the_model() -> None:
    talk, model = talk_of("<tool_call>\nadd(2\n</tool_call>", "So.", tools=["add"])
    await talk.say("go", Kept())
    assert "The call could not be read" in shown(model.asked[1])


async def test_calls_end_at_the_runs_limit_and_without_tools_none_is_made() -> None:
    call = CALL % ("add", '{"a": 2, "b": 3}')
    talk, model = talk_of(call, call, call, tools=["add"], max_turns=2)
    seen = Kept()
    await talk.say("go", seen)
    assert len(model.asked) == 2
    assert seen.said[-1] == "[no more calls: rollout.session.max_turns = 2]"
    talk, model = talk_of(call)
    await talk.say("go", Kept())
    assert len(model.asked) == 1


async def test_a_turn_that_fails_leaves_the_conversation_as_it_was() -> None:
    talk, model = talk_of("It is 2.", "", "It is 4.")
    await talk.say("1+1=", Kept())
    before = list(talk.ids)
    with pytest.raises(ConfigError, match="does not fit"):
        await talk.say("2+2=", Kept())
    assert (talk.ids, talk.turns) == (before, 1)
    await talk.say("2+2=", Kept())
    assert model.asked[2] == model.asked[1]


def test_a_message_that_one_of_two_cannot_answer_is_in_neither_conversation() -> None:
    first, second = talk_of("It is 2.", "It is 4.")[0], talk_of("It is 2.", "")[0]
    with asyncio.Runner() as runner:
        _answer(runner, [first, second], ["one", "two"], "1+1=")
        before = [(list(talk.ids), talk.turns) for talk in (first, second)]
        assert [turns for _, turns in before] == [1, 1]
        _answer(runner, [first, second], ["one", "two"], "2+2=")
    assert [(talk.ids, talk.turns) for talk in (first, second)] == before


async def test_an_answer_that_is_cut_off_is_said_and_calls_nothing() -> None:
    talk, model = talk_of(CALL % ("add", '{"a": 2, "b": 3}'), tools=["add"])
    model.truncated = True
    seen = Kept()
    await talk.say("go", seen)
    assert "cut off after" in seen.said[-1]


@pytest.mark.parametrize(
    ("text", "stops", "sure"),
    [
        ("It is", [], "It is"),
        ("It is é\ufffd\ufffd", [], "It is é"),
        ("It is EN", ["END"], "It is "),
        ("EN", ["END"], ""),
    ],
)
def test_what_later_tokens_may_change_is_not_shown(text: str, stops: list[str], sure: str) -> None:
    assert settled(text, stops) == sure
