"""Chosen groups with their stored samples, credit and chunks; and the account of an iteration, read from what it stored.

filter uses it for a batch and eager_passes for its first chunks, so that both make the same rows of a chunk. Does not know why
a group was chosen.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import partial

import pyarrow as pa

from millrace.connectors.storage.iteration_files import IterationFiles, way_out
from millrace.connectors.storage.parts import list_parts, read_parts
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.accounts.account import Account
from millrace.core.accounts.token_counts import COLUMNS, account_of
from millrace.core.algorithms.credit import SampleCredit, ScoredSamples, sample_credit
from millrace.core.contracts.ids import iteration_number, rollout_of, sample_id
from millrace.core.errors import ConfigError, StorageError, of_run
from millrace.tasks.batching.judged_groups import reward_of
from millrace.tasks.batching.kept_groups import KeptGroups, read_kept
from millrace.tasks.context import IterationContext
from millrace.tasks.scoring.scored_group import ScoredGroup

CREDIT_TIMEOUT_S = 600.0  # for a whole batch; only a user's function takes long


def read_chosen(ctx: IterationContext, groups: list[ScoredGroup]) -> KeptGroups:
    """The groups that are trained, with their scored samples. Parts of replaced shards do not count."""
    paths = ctx.stream.parts("rollouts") if ctx.shards else list_parts(ctx.folder, "rollouts")
    return read_kept(ctx.landed, paths, groups, partial(sample_ids, ctx))


def sample_ids(ctx: IterationContext, group: ScoredGroup) -> list[str]:
    """The group's samples, rollout by rollout; for a rollout that was not made, the id that it would have."""
    return [
        sid
        for index in range(ctx.config.rollout.samples_per_prompt)
        for sid in [score.sample_id for score in group.rollout(index)] or [sample_id(group.group_id, index)]
    ]


async def credited(ctx: IterationContext, kept: KeptGroups) -> SampleCredit:
    """Shaped rewards and advantages of the scored samples, computed in the worker process."""
    samples = ScoredSamples(
        rewards=[reward_of(score) for score in kept.scores],
        group_ids=_numbered([(score.group_id, score.role) for score in kept.scores]),
        units=_numbered([(rollout_of(score.sample_id), score.role) for score in kept.scores]),
        lengths=kept.rows.column("response_length").to_pylist(),
        truncated=[status == "truncated" for status in kept.rows.column("status").to_pylist()],
    )
    algorithm, budget = ctx.config.algorithm, ctx.config.rollout.longest_response
    outcome = await ctx.runtime.scoring.credit_worker.call(
        sample_credit, samples, algorithm, budget, timeout_s=CREDIT_TIMEOUT_S, again=1
    )
    if outcome.kind != "done":
        raise ConfigError(
            f"shaping and advantages of iteration {iteration_number(ctx.index)} failed: {outcome.reason}",
            where="algorithm",
            remedy="correct the setting or the function, and start the run again. What finished is kept",
        )
    credit: SampleCredit = outcome.value
    return credit


def chunk_rows(ctx: IterationContext, kept: KeptGroups) -> list[int]:
    """Rows of the batch in each run of pipeline.eager_groups groups, in its order; runs without rows are left out."""
    size = ctx.config.pipeline.chunk_groups(ctx.config.rollout.prompts)
    rows = Counter(score.group_id for score in kept.scores)
    of_groups = [rows[group.group_id] for group in kept.groups]
    return [count for at in range(0, len(of_groups), size) if (count := sum(of_groups[at : at + size]))]


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    """The keys as numbers from 0, in the order of their first occurrence."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def carried_to(files: IterationFiles) -> pa.Table | None:
    """Generated samples that the previous iteration deferred to this one; None without any."""
    return files.before.read_deferred(COLUMNS["rollouts"]) if files.index else None


def stored_account(files: IterationFiles) -> Account:
    """The account of an iteration whose batch is fixed, from the files that its manifest or records name, each checked."""
    return account_of(
        files.read_parts("rollouts", COLUMNS["rollouts"]),
        files.read_parts("turns", COLUMNS["turns"]),
        files.read_table("verdicts", COLUMNS["verdicts"]),
        files.read_table("batch", COLUMNS["batch"]),
        cut=files.read_deferred(COLUMNS["rollouts"]),
        carried=carried_to(files),
    )


def open_account(files: IterationFiles) -> Account:
    """The account of an unfinished iteration, from its parts so far."""
    rollouts, turns = (
        read_parts(files.folder, kind, kind, columns=COLUMNS[kind]) for kind in ("rollouts", "turns")
    )
    cut = files.read_deferred(COLUMNS["rollouts"])
    return account_of(rollouts, turns, cut=cut, carried=carried_to(files))


def check_closes(account: Account, files: IterationFiles, run: RunFolder) -> None:
    """Raise StorageError if the account of an iteration does not close."""
    problems = account.problems()
    if problems:
        raise StorageError(
            f"the account of iteration {iteration_number(files.index)} does not close: {'; '.join(problems)}",
            where=files.folder.url,
            remedy=f"its files disagree: `millrace verify {of_run(run.name, run.store.url)}` names them; restore them from a copy, or "
            f"{way_out(run, files.index)}",
        )
