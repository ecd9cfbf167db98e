"""The program in a response: which lines of Markdown are its fences."""

from __future__ import annotations

import pytest

from millrace.core.rewards.code.answer import last_code_block


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```\n", "a"),
        ("~~~py\na\n~~~", "a"),
        ("````\n```\na\n```\n````", "```\na\n```"),  # a longer fence holds shorter ones
        ("```\na\n`````", "a"),
        ("```\na\n~~~\nb\n```", "a\n~~~\nb"),
        ("~~~ a `b`\nc\n~~~", "c"),
        ("1. Read:\n\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("- x\n  - y\n\n      ```\n      a\n       b\n      ```", "a\n b"),
        ("  ```\n a\n   b\n  ```", "a\n b"),  # no line loses more than the fence has
        ("```\n    a\n```", "    a"),
        ("\t```\n\ta\n\t\tb\n\t```", "a\n    b"),
        ("```python\r\na\r\nb\r\n```\r\n", "a\nb"),
        ("```\na\n```   ", "a"),
        ("```\na\n  ```", "a"),
        ("```\na\n``` b\n```", "a\n``` b"),  # what follows a closing fence is space alone
        ("``` a`b\nc\n```\nd\n```", "d"),  # no fence: it has a backtick
        ("``\na\n``", None),
        ("```\na", None),
        ("```\na\n```\n```\nb", "a"),
        ("```\n```", ""),
        ("```\na\u2028b\n```", "a\u2028b"),
        ("no code", None),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, code: str | None) -> None:
    assert last_code_block(text) == code
