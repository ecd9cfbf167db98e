"""After a sync, engines and trainer compute log-probabilities of four fixed texts, which shows wrong weights at once.

Of adapters by name it shows also that each engine moved from version to version as the trainer did.

Owns the texts, the comparison and the state of an engine that fails it. Costs a forward pass of the trainer over some hundred
tokens, and one request to each engine.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from millrace.connectors.engines.client import EngineClient
from millrace.connectors.engines.weight_update import idle
from millrace.connectors.trainers.rank import HeldOutSample, Rank
from millrace.core.accounts.staleness import VersionRange
from millrace.core.errors import WeightsDifferError
from millrace.core.fixed_texts import Logprobs, mean_gap
from millrace.tasks.context import IterationContext

TEXTS = (
    "The capital of France is Paris.",
    "1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8",
    "def add(a, b):\n    return a + b\n",
    "Once upon a time there was a king.",
)
LONGEST = 32  # tokens of a text that are compared


@dataclass(frozen=True)
class Compared:
    """Result of a comparison."""

    gap: float  # largest mean absolute difference of an engine's log-probabilities; nats a token
    checksums: dict[str, str]  # hash of an engine's checksums of its tensors, by engine; none of adapters


def fixed_prompts(ctx: IterationContext) -> list[list[int]]:
    """Token ids of the texts: the same in each iteration of a run."""
    found = ctx.runtime.prompts.tokenizer.encode_prompts(list(TEXTS), chat=False)
    return [ids[:LONGEST] for ids in found if len(ids) > 1]


async def trainer_logprobs(ctx: IterationContext, version: int, prompts: Sequence[Sequence[int]]) -> Logprobs:
    """The trainer's log-probabilities of the texts. Computed before the sync, while the trainer has its memory on shared GPUs."""
    samples = [HeldOutSample(list(ids[: end + 1]), [1]) for ids in prompts for end in range(1, len(ids))]
    async with ctx.runtime.memory.for_trainer() as trainer:
        ranks = await trainer.at(version)
        losses = iter(await ranks.together(Rank.losses, version, samples))
    return [[-next(losses) for _ in ids[1:]] for ids in prompts]


async def compare_engines(
    ctx: IterationContext, version: int, prompts: Sequence[Sequence[int]], expected: Logprobs
) -> Compared:
    """Compare every engine that holds the version. On shared GPUs they take all their memory for it.

    Raises WeightsDifferError for an engine that differs more than sync.max_prompt_gap, or that answers by adapters of an earlier
    version. The engine then serves no version, so that the next start sends it the weights again.
    """
    limit = ctx.config.sync.max_prompt_gap
    engines = (await ctx.runtime.memory.for_engines(VersionRange.only(version))).serving
    found = await asyncio.gather(*(engine.weights.logprobs(prompts) for engine in engines))
    gaps = {engine: mean_gap(expected, logprobs) for engine, logprobs in zip(engines, found, strict=True)}
    if limit is not None and (wrong := [engine for engine, gap in gaps.items() if not gap <= limit]):
        for engine in wrong:
            await _forget(engine)
        raise _differs(version, {engine.engine_id: gaps[engine] for engine in wrong}, limit)
    if ctx.config.adapters_by_name:
        earlier = ctx.runtime.earlier_versions
        stale = [engine for engine, at in zip(engines, found, strict=True) if earlier.answer(expected, at)]
        for engine in stale:
            await engine.forget_version()
        if stale:
            raise _stayed(version, [engine.engine_id for engine in stale])
        earlier.note(expected)
        return Compared(max(gaps.values(), default=0.0), {})
    sums = await asyncio.gather(*(engine.weights.checksum() for engine in engines))
    checksums = {
        engine.engine_id: hashlib.sha256(orjson.dumps(answer, option=orjson.OPT_SORT_KEYS)).hexdigest()
        for engine, answer in zip(engines, sums, strict=True)
    }
    return Compared(max(gaps.values(), default=0.0), checksums)


async def _forget(engine: EngineClient) -> None:
    await idle(engine)
    await engine.forget_version()


def _differs(version: int, gaps: Mapping[str, float], limit: float) -> WeightsDifferError:
    named = ", ".join(f"{engine} by {gap:.3g}" for engine, gap in gaps.items())
    return WeightsDifferError(
        f"after the sync of weight version {version} engines differ from the trainer on four fixed texts: {named} nats a token, "
        f"sync.max_prompt_gap is {limit:g}",
        remedy="start the same command again, which sends the weights again. If it comes again, set sync.kind=disk; if the dtype alone makes the difference, raise sync.max_prompt_gap",
    )


def _stayed(version: int, engines: Sequence[str]) -> WeightsDifferError:
    return WeightsDifferError(
        f"after the sync of weight version {version} {', '.join(engines)} answer four fixed texts as an earlier version does",
        remedy="start the same command again, which sends the adapters again. If it comes again, set sync.lora=merged",
    )
