"""Samples of held-out sets: generated and scored, in the driver or a shard.

Owns which samples of a set are due, and the row of a sample. Knows nothing of tables or metrics.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal

from millrace.connectors.storage.files import FileEntry
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts import schema
from millrace.core.contracts.ids import derived_seed
from millrace.core.contracts.progress import Count
from millrace.core.contracts.rows.chat_options import own_sampling
from millrace.core.contracts.rows.prompts import PromptRow
from millrace.core.contracts.sample import DrawnGroup, EvaluatedSample, Scorable
from millrace.core.contracts.topics import EvaluationTopic
from millrace.core.contracts.turns import TurnRow
from millrace.core.errors import only_first_error
from millrace.core.plain_text import json_text
from millrace.tasks.context import IterationContext
from millrace.tasks.data.rows import UsablePrompt
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.part_writer import PartWriter
from millrace.tasks.generation.sessions.runner import session_task
from millrace.tasks.generation.single_samples import SampleGenerator
from millrace.tasks.kill_points import kill_point
from millrace.tasks.scoring.scoring import Score, score, score_group, scored_by_group

log = logging.getLogger(__name__)

KIND: Literal["evaluations"] = "evaluations"  # kind of the parts
PROMPTS = "held_out.parquet"  # the prompts of all sets, while shards use them
Made = dict[tuple[str, int], EvaluatedSample]
"""Samples by prompt and index."""


def made_of(samples: Iterable[EvaluatedSample], version: int, *, failed: bool = False) -> Made:
    """Generated samples of a weight version, the last row of each. failed: include samples that no attempt could generate."""
    found = [s for s in samples if s.version == version and (failed or s.status != "failed")]
    return {(s.prompt_id, s.index): s for s in sorted(found, key=lambda s: s.status != "failed")}


def places(held_out: EvalSet, prompts: Sequence[UsablePrompt]) -> list[tuple[str, int]]:
    """The samples of a set, in their order: prompt and index of each."""
    return [
        (prompt.row.prompt_id, index) for prompt in prompts for index in range(held_out.samples_per_prompt)
    ]


def evaluation_budget(
    ctx: IterationContext, evaluation: EvaluationTopic, held_out: EvalSet, prompts: int
) -> FailureBudget:
    """Counts samples of a set that fail to generate. prompts: number of its prompts."""
    return FailureBudget(
        "rollout.max_failed_share",
        ctx.config.rollout.max_failed_share,
        prompts * held_out.samples_per_prompt,
        what="failed to generate",
        where=f"evaluation of {held_out.name} after {evaluation.done} iterations",
        remedy="fix the cause or raise the share, and start the same command again: answers are kept",
        also=partial(ctx.note_failure, held_out.name),
    )


async def make_set(
    ctx: IterationContext,
    evaluation: EvaluationTopic,
    held_out: EvalSet,
    prompts: Sequence[UsablePrompt],
    budget: FailureBudget,
    made: Made,
) -> Made:
    """Make the missing samples of these prompts of a set. Raises BudgetError naming the set if too many fail to generate.

    made: samples of an earlier attempt. Returns them with the new ones.
    """
    version = evaluation.version
    generator = SampleGenerator(
        ctx.config,
        held_out.sampling,
        lambda: ctx.engines_at(VersionRange.only(version)),
        budget,
        lambda ids: ctx.runtime.prompts.tokenizer.decode(ids, held_out.sampling.skip_special_tokens),
        ctx.runtime.places(ctx.share),
        lambda: ctx.runtime.prompts.tokenizer.ends,
        unsampled=ctx.runtime.prompts.unsampled([held_out]),
    )
    respond = _in_sessions if ctx.config.rollout.session else _at_once
    answers = respond(ctx, held_out, generator, version)
    units = [unit for prompt in prompts for unit in _units(ctx, held_out, prompt.row, prompt.tokens)]
    due = [unit for unit in units if not all(place.key in made for place in unit)]
    limit = ctx.config.rollout.part_groups * ctx.config.rollout.samples_per_prompt
    results = dict(made)
    count = Count(log, f"evaluation of {held_out.name}, answers", sum(map(len, due)))

    async def landed(entry: FileEntry) -> None:
        await kill_point(ctx.index, evaluation.task, "in")
        await ctx.announce(KIND, entry)

    with only_first_error():
        async with (
            PartWriter(ctx, KIND, limit, lambda: generator.outstanding > 0, landed).open() as writer,
            asyncio.TaskGroup() as group,
        ):

            async def work(unit: list[_Place]) -> None:
                rows = await _evaluate(ctx, answers, unit, version)
                results.update({(row.prompt_id, row.index): row for row in rows})
                writer.put(rows)
                count.add(len(rows))

            for unit in due:
                group.create_task(work(unit))
    return results


async def make_share(
    ctx: IterationContext, evaluation: EvaluationTopic, stored: Iterable[EvaluatedSample]
) -> None:
    """Make this process's share of all sets, from the prompts that the driver wrote. stored: samples in parts."""
    table = await asyncio.to_thread(ctx.folder.read_table, PROMPTS, "prompts")
    rows = [DrawnGroup(**row) for row in table.to_pylist()]
    made = made_of(stored, evaluation.version)
    for held_out in ctx.config.evaluation.sets:
        of_set = [row for row in rows if row.source == held_out.name]
        own = [_usable(row) for row in of_set if ctx.share.holds(row.ordinal)]
        budget = evaluation_budget(ctx, evaluation, held_out, len(of_set))
        await make_set(ctx, evaluation, held_out, own, budget, made)


def write_prompts(ctx: IterationContext, evaluation: EvaluationTopic) -> None:
    """Write the prompts of all sets for shards, so that shards need no data files."""
    ordinals = count()
    rows = [
        DrawnGroup(
            group_id=prompt.row.prompt_id,
            prompt_id=prompt.row.prompt_id,
            iteration=evaluation.index,
            source=held_out.name,
            row=prompt.row.row,
            epoch=0,
            ordinal=next(ordinals),
            prompt=json_text(prompt.row.prompt),
            prompt_tokens=list(prompt.tokens),
            label=None if prompt.row.label is None else json_text(prompt.row.label),
            metadata=json_text(prompt.row.metadata) if prompt.row.metadata else None,
        )
        for held_out in ctx.config.evaluation.sets
        for prompt in ctx.runtime.prompts.held_out(held_out).usable
    ]
    ctx.folder.write_table(PROMPTS, schema.to_table(rows, "prompts"), "prompts")


def remove_prompts(ctx: IterationContext) -> None:
    """Remove the file of `write_prompts`, if there is one."""
    if ctx.folder.exists(PROMPTS):
        ctx.folder.remove(PROMPTS)


def _usable(row: DrawnGroup) -> UsablePrompt:
    label = None if row.label is None else json.loads(row.label)
    metadata = json.loads(row.metadata) if row.metadata else {}
    found = PromptRow(row.source, row.row, row.prompt_id, json.loads(row.prompt), label, metadata)
    return UsablePrompt(found, row.prompt_tokens)


@dataclass(frozen=True)
class _Place:
    """A due sample of a held-out set."""

    held_out: EvalSet
    row: PromptRow
    tokens: list[int]
    index: int

    @property
    def key(self) -> tuple[str, int]:
        """Its prompt and index."""
        return self.row.prompt_id, self.index

    @property
    def prompt(self) -> str:
        """Its prompt as JSON."""
        return json_text(self.row.prompt)

    @property
    def subset(self) -> str | None:
        """The subset of its row."""
        found = (self.row.metadata or {}).get(self.held_out.subset_key or "")
        return None if found is None else str(found)

    def seed(self, run_seed: int) -> int:
        """Its sampling seed."""
        return derived_seed(run_seed, "evaluate", self.held_out.name, self.row.prompt_id, self.index)

    def request(self, version: int) -> str:
        """Id of its request."""
        return f"eval-{version}-{self.row.prompt_id}-{self.index}"

    def scorable(self) -> Scorable:
        """The fields that a reward may read, before there is an answer."""
        row = self.row
        return {
            "prompt": self.prompt,
            "label": None if row.label is None else json_text(row.label),
            "metadata": json_text(row.metadata) if row.metadata else None,
            "response": "",
            "response_length": 0,
            "status": "failed",
            "dialogue": None,
            "session_reward": None,
            "session_parts": None,
            "session_texts": None,
            "session_answer": None,
        }


Respond = Callable[[_Place], Awaitable[Scorable]]


def _at_once(ctx: IterationContext, held_out: EvalSet, generator: SampleGenerator, version: int) -> Respond:
    """Generate responses of one answer each."""

    async def respond(place: _Place) -> Scorable:
        seed = place.seed(ctx.config.run.seed)
        own = own_sampling(place.row.metadata, held_out.sampling_key, held_out.sampling.max_new_tokens)
        answer = await generator.generate(
            place.tokens,
            seed=seed,
            rid=place.request(version),
            session=None,
            own=own,
            priority=ctx.index,  # before rollouts of later iterations: the next sync waits for it
            images=partial(ctx.runtime.prompts.sent_images, place.prompt),
        )
        found = place.scorable()
        found["response"], found["status"] = answer.text, answer.status
        found["response_length"] = len(answer.output_ids)
        return found

    return respond


def _in_sessions(
    ctx: IterationContext, held_out: EvalSet, generator: SampleGenerator, version: int
) -> Respond:
    """Generate responses by rollouts of several turns; a rollout with branches counts by its first one. No turns are stored."""
    sessions = ctx.runtime.sessions
    runner = sessions.runner(held_out.sampling, generator, ctx.share)

    async def respond(place: _Place) -> Scorable:
        found, request = place.scorable(), place.request(version)
        seed = place.seed(ctx.config.run.seed) & 0x7FFFFFFF
        opening = sessions.opening(held_out, request, request, found["prompt"], place.tokens, seed)
        task = session_task(
            found["prompt"], found["label"], found["metadata"], held_out.name, place.index, evaluation=True
        )
        samples, _, _ = await runner.run(opening, task, [], _not_stored)
        first = samples[0]
        found["response"], found["status"] = first.response, first.status
        found["response_length"] = len(first.response_ids)
        found["dialogue"], found["session_reward"] = first.dialogue, first.reward
        found["session_parts"], found["session_texts"] = first.parts, first.texts
        found["session_answer"] = first.answer
        return found

    return respond


async def _not_stored(row: TurnRow) -> None:
    """Drop a turn: a rollout of an evaluation is repeated whole."""


def _units(ctx: IterationContext, held_out: EvalSet, row: PromptRow, tokens: list[int]) -> list[list[_Place]]:
    """The samples of a prompt by calls of the reward: each alone, or all in one call."""
    places = [_Place(held_out, row, tokens, index) for index in range(held_out.samples_per_prompt)]
    together = scored_by_group(
        ctx.runtime, places[0].scorable(), ctx.runtime.scoring.of_sets.get(held_out.name)
    )
    return [places] if together else [[place] for place in places]


async def _evaluate(
    ctx: IterationContext, respond: Respond, places: list[_Place], version: int
) -> list[EvaluatedSample]:
    """The rows of samples that are scored together."""
    own = ctx.runtime.scoring.of_sets.get(places[0].held_out.name)
    answers = await asyncio.gather(*map(respond, places))
    if scored_by_group(ctx.runtime, answers[0], own):
        results = await score_group(ctx.runtime, answers, own)
    else:
        results = [await score(ctx.runtime, answer, own) for answer in answers]
    return [
        _row(place, answer, result, version)
        for place, answer, result in zip(places, answers, results, strict=True)
    ]


def _row(place: _Place, answer: Scorable, result: Score, version: int) -> EvaluatedSample:
    return EvaluatedSample(
        set=place.held_out.name,
        prompt_id=place.row.prompt_id,
        index=place.index,
        prompt=answer["prompt"],
        label=answer["label"],
        response=answer["response"],
        response_length=answer["response_length"],
        status=answer["status"],
        reward=result.reward,
        scoring=result.scoring,
        version=version,
        subset=place.subset,
        reason=result.reason,
        reward_texts=result.texts,
        answer=result.answer,
    )
