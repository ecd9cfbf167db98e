"""Samples of one answer each: asked for, or gone on with where they were deferred, and as rows.

Owns the row of a sample and how the pieces of an answer become one. Knows nothing of engines or files.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.connectors.sglang.dispatcher import NOTHING, joined_spans
from millrace.connectors.sglang.wire.answer_body import NO_TOKENS
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.rows.own_sampling import own_sampling
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample
from millrace.tasks.context import IterationContext
from millrace.tasks.samples.generation import Answer, SampleGenerator
from millrace.tasks.samples.part_writer import PartWriter


@dataclass(frozen=True)
class Made:
    """What was generated of an answer in earlier iterations."""

    output_ids: npt.NDArray[np.int32] = field(default_factory=lambda: NO_TOKENS.ids)
    logprobs: npt.NDArray[np.float64] = field(default_factory=lambda: NO_TOKENS.logprobs)
    versions: list[tuple[int, int]] = field(default_factory=list)  # first token, weight version

    @classmethod
    def of(cls, row: GeneratedSample | None) -> Made:
        """Of the row of a sample that was cut; nothing of None."""
        if row is None:
            return cls()
        spans = [(span["first_token"], span["version"]) for span in row.policy_versions]
        length = row.response_length
        ids = np.asarray(row.tokens[len(row.tokens) - length :], dtype=np.int32)
        return cls(ids, np.asarray(row.rollout_logprobs, dtype=np.float64), spans)

    def then(self, answer: Answer, text_of: Callable[[Sequence[int]], str]) -> Answer:
        """The whole answer, with what was generated now. One that failed has no tokens."""
        if not len(self.output_ids) or answer.status == "failed":
            return answer
        new = answer.generation or NOTHING
        output_ids = np.concatenate([self.output_ids, new.output_ids])
        whole = replace(
            new,
            output_ids=output_ids,
            logprobs=np.concatenate([self.logprobs, new.logprobs]),
            text=text_of(output_ids.tolist()),
            weight_versions=joined_spans(self.versions, new.weight_versions, len(self.output_ids)),
        )
        return replace(answer, generation=whole)


class Answers:
    """Makes samples of one answer each."""

    def __init__(self, ctx: IterationContext, generator: SampleGenerator, writer: PartWriter) -> None:
        self._ctx, self._generator = ctx, generator
        self._keys = {source.name: source.sampling_key for source in ctx.config.data.sources}
        self._writer = writer
        self.begun: list[GeneratedSample] = []  # that the cut ended

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Samples are written meanwhile, and all of them at the end."""
        async with self._writer.open():
            yield

    async def __call__(self, group: DrawnGroup, index: int) -> None:
        """Make a sample of a group, or the rest of one that was deferred."""
        ctx, sample = self._ctx, sample_id(group.group_id, index)
        joined = ctx.stream.joined if ctx.stream and group.deferrals else None
        if joined and sample in joined.finished:
            self._writer.put([joined.finished[sample]])
            return
        seed = ctx.runtime.prompts.sample_seed(group, index)
        made = Made.of(joined.begun.get(sample) if joined else None)
        answer = await self._generator.generate(
            group.prompt_tokens,
            seed=seed,
            rid=sample,
            session=group.group_id,
            own=self._own(group),
            made=made.output_ids.tolist(),
            priority=ctx.index,
        )
        row = generated_sample(group, index, seed, made.then(answer, ctx.runtime.prompts.tokenizer.decode))
        if row.status == "aborted":
            self.begun.append(row)
        else:
            self._writer.put([row])

    def _own(self, group: DrawnGroup) -> dict[str, Any]:
        """Sampling parameters that the group's row names."""
        key = self._keys[group.source]
        metadata = json.loads(group.metadata) if key and group.metadata else {}
        return own_sampling(metadata, key, self._ctx.config.rollout.sampling.max_new_tokens)


def generated_sample(group: DrawnGroup, index: int, seed: int, answer: Answer) -> GeneratedSample:
    """The row of a sample, generated or failed."""
    result, length = answer.generation, len(answer.output_ids)
    return sample_row(
        group,
        index,
        sample_id=sample_id(group.group_id, index),
        tokens=np.concatenate([np.array(group.prompt_tokens, dtype=np.int32), answer.output_ids]),
        response_length=length,
        response=answer.text,
        loss_mask=np.ones(length, dtype=np.int8),
        rollout_logprobs=(result.logprobs if result else NO_TOKENS.logprobs).astype(np.float32),
        policy_versions=[
            {"first_token": first, "version": version}
            for first, version in (result.weight_versions if result else [])
        ],
        engine_id=result.engine_id if result else "",
        seed=seed,
        turns=1,
        status=answer.status,
        reason=answer.reason,
        timings=[("started", answer.started), ("generate_s", answer.seconds)],
    )


def sample_row(group: DrawnGroup, index: int, **made: Any) -> GeneratedSample:
    """A row of a drawn group's sample. made: the columns that are its own."""
    return GeneratedSample(
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        iteration=group.iteration,
        source=group.source,
        index=index,
        prompt=group.prompt,
        label=group.label,
        metadata=group.metadata,
        **made,
    )
