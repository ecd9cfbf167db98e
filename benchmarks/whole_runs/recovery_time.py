"""How long a run takes from its start after a kill until it works again, and what that time goes to.

    python -m benchmarks.whole_runs.recovery_time [--replay 1 4] [--out FILE]

Kills a run on a random tiny model right before it generates, then starts it again: with its driver dead only (trainer
and engine are found as they were), and with everything dead (Ray head too), so that the trainer is built, loads the
newest checkpoint and replays `--replay` iterations of two steps, and a new engine is started and gets the weights. It
is ready when the engine may be asked for the next sample. `start` is what the phases leave: Python, Prefect, Ray, the
engine's start, checks. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from millrace.connectors.huggingface.tiny import build_tiny_model

PHASES = ("find", "build", "load", "replay", "sync", "start", "ready")
MILLRACE = [sys.executable, "-m", "millrace.flows.commands"]


def main() -> None:
    """Kill, start again, read, print."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--replay", type=int, nargs="+", default=[1, 4], help="iterations to replay")
    arguments.add_argument("--out", type=Path, help="where to keep the figures as JSON")
    options = arguments.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        environment = {**os.environ, "MILLRACE_HOME": str(folder / "home")}
        try:
            for replay in options.replay:
                for everything in (False, True):
                    figures = recovery(folder, environment, replay, everything)
                    case = "everything died" if everything else "driver died"
                    results.append(
                        {"case": case, "iterations replayed": replay if everything else 0, **figures}
                    )
        finally:
            subprocess.run([*MILLRACE, "server", "stop"], cwd=folder, env=environment, check=True)
    show(results)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


def prepare(folder: Path) -> None:
    """Model, prompts and configuration."""
    build_tiny_model(folder / "model", seed=0)
    rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a in range(32) for b in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "run": {"name": "recovery"},
        "model": {"path": str(folder / "model")},
        "data": {"sources": [{"name": "sums", "path": str(folder / "prompts.jsonl")}]},
        "rollout": {"prompts": 16, "samples_per_prompt": 8, "sampling": {"max_new_tokens": 32}},
        "reward": {"function": "millrace.core.rewards.text:contains", "workers": 1},
        "trainer": {"global_batch": 64, "max_pack_tokens": 4096, "threads": 2},
        "engines": {"threads": 2},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def recovery(folder: Path, environment: dict[str, str], replay: int, everything: bool) -> dict[str, float]:
    """Seconds by phase of the start after the kill. The checkpoint lies `replay` iterations before it."""
    root, reached = folder / f"{replay}-{everything}", folder / "reached"
    command = [*MILLRACE, "train", "run.yaml", f"storage.root={root}", f"checkpoint.every={replay + 1}"]
    command.append(f"run.iterations={2 * replay + 2}")
    hold = {
        "MILLRACE_KILL_POINT": f"{2 * replay + 1}/rollout/before",
        "MILLRACE_KILL_POINT_FILE": str(reached),
    }
    run = subprocess.Popen(command, cwd=folder, env={**environment, **hold}, stdout=subprocess.DEVNULL)
    while not reached.exists():
        if run.poll() is not None:
            raise SystemExit(f"the run ended with {run.returncode} before it could be killed")
        time.sleep(0.01)
    run.kill()
    run.wait()
    reached.unlink()
    if everything:
        heads = [
            psutil.Process(pid) for pid in json.loads((folder / "home" / "ray.json").read_text())["pids"]
        ]
        for process in [*(child for head in heads for child in head.children(recursive=True)), *heads]:
            with contextlib.suppress(psutil.NoSuchProcess):  # engines end with their actors
                process.send_signal(signal.SIGKILL)
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    record = json.loads((root / "recovery" / "run.json").read_text())["attempts"][-1]["recovery"]
    known = {phase: record.get(phase, 0.0) for phase in PHASES if phase != "start"}
    return {**known, "start": known["ready"] - sum(known[p] for p in PHASES[:5])}


def show(results: list[dict[str, Any]]) -> None:
    """Print the figures as a table and as JSON."""
    table = Table("case", "replayed", *PHASES, title="seconds from start to work")
    for row in results:
        figures = [f"{row[phase]:.2f}" for phase in PHASES]
        table.add_row(row["case"], str(row["iterations replayed"]), *figures)
    Console(width=130).print(table)
    print(
        json.dumps(
            [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in results]
        )
    )


if __name__ == "__main__":
    main()
