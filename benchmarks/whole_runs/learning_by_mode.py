"""What the recipe `grpo` learns in each mode of the pipeline, from the same warm model and on the same prompts.

    python -m benchmarks.whole_runs.learning_by_mode [--modes sync both] [--seeds 0 1 2] [--iterations 100] [--folder FOLDER] [--out FILE]

Prints JSON: for each mode and seed held-out reward (sampled, 200 problems x 4) before and after, seconds from the run's start to
its end, and the share of trained tokens that weights of an earlier iteration made. Engine and trainer are a process each.
`pipeline.eager` is left out: it makes the plain loop's step, one an iteration where this recipe makes two.
With --folder files and finished runs are kept; --out takes the results into those of other modes and seeds that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kept import RESULTS
from benchmarks.presets import MILLRACE, keep, measure
from millrace.connectors.storage.run_folder import RunFolder

OUT = RESULTS / "cpu" / "learning_by_mode.json"
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial": {"select": "finish", "reserve": 0.5, "max_staleness": 1},
    "ahead": {"ahead": 1},
    "both": {"ahead": 1, "select": "finish", "reserve": 0.5, "max_staleness": 2},
}
AGES = "train/share_age_"
ITERATIONS = 100
CORRECTED = "algorithm.correction.kind=truncate"  # which tokens of older weights need, and others hardly feel


def main() -> None:
    """Run each mode for each seed, read what it learnt, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--folder", help="where files and runs are kept; temporary when not given")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file that takes the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["MILLRACE_HOME"] = str(folder / "home")
        try:
            for seed in options.seeds:
                for mode in options.modes:
                    keep(options.out, {mode: learnt(folder, mode, options.iterations, seed)}, MODES)
        finally:
            subprocess.run([*MILLRACE, "server", "stop"], cwd=folder, check=True)
    print(options.out.read_text())


def learnt(folder: Path, mode: str, iterations: int, seed: int) -> dict[str, Any]:
    """A run of a mode and a seed."""
    name = f"{mode}-{seed}-{iterations}"
    fields = [f"pipeline.{field}={json.dumps(value)}" for field, value in MODES[mode].items()]
    result = measure(folder, "grpo", iterations, seed, [f"run.name={name}", CORRECTED, *fields])
    return {
        **result,
        "older_tokens": round(older_tokens(RunFolder(str(folder / "runs"), name), iterations), 4),
    }


def older_tokens(run: RunFolder, iterations: int) -> float:
    """The mean share of trained tokens that weights of an earlier iteration made."""
    found = [run.manifest(index) for index in range(iterations)]
    shares = [one.tasks["metrics"] for one in found if one]
    return statistics.mean(
        sum(share for name, share in row.items() if name.startswith(AGES) and name != f"{AGES}0")
        for row in shares
    )


if __name__ == "__main__":
    main()
