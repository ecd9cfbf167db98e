"""What is trained of a whole dialogue: a table of templates and dialogues, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.connectors.huggingface.dialogue import Dialogues, TrainedDialogue
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.contracts.rows.chat_options import ChatOptions
from millrace.core.contracts.rows.messages import LossOn, for_template, trained_messages
from millrace.core.errors import ConfigError
from tests.support.chat_templates import TOOL, tokenizer_of

Message = dict[str, Any]


@cache
def reader(family: str) -> Dialogues:
    tokenizer = build_tokenizer(tools=True) if family == "tiny" else tokenizer_of(family)
    return Dialogues(PromptTokenizer(tokenizer), ())


def said(role: str, content: str | None = None, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(a: int, b: int) -> list[Message]:
    return [{"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}]


def learn(
    family: str,
    messages: Sequence[Message],
    loss_on: LossOn = "assistant",
    options: ChatOptions | None = None,
) -> TrainedDialogue:
    numbers = trained_messages(messages, loss_on)
    return reader(family).trained(messages, numbers, options or ChatOptions(tools=[TOOL]))


def trained_texts(family: str, dialogue: TrainedDialogue) -> list[str]:
    """The text of each run of trained tokens."""
    runs: list[list[int]] = []
    before = 0
    for token, mask in zip(dialogue.tokens, dialogue.mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return [reader(family).decode(run) for run in runs]


ASKED, AGAIN = said("user", "What is 2 + 2?"), said("user", "And 3?")
TWO_TURNS = [ASKED, said("assistant", "It is 4."), AGAIN, said("assistant", "7 naïve 日本 🙂 \u0301")]
WITH_TOOL = [
    said("system", "Be brief."),
    ASKED,
    said("assistant", "", tool_calls=call(2, 2)),
    said("tool", "4"),
    said("assistant", "Four."),
]
THINKING = [ASKED, said("assistant", "Yes.", reasoning_content="Hm."), AGAIN, said("assistant", "No.")]
CHATML_CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
UNICODE = "7 naïve 日本 🙂 \u0301"
TABLE: list[tuple[str, str, list[Message], LossOn, list[str]]] = [
    ("chatml", "two turns", TWO_TURNS, "assistant", ["It is 4.<|im_end|>", f"{UNICODE}<|im_end|>"]),
    ("llama3", "two turns", TWO_TURNS, "assistant", ["It is 4.<|eot_id|>", f"{UNICODE}<|eot_id|>"]),
    ("glm4", "two turns", TWO_TURNS, "assistant", ["It is 4.<|user|>", f"{UNICODE}<|user|>"]),
    ("deepseek", "two turns", TWO_TURNS, "assistant", ["It is 4.<｜end▁of▁sentence｜>", f"{UNICODE}<｜end▁of▁sentence｜>"]),
    ("tiny", "two turns", [ASKED, said("assistant", "4"), AGAIN, said("assistant", "7")], "assistant", ["4<eos>", "7<eos>"]),
    ("chatml", "the last turn", TWO_TURNS, "last_assistant", [f"{UNICODE}<|im_end|>"]),
    ("chatml", "a tool", WITH_TOOL, "assistant", [CHATML_CALL, "Four.<|im_end|>"]),
    ("tiny", "a tool", WITH_TOOL, "assistant", ["add(a=2,b=2)<eos>", "Four.<eos>"]),
    ("glm4", "a tool", WITH_TOOL, "assistant", ["\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>", "Four.<|user|>"]),
    ("chatml", "thinking", THINKING, "assistant", ["<think>\nHm.\n</think>\n\nYes.<|im_end|>", "No.<|im_end|>"]),
    ("qwen3", "thinking, the last turn", THINKING, "last_assistant", ["<think>\n\n</think>\n\nNo.<|im_end|>"]),
    ("chatml", "an empty turn", [ASKED, said("assistant", "")], "assistant", ["<|im_end|>"]),
    ("chatml", "a first newline", [ASKED, said("assistant", "\n\nYes\n")], "assistant", ["\n\nYes\n<|im_end|>"]),
    ("chatml", "the same text twice", [said("user", "Yes."), said("assistant", "Yes."), said("user", "Yes.")], "assistant", ["Yes.<|im_end|>"]),
    ("chatml", "a special token in the text", [ASKED, said("assistant", "a<|im_end|>b")], "assistant", ["a<|im_end|>b<|im_end|>"]),
    ("chatml", "switched off", [ASKED, said("assistant", "No.", train=False), AGAIN, said("assistant", "Yes.", weight=1)], "assistant", ["Yes.<|im_end|>"]),
    ("chatml", "the last one off", [ASKED, said("assistant", "Yes."), AGAIN, said("assistant", "No.", weight=0)], "assistant", ["Yes.<|im_end|>"]),
    ("chatml", "an earlier one on", [ASKED, said("assistant", "Yes.", weight=1.0), AGAIN, said("assistant", "No.")], "last_assistant", ["Yes.<|im_end|>", "No.<|im_end|>"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "messages", "loss_on", "expected"),
    [
        pytest.param(family, messages, on, texts, id=f"{family}, {name}")
        for family, name, messages, on, texts in TABLE
    ],
)
def test_what_the_assistant_says_is_trained_and_nothing_else(
    family: str, messages: list[Message], loss_on: LossOn, expected: list[str]
) -> None:
    found = learn(family, messages, loss_on)
    assert trained_texts(family, found) == expected
    assert found.mask[0] == 1
    assert found.turns == len(expected)
    assert found.text == reader(family).decode(found.tokens)
    tokenizer = reader(family)._tokenizer.tokenizer
    whole = tokenizer.apply_chat_template(for_template(messages), tools=[TOOL], tokenize=False)
    text = reader(family).decode([*found.prompt_tokens, *found.tokens])
    assert text in (whole, f"{whole}<|user|>")  # where a template ends no turn, its end is added to the last


@pytest.mark.parametrize("family", ["chatml", "glm4", "deepseek", "tiny"])
def test_the_tokens_are_those_of_the_whole_text_where_no_token_spans_a_cut(family: str) -> None:
    messages = [ASKED, said("assistant", "4."), AGAIN, said("assistant", "7")]
    found, tokenizer = learn(family, messages), reader(family)._tokenizer.tokenizer
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=True, return_dict=False)
    assert [*found.prompt_tokens, *found.tokens][: len(whole)] == whole


def test_the_prompt_is_the_one_that_generation_would_have() -> None:
    found = learn("chatml", WITH_TOOL)
    assert found.prompt_tokens == reader("chatml").opening(WITH_TOOL[:2], True, ChatOptions(tools=[TOOL]))


def test_a_template_that_drops_thinking_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="rewritten turn: .* message 1 .* loss_on: last_assistant"):
        learn("qwen3", THINKING)


def test_what_the_template_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="one call at a time"):
        learn("llama3", [ASKED, said("assistant", "", tool_calls=call(1, 2) * 2)])


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    with pytest.raises(ValueError, match="endless turn: .* message 1 .* eos_token"):
        Dialogues(PromptTokenizer(tokenizer), ()).trained(TWO_TURNS[:2], [1])


def test_a_tokenizer_that_puts_spaces_before_texts_is_refused() -> None:
    from tokenizers import decoders, pre_tokenizers

    tokenizer = tokenizer_of("chatml")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(ConfigError, match="puts a space before every text"):
        Dialogues(PromptTokenizer(tokenizer), ()).trained(TWO_TURNS, [1, 3])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "<|" not in text)


@st.composite
def random_dialogues(draw: st.DrawFn) -> list[Message]:
    messages = [said("system", draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(said("user", "?" + draw(TEXTS)))
        if draw(st.booleans()):
            messages.append(said("assistant", draw(TEXTS), tool_calls=call(1, 2)))
            messages.append(said("tool", draw(TEXTS)))
        messages.append(said("assistant", draw(TEXTS)))
    for message in messages:
        if message["role"] == "assistant" and draw(st.booleans()):
            message["train"] = draw(st.booleans())
    return messages


@settings(deadline=None, max_examples=60)
@given(random_dialogues(), st.sampled_from(["assistant", "last_assistant"]))
def test_trained_tokens_decode_to_what_assistants_said(messages: list[Message], loss_on: LossOn) -> None:
    last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
    expected = []
    for number, message in enumerate(messages):
        default = message["role"] == "assistant" and (loss_on == "assistant" or number == last)
        if message.get("train", default):
            calls = CHATML_CALL.replace('"a": 2', '"a": 1') if "tool_calls" in message else "<|im_end|>"
            expected.append(message["content"] + calls)
    if not expected:
        with pytest.raises(ValueError, match="nothing to train"):
            trained_messages(messages, loss_on)
        return
    found = learn("chatml", messages, loss_on)
    assert trained_texts("chatml", found) == expected
    tokenizer = reader("chatml")._tokenizer.tokenizer
    whole = tokenizer.apply_chat_template(for_template(messages), tools=[TOOL], tokenize=False)
    assert reader("chatml").decode([*found.prompt_tokens, *found.tokens]) == whole


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASKED], "nothing to train: no message is the assistant's"),
        ([ASKED, said("assistant", "a", train=False)], "nothing to train: every message"),
        ([said("user", "a", train=True), said("assistant", "a")], "bad message: number 0: .* role is user"),
        (
            [ASKED, said("assistant", "a", weight=0.5)],
            "bad message: number 1: weight is 0.5, neither 0 nor 1",
        ),
        ([ASKED, said("assistant", "a", train="yes")], "bad message: number 1: train is yes"),
        ([ASKED, said("assistant", "a", train=True, weight=0)], "bad message: number 1: .* contradict"),
    ],
)
def test_switches_that_cannot_be_obeyed_are_refused(messages: list[Message], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        trained_messages(messages, "assistant")
