"""Templates by which transformers parses the answers of model families into thinking, content and tool calls.

If a tokenizer has a `response_template`, that is used. These are for families whose folders have none yet; the chat template
shows which family it is. Formats: Qwen's and Hermes' `<tool_call>` JSON, Qwen3-Coder's XML, Llama 3's JSON, GLM-4.5's keys and
values, the marked calls of DeepSeek (R1, V3 and V3.1) and Kimi K2, Mistral's before and since its v11 tokenizer, and gpt-oss's
channels (harmony).
"""

from typing import Any

Template = dict[str, Any]
OUTSIDE = "outside"  # text in no field of a format that puts all text into fields
_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _template(
    anchor: str, end: str, *marks: str, think: tuple[str, str] = ("<think>", "</think>"), **fields: Template
) -> Template:
    """marks: texts that are no part of the answer."""
    return {
        "start_anchor_pattern": anchor,
        "defaults": {"role": "assistant"},
        "fields": {
            "reasoning_content": {"open": think[0], "close": think[1]},
            **fields,
            **({"marks": {"open": list(marks), "close_pattern": ""}} if marks else {}),
            "content": {"close_pattern": end, "repeats": True, "join": ""},
        },
    }


_HARMONY: Template = {
    "start_anchor_pattern": r"<\|start\|>assistant",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|end\|>",
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            # the recipient stands before or behind the channel
            "open_pattern": r"(?:<\|start\|>assistant)?(?: to=functions\.(?P<name>[^\s<]+)<\|channel\|>commentary"
            r"|<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[^\s<]+))"
            r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
            "close_pattern": r"<\|call\|>|<\|end\|>",
            "content": "json",
            "repeats": True,
            "transform": _NAMED,
        },
        "content": {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>",
            "close_pattern": r"<\|return\|>|<\|end\|>",
            "repeats": True,
            "join": "",
        },
        OUTSIDE: {"repeats": True, "join": ""},
    },
}

FAMILIES: dict[str, tuple[str, Template]] = {
    # name: text that only this family's chat template has, and the template for its answers
    "deepseek": (
        "<｜tool▁call▁begin｜>",
        _template(
            # a turn after the answers of tools has no mark of its own
            "<｜Assistant｜>|<｜tool▁outputs?▁end｜>",
            "<｜end▁of▁sentence｜>",
            "</think>",  # how a prompt ends that asks for no thinking
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            tool_calls={
                "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+)"
                r"(?:<｜tool▁sep｜>|\n```json\n)",
                "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>",
                "content": "json",
                "repeats": True,
                "transform": _NAMED,
            },
        ),
    ),
    "kimi_k2": (
        "<|tool_call_argument_begin|>",
        _template(
            r"<\|im_assistant\|>assistant<\|im_middle\|>",
            r"<\|im_end\|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            tool_calls={
                "open_pattern": r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?):\d+)\s*"
                r"<\|tool_call_argument_begin\|>",
                "close": "<|tool_call_end|>",
                "content": "json",
                "repeats": True,
                "transform": {"id": "{id}", **_NAMED},
            },
        ),
    ),
    "harmony": ("<|channel|>", _HARMONY),
    "mistral": (
        "[ARGS]",
        _template(
            r"\[/INST\]|\[/TOOL_RESULTS\]",
            "</s>",
            think=("[THINK]", "[/THINK]"),
            tool_calls={
                "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\])?"
                r"(?P<id>(?<=\[CALL_ID\])\w+|)\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\]|</s>)",
                "content": "json",
                "repeats": True,
                "transform": {"id": "{id}", **_NAMED},
            },
        ),
    ),
    "mistral_json": (
        "[TOOL_CALLS]",
        _template(
            r"\[/INST\]|\[/TOOL_RESULTS\]",
            "</s>",
            think=("[THINK]", "[/THINK]"),
            # a list of names and arguments, some with ids
            tool_calls={
                "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
                "close_pattern": r"(?=</s>)",
                "content": "json",
            },
        ),
    ),
    "glm4": (
        "<arg_key>",
        _template(
            r"<\|assistant\|>",
            r"<\|(?:user|observation|endoftext)\|>",
            "</think>",
            tool_calls={
                "open_pattern": r"<tool_call>(?P<name>[^\n<]+)",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                },
                "repeats": True,
                "transform": _NAMED,
            },
        ),
    ),
    "qwen3_coder": (
        "<function=",
        _template(
            r"<\|im_start\|>assistant\n",
            r"<\|im_end\|>",
            tool_calls={
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
                },
                "repeats": True,
                "transform": _NAMED,
            },
        ),
    ),
    "hermes": (
        "<tool_call>",
        _template(
            r"<\|im_start\|>assistant\n|<assistant>",
            r"<\|im_end\|>|<eos>",
            tool_calls={
                "open": "<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "repeats": True,
                "transform": _CALL,
            },
        ),
    ),
    "llama3": (
        '"parameters": ',
        _template(
            r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
            r"<\|eot_id\|>|<\|eom_id\|>",
            tool_calls={
                "open_pattern": r'(?:<\|python_tag\|>)?(?=\{"name": *")',
                "close_pattern": r"<\|eot_id\|>|<\|eom_id\|>",
                "content": "json",
                "repeats": True,
                "transform": {
                    "type": "function",
                    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                },
            },
        ),
    ),
}


IDS_OF_NINE = ("mistral", "mistral_json")
"""Families whose templates want an id of nine characters in the answer to a call."""


def family_for(chat_template: str | None) -> str | None:
    """The family whose answers have the form that a chat template writes; None if it is none of these."""
    found = (name for name, (mark, _) in FAMILIES.items() if chat_template and mark in chat_template)
    return next(found, None)


def template_for(chat_template: str | None) -> Template | None:
    """The response template of the family that a chat template belongs to; None if it is none of these."""
    family = family_for(chat_template)
    return FAMILIES[family][1] if family else None
