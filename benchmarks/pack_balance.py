"""How evenly the work of a step lies on data parallel ranks: packs dealt by tokens and by a model's operations.

    python -m benchmarks.pack_balance [--samples 256] [--batches 30] [--shortest 256] [--out FILE]

Lengths are drawn log-uniformly up to 16,384 tokens; operations are those of the 0.6B shape. Prints the slowest rank's
operations over the mean of all, mean and worst of the batches, and packs a rank; and how long a plan takes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gpu.shapes import model_config
from millrace.connectors.trainers.batching import plan_packs
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import resolved

LONGEST = 16384
CASES = ((8, 16384), (8, 32768), (16, 16384), (64, 16384))  # ranks, tokens a pack


def main() -> None:
    """Plan them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--shortest", type=int, default=256)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    results = [
        measure(ranks, tokens, options.samples, options.shortest, options.batches) for ranks, tokens in CASES
    ]
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(ranks: int, tokens: int, samples: int, shortest: int, batches: int) -> dict[str, Any]:
    """Ratios of some batches, by tokens and by operations."""
    shape = architecture(resolved(model_config("0.6b").to_dict(), "benchmark"))
    ratios: dict[str, list[float]] = {"tokens": [], "operations": []}
    packs: dict[str, list[int]] = {"tokens": [], "operations": []}
    seconds = []
    for batch in range(batches):
        draw = random.Random(batch)
        lengths = [round(shortest * (LONGEST / shortest) ** draw.random()) for _ in range(samples)]
        cost = [shape.flops(length) for length in lengths]
        for by, weights in (("tokens", None), ("operations", cost)):
            started = time.perf_counter()
            plan = plan_packs(lengths, ranks=ranks, max_tokens=tokens, cost=weights)
            seconds.append(time.perf_counter() - started)
            work = [sum(cost[i] for pack in packs_of_rank for i in pack) for packs_of_rank in plan]
            ratios[by].append(max(work) / mean(work))
            packs[by].append(len(plan[0]))
    return {
        "ranks": ranks,
        "max_pack_tokens": tokens,
        "samples": samples,
        **{
            f"by_{by}": {
                "mean": round(mean(ratios[by]), 4),
                "worst": round(max(ratios[by]), 4),
                "packs_a_rank": round(mean(packs[by]), 2),
            }
            for by in ratios
        },
        "slowest_plan_s": round(max(seconds), 3),
    }


if __name__ == "__main__":
    main()
