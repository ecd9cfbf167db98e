"""Tokens a second of our rollout task over those of raw SGLang, at equal concurrency, on one server.

    python -m benchmarks.gpu.rollout [--shape 0.6b] [--samples 256] [--tokens 512] [--concurrency 256] [--rounds 3]

Raw: plain aiohttp posts the requests of the same prompts with the same fields and parses each answer. Ours: the task
`rollout` itself, through dispatcher and fleet, with rows written as Parquet parts. Rounds alternate after one warm-up
round of each. JSON to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.gpu.shapes import SGLANG, command_line, configuration, device_name, model_folder, versions
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.fleet import Fleet
from millrace.core.accounts.staleness import VersionRange
from millrace.core.config import RunConfig
from millrace.tasks.context import IterationContext
from millrace.tasks.rollout import rollout
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.sample_prompts import sample_prompts
from millrace.tasks.stream import Stream
from tests.support.local_handle import LocalHandle

GROUP = 8


def main() -> None:
    """Start the server, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="tokens generated for each sample")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=None, help="where model folders are kept")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(options.shape, (options.models or Path(scratch)) / options.shape)
        report = asyncio.run(_measured(options, model, Path(scratch)))
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


async def _measured(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    config = RunConfig.model_validate(
        configuration(
            model,
            folder,
            run={"name": "rollout", "iterations": 100},
            rollout={
                "prompts": options.samples // GROUP,
                "samples_per_prompt": GROUP,
                "max_concurrency": options.concurrency,
                "sampling": {"max_new_tokens": options.tokens},
            },
            engines={"sglang": {**SGLANG, "mem_fraction_static": 0.6, "cuda_graph_max_bs_decode": 256}},
            placement={"colocate": False},
        )
    )
    handle = LocalHandle(config, 0)

    async def made(_: int) -> LocalHandle:
        return handle

    fleet = Fleet(config, made)
    try:
        await fleet.ensure(str(model))
        await fleet.update_weights(str(model), 0)
        ours: list[float] = []
        raw: list[float] = []
        for index in range(options.rounds + 1):
            ctx = await _drawn(config, fleet, index)
            tokens, seconds = await _raw(ctx, fleet, options)
            raw.append(tokens / seconds)
            tokens, seconds = await _ours(ctx)
            ours.append(tokens / seconds)
            print(f"round {index}: raw {raw[-1]:.0f}, ours {ours[-1]:.0f} tokens/s", file=sys.stderr)
        await fleet.close()
    finally:
        handle.close()
    ratios = [a / b for a, b in zip(ours[1:], raw[1:], strict=True)]
    return {
        "command": command_line(),
        "device": device_name(),
        "versions": versions(),
        "samples": options.samples,
        "tokens": options.tokens,
        "concurrency": options.concurrency,
        "raw_tokens_s": [round(x) for x in raw[1:]],
        "ours_tokens_s": [round(x) for x in ours[1:]],
        "ratio_median": round(statistics.median(ratios), 4),
        "ratios": [round(x, 4) for x in ratios],
        "target": 0.97,
    }


async def _drawn(config: RunConfig, fleet: Fleet, number: int) -> IterationContext:
    """The first iteration of a run of its own, with its prompts drawn."""
    run = config.run.model_copy(update={"name": f"{config.run.name}-{number}"})
    runtime = _RolloutOnly(config.model_copy(update={"run": run}), fleet)
    ctx = IterationContext(runtime, 0, Stream(released=config.rollout.prompts))
    await sample_prompts.fn(ctx)
    return ctx


async def _raw(ctx: IterationContext, fleet: Fleet, options: argparse.Namespace) -> tuple[int, float]:
    """Tokens and seconds of plain requests for an iteration's samples."""
    prompts = ctx.folder.read_table("prompts.parquet", "prompts").sort_by("ordinal").to_pylist()
    slots = asyncio.Semaphore(options.concurrency)
    (client,) = fleet._clients.values()
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": options.tokens, "no_stop_trim": True}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)

    async def one(session: aiohttp.ClientSession, prompt: dict[str, Any], index: int) -> int:
        body = {
            "input_ids": prompt["prompt_tokens"],
            "sampling_params": {**sampling, "sampling_seed": 1000 * prompt["ordinal"] + index},
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
        }
        async with slots, session.post(f"{client.url}/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return len(orjson.loads(await answer.read())["meta_info"]["output_token_logprobs"])

    headers = {"Authorization": f"Bearer {client.key}"} if client.key else None
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        started = time.perf_counter()
        chosen = prompts[: ctx.config.rollout.prompts]
        counts = await asyncio.gather(*(one(session, p, i) for p in chosen for i in range(GROUP)))
        return sum(counts), time.perf_counter() - started


async def _ours(ctx: IterationContext) -> tuple[int, float]:
    """Tokens and seconds of the rollout task, until its last part is in storage."""
    assert ctx.stream is not None

    async def settle() -> float:
        """Stands where reward and filter do: settles once every sample has landed."""
        assert ctx.stream is not None
        revision, rows, read = ctx.stream.revision, 0, 0
        while rows < ctx.config.samples_per_iteration:
            revision = await ctx.stream.wait(revision)
            landed = ctx.stream.parts("rollouts")
            for path in landed[read:]:
                rows += ctx.folder.read_table(path, "rollouts", columns=["sample_id"]).num_rows
            read = len(landed)
        done = time.perf_counter()
        await ctx.stream.settle()
        return done

    started = time.perf_counter()
    settled = asyncio.create_task(settle())
    record = await rollout.fn(ctx)
    return int(record["tokens_generated"]), await settled - started


class _RolloutOnly(Runtime):
    """The live parts of a run whose only engines are those of one fleet."""

    def __init__(self, config: RunConfig, fleet: Fleet) -> None:
        super().__init__(config)
        self.memory = _RunningEngines(fleet)  # type: ignore[assignment]


class _RunningEngines:
    """Stands where GpuMemory does: engines run already and hold the only version."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def for_engines(self, versions: VersionRange) -> Dispatcher:
        """A dispatcher over the fleet."""
        return self._fleet.dispatcher(versions.newest, self._recover)

    async def _recover(self, version: int) -> None:
        raise RuntimeError("an engine was lost in a benchmark")


if __name__ == "__main__":
    main()
