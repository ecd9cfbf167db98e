"""Dialogues grow by what is new alone: over templates of every behaviour, and over random dialogues, nothing drifts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from millrace.connectors.huggingface.dialogue import Dialogues, dialogues
from millrace.connectors.huggingface.response_templates import FAMILIES, template_for
from millrace.connectors.huggingface.suffix import Difference, first_difference
from millrace.connectors.huggingface.template import ChatTemplate
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from tests.support.chat_templates import SPECIAL, TEMPLATES, TOOL, tokenizer_of

Message = Mapping[str, Any]
REWRITES = {  # family, what follows a turn: what the template no longer sends then; none: it leaves all as it was
    ("chatml", "user"): None,
    ("chatml", "tool"): None,
    ("qwen3", "user"): "<think>",
    ("qwen3", "tool"): None,
    ("llama3", "user"): None,
    ("llama3", "tool"): None,
    ("glm4", "user"): None,
    ("glm4", "tool"): None,
    ("deepseek", "user"): "<think>",
    ("deepseek", "tool"): "<think>",
}


@cache
def tokenizer(family: str) -> Any:
    return tokenizer_of(family)


def rendered(family: str, messages: Sequence[Message], for_answer: bool) -> str:
    text: str = tokenizer(family).apply_chat_template(
        list(messages), tools=[TOOL], tokenize=False, add_generation_prompt=for_answer
    )
    return text


def found_difference(family: str, follows: Any) -> Difference | None:
    template = ChatTemplate(TEMPLATES[family], {})

    def render(messages: Sequence[Message], for_answer: bool) -> str:
        return template.render([dict(message) for message in messages], None, for_answer, [TOOL])

    return first_difference(render, dialogues(follows), SPECIAL[family])


def test_every_template_has_a_row() -> None:
    assert {family for family, _ in REWRITES} == TEMPLATES.keys() == SPECIAL.keys()


@pytest.mark.parametrize(("family", "follows"), REWRITES)
def test_a_template_that_rewrites_turns_is_found_and_no_other(family: str, follows: str) -> None:
    difference = found_difference(family, follows)
    lost = REWRITES[family, follows]
    if lost is None:
        assert difference is None
    else:
        assert difference is not None
        assert difference.grown.startswith(lost)


ALPHABET = [
    "a",
    "the ",
    "4",
    "\n",
    " ",
    "  ",
    "日",
    "🙂",
    "é",
    "\u0301",
    "<b>",
    "{",
    "}",
    "'",
    "\\",
    "</s",
    "\t",
]


def text(numbers: random.Random, least: int = 0) -> str:
    return "".join(numbers.choices(ALPHABET, k=numbers.randint(least, 12)))


def grown_and_rendered(family: str, follows: str, seed: int) -> tuple[list[int], list[int]]:
    """Tokens of a random dialogue as it grows turn by turn, and as the template renders all of it at the end.

    A turn's tokens are cut at random places, as no tokenizer would: what is compared is their text.
    """
    numbers = random.Random(seed)
    made = Dialogues(PromptTokenizer(tokenizer(family), [TOOL]), [TOOL])
    messages: list[Message] = [{"role": "user", "content": text(numbers, 1)}]
    ids = made.opening(messages, chat=True)
    for _ in range(numbers.randint(1, 4)):
        calls = numbers.randint(1, 1 if family == "llama3" else 3) if follows == "tool" else 0
        turn: dict[str, Any] = {"role": "assistant", "content": text(numbers)}
        if calls:
            arguments = {"a": numbers.randint(0, 99), "b": numbers.randint(0, 9)}
            turn["tool_calls"] = [
                {"type": "function", "function": {"name": "add", "arguments": arguments}}
            ] * calls
        before = rendered(family, messages, True)
        said = rendered(family, [*messages, turn], False).removeprefix(before)
        new: list[Message] = [{"role": follows, "content": text(numbers, 1)} for _ in range(calls or 1)]
        after = rendered(family, [*messages, turn, *new], True)
        end = next((end for end in SPECIAL[family] if said.rstrip("\n").endswith(end)), "")
        if not end:  # what ends the turn is what begins the next message
            end = next(end for end in SPECIAL[family] if after.removeprefix(before + said).startswith(end))
            said += end
        ids += in_pieces(family, said.rstrip("\n"), numbers)
        ids += made.following(new, ids, chat=True)
        messages += [turn, *new]
    return ids, made.opening(messages, chat=True)


def in_pieces(family: str, said: str, numbers: random.Random) -> list[int]:
    """Token ids of a text that is cut in two where no special token stands."""
    end = next(end for end in SPECIAL[family] if said.endswith(end))
    body = said.removesuffix(end)
    cut = numbers.randint(0, len(body)) if not any(token in body for token in SPECIAL[family]) else 0
    encode = tokenizer(family)
    parts = [encode(part, add_special_tokens=False)["input_ids"] for part in (body[:cut], body[cut:], end)]
    return [token for part in parts for token in part]


GROW = [key for key, lost in REWRITES.items() if key[0] != "qwen3" or not lost]


@pytest.mark.parametrize(("family", "follows"), GROW)
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_dialogues_grow_to_what_the_template_renders(family: str, follows: str, count: int) -> None:
    """Without thinking no template rewrites a turn, but qwen3's before a message of the user, which is refused."""
    decode = tokenizer(family).decode
    for seed in range(count):
        grown, whole = grown_and_rendered(family, follows, seed)
        assert decode(grown) == decode(whole), f"dialogue {seed}"


def test_every_template_that_grows_is_tried_and_every_other_is_refused() -> None:
    left = REWRITES.keys() - set(GROW)
    assert left == {("qwen3", "user")}
    assert all(found_difference(*key) is not None for key in left)


CALLS: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    # family: an answer as its model writes it, the content, and the calls
    "hermes": (
        '<think>\nhm\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>',
        "I add.",
        [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})],
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>",
        "",
        [("add", {"a": 1, "b": 2})],
    ),
    "llama3": ('{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "", [("add", {"a": 1, "b": 2})]),
    "glm4": (
        "Well.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call><|observation|>",
        "Well.",
        [("add", {"a": 1, "b": 2})],
    ),
    "deepseek": (
        'So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "So.",
        [("add", {"a": 1, "b": 2})],
    ),
}
TOKENIZERS = {"hermes": "chatml", "qwen3_coder": "chatml"}


def reader(family: str) -> Dialogues:
    made = tokenizer_of(TOKENIZERS.get(family, family))
    made.chat_template += f"{{# {FAMILIES[family][0]} #}}"
    if family == "hermes":
        made.chat_template = TEMPLATES["chatml"]
    return Dialogues(PromptTokenizer(made, [TOOL]), [TOOL])


def test_every_family_has_an_answer() -> None:
    assert CALLS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", CALLS)
def test_calls_are_read_as_each_family_writes_them(family: str) -> None:
    answer, content, calls = CALLS[family]
    reading = reader(family).read(answer, [])
    assert reading.problem is None
    assert [(call.name, call.arguments) for call in reading.calls] == calls
    assert reading.content == content


def test_thinking_that_the_prompt_began_is_read_as_thinking() -> None:
    made = Dialogues(PromptTokenizer(tokenizer("chatml"), [TOOL]), [TOOL])
    began = tokenizer("chatml")("<|im_start|>assistant\n<think>\n", add_special_tokens=False)["input_ids"]
    reading = made.read("two and two\n</think>\n\nIt is 4.<|im_end|>", began)
    assert (reading.thinking, reading.content) == ("two and two", "It is 4.")


@pytest.mark.parametrize(
    "answer",
    ['<tool_call>{"name": 3', "<tool_call>\n[1]\n</tool_call>", '<tool_call>{"arguments": {}}</tool_call>'],
)
def test_a_call_that_cannot_be_read_is_a_problem_and_the_text_stays(answer: str) -> None:
    reading = reader("hermes").read(answer + "<|im_end|>", [])
    assert reading.problem
    assert (reading.calls, reading.content) == ([], answer)


def test_no_family_is_seen_in_a_template_without_calls() -> None:
    assert template_for("{{ messages[0].content }}") is None


def test_a_turn_that_was_cut_off_is_ended_before_what_follows() -> None:
    made = Dialogues(PromptTokenizer(tokenizer("chatml"), [TOOL]), [TOOL])
    encode = tokenizer("chatml")
    new = [{"role": "tool", "content": "5"}]
    cut, ended = (encode(t, add_special_tokens=False)["input_ids"] for t in ("It", "It is<|im_end|>"))
    end = encode.convert_tokens_to_ids("<|im_end|>")
    assert made.following(new, cut, chat=True) == [end, *made.following(new, ended, chat=True)]
