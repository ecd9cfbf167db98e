"""Tokens a second by the clock from the engines' answers to rollout parts, in several shards at once.

A shard is a process with the parts of the project that a shard of a run has; Ray and Prefect, which start it, are left out. Each has
engines of its own, and its share of one iteration's groups. `python -m benchmarks.data_plane --shards 1 2 4` runs it. What one shard
does to another shows where the host has a core for each of them and of their engines; elsewhere they wait for cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.answers.engines import engines
from benchmarks.answers.generating import GROUP, as_a_driver, context, generate
from benchmarks.kept import RESULTS
from millrace.connectors.storage.parts import read_parts
from millrace.core.sharding import Share

OUT = RESULTS / "cpu" / "data_plane_shards.json"
WARM_UP = 4  # groups that each shard makes before the clock starts


def in_shards(args: argparse.Namespace) -> None:
    """Measure each number of shards in turns, as often as asked, and report."""
    tries: dict[int, list[dict[str, float]]] = {count: [] for count in args.shards}
    for _ in range(args.repeats):
        for count, found in tries.items():
            found.append(measured(args, count))
            print(count, "shards:", {name: round(value, 2) for name, value in found[-1].items()}, flush=True)
    fastest = {count: max(found, key=lambda one: one["tokens_per_s"]) for count, found in tries.items()}
    least = min(args.shards)
    report = {
        "benchmark": "data_plane_shards",
        "command": " ".join(["python -m benchmarks.data_plane", *sys.argv[1:]]),
        "samples": args.samples,
        "tokens": args.tokens,
        "engines_of_a_shard": args.engines,
        "repeats": args.repeats,
        "cores": len(os.sched_getaffinity(0)),
        "shards": [
            {
                "shards": count,
                **best,
                "speedup": best["tokens_per_s"] / fastest[least]["tokens_per_s"] * least,
                "median_tokens_per_s": statistics.median(one["tokens_per_s"] for one in tries[count]),
            }
            for count, best in fastest.items()
        ],
    }
    print(json.dumps(report, indent=1))
    (args.out or OUT).write_text(json.dumps(report, indent=1) + "\n")


def measured(args: argparse.Namespace, count: int) -> dict[str, float]:
    """An iteration in so many shards: from the moment at which all begin until the last is done."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        shards = []
        for number in range(count):
            ports = stack.enter_context(engines(args.engines, number * args.engines, args.tokens, args.rate))
            ours, theirs = spawn.Pipe()
            given = (theirs, args.samples, args.tokens, Share((number,), count), ports, folder)
            shard = spawn.Process(target=make_share, args=given, daemon=True)
            shard.start()
            stack.callback(shard.kill)
            shards.append(ours)
        for shard in shards:
            shard.recv()  # it is ready
        began = time.perf_counter()
        for shard in shards:
            shard.send(None)
        cpu = [shard.recv() for shard in shards]
        wall = time.perf_counter() - began
        stored = read_parts(iteration_of(args, folder), "rollouts", "rollouts", columns=["sample_id"])
        made = set(stored.column("sample_id").to_pylist())
        assert len(made) == len(stored), "no sample was made twice"
        assert len(made) == args.samples + warm_up(args.samples, count), "every sample was made"
    tokens = args.samples * args.tokens
    return {"tokens_per_s": tokens / wall, "wall_s": wall, "cpu_s": sum(cpu), "cpu_s_longest": max(cpu)}


def warm_up(samples: int, count: int) -> int:
    """Samples that all shards make before the clock starts."""
    return min(WARM_UP, samples // GROUP) * GROUP * count


def iteration_of(args: argparse.Namespace, folder: str) -> Any:
    """The iteration's folder."""
    return context(args, Path(folder)).folder


def make_share(
    port: Connection, samples: int, tokens: int, share: Share, ports: list[int], folder: str
) -> None:
    """One shard: sends a message when it is ready, waits for one, generates its groups, and sends the CPU seconds that took."""
    ctx = context(argparse.Namespace(samples=samples, tokens=tokens), Path(folder))
    ctx.share = share
    groups = [number for number in range(samples // GROUP) if share.holds(number)]
    shard = share.places[0]
    first = samples // GROUP + WARM_UP * shard  # no shard's group
    asyncio.run(generate(ctx, range(first, first + min(WARM_UP, samples // GROUP)), ports))
    as_a_driver()
    port.send(None)
    port.recv()
    began = time.process_time()
    asyncio.run(generate(ctx, groups, ports))
    port.send(time.process_time() - began)
