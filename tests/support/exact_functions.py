"""Rollout functions for each way in which a prompt can grow."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from millrace.core.sessions.interface import Session
from tests.support.client_functions import asked, client


async def grows(session: Session) -> float:
    """By text, a message, messages, token ids and answers of tools; with lengths and stops of its own, and after an error."""
    await session.generate("and", max_new_tokens=5)
    session.observe([7, 8, 9])
    session.observe("seen")
    await session.generate([{"role": "user", "content": "more"}, {"role": "user", "content": "and more"}])
    session.observe(await session.call("add", a=1, b=2))
    session.observe(await session.call("unknown"))
    await session.generate(stop="e")
    turn = await session.generate([10, 11], logprobs=True)
    assert len(turn.logprobs) == len(turn.output_ids)
    return float(len(session.turns))


async def roles(session: Session) -> None:
    """Branches from different turns, side by side, and branches of branches."""
    await session.generate()
    early = session.branch("early")
    critic = session.branch("critic", prompt="is it right?")
    await asyncio.gather(session.generate("go on"), early.generate("or so"), critic.generate())
    late = early.branch()
    session.observe("after the branch")
    await asyncio.gather(
        session.generate(), late.generate("and"), early.generate("but"), critic.generate("?")
    )
    for at, each in enumerate((session, early, critic, late)):
        each.reward(float(at))


async def hangs_up_in_a_stream(session: Session) -> float:
    """A client that leaves in the midst of a stream, asks the same again, and goes on."""
    openai, messages = client(session), list(session.messages)
    stream = await openai.chat.completions.create(model="policy", messages=messages, stream=True)
    async for _ in stream:
        break
    await stream.close()
    cut: dict[str, Any] = {"model": "policy", "messages": messages, "stream": True}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with aiohttp.ClientSession() as http:
        for _ in range(3):  # before the answer has begun
            try:
                timeout = aiohttp.ClientTimeout(total=0.01)
                await http.post(
                    f"{session.base_url}/chat/completions", json=cut, headers=headers, timeout=timeout
                )
            except TimeoutError:
                continue
    await asked(openai, messages)
    messages.append({"role": "user", "content": "again"})
    await asked(openai, messages)
    return float(len(session.turns))


async def by_ids(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """slime's form: two turns by token ids with something observed between them, and a second sample."""
    from slime.rollout.sglang_rollout import GenerateState  # type: ignore[import-not-found]
    from slime.utils.http_utils import post  # type: ignore[import-not-found]

    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

    async def ask(ids: list[int]) -> list[int]:
        answer = await post(
            url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
        )
        return [pair[1] for pair in answer["meta_info"]["output_token_logprobs"]]

    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    seen = state.tokenizer("<user>so?<assistant>", add_special_tokens=False)["input_ids"]
    first = await ask(prompt)
    second = await ask([*prompt, *first, *seen])
    sample.tokens = [*prompt, *first, *seen, *second]
    sample.response_length = len(sample.tokens) - len(prompt)
    sample.loss_mask = [1] * len(first) + [0] * len(seen) + [1] * len(second)
    sample.reward = 1.0
    other = await ask([*prompt, *seen])
    more = type(sample)(tokens=[*prompt, *seen, *other], response_length=len(other), reward=0.0)
    return [sample, more]
