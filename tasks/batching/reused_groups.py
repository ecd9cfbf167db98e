"""Groups that an earlier iteration trained, and that this iteration trains again.

Owns how they are read: from the batch that the earlier iteration's manifest names, checked against it. A sample keeps its
id, tokens, log-probabilities and reward; credit and step are this iteration's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import pyarrow as pa
import pyarrow.compute as pc

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.core.contracts import schema
from millrace.core.contracts.sample import JudgedSample, ScoredSample
from millrace.core.contracts.task_records import ReusedGroup
from millrace.core.hooks.group_filters import Judgement
from millrace.tasks.context import IterationContext
from millrace.tasks.scoring.scored_group import ScoredGroup

REASON = "reused"
REUSED = f"kept: {REASON}"  # key in counts of verdicts


@dataclass(frozen=True)
class Reuse:
    """A group that is trained again. `rollouts` has a row for each of the group's scores, in their order."""

    group: ScoredGroup
    rollouts: pa.Table
    iteration: int  # the iteration that generated it
    uses: int  # times that it was trained, this time included


def read_reused(ctx: IterationContext) -> list[Reuse]:
    """The groups that this iteration trains again, as their iterations stored them, in the order of the choice.

    Raises MissingFileError or CorruptFileError for a missing or changed file of an earlier iteration.
    """
    by_iteration: dict[int, list[ReusedGroup]] = {}
    for item in ctx.reused:
        by_iteration.setdefault(item["iteration"], []).append(item)
    found = {
        (iteration, reuse.group.ordinal): reuse
        for iteration, items in by_iteration.items()
        for reuse in _of_iteration(ctx, iteration, items)
    }
    return [found[item["iteration"], item["ordinal"]] for item in ctx.reused]


def _of_iteration(ctx: IterationContext, iteration: int, items: Sequence[ReusedGroup]) -> Iterable[Reuse]:
    files = IterationFiles(ctx.run_folder, iteration)
    drawn = files.read_table("prompts", ["group_id", "prompt_id", "ordinal"]).to_pylist()
    by_ordinal = {row["ordinal"]: row for row in drawn}
    batch = files.read_table("batch")
    for item in items:
        row = by_ordinal[item["ordinal"]]
        samples = batch.filter(pc.equal(batch.column("group_id"), row["group_id"]))
        assert len(samples), "a group that was trained has samples in the batch"
        yield Reuse(
            group=ScoredGroup(
                **row,
                scores={score.sample_id: score for score in _scores(samples)},
                judgement=Judgement(True, REASON, True),
            ),
            rollouts=_of_this_iteration(samples, ctx.index),
            iteration=iteration,
            uses=item["uses"],
        )


def _scores(samples: pa.Table) -> Iterable[ScoredSample]:
    stored = {item.name for item in fields(ScoredSample)} & set(samples.column_names)
    for row in samples.select(sorted(stored)).to_pylist():
        yield ScoredSample(**{**row, "reason": None}, scoring_s=0.0)


def _of_this_iteration(samples: pa.Table, index: int) -> pa.Table:
    """Turn rows of a batch into rows of rollouts of iteration `index`."""
    wanted = schema.schema("rollouts")
    rollouts = samples.select(wanted.names).cast(wanted)
    at = wanted.get_field_index("iteration")
    return rollouts.set_column(at, wanted.field(at), pa.array([index] * len(rollouts), wanted.field(at).type))


def reused_samples(reused: Iterable[Reuse], steps: Mapping[str, int]) -> list[JudgedSample]:
    """The verdicts on reused samples: each use has its own. steps: weight version that each sample's step makes."""
    return [
        JudgedSample(
            sample_id=sample,
            group_id=item.group.group_id,
            prompt_id=item.group.prompt_id,
            verdict="kept",
            reason=REASON,
            train_step=steps[sample],
            reused_from=item.iteration,
            reused_ordinal=item.group.ordinal,
        )
        for item in reused
        for sample in item.group.scores
    ]
