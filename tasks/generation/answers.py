"""Samples of one answer each: requests new ones, continues deferred or killed ones, and makes their rows.

Owns the row of a sample. Knows nothing of engines or files.
"""

import json
import time
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from millrace.connectors.engines.client import NO_TOKENS, Generation
from millrace.connectors.engines.dispatching.pieces import Flush
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.rows.chat_options import own_sampling
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample
from millrace.core.contracts.turns import TurnRow
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.answer_segments import AnswerSegments, Made
from millrace.tasks.generation.part_writer import PartWriter
from millrace.tasks.generation.sessions.rollout_record import stored_events
from millrace.tasks.generation.single_samples import Answer, SampleGenerator
from millrace.tasks.stream import Joined


class Answers:
    """Makes samples of one answer each."""

    def __init__(
        self,
        ctx: IterationContext,
        generator: SampleGenerator,
        writer: PartWriter,
        segments: PartWriter,
        stored: Iterable[TurnRow] = (),
    ) -> None:
        """stored: segments of an earlier attempt."""
        self._ctx, self._generator = ctx, generator
        self._keys = {source.name: source.sampling_key for source in ctx.config.data.sources}
        self._writer, self._segments = writer, segments
        self._stored = stored_events(stored)
        self.begun: list[GeneratedSample] = []  # ended by the cut
        # of the same samples: the group, and the tokens of this attempt
        self._ended: list[tuple[str, AnswerSegments, Generation]] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Write samples and segments in the background, and all of them on leaving."""
        async with self._writer.open(), self._segments.open():
            yield

    async def __call__(self, group: DrawnGroup, index: int) -> None:
        """Make a sample of a group, or the rest of an unfinished one."""
        ctx, sample = self._ctx, sample_id(group.group_id, index)
        whole = self._whole(group, sample)
        if whole:
            self._writer.put([whole])
            return
        seed, every = ctx.runtime.prompts.sample_seed(group, index), ctx.config.rollout.flush_tokens
        segments = self._begun(group, sample, seed)
        made = segments.made
        answer = await self._generator.generate(
            group.prompt_tokens,
            seed=seed,
            rid=sample,
            session=group.group_id,
            own=self._own(group),
            made=made.output_ids.tolist(),
            priority=ctx.index,
            flush=Flush(every, segments) if every else None,
            routed=made.routed,
            images=partial(ctx.runtime.prompts.sent_images, group.prompt),
        )
        row = generated_sample(group, index, seed, made.then(answer, self._text_of))
        if row.status == "aborted":
            self.begun.append(row)
            if answer.generation:
                self._ended.append((group.group_id, segments, answer.generation))
        else:
            self._writer.put([row])

    def store_begun(self, groups: Collection[str]) -> None:
        """Store the tokens of these groups' cut samples as segments, so that `left` finds them in another process."""
        for group_id, segments, made in self._ended:
            if group_id in groups:
                segments.put_rest(made)

    def left(self, group: DrawnGroup, index: int) -> GeneratedSample | None:
        """The stored part of a sample that was not continued; None without any. A sample that was deferred before has a row."""
        sample, joined = sample_id(group.group_id, index), self._joined(group)
        whole = self._whole(group, sample)
        seed = self._ctx.runtime.prompts.sample_seed(group, index)
        made = self._begun(group, sample, seed).made
        carried = joined is not None and sample in joined.begun  # its account must know what became of it
        if whole or not (len(made.output_ids) or carried):
            return whole
        none = Answer(None, None, time.time(), 0.0)
        return generated_sample(group, index, seed, made.then(none, self._text_of))

    def _whole(self, group: DrawnGroup, sample: str) -> GeneratedSample | None:
        """The row of a sample that was finished when its group was deferred."""
        joined = self._joined(group)
        return joined.finished.get(sample) if joined else None

    def _begun(self, group: DrawnGroup, sample: str, seed: int) -> AnswerSegments:
        joined = self._joined(group)
        return AnswerSegments(
            group,
            sample,
            seed,
            Made.of(joined.begun.get(sample) if joined else None),
            self._stored.get(sample, ()),
            self._segments,
            self._text_of,
        )

    def _text_of(self, ids: Sequence[int]) -> str:
        """The text of an answer's tokens, equal to the engine's."""
        skip = self._ctx.config.rollout.sampling.skip_special_tokens
        return self._ctx.runtime.prompts.tokenizer.decode(ids, skip)

    def _joined(self, group: DrawnGroup) -> Joined | None:
        """The deferred state of a group that was deferred to the iteration; None for others."""
        return self._ctx.stream.joined if group.deferrals else None

    def _own(self, group: DrawnGroup) -> dict[str, Any]:
        """Sampling parameters that the group's row names."""
        key = self._keys[group.source]
        metadata = json.loads(group.metadata) if key and group.metadata else {}
        return own_sampling(metadata, key, self._ctx.config.rollout.sampling.max_new_tokens)


def generated_sample(group: DrawnGroup, index: int, seed: int, answer: Answer) -> GeneratedSample:
    """The row of a sample, generated or failed."""
    result, length = answer.generation, len(answer.output_ids)
    return GeneratedSample(
        **group.of_sample(index),
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
        routed_experts=answer.routed,
    )
