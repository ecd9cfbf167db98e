"""evaluate: sample the held-out sets with the weights of one version and score them.

Engines serve a version from its sync to the next one. `evaluate` is waited for before the next iteration goes on;
`evaluate_before` is of the version that an iteration begins with, and may run beside its work until that iteration's sync.

Reads the held-out sets; writes eval/<set>/NNNNNN.parquet, named by the iterations trained so far. Scored samples are parts of
the iteration's folder until then: what is stored is not generated again. Same engines and same failure budget as training,
and the same reward unless the set has its own. An answer whose scoring failed or timed out counts as wrong, and is counted:
else a policy would gain by answers that no grader can read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prefect import task

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.parts import read_parts
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts import schema
from millrace.core.contracts.failures import Failures
from millrace.core.contracts.ids import derived_seed
from millrace.core.contracts.rows.own_sampling import own_sampling
from millrace.core.contracts.rows.prompts import PromptRow
from millrace.core.contracts.sample import EvaluatedSample, Scorable
from millrace.core.contracts.task_records import EvaluatedSet, EvaluateRecord, FileRecord
from millrace.core.contracts.turns import TurnRow
from millrace.core.errors import only_first_error
from millrace.core.evaluation.figures import Answer, by_subset, figures
from millrace.core.rewards.answer_text import spelling
from millrace.core.rewards.math import answer_of
from millrace.core.staleness import VersionRange
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.run_recorded import may_help
from millrace.tasks.samples.failures import FailureBudget
from millrace.tasks.samples.generation import SampleGenerator
from millrace.tasks.samples.part_writer import PartWriter
from millrace.tasks.samples.scoring import Score, score, score_group, scored_by_group
from millrace.tasks.sessions.runner import session_task

log = logging.getLogger(__name__)
KIND = "evaluations"
UNSCORED = ("failed", "timed_out")


@task(name="evaluate", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def evaluate(ctx: IterationContext) -> EvaluateRecord:
    """Evaluate every set after this iteration; the record holds mean reward by set."""
    return await evaluate_version(ctx, done=ctx.index + 1, version=ctx.version_after, task="evaluate")


@task(name="evaluate_before", retries=2, retry_delay_seconds=1, retry_condition_fn=may_help)
async def evaluate_before(ctx: IterationContext) -> EvaluateRecord:
    """Evaluate every set at the weights that this iteration begins with."""
    return await evaluate_version(ctx, done=ctx.index, version=ctx.version_before, task="evaluate_before")


def is_evaluated_by(ctx: IterationContext) -> bool:
    """Whether the iteration before has evaluated the weights that this one begins with, as one that waits for it does."""
    return ctx.index > 0 and IterationFiles(ctx.run_folder, ctx.index).before.record("evaluate") is not None


async def evaluate_version(
    ctx: IterationContext, done: int, version: int, task: str = "evaluate"
) -> EvaluateRecord:
    """Evaluate all sets at a weight version and write one table per set. `done`: iterations trained. task: whose parts these are."""
    started = time.perf_counter()
    results: dict[str, EvaluatedSet] = {}
    known = await stored_samples(ctx, version)
    for held_out in ctx.config.evaluation.sets:
        of_set = [sample for sample in known if sample.set == held_out.name]
        samples = await _evaluate_set(ctx, held_out, done, version, of_set, task)
        results[held_out.name] = _figures(await write_set(ctx, held_out, done, samples), samples, held_out)
    return {
        "version": version,
        "done": done,
        "sets": results,
        "seconds": time.perf_counter() - started,
        "files": ctx.parts[KIND],
        "lag": await asyncio.to_thread(_lag, ctx, done),
    }


def _lag(ctx: IterationContext, done: int) -> int:
    """Weight versions that are made by now of the one after `done` iterations."""
    index = done
    while ctx.run_folder.iteration(index).exists(record_path("train_step")):
        index += 1
    return (index - done) * ctx.config.steps_per_iteration


async def stored_samples(ctx: IterationContext, version: int) -> list[EvaluatedSample]:
    """What an earlier attempt stored of the sets at this weight version; from here on parts are added to it."""
    stored = await asyncio.to_thread(read_parts, ctx.folder, KIND, KIND, ignore_incomplete=True)
    await asyncio.to_thread(ctx.start_parts, KIND)
    return [EvaluatedSample(**row) for row in stored.to_pylist() if row["version"] == version]


async def write_set(
    ctx: IterationContext, held_out: EvalSet, done: int, samples: list[EvaluatedSample]
) -> FileRecord:
    """The table of a set, by the iterations trained."""
    path, table = f"eval/{held_out.name}/{done:06d}.parquet", schema.to_table(samples, KIND)
    entry = await asyncio.to_thread(ctx.run_folder.store.write_table, path, table, KIND)
    return entry.record()


def _figures(file: FileRecord, samples: list[EvaluatedSample], held_out: EvalSet) -> EvaluatedSet:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    answers = [
        _answer(sample) for sample in samples if sample.reward is not None or sample.scoring in UNSCORED
    ]
    unscored, count = len(answers) - len(rewards), max(1, len(samples))
    whole = figures(answers, held_out.correct_from)
    return {
        "file": file,
        "reward_mean": whole.reward_mean,
        "interval": whole.interval,
        "majority": whole.majority,
        "pass_at": {str(k): value for k, value in whole.pass_at.items()},
        "subsets": {
            name: {
                "samples": part.answers,
                "reward_mean": part.reward_mean,
                "pass_at": {str(k): value for k, value in part.pass_at.items()},
            }
            for name, part in by_subset(answers, held_out.correct_from).items()
        },
        "samples": len(samples),
        "not_scored": len(samples) - len(rewards),
        "unscored": unscored,
        "response_length_mean": sum(sample.response_length for sample in samples) / count,
        "truncated_share": sum(sample.status == "truncated" for sample in samples) / count,
        "failed": sum(sample.status == "failed" for sample in samples),
    }


def _answer(sample: EvaluatedSample) -> Answer:
    text = answer_of(sample.response) or sample.response.strip()
    return Answer(sample.prompt_id, sample.reward or 0.0, spelling(text), sample.subset)


async def _evaluate_set(
    ctx: IterationContext,
    held_out: EvalSet,
    done: int,
    version: int,
    stored: list[EvaluatedSample],
    task: str,
) -> list[EvaluatedSample]:
    """The samples of a set, by prompt and index. Raises BudgetError naming the set if too many fail to generate.

    stored: those of an earlier attempt.
    """
    prompts = ctx.runtime.prompts.held_out(held_out)
    budget = FailureBudget(
        "rollout.max_failed_share",
        ctx.config.rollout.max_failed_share,
        len(prompts.usable) * held_out.samples_per_prompt,
        what="failed to generate",
        where=f"evaluation of {held_out.name} after {done} iterations",
        remedy="fix the cause or raise the share, and start the same command again: what was answered is kept",
    )
    unscored = Failures()
    generator = SampleGenerator(
        ctx.config,
        held_out.sampling,
        lambda: ctx.runtime.memory.for_engines(VersionRange.only(version)),
        budget,
        lambda ids: ctx.runtime.prompts.tokenizer.decode(ids),
    )
    respond = _in_sessions if ctx.config.rollout.session else _at_once
    answers = respond(ctx, held_out, generator, version)
    units = [unit for prompt in prompts.usable for unit in _units(ctx, held_out, prompt.row, prompt.tokens)]
    made = {(sample.prompt_id, sample.index): sample for sample in stored if sample.status != "failed"}
    due = [unit for unit in units if not all(place.key in made for place in unit)]
    limit = ctx.config.rollout.part_groups * ctx.config.rollout.samples_per_prompt

    async def landed(_: FileEntry) -> None:
        await kill_point(ctx.index, task, "in")

    with only_first_error():
        async with (
            PartWriter(ctx, KIND, limit, lambda: generator.outstanding > 0, landed).open() as writer,
            asyncio.TaskGroup() as group,
        ):

            async def work(unit: list[_Place]) -> None:
                rows = await _evaluate(ctx, answers, unit, version)
                made.update({(row.prompt_id, row.index): row for row in rows})
                writer.put(rows)

            for unit in due:
                group.create_task(work(unit))
    results = [made[place.key] for unit in units for place in unit]
    for sample in results:
        if sample.scoring in UNSCORED:
            unscored.add(
                sample.reason or sample.scoring, f"sample {sample.index} of prompt {sample.prompt_id}"
            )
    if unscored.total:
        log.warning(
            "evaluation of %s: %d of %d answers could not be scored and count as wrong; most often: %s",
            held_out.name,
            unscored.total,
            len(results),
            unscored.most_frequent(),
        )
    return results


@dataclass(frozen=True)
class _Place:
    """One sample of a held-out set that is due."""

    held_out: EvalSet
    row: PromptRow
    tokens: list[int]
    index: int

    @property
    def key(self) -> tuple[str, int]:
        """Which sample of the set it is."""
        return self.row.prompt_id, self.index

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
        """What a reward may read of it before there is an answer."""
        row = self.row
        return {
            "prompt": json.dumps(row.prompt, ensure_ascii=False),
            "label": None if row.label is None else json.dumps(row.label, ensure_ascii=False),
            "metadata": json.dumps(row.metadata, ensure_ascii=False) if row.metadata else None,
            "response": "",
            "response_length": 0,
            "status": "failed",
            "dialogue": None,
            "session_reward": None,
            "session_parts": None,
        }


Respond = Callable[[_Place], Awaitable[Scorable]]


def _at_once(ctx: IterationContext, held_out: EvalSet, generator: SampleGenerator, version: int) -> Respond:
    """Responses of one answer each."""

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
        )
        found = place.scorable()
        found["response"], found["status"] = answer.text, answer.status
        found["response_length"] = len(answer.output_ids)
        return found

    return respond


def _in_sessions(
    ctx: IterationContext, held_out: EvalSet, generator: SampleGenerator, version: int
) -> Respond:
    """Rollouts of several turns; of one that branches, what its first branch said. None of their turns are stored."""
    sessions = ctx.runtime.sessions
    runner = sessions.runner(held_out.sampling, generator)

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
        found["session_parts"] = first.parts
        return found

    return respond


async def _not_stored(row: TurnRow) -> None:
    """A rollout of an evaluation is repeated whole."""


def _units(ctx: IterationContext, held_out: EvalSet, row: PromptRow, tokens: list[int]) -> list[list[_Place]]:
    """The samples of a prompt as they are scored: each alone, or all in one call."""
    places = [_Place(held_out, row, tokens, index) for index in range(held_out.samples_per_prompt)]
    together = scored_by_group(ctx.runtime, places[0].scorable(), ctx.runtime.scoring.of_set(held_out.name))
    return [places] if together else [[place] for place in places]


async def _evaluate(
    ctx: IterationContext, respond: Respond, places: list[_Place], version: int
) -> list[EvaluatedSample]:
    """The rows of samples that are scored together."""
    own = ctx.runtime.scoring.of_set(places[0].held_out.name)
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
    )
