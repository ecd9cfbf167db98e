"""A cut that was made has had its effect: it holds whatever pipeline.select says later, and nothing goes on without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.connectors.storage.iteration_files import IterationFiles, record_path
from millrace.connectors.storage.parts import write_part
from millrace.connectors.storage.run_folder import CUT, DEFERRED
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.task_records import Cut
from millrace.core.errors import CorruptFileError, MissingFileError, StorageError
from millrace.tasks.batching.deferred_groups import join, read_cut
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.rollout import _deferral, _read_groups
from millrace.tasks.run_recorded import _check_found
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream
from tests.tasks.test_filter import DRAWN, EACH, drawn, rollout, score

pytestmark = pytest.mark.usefixtures("one_credit_worker")

THE_CUT = Cut(trained=["g2", "g3"], deferred={"g0": 1}, returned=["g1"], parts=[])
MakeConfig = Callable[..., RunConfig]


NOTHING_BEGUN = SimpleNamespace(begun=[])  # every sample is whole


def context(config: RunConfig, index: int = 1, *, run: str | None = None) -> IterationContext:
    ctx = IterationContext(Runtime(config), index, Stream(released=DRAWN))
    if run:
        ctx.run_folder.owner.drive_as(run)
    return ctx


@pytest.fixture
def cut(make_config: MakeConfig) -> IterationContext:
    """An open iteration whose cut is committed: its four groups are whole, and those of the middle of the draw are trained."""
    ctx = context(make_config(pipeline={"select": "finish", "reserve": 1.0, "max_staleness": 1}), run="r1")
    groups = [drawn(number) for number in range(DRAWN)]
    ctx.folder.write_table("prompts.parquet", schema.to_table(groups, "prompts"), "prompts")
    for number in range(DRAWN):
        made = [rollout(number, index) for index in range(EACH)]
        write_part(ctx.folder, "rollouts", schema.to_table(made, "rollouts"), "rollouts")
        scored = [score(number, index) for index in range(EACH)]
        write_part(ctx.folder, "rewards", schema.to_table(scored, "rewards"), "rewards")
    place = f"{ctx.run_folder.iteration_path(1)}/{CUT}"
    ctx.folder.write_sealed(CUT, THE_CUT.model_dump(), place, "r1")
    return ctx


def record_rollout(ctx: IterationContext) -> None:
    """And those of the tasks before it, as far as they are read."""
    parts = [entry.record() for entry in ctx.folder.entries(ctx.folder.list("rewards"))]
    named = {
        "sample_prompts": [ctx.folder.entry("prompts.parquet").record()],
        "reward": parts,
        "rollout": _deferral(ctx, cast(Any, NOTHING_BEGUN), []),
    }
    for task, files in named.items():
        ctx.folder.write_sealed(record_path(task), {"result": json.dumps({"files": files})})


async def trained(ctx: IterationContext) -> set[str]:
    try:
        await filter_groups.fn(ctx)
    finally:
        ctx.runtime.scoring.close()
    return set(ctx.folder.read_table("batch.parquet", "batch").column("group_id").to_pylist())


@pytest.mark.parametrize("pipeline", [{"select": "finish", "max_staleness": 1}, {"select": "draw"}])
async def test_a_cut_holds_also_where_the_first_of_the_draw_are_to_be_trained_by_now(
    cut: IterationContext, make_config: MakeConfig, pipeline: dict[str, Any]
) -> None:
    """The next iteration had the deferred groups too: they were trained twice."""
    ctx = context(make_config(pipeline=pipeline))
    assert await trained(ctx) == {"g2", "g3"}
    verdicts = ctx.folder.read_table("verdicts.parquet", "verdicts").to_pylist()
    assert {row["group_id"]: row["verdict"] for row in verdicts} == {
        "g0": "deferred",
        "g1": "returned",
        "g2": "kept",
        "g3": "kept",
    }


async def test_the_record_of_the_rollout_names_the_cut_and_what_was_deferred(cut: IterationContext) -> None:
    record_rollout(cut)
    assert {CUT, DEFERRED} < set(IterationFiles(cut.run_folder, 1).entries)
    joined = join(context(cut.config, 2))
    assert [group.group_id for group in joined.groups] == ["g0"]
    assert {row.group_id for row in joined.finished.values()} == {"g0"}


ALTERED: dict[str, tuple[Callable[[IterationContext], object], type[StorageError]]] = {
    "removed": (lambda ctx: ctx.folder.remove(CUT), MissingFileError),
    "another": (
        lambda ctx: ctx.folder.write_sealed(
            CUT, THE_CUT.model_copy(update={"deferred": {}}).model_dump(), CUT, "r1"
        ),
        CorruptFileError,
    ),
}


@pytest.mark.parametrize("way", ALTERED)
async def test_a_cut_that_had_its_effect_is_not_made_again(cut: IterationContext, way: str) -> None:
    """Without it another choice was made in silence, beside rows that were deferred by the first one."""
    record_rollout(cut)
    alter, error = ALTERED[way]
    alter(cut)
    for read in (lambda: _check_found(cut, "rollout"), lambda: join(context(cut.config, 2))):
        with pytest.raises(error, match=rf"iterations/000001/{CUT}.*millrace discard a --from 2"):
            read()


async def test_prompts_that_are_not_those_that_were_recorded_are_neither_judged_nor_answered(
    cut: IterationContext,
) -> None:
    """A file that was replaced while the run lived went into its rollouts."""
    entry = cut.folder.entry("prompts.parquet")
    cut.records["sample_prompts"] = {"files": [entry.record()], "groups": DRAWN, "by_source": {}}
    assert len(_read_groups(cut)) == DRAWN
    others = [drawn(number) for number in reversed(range(DRAWN))]
    cut.folder.write_table("prompts.parquet", schema.to_table(others[1:], "prompts"), "prompts")
    with pytest.raises(CorruptFileError, match=r"prompts\.parquet"):
        _read_groups(cut)
    with pytest.raises(CorruptFileError, match=r"prompts\.parquet"):
        await trained(cut)


def test_a_cut_of_another_run_of_the_name_is_named(cut: IterationContext) -> None:
    assert read_cut(context(cut.config, run="r1")) == THE_CUT
    cut.run_folder.store.write_sealed("run.json", {"id": "r2"})
    with pytest.raises(StorageError, match=rf"{CUT}: is of another run"):
        read_cut(context(cut.config, run="r2"))


@pytest.mark.parametrize("content", [b"{}", b"", b"[]", b'{"trained": ["g0"]'])
def test_what_is_no_cut_is_named(cut: IterationContext, content: bytes) -> None:
    cut.folder.write(CUT, content)
    with pytest.raises(CorruptFileError, match=CUT) as raised:
        read_cut(cut)
    assert "millrace discard a --from 2" in (raised.value.remedy or "")
