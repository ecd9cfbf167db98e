"""The writer of finished samples, over real files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.core.config import RunConfig
from millrace.core.contracts.sample import GeneratedSample
from millrace.core.errors import StorageError
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.answers import generated_sample
from millrace.tasks.generation.single_samples import Answer
from millrace.tasks.rollout import row_writer, sample_generator
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream
from tests.support.stored_samples import drawn_group


def context(root: Path) -> IterationContext:
    config = RunConfig.model_validate(
        {
            "run": {"name": "a", "iterations": 1},
            "model": {"path": "model"},
            "data": {"sources": [{"path": "train.jsonl"}]},
            "storage": {"root": str(root)},
            "rollout": {"prompts": 1, "samples_per_prompt": 2, "sampling": {"max_new_tokens": 4}},
        }
    )
    return IterationContext(Runtime(config), 0, Stream(released=1))


def row(group: str) -> GeneratedSample:
    drawn = drawn_group(0, group_id=group, iteration=0)
    return generated_sample(drawn, 0, 7, Answer(None, "engine-0: died", 0.0, 0.0))


def landed(ctx: IterationContext) -> list[str]:
    return ctx.stream.parts("rollouts")


@pytest.mark.timeout(20)
async def test_a_write_that_fails_ends_a_body_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.touch()
    monkeypatch.setenv("MILLRACE_STORAGE_FULL", str(full))
    ctx = context(tmp_path)

    async def waits() -> None:
        async with row_writer(ctx, "rollouts", sample_generator(ctx)).open() as writer:
            writer.put([row("a")])
            await asyncio.Event().wait()

    with pytest.raises(BaseExceptionGroup) as caught:
        await waits()
    assert caught.value.subgroup(StorageError) is not None
    assert landed(ctx) == []


async def test_what_was_finished_before_another_error_is_written(tmp_path: Path) -> None:
    ctx = context(tmp_path)

    async def fails() -> None:
        async with row_writer(ctx, "rollouts", sample_generator(ctx)).open() as writer:
            writer.put([row("a")])
            raise EOFError

    with pytest.raises(BaseExceptionGroup) as caught:
        await fails()
    assert caught.value.subgroup(EOFError) is not None
    (path,) = landed(ctx)
    assert ctx.folder.read_table(path, "rollouts").column("sample_id").to_pylist() == ["a-0000"]
