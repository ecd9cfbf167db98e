"""An iteration of the data plane's benchmark: its groups, and answers made into parts as a rollout makes them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from pathlib import Path

from benchmarks.answers.engines import PROMPT
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.host.garbage import collect_garbage, collect_whole_when_asked, use_few_heaps
from millrace.core.config import RunConfig
from millrace.core.contracts.sample import DrawnGroup
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.answers import generated_sample
from millrace.tasks.rollout import row_writer, sample_generator
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream

GROUP = 8


def drawn_group(number: int) -> DrawnGroup:
    """A drawn prompt."""
    return DrawnGroup(
        group_id=f"g{number}",
        prompt_id=f"p{number}",
        iteration=0,
        source="s",
        row=number,
        epoch=0,
        ordinal=number,
        prompt='"1+1="',
        prompt_tokens=[number % 100] * PROMPT,
        label=None,
        metadata=None,
    )


def as_a_driver() -> None:
    """Hold memory as a run's driver does: it has set the garbage of its start aside by its first train step."""
    use_few_heaps()
    collect_whole_when_asked()
    collect_garbage()


def context(args: argparse.Namespace, folder: Path) -> IterationContext:
    """The iteration, on a folder."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "bench", "iterations": 1},
            "model": {"path": "none"},
            "data": {"sources": [{"path": "none.jsonl"}]},
            "storage": {"root": str(folder)},
            "rollout": {
                "prompts": args.samples // GROUP,
                "samples_per_prompt": GROUP,
                "sampling": {"max_new_tokens": args.tokens},
            },
        }
    )
    return IterationContext(Runtime(config), 0, Stream(released=args.samples // GROUP))


async def generate(ctx: IterationContext, groups: Iterable[int], ports: list[int]) -> None:
    """Ask for all samples of the groups and store their rows, a task a sample, begun group by group as the rollout task does."""
    clients = [SglangClient(f"http://127.0.0.1:{port}", f"engine-{port}") for port in ports]

    async def nothing(version: int) -> None:
        """No engine is lost."""

    dispatcher = Dispatcher(
        lambda: clients, nothing, lambda engine, error: None, version=0, attempts=1, progress_timeout_s=60
    )

    async def ready() -> Dispatcher:
        return dispatcher

    generator = sample_generator(ctx)
    generator._make_ready = ready
    writer = row_writer(ctx, "rollouts", generator)

    async def sample(group: DrawnGroup, index: int) -> None:
        rid = f"{group.group_id}-{index:04}"
        answer = await generator.generate(group.prompt_tokens, seed=0, rid=rid, session=group.group_id)
        assert answer.status != "failed", answer.reason
        writer.put([generated_sample(group, index, 0, answer)])

    try:
        async with writer.open(), asyncio.TaskGroup() as running:
            for number in groups:
                group = drawn_group(number)
                for index in range(GROUP):
                    running.create_task(sample(group, index))
                await asyncio.sleep(0)
    finally:
        for client in clients:
            await client.close()
