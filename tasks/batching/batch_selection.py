"""Waits for the groups that an iteration trains: until the first of the draw fill the batch, or until the cut.

Owns both waits, the release of further groups, and the commit of the cut. millrace.core.accounts.selection makes the choice.
"""

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.run_folder import CUT
from millrace.core.accounts.selection import Candidate, choose
from millrace.core.contracts.task_records import Cut
from millrace.tasks.batching.deferred_groups import read_cut
from millrace.tasks.batching.judged_groups import Judging
from millrace.tasks.context import IterationContext
from millrace.tasks.kill_points import kill_point
from millrace.tasks.scoring.scored_group import ScoredGroup
from millrace.tasks.stream import Joined


async def until_filled(ctx: IterationContext, judging: Judging, need: int) -> list[ScoredGroup]:
    """Judge groups in drawing order, releasing one more for each that is dropped, until `need` are kept or none is left.

    Returns the kept groups. Groups deferred to the iteration come first. filter.oversample releases more groups, which are
    judged in their turn, so that they do not change which groups are kept.
    """
    if ctx.config.pipeline.rollouts_from:
        # nothing can be generated: groups that the filter wants beyond the stored ones are left out
        await judging.read()
        return [group for group in judging.groups[: _wanted(judging, need)] if group.judgement]
    spare = math.ceil(ctx.config.filter.oversample * ctx.config.rollout.prompts)
    _take_in(judging, await ctx.stream.until_joined())
    groups = judging.groups
    while True:
        revision = ctx.stream.revision
        await judging.read()
        wanted = _wanted(judging, need)
        if ctx.eager:
            await ctx.stream.keep(_first_kept(groups[:wanted], need))
        if min(len(groups), wanted + spare) > ctx.stream.released:
            await ctx.stream.release(min(len(groups), wanted + spare))
            continue
        if all(group.judgement for group in groups[:wanted]):
            return groups[:wanted]
        await ctx.stream.wait(revision)


def _wanted(judging: Judging, need: int) -> int:
    """How many groups of the draw the batch takes, as known so far; judges their whole groups."""
    groups, wanted = judging.groups, 0
    while True:
        dropped = sum(bool(g.judgement and not g.judgement.keep) for g in groups[:wanted])
        if wanted == min(len(groups), need + dropped):
            return wanted
        wanted = min(len(groups), need + dropped)
        judging.judge(groups[:wanted])


def _first_kept(groups: Sequence[ScoredGroup], need: int) -> list[ScoredGroup]:
    """The first groups of the batch, up to the first group that is not judged yet."""
    judged = itertools.takewhile(lambda group: group.judgement is not None, groups)
    return [group for group in judged if group.judgement and group.judgement.keep][:need]


async def until_cut(
    ctx: IterationContext, judging: Judging, need: int
) -> tuple[list[FileEntry], list[ScoredGroup]]:
    """Judge groups as they finish until `need` are kept; commit cut.json. Returns its entry, and the trainable groups.

    The cut holds from its commit on: a start after a kill reads it again.
    """
    cut, taken_in = await asyncio.to_thread(read_cut, ctx), False
    while True:
        revision = ctx.stream.revision
        if not taken_in and (cut or ctx.stream.joined):
            _take_in(judging, await ctx.stream.until_joined())
            taken_in = True
        await judging.read()
        begun = judging.groups if cut else _begun(ctx, judging)
        judging.judge(begun)
        if cut:
            break
        if await _release_for_dropped(ctx, judging):
            continue
        cut = _decide(ctx, begun, judging.whole, judging.parts, need) if taken_in else None
        if cut:
            break
        await ctx.stream.wait(revision)
    if ctx.folder.exists(CUT):
        entry = await asyncio.to_thread(ctx.folder.entry, CUT)
    else:
        await kill_point(ctx.index, "cut", "before")
        entry = await asyncio.to_thread(_commit, ctx, cut)
        await kill_point(ctx.index, "cut", "after")
    for group in judging.groups:
        if group.group_id in cut.deferred:
            group.cut = "deferred"
        elif group.group_id in cut.returned or not group.judgement:
            group.cut = "returned"
    return [entry], [group for group in judging.groups if group.cut is None]


def _begun(ctx: IterationContext, judging: Judging) -> list[ScoredGroup]:
    """The released groups, and the groups deferred to the iteration."""
    return [g for g in judging.groups if g.joined is not None or g.ordinal < ctx.stream.released]


async def _release_for_dropped(ctx: IterationContext, judging: Judging) -> bool:
    """Release one more group of the draw for each dropped one; returns whether there was one."""
    first = ctx.records["sample_prompts"].get("released", ctx.fresh_groups)
    drawn = [group for group in judging.groups if group.joined is None]
    dropped = sum(bool(g.judgement and not g.judgement.keep) for g in _begun(ctx, judging))
    wanted = min(len(drawn), first + dropped)
    if wanted <= ctx.stream.released:
        return False
    await ctx.stream.release(wanted)
    return True


def _decide(
    ctx: IterationContext,
    begun: list[ScoredGroup],
    whole: Mapping[str, int],
    parts: Sequence[str],
    need: int,
) -> Cut | None:
    candidates = [
        Candidate(
            group.group_id,
            group.deferrals,
            whole.get(group.group_id),
            bool(group.judgement and group.judgement.keep),
        )
        for group in begun
    ]
    choice = choose(candidates, need, ctx.config.pipeline.deferrals)
    if choice is None:
        return None
    before = {group.group_id: group.deferrals for group in begun}
    return Cut(
        trained=choice.trained,
        deferred={group: before[group] + 1 for group in choice.deferred},
        returned=choice.returned,
        parts=sorted(parts),
    )


def _commit(ctx: IterationContext, cut: Cut) -> FileEntry:
    place = f"{ctx.run_folder.iteration_path(ctx.index)}/{CUT}"
    return ctx.folder.write_sealed(CUT, cut.model_dump(), place, ctx.run_folder.owner.run_id)


def _take_in(judging: Judging, joined: Joined) -> None:
    judging.add(
        [
            ScoredGroup(
                group_id=group.group_id,
                prompt_id=group.prompt_id,
                ordinal=group.ordinal,
                joined=at,
                deferrals=group.deferrals or 0,
            )
            for at, group in enumerate(joined.groups)
        ]
    )
