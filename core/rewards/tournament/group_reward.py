"""A group reward that compares the samples of a prompt in pairs, for tasks in which one sample alone cannot be scored.

The comparison is a function `compare(first, second, **options)` of two RewardInputs, sync or async: 1 if the first is better, 0
if the second is, 0.5 if neither; or a RewardResult of that number with texts, which are kept.
`millrace.connectors.rewards.judge:pairwise_judge` asks a model. The pairs depend only on the seed and the prompt: the
same group has the same tournament again.
"""

import asyncio
import hashlib
import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from millrace.core.errors import ConfigError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.hooks.reward_forms import bound
from millrace.core.rewards.tournament.schemes import SCHEMES, Pair

WHERE = "reward.options"
_Said = tuple[int, str, Mapping[str, str]]
"""The other sample of a comparison, the place of this one, and its texts."""


async def tournament(
    samples: Sequence[RewardInput],
    *,
    compare: str | Mapping[str, Any],
    scheme: Literal["round_robin", "anchor", "elimination"] = "elimination",
    reward: Literal["rank", "win_rate"] = "rank",
    both_orders: bool = True,
    seed: int = 0,
    concurrency: int = 8,
) -> list[RewardResult]:
    """A reward from 0 to 1 for each sample of a group; 0.5 in a group of one.

    compare: an import path, or {function, options}. scheme: of `schemes`. reward: the place, in equal steps from 1 for the
    best to 0 for the last, or the share of meetings won. both_orders: compare each pair both ways and take the mean, which
    cancels a judge's liking for the first. concurrency: comparisons at once, if `compare` is async.
    Parts: `place` and `win_rate`, each from 0 to 1, and `meetings`; and the texts of comparisons, joined to one text a name, in
    the order of samples. Before each, a line names the other sample, counted from 1.
    Errors: ConfigError for options; TypeError and ValueError of an answer outside 0 to 1; what the comparison raises.
    """
    for name, value, known in (("scheme", scheme, (*SCHEMES,)), ("reward", reward, ("rank", "win_rate"))):
        if value not in known:
            raise ConfigError(
                f"{value} is not a choice", where=f"{WHERE}.{name}", remedy=f"give {' or '.join(known)}"
            )
    function, path = _comparison(compare)
    limit = asyncio.Semaphore(concurrency)
    said: list[list[_Said]] = [[] for _ in samples]

    async def one(first: int, second: int) -> float:
        async with limit:
            answer = function(samples[first], samples[second])
            score, texts = _score(await answer if inspect.isawaitable(answer) else answer, path)
        if texts:
            said[first].append((second, "first", texts))
            said[second].append((first, "second", texts))
        return score

    async def pair(first: int, second: int) -> float:
        if not both_orders:
            return await one(first, second)
        there, back = await asyncio.gather(one(first, second), one(second, first))
        return (there + 1 - back) / 2

    async def compared(pairs: Sequence[Pair]) -> Sequence[float]:
        return await asyncio.gather(*(pair(first, second) for first, second in pairs))

    standing = await SCHEMES[scheme](len(samples), _order(samples, seed), compared)
    rows = zip(standing.places(), standing.win_rates(), standing.meetings, said, strict=True)
    return [
        RewardResult(
            place if reward == "rank" else rate,
            {**_texts(heard), "place": place, "win_rate": rate, "meetings": float(meetings)},
        )
        for place, rate, meetings, heard in rows
    ]


def _comparison(compare: Any) -> tuple[Callable[..., Any], str]:
    """The function with its options bound, and its import path."""
    given: Any = {"function": compare} if isinstance(compare, str) else compare
    if not isinstance(given, Mapping) or not isinstance(given.get("function"), str):
        raise ConfigError(
            "it names no function",
            where=f"{WHERE}.compare",
            remedy="write {function: package.module:name, options: {...}}",
        )
    path: str = given["function"]
    return bound(path, given.get("options") or {}, f"{WHERE}.compare"), path


def _order(samples: Sequence[RewardInput], seed: int) -> list[int]:
    """The samples in an order that depends only on seed and prompt; the first one is the anchor."""
    prompt = samples[0].prompt
    text = prompt if isinstance(prompt, str) else json.dumps([dict(message) for message in prompt])
    digest = hashlib.sha256(f"{seed}\n{text}".encode("utf-8", "surrogatepass")).digest()
    order = list(range(len(samples)))
    random.Random(digest).shuffle(order)
    return order


def _texts(heard: Sequence[_Said]) -> dict[str, str]:
    """The texts of a sample's comparisons, by the text's name. Sorted, since comparisons end in any order."""
    lines: dict[str, list[str]] = {}
    for other, place, texts in sorted(heard, key=lambda one: one[:2]):
        for name, text in texts.items():
            lines.setdefault(name, []).append(f"As the {place} of two, against sample {other + 1}:\n{text}")
    return {name: "\n\n".join(each) for name, each in lines.items()}


def _score(answer: Any, path: str) -> tuple[float, dict[str, str]]:
    texts: dict[str, str] = {}
    if isinstance(answer, RewardResult):
        texts = {name: part for name, part in answer.parts.items() if isinstance(part, str)}
        answer = answer.reward
    if isinstance(answer, str) or not hasattr(answer, "__float__"):
        raise TypeError(f"{path} returned a {type(answer).__name__}; return 1, 0 or 0.5")
    score = float(answer)
    if not 0 <= score <= 1:
        raise ValueError(
            f"{path} returned {score:g}; return 1 for the first, 0 for the second, 0.5 for neither"
        )
    return score, texts
