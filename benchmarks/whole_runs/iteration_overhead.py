"""Where an iteration's time goes: generation, training, weight sync, and everything else.

    python -m benchmarks.whole_runs.iteration_overhead [--iterations 8] [--root s3://bucket/x] [--out FILE]

Runs `millrace train` on a random tiny model with iterations of a few seconds, on two cores where the system can pin a
process, and prints the mean split as a table and as JSON, without the first two iterations, which import and tidy up,
and the last, which saves. Generation is the time in which at least one request was out; training is what the ranks
report; everything else (prompts, scoring that outlasts generation, filter, records, Prefect, MLflow, manifest, the gap
between iterations) is the overhead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.run_folder import RunFolder


def main() -> None:
    """Run, read, print."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--iterations", type=int, default=12)
    arguments.add_argument("--root", default=None, help="storage root; a temporary folder when not given")
    arguments.add_argument("--out", type=Path, help="JSON file for the figures")
    options = arguments.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = options.root or str(folder / "runs")
        prepare(folder, root, options.iterations)
        millrace = [sys.executable, "-m", "millrace.flows.commands"]
        environment = {**os.environ, "MILLRACE_HOME": str(folder / "home")}
        try:
            subprocess.run([*millrace, "train", "run.yaml"], cwd=folder, env=environment, check=True)
        finally:
            subprocess.run([*millrace, "server", "stop"], cwd=folder, env=environment, check=True)
        split = [iteration_split(RunFolder(root, "overhead"), k) for k in range(2, options.iterations - 1)]
    mean = {part: sum(row[part] for row in split) / len(split) for part in split[0]}
    worst = max(row["overhead"] for row in split)
    table = Table("part", "seconds", "share", title=f"an iteration, mean of {len(split)}")
    for part, seconds in mean.items():
        table.add_row(part, f"{seconds:.3f}", f"{seconds / mean['iteration']:.1%}")
    Console().print(table)
    report = {**{part: round(seconds, 4) for part, seconds in mean.items()}, "overhead_max": round(worst, 4)}
    print(json.dumps(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def prepare(folder: Path, root: str, iterations: int) -> None:
    """Model, prompts and configuration."""
    build_tiny_model(folder / "model", seed=0)
    rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a in range(32) for b in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "run": {"name": "overhead", "iterations": iterations},
        "model": {"path": str(folder / "model")},
        "data": {"sources": [{"name": "sums", "path": str(folder / "prompts.jsonl")}]},
        "storage": {"root": root},
        "rollout": {"prompts": 64, "samples_per_prompt": 8, "sampling": {"max_new_tokens": 40}},
        "reward": {"function": "millrace.core.rewards.text:contains"},
        "trainer": {"global_batch": 512, "max_pack_tokens": 8192, "threads": 2},
        "engines": {"threads": 2},
        "checkpoint": {"every": 1000},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def iteration_split(run: RunFolder, index: int) -> dict[str, float]:
    """Seconds of one iteration by part, from what it stored."""
    manifest, before = run.manifest(index), run.manifest(index - 1)
    assert manifest is not None
    assert before is not None
    wall = manifest.tasks["committed"] - before.tasks["committed"]
    timings = [
        dict(row)
        for row in read_parts(run.iteration(index), "rollouts", "rollouts").column("timings").to_pylist()
    ]
    spans = sorted((row["started"], row["started"] + row["generate_s"]) for row in timings)
    generation, end = 0.0, 0.0
    for start, stop in spans:
        generation += max(0.0, stop - max(start, end))
        end = max(end, stop)
    metrics = manifest.tasks["metrics"]
    steps = run.iteration(index).read_json("step.json")["steps"]
    training = sum(sum(step["seconds"].values()) for step in steps)
    sync = metrics["time/sync_weights_s"]
    return {
        "iteration": wall,
        "generation": generation,
        "training": training,
        "sync": sync,
        "overhead": wall - generation - training - sync,
    }


if __name__ == "__main__":
    main()
