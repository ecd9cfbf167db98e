"""A rollout of two turns by a client of your own: a sum, and a second try where the first was wrong."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from millrace import Session

CLIENT = AsyncOpenAI(api_key="each session brings its own")


async def two_tries(session: Session, *, second: float = 0.5) -> float:
    """1 for the right number at once, `second` for the right one at the second try, else 0."""
    client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = list(session.messages)
    for worth in (1.0, second):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        if text == session.task.label:
            return worth
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "no"}]
    return 0.0
