"""The groups that an iteration trains, and the batch that they make.

Owns the order of the batch and its columns. Does not know why a group was kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from millrace.connectors.storage.files import in_threads
from millrace.core.accounts.buffer import spread
from millrace.core.accounts.staleness import admissible, oldest_versions
from millrace.core.algorithms.credit import SampleCredit
from millrace.core.contracts import schema
from millrace.core.contracts.sample import ScoredSample
from millrace.core.errors import MissingFileError
from millrace.tasks.batching.reused_groups import Reuse
from millrace.tasks.batching.row_sources import LandedParts, RowKey, RowSources
from millrace.tasks.context import IterationContext
from millrace.tasks.scoring.scored_group import ScoredGroup

ASKED = ["sample_id", "turns", "response_length", "status", "iteration", "policy_versions"]
"""Columns of rollouts that are read for all rows at once: none with a value for each token."""


@dataclass
class KeptGroups:
    """The groups that are trained on, in drawing order, and the stored rows of their scored samples."""

    groups: list[ScoredGroup]
    rows: pa.Table  # the columns ASKED
    scores: list[ScoredSample]
    places: list[RowKey] = field(default_factory=list)  # the place of each row's other columns
    sources: RowSources = field(default_factory=RowSources)
    reused: dict[str, Reuse] = field(
        default_factory=dict
    )  # groups that an earlier iteration generated, by group


def read_kept(
    landed: LandedParts,
    paths: Sequence[str],
    groups: list[ScoredGroup],
    ids_of: Callable[[ScoredGroup], list[str]],
) -> KeptGroups:
    """The kept groups with their scored samples that have tokens.

    landed: reads parts. paths: parts of samples. ids_of: a group's samples, in order. Raises MissingFileError for a scored
    sample without a row: a part is missing, and without it the batch would differ.
    """
    sources = RowSources()
    tables = in_threads(lambda path: landed.read(path, ASKED), paths)
    places: dict[str, RowKey] = {}
    where: dict[str, int] = {}  # by sample id, its row among all parts
    stored: set[str] = set()
    first = 0
    for path, table in zip(paths, tables, strict=True):
        source = sources.add(partial(landed.read, path))
        named = zip(table.column("sample_id").to_pylist(), table.column("turns").to_pylist(), strict=True)
        for at, (sid, turns) in enumerate(named):
            stored.add(sid)
            # a sample without tokens is not trained
            if turns:
                places[sid], where[sid] = (source, at), first + at
        first += len(table)
    scored = [
        group.scores[sid]
        for group in groups
        for sid in ids_of(group)
        if group.scores[sid].scoring == "scored"
    ]
    if lacking := [score.sample_id for score in scored if score.sample_id not in stored]:
        raise MissingFileError(
            f"{len(lacking)} scored samples are in none of the {len(paths)} parts that count, such as {lacking[0]}",
            where=landed.url,
            remedy="start the same command again, which generates them once more. If that ends here too, restore the parts from "
            "a copy",
        )
    scores = [score for score in scored if score.sample_id in places]
    empty = schema.schema("rollouts").empty_table().select(ASKED)
    rows = pa.concat_tables([empty, *tables]).take([where[score.sample_id] for score in scores])
    return KeptGroups(groups, rows, scores, [places[score.sample_id] for score in scores], sources)


def with_reused(kept: KeptGroups, reused: list[Reuse]) -> KeptGroups:
    """The batch's groups in the order of steps: reused groups at equal distances among the others."""
    fresh = len(kept.groups)
    groups = [*kept.groups, *(item.group for item in reused)]
    scores = [*kept.scores, *(score for item in reused for score in item.group.scores.values())]
    places = list(kept.places)
    for item in reused:
        source = kept.sources.add(partial(_whole, item))
        places += ((source, at) for at in range(len(item.rollouts)))
    by_id: dict[str, list[int]] = {}
    for at, score in enumerate(scores):
        by_id.setdefault(score.group_id, []).append(at)
    ordered = [groups[at] for at in spread(fresh, len(reused))]
    order = [at for group in ordered for at in by_id.get(group.group_id, ())]
    rows = pa.concat_tables([kept.rows, *(item.rollouts.select(ASKED) for item in reused)])
    return KeptGroups(
        ordered,
        rows.take(order),
        [scores[at] for at in order],
        [places[at] for at in order],
        kept.sources,
        {item.group.group_id: item for item in reused},
    )


def _whole(item: Reuse) -> pa.Table:
    return item.rollouts


def batch_pieces(kept: KeptGroups, credit: SampleCredit, steps: dict[str, int]) -> Iterator[pa.Table]:
    """The scored samples' rollouts with reward, credit and step, in drawing order, some million tokens at a time."""
    wanted = schema.schema("batch")
    lengths = kept.rows.column("response_length").to_pylist()
    for span, table in kept.sources.pieces(kept.places, lengths):
        for name, values in _added(kept, credit, steps, span).items():
            table = table.append_column(wanted.field(name), pa.array(values, wanted.field(name).type))
        yield table.select(wanted.names).cast(wanted)


def _added(
    kept: KeptGroups, credit: SampleCredit, steps: dict[str, int], span: slice
) -> dict[str, Sequence[object]]:
    """The columns that a batch has in addition to a rollout's, for some of its rows."""
    scores = kept.scores[span]
    reuses = [kept.reused.get(score.group_id) for score in scores]
    return {
        "reward": [score.reward for score in scores],
        "reward_parts": [score.reward_parts for score in scores],
        "scoring": [score.scoring for score in scores],
        "verdict": ["kept"] * len(scores),
        "shaped_reward": credit.shaped_rewards[span],
        "advantage": credit.advantages[span] if credit.advantages else [None] * len(scores),
        "train_step": [steps[score.sample_id] for score in scores],
        "teacher_logprobs": [score.teacher_logprobs for score in scores],
        "reused_from": [reuse.iteration if reuse else None for reuse in reuses],
        "uses": [reuse.uses if reuse else None for reuse in reuses],
        "teacher_top_tokens": [score.teacher_top_tokens for score in scores],
        "teacher_top_logprobs": [score.teacher_top_logprobs for score in scores],
        "reward_texts": [score.reward_texts for score in scores],
        "answer": [score.answer for score in scores],
    }


def check_ages(ctx: IterationContext, kept: KeptGroups) -> None:
    """Assert that no token of a batch is older than pipeline.max_staleness, or than its group's deferral allows.

    The opening of iterations and the deferral of groups ensure this; nothing is dropped for its age. Stored rollouts are not
    checked.
    """
    if ctx.config.pipeline.rollouts_from:
        return
    steps, ahead = ctx.config.steps_per_iteration, ctx.runtime.prompts.ahead
    oldest = oldest_versions(kept.rows.column("policy_versions"), ctx.version_before).tolist()
    origins = kept.rows.column("iteration").to_pylist()
    fresh = (score.group_id not in kept.reused for score in kept.scores)
    made = {(origin, version) for origin, version, new in zip(origins, oldest, fresh, strict=True) if new}
    for origin, version in made:
        between = ctx.config.pipeline.sync_every - 1
        allowed = max(ctx.config.pipeline.staleness, ctx.index - origin + ahead.at(origin) + between)
        assert admissible(version, ctx.index, allowed, steps), (
            f"a token of version {version} in iteration {ctx.index}"
        )
