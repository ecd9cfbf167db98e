"""Templates by which transformers parses the answers of model families into thinking, content and tool calls.

If a tokenizer has a `response_template`, that is used. These are for families whose folders have none yet; the chat template
shows which family it is. Formats: Qwen's and Hermes' `<tool_call>` JSON, Qwen3-Coder's XML, Llama 3's JSON, GLM-4's keys and
values, DeepSeek's marked calls.
"""

from __future__ import annotations

from typing import Any

Template = dict[str, Any]
_CALL = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}


def _template(anchor: str, end: str, **fields: Template) -> Template:
    return {
        "start_anchor_pattern": anchor,
        "defaults": {"role": "assistant"},
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            **fields,
            "content": {"close_pattern": end, "repeats": True, "join": ""},
        },
    }


FAMILIES: dict[str, tuple[str, Template]] = {
    # name: text that only this family's chat template has, and the template for its answers
    "deepseek": (
        "<｜tool▁call▁begin｜>",
        _template(
            "<｜Assistant｜>",
            "<｜end▁of▁sentence｜>",
            tool_calls={
                "open_pattern": r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+)"
                r"(?:<｜tool▁sep｜>|\n```json\n)",
                "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>",
                "content": "json",
                "repeats": True,
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            marks={"open": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"], "close_pattern": ""},
        ),
    ),
    "glm4": (
        "<arg_key>",
        _template(
            r"<\|assistant\|>",
            r"<\|(?:user|observation|endoftext)\|>",
            tool_calls={
                "open_pattern": r"<tool_call>(?P<name>[^\n<]+)",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                },
                "repeats": True,
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
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
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
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


def family_for(chat_template: str | None) -> str | None:
    """The family whose answers have the form that a chat template writes; None if it is none of these."""
    found = (name for name, (mark, _) in FAMILIES.items() if chat_template and mark in chat_template)
    return next(found, None)


def template_for(chat_template: str | None) -> Template | None:
    """The response template of the family that a chat template belongs to; None if it is none of these."""
    family = family_for(chat_template)
    return FAMILIES[family][1] if family else None
