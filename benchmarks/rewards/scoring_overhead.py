"""10,000 mathematical answers scored by one worker of a run, against plain calls of math-verify in one process.

    python -m benchmarks.rewards.scoring_overhead [--answers 10000] [--rounds 3] [--out FILE]

Both grade the same answers, half of them numbers and half algebra, each at the end of a response of 200 words. A run's way
includes what surrounds the library: the worker process, its deadline, and a request and an answer for each sample. Seconds
are by the clock, of the best round, without the loading of the library. The library is called without time limits of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from benchmarks.rewards.graded_answers import GROUP, KINDS
from millrace.core.config import RunConfig
from millrace.tasks.runtime.scoring import Scoring
from millrace.tasks.scoring.scoring import score

WORDS = "so 3 of 4 words " * 50


def main() -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    rows = answers(options.answers)
    by_library = min(library(rows) for _ in range(options.rounds))
    by_run = min(asyncio.run(rounds(rows, options.rounds)))
    figures = {
        "answers": len(rows),
        "library_s": by_library,
        "run_s": by_run,
        "ratio": by_run / by_library,
        "command": "python -m benchmarks.rewards.scoring_overhead",
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def answers(count: int) -> list[dict[str, Any]]:
    """Rows as a reward task has them: each label against eight answers of its group."""
    of_kinds = [
        [(label, answer) for label, given in kind.items() for answer in islice(cycle(given), GROUP)]
        for kind in KINDS.values()
    ]
    pairs = chain.from_iterable(zip(*(cycle(kind) for kind in of_kinds), strict=True))
    return [
        {
            "prompt": '"?"',
            "label": json.dumps(label),
            "metadata": None,
            "response": f"{WORDS}\\boxed{{{answer}}}.",
            "response_length": 200,
            "status": "completed",
            "dialogue": None,
            "session_reward": None,
            "session_parts": None,
        }
        for label, answer in islice(pairs, count)
    ]


def library(rows: list[dict[str, Any]]) -> float:
    """Seconds of plain calls."""
    started = time.perf_counter()
    for row in rows:
        gold = parse(f"\\boxed{{{json.loads(row['label'])}}}", parsing_timeout=None)
        verify(gold, parse(row["response"], parsing_timeout=None), timeout_seconds=None)
    return time.perf_counter() - started


async def rounds(rows: list[Any], count: int) -> list[float]:
    """Seconds of each round of a run's scoring, after one answer that loads the library."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "scoring"},
            "model": {"path": "model"},
            "data": {"sources": [{"path": "train.jsonl"}]},
            "reward": {"function": "millrace.core.rewards.math:math"},
        }
    )
    scoring = Scoring(config)
    runtime: Any = _OnlyScoring(scoring)
    await score(runtime, rows[-1], None)
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        scores = await asyncio.gather(*(score(runtime, row, None) for row in rows))
        seconds.append(time.perf_counter() - started)
        assert all(each.scoring == "scored" for each in scores)
    scoring.close()
    return seconds


class _OnlyScoring:
    """The part of a run's live parts that scoring takes."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring


if __name__ == "__main__":
    main()
