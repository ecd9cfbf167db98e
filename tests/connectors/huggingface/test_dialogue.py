"""Dialogues grow by what is new alone: over templates of every behaviour, and over random dialogues, nothing drifts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from millrace.connectors.huggingface.dialogue import Dialogues, dialogues, thinks_in_text
from millrace.connectors.huggingface.response_templates import FAMILIES, template_for
from millrace.connectors.huggingface.suffix import Difference, first_difference
from millrace.connectors.huggingface.template import ChatTemplate
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.families.chat_templates import with_arguments_for
from millrace.core.sessions.interface import ToolCall
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
    ("glm45", "user"): "Let me see.",
    ("glm45", "tool"): None,
    ("deepseek31", "user"): None,
    ("deepseek31", "tool"): None,
    ("kimi_k2", "user"): "\nHm.",
    ("kimi_k2", "tool"): None,
    ("harmony", "user"): "return|>",
    ("harmony", "tool"): None,
    ("mistral", "user"): None,
    ("mistral", "tool"): None,
    ("mistral_json", "user"): None,
    ("mistral_json", "tool"): None,
}


@cache
def tokenizer(family: str) -> Any:
    return tokenizer_of(family)


def rendered(family: str, messages: Sequence[Message], for_answer: bool) -> str:
    text: str = tokenizer(family).apply_chat_template(
        with_arguments_for(TEMPLATES[family], messages),
        tools=[TOOL],
        tokenize=False,
        add_generation_prompt=for_answer,
    )
    return text


def found_difference(family: str, follows: Any) -> Difference | None:
    template = ChatTemplate(TEMPLATES[family], {})

    def render(messages: Sequence[Message], for_answer: bool) -> str:
        return template.render([dict(message) for message in messages], None, for_answer, [TOOL])

    return first_difference(render, dialogues(follows, thinks_in_text(render, follows)), SPECIAL[family])


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
        calls = numbers.randint(1, 1 if family in ("llama3", "harmony") else 3) if follows == "tool" else 0
        turn: dict[str, Any] = {"role": "assistant", "content": text(numbers)}
        if calls:
            arguments = {"a": numbers.randint(0, 99), "b": numbers.randint(0, 9)}
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "id": f"call{n:05d}",
                    "function": {"name": "add", "arguments": arguments},
                }
                for n in range(calls)
            ]
        before = rendered(family, messages, True)
        said = rendered(family, [*messages, turn], False).removeprefix(before)
        new: list[Message] = [
            {
                "role": follows,
                "content": text(numbers, 1),
                **({"name": "add", "tool_call_id": f"call{n:05d}"} if calls else {}),
            }
            for n in range(calls or 1)
        ]
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


# with thinking or without, each turn is written differently when another follows
ALWAYS = {("qwen3", "user"), ("harmony", "user")}
GROW = [key for key in REWRITES if key not in ALWAYS]


@pytest.mark.parametrize(("family", "follows"), GROW)
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_dialogues_grow_to_what_the_template_renders(family: str, follows: str, count: int) -> None:
    """Without thinking no template rewrites a turn but those of ALWAYS, which are refused."""
    decode = tokenizer(family).decode
    for seed in range(count):
        grown, whole = grown_and_rendered(family, follows, seed)
        assert decode(grown) == decode(whole), f"dialogue {seed}"


def test_every_template_that_grows_is_tried_and_every_other_is_refused() -> None:
    assert REWRITES.keys() > ALWAYS
    assert all(found_difference(*key) is not None for key in ALWAYS)


ADD = [ToolCall("add", {"a": 1, "b": 2})]
# family: where a prompt ends, an answer as its model writes it, its thinking, its content, and its calls
ANSWERS: dict[str, list[tuple[str, str, str, str, list[ToolCall]]]] = {
    "hermes": [
        (
            "<|im_start|>assistant\n",
            '<think>\nhm\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>',
            "hm",
            "I add.",
            [*ADD, ToolCall("add", {"a": 3, "b": 4})],
        ),
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nIt is 4.<|im_end|>", "hm", "It is 4.", []),
    ],
    "qwen3_coder": [
        (
            "<|im_start|>assistant\n",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
            "</tool_call><|im_end|>",
            "",
            "",
            ADD,
        )
    ],
    "llama3": [("", '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "", "", ADD)],
    "glm4": [
        (
            "<|assistant|>",
            "\n<think>hm</think>\nWell.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call><|observation|>",
            "hm",
            "Well.",
            ADD,
        ),
        # GLM-4.7 writes no lines, and its prompt opens or closes thinking
        (
            "<|assistant|><think>",
            "hm</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value>"
            "</tool_call><|observation|>",
            "hm",
            "",
            ADD,
        ),
        ("<|assistant|></think>", "Four.<|user|>", "", "Four.", []),
        ("<|user|>\nq/nothink<|assistant|>\n<think></think>", "\nFour.<|user|>", "", "Four.", []),
    ],
    "deepseek": [
        (
            "<｜Assistant｜><think>\n",
            'hm\n</think>So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "hm",
            "So.",
            ADD,
        ),
        # V3.1: the name and arguments alone, and a prompt that closes thinking
        (
            "<｜User｜>q<｜Assistant｜></think>",
            'So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "",
            "So.",
            ADD,
        ),
        # after the answer of a tool no mark opens the turn: the call before it is another turn's
        (
            "<｜Assistant｜></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>5<｜tool▁output▁end｜>",
            "It is 5.<｜end▁of▁sentence｜>",
            "",
            "It is 5.",
            [],
        ),
    ],
    "kimi_k2": [
        (
            "<|im_assistant|>assistant<|im_middle|>",
            "<think>hm</think>Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1, "b": 2}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 3, "b": 4}'
            "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
            "hm",
            "Well.",
            [
                ToolCall("add", {"a": 1, "b": 2}, "functions.add:0"),
                ToolCall("add", {"a": 3, "b": 4}, "functions.add:1"),
            ],
        ),
    ],
    "harmony": [
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
            "hm",
            "",
            ADD,
        ),
        (
            "<|start|>assistant",
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
            "",
            "",
            ADD,
        ),
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I add. <|end|>"
            "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
            "hm\nso",
            "I add.It is 4.",
            [],
        ),
    ],
    "mistral": [
        (
            "[INST]q[/INST]",
            '[THINK]hm[/THINK]Well.[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4}</s>',
            "hm",
            "Well.",
            [
                ToolCall("add", {"a": 1, "b": 2}, "abcdefghi"),
                ToolCall("add", {"a": 3, "b": 4}, "call00001"),
            ],
        ),
        (
            "[INST]q[/INST][TOOL_CALLS]add[ARGS]{}</s>[TOOL_RESULTS]5[/TOOL_RESULTS]",
            "It is 5.</s>",
            "",
            "It is 5.",
            [],
        ),
    ],
    "mistral_json": [
        (
            "[INST] q[/INST]",
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3, "b": 4}, '
            '"id": "abcdefghi"}]</s>',
            "",
            "",
            [
                ToolCall("add", {"a": 1, "b": 2}, "call00000"),
                ToolCall("add", {"a": 3, "b": 4}, "abcdefghi"),
            ],
        ),
    ],
}
TOKENIZERS = {"hermes": "chatml", "qwen3_coder": "chatml"}


def reader(family: str) -> Dialogues:
    made = tokenizer_of(TOKENIZERS.get(family, family))
    made.chat_template += f"{{# {FAMILIES[family][0]} #}}"
    if family == "hermes":
        made.chat_template = TEMPLATES["chatml"]
    return Dialogues(PromptTokenizer(made, [TOOL]), [TOOL])


def encoded(family: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(TOKENIZERS.get(family, family))(text, add_special_tokens=False)["input_ids"]
    return ids


def test_every_family_has_an_answer() -> None:
    assert ANSWERS.keys() == FAMILIES.keys()


@pytest.mark.parametrize(
    ("family", "number"), [(name, at) for name, rows in ANSWERS.items() for at in range(len(rows))]
)
def test_thinking_content_and_calls_are_read_as_each_family_writes_them(family: str, number: int) -> None:
    prompt, answer, thinking, content, calls = ANSWERS[family][number]
    reading = reader(family).read(answer, encoded(family, prompt))
    assert reading.problem is None
    assert (reading.thinking, reading.content, reading.calls) == (thinking, content, calls)


WRITES: dict[str, tuple[bool, bool]] = {
    # template: whether it writes a turn's thinking, and content beside calls
    "chatml": (True, True),
    "qwen3": (True, True),
    "llama3": (False, False),
    "glm4": (False, True),
    "deepseek": (False, True),
    "glm45": (True, True),
    "deepseek31": (False, True),
    "kimi_k2": (True, True),
    "harmony": (True, False),
    "mistral": (False, True),
    "mistral_json": (False, True),
}


def test_every_template_is_read_back() -> None:
    assert WRITES.keys() == TEMPLATES.keys()


@pytest.mark.parametrize("family", WRITES)
@pytest.mark.parametrize("text", ["", "It is 4.", 'a "b" {c}: ü🙂'])
def test_a_turn_that_a_template_writes_is_read_as_it_was(family: str, text: str) -> None:
    """Its tokens too: what grows after the turn is what the template writes of the whole dialogue."""
    thinks, content = WRITES[family]
    made = Dialogues(PromptTokenizer(tokenizer(family), [TOOL]), [TOOL])
    call = {
        "type": "function",
        "id": "functions.add:0" if family == "kimi_k2" else "abcdefghi",
        "function": {"name": "add", "arguments": {"a": 4, "b": -1}},
    }
    turn: dict[str, Any] = {"role": "assistant", "content": text if content else "", "tool_calls": [call]}
    if thinks:
        turn["reasoning_content"] = "two and two"
    asked: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = rendered(family, asked, True)
    said = rendered(family, [*asked, turn], False).removeprefix(prompt).rstrip("\n")
    end = "" if any(said.endswith(end) for end in SPECIAL[family]) else "<|observation|>"
    reading = made.read(said + end, encoded(family, prompt))
    assert reading.problem is None
    assert [(each.name, dict(each.arguments)) for each in reading.calls] == [("add", {"a": 4, "b": -1})]
    assert (reading.thinking, reading.content) == ("two and two" if thinks else "", turn["content"])

    # a tool's answer says neither name nor id, as in Session.observe
    ids = encoded(family, prompt + said + end)
    answered = {"role": "tool", "content": "4"}
    grown = ids + made.following([answered], ids, chat=True, calls=reading.calls)
    whole = [*asked, turn, {**answered, "name": "add", "tool_call_id": call["id"]}]
    assert tokenizer(family).decode(grown) == rendered(family, whole, True)


def test_an_answer_outside_of_every_channel_is_a_problem_and_stays_content() -> None:
    reading = reader("harmony").read("It is 4.<|return|>", encoded("harmony", "<|start|>assistant"))
    assert reading.problem == "text outside of a channel: 'It is 4.<|return|>'"
    assert reading.content == "It is 4."


def test_a_turn_that_ended_with_the_end_of_sequence_is_not_ended_again() -> None:
    made, new = (
        Dialogues(PromptTokenizer(tokenizer("harmony"), [TOOL]), [TOOL]),
        [{"role": "user", "content": "again"}],
    )
    said = "<|channel|>final<|message|>Four."
    after = made.following(new, encoded("harmony", f"{said}<|return|>"), chat=True)
    cut = made.following(new, encoded("harmony", said), chat=True)
    assert made.decode(after) == "<|start|>user<|message|>again<|end|><|start|>assistant"
    assert made.decode(cut) == f"<|end|>{made.decode(after)}"


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
