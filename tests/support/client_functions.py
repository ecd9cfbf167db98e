"""Rollout functions that bring a client of their own: the openai package, or plain HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI, OpenAI

from millrace.core.sessions.interface import Session
from tests.support.session_functions import add


def client(session: Session, **options: Any) -> AsyncOpenAI:
    """The client of a session."""
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **{"max_retries": 0, **options})


async def asked(openai: AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    """One request, and its answer added to the messages."""
    answer = await openai.chat.completions.create(model="policy", messages=messages, **options)
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return answer


def shown(session: Session, name: str, seen: Any) -> None:
    """Give the test something to look at: as a reward's part, which is a number, or in the reason of a failure."""
    raise AssertionError(f"{name}: {json.dumps(seen)}")


async def two_turns(session: Session) -> float:
    """A loop, with the message of a user between its turns."""
    openai, messages = client(session), list(session.messages)
    first = await asked(openai, messages)
    messages.append({"role": "user", "content": "again"})
    second = await asked(openai, messages)
    assert (first.id, second.id) == ("chatcmpl-0-0", "chatcmpl-0-1")
    assert second.usage.completion_tokens == 1
    assert second.choices[0].finish_reason == "stop"
    return float(len(session.turns))


async def in_a_thread(session: Session) -> float:
    """The same with a client that is not async, in a thread."""
    openai, messages = OpenAI(base_url=session.base_url, api_key=session.api_key), list(session.messages)
    for _ in range(2):
        answer = await asyncio.to_thread(openai.chat.completions.create, model="policy", messages=messages)  # type: ignore[arg-type]
        messages += [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": "again"},
        ]
    return float(len(session.turns))


async def uses_tools(session: Session) -> float:
    """Answers the calls of tools until there are none."""
    openai, messages = client(session), list(session.messages)
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a", "b"],
            },
        },
    }
    answer = await asked(openai, messages, tools=[tool])
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls:
        content = str(add(**json.loads(call.function.arguments)))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    last = await asked(openai, messages, tools=[tool])
    return float(last.choices[0].message.content == "three")


async def streams(session: Session) -> float:
    """Two turns as streams, the second with its usage."""
    openai, messages = client(session), list(session.messages)
    texts = []
    for usage in (False, True):
        stream = await openai.chat.completions.create(
            model="policy", messages=messages, stream=True, stream_options={"include_usage": usage}
        )
        chunks = [chunk async for chunk in stream]
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
        assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [usage]
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "again"}]
    return float(texts == ["one", "two"])


async def repeats(session: Session) -> float:
    """The same request in turn, at once, and after the dialogue went on."""
    openai, messages = client(session), list(session.messages)
    begun = list(messages)
    first, second = await asyncio.gather(asked(openai, list(begun)), asked(openai, messages))
    third = await asked(openai, list(begun))
    messages.append({"role": "user", "content": "again"})
    await asked(openai, messages)
    fourth = await asked(openai, list(begun), extra_headers={"x-stainless-retry-count": "1"})
    assert first == second == third == fourth
    return float(len(session.turns))


async def hangs_up(session: Session) -> float:
    """A client that does not wait for the first turn, and asks again."""
    openai, messages = client(session, timeout=0.3, max_retries=5), list(session.messages)
    await asked(openai, messages)
    return float(len(session.turns))


async def compacts(session: Session) -> float:
    """Two turns, then a summary in place of what was said, then on from there."""
    openai, messages = client(session), list(session.messages)
    await asked(openai, messages)
    messages.append({"role": "user", "content": "again"})
    await asked(openai, messages)
    compacted: list[Any] = [{"role": "user", "content": "in short: 2"}]
    await asked(openai, compacted)
    compacted.append({"role": "user", "content": "go on"})
    await asked(openai, compacted)
    forked = [*messages[:2], {"role": "user", "content": "otherwise"}]
    await asked(openai, forked)
    return 1.0


async def in_parallel(session: Session) -> float:
    """Different requests at once."""
    openai, messages = client(session), list(session.messages)
    await asked(openai, messages)
    answers = await asyncio.gather(
        *(asked(openai, [*messages, {"role": "user", "content": text}]) for text in ("left", "right"))
    )
    return float(len({answer.id for answer in answers}))


async def two_roles(session: Session) -> None:
    """A solver and a critic that send the same messages through endpoints of their own."""
    critic = session.branch("critic", prompt=session.messages)
    for each in (session, critic):
        await asked(client(each), list(session.messages))
    critic.reward(0.5)
    session.reward(1.0)


async def for_ever(session: Session) -> None:
    """Asks until a limit ends it."""
    openai, messages = client(session), list(session.messages)
    while True:
        await asked(openai, messages)
        messages.append({"role": "user", "content": "again"})


async def posts(session: Session, *, body: dict[str, Any], headers: dict[str, str], path: str) -> None:
    """One request by hand; fails with its status and error."""
    sent = {"Authorization": f"Bearer {session.api_key}", **headers}
    async with aiohttp.ClientSession() as http:
        given = {"messages": list(session.messages), **body}
        async with http.post(session.base_url + path, data=json.dumps(given), headers=sent) as answer:
            found = await answer.json()
    raise ValueError(f"{answer.status} {found.get('error', {}).get('message')}")


async def posts_much(session: Session, *, characters: int, seen: str) -> None:
    """A message of so many characters; fails with the status and the error, which it writes to a file."""
    try:
        await posts(
            session,
            body={"messages": [*session.messages, {"role": "user", "content": "ab " * (characters // 3)}]},
            headers={"Content-Type": "application/json"},
            path="/chat/completions",
        )
    except ValueError as error:
        Path(seen).write_text(str(error))  # noqa: ASYNC240 - of a test
        raise


async def posts_deep(session: Session, *, depth: int, inside: bool) -> None:
    """A body of nested lists, or one whose message has them; fails with the status and the error."""
    deep = "[" * depth + "]" * depth
    body = f'{{"messages": [{{"role": "user", "content": "a", "tool_calls": {deep}}}]}}' if inside else deep
    sent = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{session.base_url}/chat/completions", data=body, headers=sent) as answer,
    ):
        found = await answer.json()
    raise ValueError(f"{answer.status} {found.get('error', {}).get('message')}")


async def lists_models(session: Session) -> float:
    """What models there are."""
    found = await client(session).models.list()
    return float([model.id for model in found.data] == ["policy"])


async def talks_and_serves(session: Session) -> float:
    """A turn of the function's own, then a client that goes on from it."""
    turn = await session.generate()
    messages = [*session.messages, {"role": "assistant", "content": turn.content}]
    await asked(client(session), [*messages, {"role": "user", "content": "again"}])
    await session.generate("and again")
    return float(len(session.turns))


async def chosen(session: Session) -> Any:
    """The function that the task names, with its options."""
    named = session.task.metadata
    return await globals()[named["function"]](session, **named["options"])
