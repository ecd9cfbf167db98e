"""Final weights and step losses of one checkout, to compare two versions bit for bit.

    python -m benchmarks.same_numbers --millrace .venv/bin/millrace --recipes deployments/recipes --out after.json
    python -m benchmarks.same_numbers --compare before.json after.json

Trains the quickstart with three seeds and each preset's recipe for three iterations. It starts the command line of the named
checkout, so one script measures two versions. Names of runs do not matter to their numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PRESETS = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "ppo",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "max_rl", "opd",
)  # fmt: skip
SEEDS = (0, 1, 2)
ITERATIONS = 3


def main() -> None:
    """Measure one checkout, or compare two measurements."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--millrace", type=Path, help="`millrace` of the checkout to measure")
    parser.add_argument("--recipes", type=Path, help="its folder of recipes")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the results; runs that it holds already are left out"
    )
    parser.add_argument("--folder", type=Path, help="where runs are kept; temporary when not given")
    parser.add_argument("--only", nargs="*", help="names such as quickstart-0 or ppo; all when not given")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*options.compare))
    with tempfile.TemporaryDirectory() as temporary:
        measure(options, (options.folder or Path(temporary)).resolve())


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Train all runs and write each result as soon as it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    commands = {f"quickstart-{seed}": quickstart(seed) for seed in SEEDS}
    recipes = options.recipes.resolve()
    commands |= {preset: recipe(recipes, preset) for preset in PRESETS}
    millrace = options.millrace.absolute()
    environment = {
        **os.environ,
        "MILLRACE_HOME": str(folder / "home"),
        "PATH": f"{millrace.parent}:{os.environ['PATH']}",
    }
    try:
        for name, arguments in commands.items():
            if name in results or (options.only and name not in options.only):
                continue
            started = time.perf_counter()
            with (folder / f"{name}.log").open("w") as log:
                subprocess.run(
                    [str(millrace), *arguments],
                    cwd=folder,
                    env=environment,
                    check=True,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            results[name] = read(folder / "runs" / name) | {
                "seconds": round(time.perf_counter() - started, 1)
            }
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}: {results[name]['weights'][:16]} in {results[name]['seconds']} s", flush=True)
    finally:
        subprocess.run([str(millrace), "server", "stop"], cwd=folder, env=environment, check=False)


def quickstart(seed: int) -> list[str]:
    """The whole quickstart."""
    return ["quickstart", "--seed", str(seed), "--root", "runs", "--name", f"quickstart-{seed}"]


def recipe(recipes: Path, preset: str) -> list[str]:
    """Three iterations of a preset's recipe from the quickstart's warm model."""
    overrides = {
        "run.name": preset,
        "run.iterations": ITERATIONS,
        "storage.root": "runs",
        "evaluation.every": ITERATIONS,
        "checkpoint.every": ITERATIONS,
    }
    return [
        "train",
        str(recipes / f"{preset}.yaml"),
        *(f"{name}={value}" for name, value in overrides.items()),
    ]


def read(run: Path) -> dict[str, Any]:
    """The hash of the last export's weights, and loss and gradient norm of each step, exact."""
    newest = sorted((run / "exports").iterdir())[-1]
    folders = sorted((run / "iterations").iterdir())
    steps = [step for folder in folders for step in json.loads((folder / "step.json").read_text())["steps"]]
    return {
        "weights": hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest(),
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
    }


def compare(before: Path, after: Path) -> int:
    """Print a line a run, and the first step that differs; 0 if all are equal."""
    left, right = json.loads(before.read_text()), json.loads(after.read_text())
    different = 0
    for name in left | right:
        verdict = difference(left.get(name), right.get(name))
        different += verdict != "equal"
        print(f"{name:30} {verdict}")
    return 1 if different else 0


def difference(left: dict[str, Any] | None, right: dict[str, Any] | None) -> str:
    """The first difference between two runs of one name."""
    if left is None or right is None:
        return "missing on one side"
    for figure in ("loss", "grad_norm"):
        if len(left[figure]) != len(right[figure]):
            return f"{len(left[figure])} and {len(right[figure])} steps"
        for step, (one, other) in enumerate(zip(left[figure], right[figure], strict=True), 1):
            if one != other:
                return f"{figure} of step {step}: {one!r} and {other!r}"
    return "equal" if left["weights"] == right["weights"] else "other weights"


if __name__ == "__main__":
    main()
