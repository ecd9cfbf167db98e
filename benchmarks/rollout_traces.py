"""What giving an iteration's chosen rollouts to MLflow takes, and how short an iteration may be to have its own.

    python -m benchmarks.rollout_traces [--samples 1024] [--tokens 2000] [--turns 10] [--out FILE]

The iteration lies on this disk, MLflow's store is SQLite. With --turns each rollout has as many turns and calls. A run gives the next
rollouts once a hundred times the CPU time of the last ones has gone by: every iteration that is longer has its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.viewer import RUN, ids, write
from millrace.connectors.mlflow.tracker import MlflowTracker
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.parts import write_part
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.contracts.turns import TurnRow
from millrace.tasks.reporting.traces import rollout_traces
from millrace.tasks.runtime.tracking import TRACED_SHARE

COMMAND = "python -m benchmarks.rollout_traces"
MOST = 16
ROUNDS = 7
TEXT = "What a model says in a turn. " * 40


def main() -> None:
    """Write the iteration, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        turns = partial(turn_part, options.turns) if options.turns else None
        write(f"{folder}/runs", options.samples, options.tokens, turns)
        found = measure(RunFolder(f"{folder}/runs", RUN), Path(folder))
    found |= {"samples": options.samples, "tokens": options.tokens, "turns": options.turns}
    print(
        f"{MOST} of {options.samples:,} rollouts of {options.tokens:,} tokens, {options.turns} turns each: "
        f"{found['wall_s']:.2f} s ({found['cpu_s']:.2f} s of CPU; read in {found['read_cpu_s']:.2f}), "
        f"{found['stored_kib']:.0f} KiB; each iteration of {found['each_from_s']:.0f} s or more has its own"
    )
    if options.out:
        options.out.write_text(json.dumps({"command": COMMAND, **found}, indent=1) + "\n")


def measure(run: RunFolder, folder: Path) -> dict[str, float]:
    """Medians over ROUNDS iterations, after one that imports what is needed."""
    database = folder / "mlflow.db"
    rounds: list[tuple[float, float, float]] = []
    size = 0
    for number in range(ROUNDS + 1):
        # rollouts of one MLflow run replace themselves
        name = f"{RUN}-{number}"
        tracker = MlflowTracker.start(f"sqlite:///{database}", "e", name, f"/runs/{name}", name, None)
        size = database.stat().st_size if number == 1 else size
        started, worked = time.monotonic(), time.process_time()
        traces = rollout_traces(IterationFiles(run, 0), MOST)
        read = time.process_time() - worked
        tracker.log_traces(traces, 1, {trace.sample: "millrace view large" for trace in traces})
        rounds.append((time.monotonic() - started, time.process_time() - worked, read))
    wall, cpu, read = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
    stored = (database.stat().st_size - size) / ROUNDS / 1024
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "read_cpu_s": read,
        "stored_kib": stored,
        "each_from_s": cpu / TRACED_SHARE,
    }


def turn_part(turns: int, store: Store, groups: Sequence[str]) -> list[FileEntry]:
    """A part with the turns of some groups' rollouts."""
    return [write_part(store, "turns", schema.to_table(turns_of(groups, turns), "turns"), "turns")]


def turns_of(groups: Sequence[str], turns: int) -> list[TurnRow]:
    """The turns and calls of the rollouts of some groups."""
    times = [("started", 1_800_000_000.0), ("generate_s", 1.0), ("call_s", 1.0)]
    return [
        TurnRow(
            rollout_id=name,
            group_id=group,
            order=at,
            branch=0,
            event=at,
            kind="call" if at % 2 else "segment",
            tool="add" if at % 2 else None,
            arguments='{"a": 2}' if at % 2 else None,
            text=TEXT,
            timings=times,
        )
        for name, group in zip(*ids(groups), strict=True)
        for at in range(2 * turns)
    ]


if __name__ == "__main__":
    main()
