"""How busy rollouts of several turns keep an engine, against single answers: its CPU time a second, in one run.

Many rollouts at once, each of four turns with a call between that waits as a tool over a network does; and as many single answers
of as many tokens, through a session and without one. The engine generates with one thread and is busy while that thread works.

    python -m benchmarks.sessions [--rollouts 512] [--turns 4] [--tokens 32] [--wait 0.05] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.embedded_engine import start_engine, wait_for
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config import RunConfig
from millrace.core.config.rollout import SessionSection
from millrace.core.contracts.turns import TurnRow
from millrace.core.sessions.interface import Session as UserSession
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.sessions.runner import SessionRunner, session_task
from millrace.tasks.generation.sessions.session_rollout import Opening
from millrace.tasks.generation.single_samples import SampleGenerator

TARGET = 0.9  # of single answers' busy share


async def turns_with_calls(session: UserSession, *, turns: int, wait: float) -> float:
    """Turns with a call between them."""
    for turn in range(turns):
        await session.generate()
        if turn + 1 < turns:
            session.observe(await session.call(look.__name__, seconds=wait), "user")
    return 1.0


async def look(seconds: float) -> str:
    """Wait as a tool does.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "ok"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=512, help="rollouts at once")
    parser.add_argument("--turns", type=int, default=4, help="turns of a rollout")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a turn")
    parser.add_argument("--wait", type=float, default=0.05, help="seconds of a call")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each, in turn")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    report = asyncio.run(measure(options))
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run."""
    from millrace.connectors.huggingface.tiny import build_tiny_model

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(
            Path(folder) / "model", hidden_size=args.hidden, intermediate_size=2 * args.hidden
        )
        port_file = Path(folder) / "port"
        engine = start_engine(model, port_file, 1)
        client = SglangClient(f"http://127.0.0.1:{wait_for(port_file, engine)}", "engine-0")
        found: dict[str, list[dict[str, float]]] = {"turns": [], "single_in_sessions": [], "single": []}
        try:
            async with kinds(args, model, client) as makers:
                for make in makers.values():  # warm-up: processes, allocator
                    await make(64)
                for _ in range(args.repeats):
                    for name, make in makers.items():
                        found[name].append(
                            await busy(psutil.Process(engine.pid), client, make, args.rollouts)
                        )
        finally:
            await client.close()
            engine.kill()
            engine.wait()
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }
    return {
        "benchmark": "sessions",
        "command": " ".join(["python -m benchmarks.sessions", *sys.argv[1:]]),
        **{name: value for name, value in vars(args).items() if name != "out"},
        "medians": medians,
        "busy_ratio": medians["turns"]["busy"] / medians["single"]["busy"],
        "single_ratio": medians["single_in_sessions"]["seconds"] / medians["single"]["seconds"],
        "target": TARGET,
    }


Make = Callable[[int], Awaitable[None]]


async def busy(engine: psutil.Process, client: SglangClient, make: Make, rollouts: int) -> dict[str, float]:
    """Seconds, the engine's CPU time a second, and tokens a second."""
    await client.flush()
    before, tokens = sum(engine.cpu_times()[:2]), (await client.progress())[0]
    started = time.perf_counter()
    await make(rollouts)
    seconds = time.perf_counter() - started
    made = (await client.progress())[0] - tokens
    return {
        "seconds": seconds,
        "busy": (sum(engine.cpu_times()[:2]) - before) / seconds,
        "tokens_per_second": made / seconds,
    }


def session_settings(args: argparse.Namespace, turns: int) -> SessionSection:
    """Rollouts of so many turns with a call after each."""
    function = {
        "function": "benchmarks.sessions:turns_with_calls",
        "options": {"turns": turns, "wait": args.wait},
    }
    limits = {"max_rollouts": args.rollouts, "max_calls": args.rollouts}
    return SessionSection.model_validate(
        {"function": function, "tools": ["benchmarks.sessions:look"], **limits}
    )


@asynccontextmanager
async def kinds(args: argparse.Namespace, model: Path, client: SglangClient) -> Any:
    """What is measured, by name."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "bench"},
            "model": {"path": str(model)},
            "data": {"sources": [{"path": "none.jsonl"}]},
            "rollout": {"max_concurrency": args.rollouts, "sampling": {"max_new_tokens": args.tokens}},
        }
    )

    async def nothing(version: int) -> None:
        """No engine is lost."""

    dispatcher = Dispatcher(
        lambda: [client], nothing, lambda engine, error: None, version=-1, attempts=1, progress_timeout_s=60
    )

    async def ready() -> Dispatcher:
        return dispatcher

    budget = FailureBudget("rollout.max_failed_share", 0.0, 1, what="failed", where="here", remedy="look")
    generator = SampleGenerator(config, config.rollout.sampling, ready, budget)
    tokenizer = PromptTokenizer.load(config.model)
    ids = tokenizer.encode_prompts(["1+1="], chat=True)[0]
    answers = args.rollouts * args.turns
    pools: list[SessionPool] = []

    def runner(turns: int) -> SessionRunner:
        settings = session_settings(args, turns)
        pools.append(SessionPool(settings))
        return SessionRunner(
            settings,
            config.rollout.sampling,
            pools[-1],
            Dialogues(tokenizer, []),
            generator,
            {},
        )

    async def keep(row: TurnRow) -> None:
        """Turns are not stored here."""

    async def session(run: SessionRunner, number: int) -> None:
        opening = Opening(
            f"g{number}-0000", f"g{number}", [{"role": "user", "content": "1+1="}], ids, number, True, 2048
        )
        samples, _, _ = await run.run(opening, session_task('"1+1="', None, None, "s", 0), [], keep)
        assert samples[0].status != "failed", samples[0].reason

    async def single(number: int) -> None:
        await generator.generate(ids, seed=number, rid=f"s{number}-0000", session=None)

    several, one = runner(args.turns), runner(1)

    async def gather(count: int, make: Callable[[int], Awaitable[None]]) -> None:
        limit = asyncio.Semaphore(args.rollouts)

        async def limited(number: int) -> None:
            async with limit:
                await make(number)

        await asyncio.gather(*map(limited, range(count)))

    per = answers // args.rollouts
    try:
        yield {
            "turns": lambda count: gather(count, lambda number: session(several, number)),
            "single_in_sessions": lambda count: gather(count * per, lambda number: session(one, number)),
            "single": lambda count: gather(count * per, single),
        }
    finally:
        for pool in pools:
            pool.close()


if __name__ == "__main__":
    main()
