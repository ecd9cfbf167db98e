"""Generation functions as slime's users write them: with its names, its signature and its sample."""

from __future__ import annotations

import asyncio
from typing import Any

from slime.rollout.sglang_rollout import GenerateState  # type: ignore[import-not-found]
from slime.utils.http_utils import post  # type: ignore[import-not-found]
from slime.utils.types import Sample  # type: ignore[import-not-found]


def _url(args: Any) -> str:
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"


async def _ask(
    args: Any, params: dict[str, Any], **what: Any
) -> tuple[list[int], list[float], dict[str, Any]]:
    answer = await post(_url(args), {"sampling_params": params, "return_logprob": True, **what})
    pairs = answer["meta_info"]["output_token_logprobs"]
    return [pair[1] for pair in pairs], [pair[0] for pair in pairs], answer


async def two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Asks by text, appends what came and an observation, asks again."""
    state = GenerateState(args)
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, ids, mask, logprobs = "", [], [], []
    for turn in range(2):
        new, values, answer = await _ask(args, sampling_params, text=sample.prompt + response)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        ids, mask, logprobs = ids + new, mask + [1] * len(new), logprobs + values
        response += answer["text"]
        if turn == 0:
            seen = state.tokenizer(args.seen, add_special_tokens=False)["input_ids"]
            ids, mask, logprobs = ids + seen, mask + [0] * len(seen), logprobs + [0.0] * len(seen)
            response += args.seen
    sample.tokens, sample.response_length, sample.response = prompt_ids + ids, len(ids), response
    sample.loss_mask, sample.rollout_log_probs = mask, logprobs
    sample.status = Sample.Status.COMPLETED
    scored = {"score": 1.5, "length": len(ids), "reward": 0.25, "pred": "4"}  # as graders of slime's give it
    sample.reward = scored if args.reward_key else 0.5
    return sample


async def retries(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Sends the same request three times, two of them at once."""
    state = GenerateState(args)
    ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    answers = await asyncio.gather(*(_ask(args, sampling_params, input_ids=ids) for _ in range(2)))
    answers.append(await _ask(args, sampling_params, input_ids=ids))
    assert [answer[0] for answer in answers] == [answers[0][0]] * 3
    sample.tokens, sample.response_length = ids + answers[0][0], len(answers[0][0])
    sample.reward = float(evaluation)
    return sample


async def fans_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A second sample with a prompt of its own."""
    tokens = GenerateState(args).tokenizer
    made = []
    for text, reward in ((sample.prompt, 1.0), ("<user>in short<assistant>", 2.0)):
        ids = tokens(text, add_special_tokens=False)["input_ids"]
        new, _, _ = await _ask(args, sampling_params, input_ids=ids)
        made.append(Sample(tokens=ids + new, response_length=len(new), reward=reward))
    return made


async def alters(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Gives back what its row says: other tokens, another mask, an aborted sample, nothing to train."""
    ids = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    new, _, _ = await _ask(args, sampling_params | sample.metadata["sampling"], input_ids=ids)
    sample.tokens, sample.response_length, sample.loss_mask = ids + new, len(new), [1] * len(new)
    if sample.metadata["what"] == "tokens":
        sample.tokens[-1] += 1
    if sample.metadata["what"] == "mask":
        sample.loss_mask[0] = 0
    if sample.metadata["what"] == "status":
        sample.status = Sample.Status.ABORTED
    if sample.metadata["what"] == "remove":
        sample.remove_sample = True
    if sample.metadata["what"] == "unknown":
        args.n_samples_per_prompt  # noqa: B018 - it raises
    return sample


async def _asked(args: Any, sample: Any, params: dict[str, Any]) -> list[int]:
    """The sample with an answer to its prompt; the tokens of the answer."""
    sample.tokens = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    new, values, answer = await _ask(args, params, input_ids=sample.tokens)
    sample.append_response_tokens(
        args, tokens=new, log_probs=values, meta_info=answer["meta_info"], text=answer["text"]
    )
    return new


async def of_a_list(args: Any, samples: list[Any], evaluation: bool = False) -> list[Any]:
    """Gets and returns samples as a list."""
    for sample in samples:
        await _asked(args, sample, dict(args.sampling_params))
        sample.reward = 2.0 + evaluation
    return samples


async def of_a_list_and_sampling(args: Any, samples: list[Any], sampling_params: dict[str, Any]) -> Any:
    """The same with sampling_params; returns lists within a list."""
    for sample in samples:
        await _asked(args, sample, sampling_params)
        sample.reward = 3.0
    return [samples]


async def leaves_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Two turns of which it leaves out what its row says."""
    what = sample.metadata["what"]
    await _asked(args, sample, sampling_params)
    seen = GenerateState(args).tokenizer("<user>4<assistant>", add_special_tokens=False)["input_ids"]
    first = len(sample.tokens)
    sample.append_response_tokens(args, tokens=seen, trainable=False, text="<user>4<assistant>")
    new, values, answer = await _ask(args, sampling_params, input_ids=sample.tokens)
    sample.append_response_tokens(args, tokens=new, log_probs=values, meta_info=answer["meta_info"])
    sample.reward = 1.0
    whole = len(sample.tokens)
    if what == "first turn":
        sample.loss_mask = [0] * len(sample.loss_mask[:-1]) + [1]
    if what == "all by mask":
        sample.loss_mask = [0] * sample.response_length
    if what == "removed":
        sample.remove_sample = True
    if what == "short mask":  # what stands before it is the prompt
        sample.loss_mask, sample.response_length = [1] * len(new), len(new)
    if what == "short response":
        sample.loss_mask, sample.response_length = None, len(new)
    if what == "no mask":
        sample.loss_mask = None
    if what == "no tokens":
        sample.tokens, sample.loss_mask = [], None
    if what == "cut before the second turn":
        sample.tokens, sample.loss_mask = sample.tokens[: whole - len(new)], sample.loss_mask[: -len(new)]
        sample.response_length = len(sample.loss_mask)
    if what == "cut within the first turn":
        sample.tokens, sample.loss_mask = sample.tokens[: first - 1], [1]
        sample.response_length = len(sample.loss_mask)
    if what == "removed with other tokens":
        sample.tokens, sample.loss_mask, sample.response_length = [0, 0], [0], 1
        sample.remove_sample = True
    if what == "truncated":
        sample.status = Sample.Status.TRUNCATED
    if what == "status as text":
        sample.status = "truncated"
    if what == "an observed token":
        sample.loss_mask = [1] * sample.response_length
    if what == "a mask of another length":
        sample.loss_mask = [1]
    if what == "nothing returned":
        return None
    if what == "an empty list":
        return []
    if what == "another type":
        return {"tokens": sample.tokens}
    return sample


async def returns_one_of_two(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generates on two prompts and returns one of them."""
    import copy

    other = copy.deepcopy(sample)
    other.prompt = "<user>in short<assistant>"
    await _asked(args, sample, sampling_params)
    await _asked(args, other, sampling_params)
    sample.reward = 1.5
    return sample


async def by_slimes_own(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """slime's own generation, on the sample."""
    from slime.rollout.sglang_rollout import generate

    sample = await generate(args, sample, sampling_params)
    sample.reward = float(args.n_samples_per_prompt)
    return sample


async def chosen(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """The function that its row names."""
    functions = (two_turns, retries, fans_out, alters, leaves_out, returns_one_of_two)
    (function,) = [each for each in functions if each.__name__ == sample.metadata["function"]]
    return await function(args, sample, sampling_params)
