"""Ordinary mathematical answers graded a second by one process: numbers, and those that need algebra.

    python -m benchmarks.rewards.graded_answers [--rounds 5] [--out FILE]

Each label stands against eight answers of its group, right and wrong, at the end of a response of 200 words. Seconds are of
CPU time, without the loading of the library. The best round counts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from millrace.core.hooks.protocols import RewardInput
from millrace.core.rewards import expressions
from millrace.core.rewards.math import math

GROUP = 8  # answers to a label
KINDS = {
    "numbers": {
        "42": ["41", "43", "42"], "-7": ["-7", "7"], "1024": ["1024", "2048"], "3/4": ["0.75", r"\frac34"],
        r"\frac{1}{2}": ["0.5", r"\frac{1}{3}"], "0.25": ["1/4", "0.24"], "1,234": ["1234"], "17": ["17", "18"],
        r"-\frac{11}{3}": ["-11/3", "-3.67"], "99": ["99", "100", "9"],
    },
    "algebra": {
        r"2\sqrt{2}": [r"\sqrt{8}", r"2\sqrt{3}", r"2\sqrt{2}", "2.83"], r"\frac{\pi}{4}": [r"\pi/4", r"\frac{\pi}{3}"],
        "x^2+2x+1": ["(x+1)^2", "x^2+1"], "(1,2]": ["(1,2]", "[1,2]"], r"\{1,2,3\}": ["3,2,1", "1,2"],
        r"\frac{3\sqrt{3}}{2}": [r"\frac{3}{2}\sqrt{3}", r"\frac{3\sqrt{2}}{2}"], "2^{10}": ["1024", "1000"],
        "(3,-4)": ["(3,-4)", "(3,4)"], r"5\text{ cm}": ["5", r"5\text{ cm}", "6"], "x=5": ["5", "x=5", "4"],
    },
}  # fmt: skip


def main() -> None:
    """Grade every kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    results = [{"kind": kind, "answers_per_s": measure(kind, options.rounds)} for kind in KINDS]
    print(json.dumps(results, indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(kind: str, rounds: int) -> int:
    """Answers of a kind graded a second, in the best of some rounds."""
    inputs = [
        RewardInput(prompt="?", response="so 3 of 4 words " * 50 + f"\\boxed{{{answer}}}.", label=label)
        for label, answers in KINDS[kind].items()
        for answer in (answers * GROUP)[:GROUP]
    ]
    seconds = []
    for _ in range(rounds):
        expressions.read.cache_clear()  # each label is new once a round
        started = time.process_time()
        for each in inputs:
            math(each)
        seconds.append(time.process_time() - started)
    return round(len(inputs) / min(seconds))


if __name__ == "__main__":
    main()
