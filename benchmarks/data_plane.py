"""Tokens a second from the engines' answers to the batch's file and the trainer's packs, and how long the event loop is held up.

Engines in processes of their own answer /generate with tokens and log-probabilities that they made before. One driver process asks
them, stores rollout parts, makes the batch and lays one rank's packs, with the parts of the project that a run uses. Reading an
answer and storing its row is also measured the plain way, in turns: the whole JSON as Python objects, and Arrow from lists.

    python -m benchmarks.data_plane [--samples 1024] [--tokens 4096] [--engines 2] [--rate 0] [--out FILE]
    python -m benchmarks.data_plane --shards 1 2 4    the rollout's part alone, in so many processes

A rate is that of the driver's own CPU time, all threads, unless it says wall time. What is measured is the second iteration of a
process, as a run has them by the thousand; what the first one takes is kept beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.answers.engines import answer_body, engines
from benchmarks.answers.generating import GROUP, as_a_driver, context, drawn_group, generate
from benchmarks.answers.shards import in_shards
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.engines.sglang.wire.answer_body import read_answer
from millrace.connectors.storage.parts import list_parts
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.batching import plan_packs
from millrace.core.algorithms.credit import SampleCredit
from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.sample import DrawnGroup, GeneratedSample, ScoredSample
from millrace.tasks.batching.kept_groups import batch_pieces, read_kept
from millrace.tasks.context import IterationContext
from millrace.tasks.generation.answers import generated_sample
from millrace.tasks.generation.single_samples import Answer
from millrace.tasks.scoring.scored_group import ScoredGroup

BEAT_S = 0.005  # the event loop is asked this often whether it answers
PACK = 32768  # tokens


class Stages:
    """CPU and wall seconds of this process, by stage."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.found: dict[str, dict[str, float]] = {}

    def end(self, name: str, began: tuple[float, float]) -> None:
        """Note a stage that began then."""
        cpu, wall = time.process_time() - began[0], time.perf_counter() - began[1]
        self.found[name] = {"cpu_s": cpu, "wall_s": wall, "tokens_per_cpu_s": self.tokens / cpu}

    def add_up(self, name: str) -> None:
        """Note all stages so far as one."""
        cpu, wall = (sum(stage[key] for stage in self.found.values()) for key in ("cpu_s", "wall_s"))
        self.found[name] = {"cpu_s": cpu, "wall_s": wall, "tokens_per_cpu_s": self.tokens / cpu}


def now() -> tuple[float, float]:
    """CPU and wall time."""
    return time.process_time(), time.perf_counter()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1024, help="samples of the iteration, a multiple of 8")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a response")
    parser.add_argument("--engines", type=int, default=2, help="processes that answer")
    parser.add_argument("--rate", type=float, default=0.0, help="tokens a second of an engine; 0: at once")
    parser.add_argument(
        "--repeats", type=int, default=5, help="of the comparison with the plain way, in turns"
    )
    parser.add_argument(
        "--shards",
        type=int,
        nargs="+",
        help="processes that generate, each with so many --engines of its own",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    if args.shards:
        in_shards(args)
        return
    report = {
        "benchmark": "data_plane",
        "command": " ".join(["python -m benchmarks.data_plane", *sys.argv[1:]]),
        **{name: value for name, value in vars(args).items() if name not in ("out", "shards")},
        "paired": paired(args.tokens, args.repeats),
        **whole(args),
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def paired(tokens: int, repeats: int) -> dict[str, float]:
    """Tokens a CPU second from an answer's bytes to a table, ours and the plain way: medians, and that of the ratios."""
    bodies = [answer_body(seed, tokens) for seed in range(64)]
    group = drawn_group(0)
    client = SglangClient("http://nowhere", "engine-0")

    def ours() -> Any:
        made = [client._generation(read_answer(body), "r") for body in bodies]
        return schema.to_table([generated_sample(group, 0, 0, Answer(one, None, 0, 0)) for one in made], kind)

    def plain() -> Any:
        return schema.to_table([plain_row(group, orjson.loads(body)) for body in bodies], kind)

    kind = "rollouts"
    assert ours().equals(plain()), "both ways store the same"
    rates: dict[str, list[float]] = {"ours": [], "plain": []}
    ways: dict[str, Callable[[], Any]] = {"plain": plain, "ours": ours}
    for _ in range(repeats):
        for name, make in ways.items():
            began = time.process_time()
            make()
            rates[name].append(len(bodies) * tokens / (time.process_time() - began))
    ratios = [new / old for new, old in zip(rates["ours"], rates["plain"], strict=True)]
    return {
        **{name: statistics.median(found) for name, found in rates.items()},
        "ratio": statistics.median(ratios),
    }


def plain_row(group: DrawnGroup, answer: dict[str, Any]) -> GeneratedSample:
    """The row of an answer whose tokens are Python lists."""
    meta = answer["meta_info"]
    ids = [token for _, token, _ in meta["output_token_logprobs"]]
    empty = generated_sample(group, 0, 0, Answer(None, None, 0, 0))
    return GeneratedSample(
        **{name: getattr(empty, name) for name in schema.SCHEMAS["rollouts"].names}
        | {
            "tokens": [*group.prompt_tokens, *ids],
            "response_length": len(ids),
            "response": answer["text"],
            "loss_mask": [1] * len(ids),
            "rollout_logprobs": [value for value, _, _ in meta["output_token_logprobs"]],
            "policy_versions": [{"first_token": 0, "version": int(meta["weight_version"])}],
            "engine_id": "engine-0",
            "status": "truncated",
        }
    )


def whole(args: argparse.Namespace) -> dict[str, Any]:
    """Two iterations of one process through all stages; figures of the second, and those of the first."""
    with engines(args.engines, 0, args.tokens, args.rate) as ports, tempfile.TemporaryDirectory() as folder:
        return asyncio.run(iterations(args, ports, Path(folder)))


async def iterations(args: argparse.Namespace, ports: list[int], folder: Path) -> dict[str, Any]:
    """The second iteration, with the stages of the first as `first`. Memory is the first one's: a run's driver never loads torch."""
    as_a_driver()
    first = await iteration(args, ports, folder / "first")
    second = await iteration(args, ports, folder / "second")
    return {**second, "driver_mib": first["driver_mib"], "first": first["stages"]}


async def iteration(args: argparse.Namespace, ports: list[int], folder: Path) -> dict[str, Any]:
    """From requests to packs; figures of each stage."""
    ctx = context(args, folder)
    before = psutil.Process().memory_info().rss
    stages, blocks = Stages(args.samples * args.tokens), Blocks()
    began = now()
    beating = asyncio.create_task(blocks.watch())
    await generate(ctx, range(args.samples // GROUP), ports)
    stages.end("generate", began)
    began = now()
    url = await asyncio.to_thread(make_batch, ctx, args.samples)
    stages.end("batch", began)
    beating.cancel()
    driver = psutil.Process().memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lay = packer()
    began = now()
    lay(url)
    stages.end("packs", began)
    stages.add_up("end_to_end")
    return {
        "stages": stages.found,
        "longest_block_s": {"wall": blocks.wall, "cpu": blocks.cpu},
        "driver_mib": {
            "before": before / 2**20,
            "after_the_batch": driver[0] / 2**20,
            "peak": driver[1] / 2**20,
        },
    }


class Blocks:
    """How long the event loop was held up at most: by the clock, and in CPU time of its own thread, which other processes do
    not lengthen."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            asked, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(BEAT_S)
            self.wall = max(self.wall, time.perf_counter() - asked - BEAT_S)
            self.cpu = max(self.cpu, time.thread_time() - used)


def make_batch(ctx: IterationContext, samples: int) -> tuple[Store, str]:
    """The batch of all samples in drawing order, as the filter task stores it."""
    groups = [scored_group(number) for number in range(samples // GROUP)]
    kept = read_kept(ctx.landed, list_parts(ctx.folder, "rollouts"), groups, lambda group: list(group.scores))
    ones, steps = [1.0] * samples, dict.fromkeys((score.sample_id for score in kept.scores), 1)
    assert len(kept.scores) == samples, "every sample is in a part"
    pieces = partial(batch_pieces, kept, SampleCredit(ones, ones), steps)
    ctx.folder.write_pieces("batch.parquet", pieces, "batch")
    return ctx.folder, "batch.parquet"


def scored_group(number: int) -> ScoredGroup:
    """A group all of whose samples have a reward."""
    group_id = drawn_group(number).group_id
    scores = [
        ScoredSample(
            sample_id=sample_id(group_id, index),
            group_id=group_id,
            reward=1.0,
            reward_parts=[],
            scoring="scored",
            reason=None,
            scoring_s=0.0,
        )
        for index in range(GROUP)
    ]
    return ScoredGroup(group_id, f"p{number}", number, {score.sample_id: score for score in scores})


def packer() -> Callable[[tuple[Store, str]], None]:
    """Lays every row of the batch in the packs of one rank. torch is loaded here: the driver of a run has none."""
    from millrace.connectors.trainers.packing import make_pack, read_rows

    def lay(place: tuple[Store, str]) -> None:
        rows = read_rows(place[0].read_table(place[1], "batch"))
        lengths = [len(row.tokens) for row in rows]
        for members in plan_packs(lengths, ranks=1, max_tokens=max(PACK, *lengths))[0]:
            make_pack([rows[i] for i in members], members, cp_size=1, cp_rank=0, align=1, device="cpu")

    return lay


if __name__ == "__main__":
    main()
