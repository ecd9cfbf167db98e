"""What each algorithm preset learns in the same time from the same warm model: every recipe, one after the other.

    python -m benchmarks.presets [--iterations 40] [--out FILE] [grpo dapo ...]

Runs `millrace train deployments/recipes/PRESET.yaml` on two cores where the system can pin a process, and prints a table and
JSON: held-out reward (sampled, 200 problems x 4) before and after, seconds from the run's start to its end with both
evaluations, and the median seconds from one iteration's end to the next. Making the warm model (and the teacher) is left
out. With --folder files and finished runs are kept; --out takes the results into those of other presets
and seeds that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config.algorithm.presets import PRESETS
from millrace.core.config.reading.load import load_config
from millrace.flows.quickstart import held_out_accuracy, recipe

MILLRACE = [sys.executable, "-m", "millrace.flows.commands"]


def main() -> None:
    """Run, read, print."""
    options = arguments()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["MILLRACE_HOME"] = str(folder / "home")
        try:
            results = {}
            for preset in options.presets:
                results[preset] = measure(folder, preset, options.iterations, options.seed)
                if options.out:
                    keep(Path(options.out), results)
        finally:
            subprocess.run([*MILLRACE, "server", "stop"], cwd=folder, check=True)
    Console().print(table(results))
    print(json.dumps(results))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("presets", nargs="*", help="presets to run; all when none is named")
    parser.add_argument(
        "--iterations", type=int, default=None, help="RL iterations; the recipe's when not given"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling")
    parser.add_argument(
        "--folder", default=None, help="where files and runs are kept; temporary when not given"
    )
    parser.add_argument("--out", default=None, help="JSON file to keep the results in")
    options = parser.parse_args()
    unknown = set(options.presets) - set(PRESETS)
    if unknown:
        parser.error(f"no such preset: {', '.join(sorted(unknown))}; known: {', '.join(PRESETS)}")
    options.presets = options.presets or list(PRESETS)
    return options


def overrides(folder: Path, preset: str, iterations: int | None, seed: int) -> list[str]:
    """The recipe's fields that differ here: files under `folder`, the seed, evaluation and checkpoint at the end alone."""
    iterations = iterations or load_config(recipe(preset)).run.iterations
    files = folder / "quickstart-files" / f"seed-{seed}"
    return [
        f"run.name={preset}-{seed}-{iterations}",
        f"run.seed={seed}",
        f"run.iterations={iterations}",
        f"storage.root={folder / 'runs'}",
        f"model.path={files / 'warm-model'}",
        f"data.sources.0.path={files / 'train.jsonl'}",
        f"evaluation.sets.0.path={files / 'held_out.jsonl'}",
        f"evaluation.every={iterations}",
        f"checkpoint.every={iterations}",
        *([f"algorithm.teacher={files / 'teacher'}"] if preset == "opd" else []),
    ]


def measure(
    folder: Path, preset: str, iterations: int | None, seed: int, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Train one recipe and read what it learnt. more: fields that are set besides."""
    changed = [*overrides(folder, preset, iterations, seed), *more]
    config = load_config(recipe(preset), changed)
    subprocess.run([*MILLRACE, "train", recipe(preset), *changed], cwd=folder, check=True)
    run = RunFolder(config.storage.root, config.run.name)
    points = held_out_accuracy(run)
    return {
        "iterations": config.run.iterations,
        "seed": seed,
        "before": round(points[0], 4),
        "after": round(points[config.run.iterations], 4),
        "seconds": round(seconds(run), 1),
        "seconds_an_iteration": round(seconds_an_iteration(run, config.run.iterations), 3),
    }


def seconds(run: RunFolder) -> float:
    """From the run's start, models and engines still to be built, to its end."""
    record = run.store.read_json("run.json")
    started, completed = record["attempts"][0]["started"], record["completed"]
    return (datetime.fromisoformat(completed) - datetime.fromisoformat(started)).total_seconds()


def seconds_an_iteration(run: RunFolder, iterations: int) -> float:
    """Median time from one manifest to the next; the last, which evaluates and saves, is left out."""
    ends = []
    for index in range(max(2, iterations - 1)):
        manifest = run.manifest(index)
        assert manifest is not None
        ends.append(manifest.tasks["committed"])
    return statistics.median(after - before for before, after in zip(ends[:-1], ends[1:], strict=True))


def keep(path: Path, results: dict[str, dict[str, Any]], order: Iterable[str] = PRESETS) -> None:
    """Put results into a file, beside those of other names and seeds that are there. order: of the names."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    for preset, row in results.items():
        others = [other for other in kept.get(preset, []) if other["seed"] != row["seed"]]
        kept[preset] = sorted([*others, row], key=lambda one: one["seed"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: kept[name] for name in order if name in kept}, indent=2) + "\n")


def table(results: dict[str, Any]) -> Table:
    """The results, a row a preset."""
    rows = Table("preset", "iterations", "before", "after", "seconds", "seconds an iteration")
    for preset, row in results.items():
        rows.add_row(
            preset,
            str(row["iterations"]),
            f"{row['before']:.3f}",
            f"{row['after']:.3f}",
            f"{row['seconds']:.0f}",
            f"{row['seconds_an_iteration']:.2f}",
        )
    return rows


if __name__ == "__main__":
    main()
