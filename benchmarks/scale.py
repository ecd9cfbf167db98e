"""What a run of 3,000 iterations costs beside one of 30: a start, `millrace show`, memory, and time of an iteration.

Choosing among a thousand engines is measured too.

Training is left out. Every iteration is drawn by the ledger, and its tables, records, manifest and summary are written by the
project's own writers, so that what reads a run reads the real thing.

    python -m benchmarks.scale [--iterations 3000] [--few 30] [--engines 1000] [--samples 100000] [--root FOLDER] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.stored_iterations import StubRun
from millrace.connectors.engines.dispatcher import LeastLoad
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.storage import files as storage_files
from millrace.connectors.storage.iteration_files import commit_again
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.accounts.ledger import Ledger
from millrace.tasks.reporting.pictures import Curves

GROWTH = 2.0  # of a start and of `millrace show`, at most
REPEATS = 3


def main() -> None:
    """Measure and report; exits with 1 if a start or `show` grows by more than GROWTH."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--few", type=int, default=30, help="iterations of the run that it is compared with")
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100_000, help="that are given to the engines")
    parser.add_argument("--root", help="keep the run folders here; a folder")
    parser.add_argument("--reader", help=argparse.SUPPRESS)  # a process that starts from this run
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    if args.reader:
        print(json.dumps(start_of(*args.reader.rsplit("/", 1))))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = args.root or folder
        made = {name: write_run(root, name, count) for name, count in sizes(args).items()}
        report: dict[str, Any] = {
            "benchmark": "scale",
            "command": " ".join(["python -m benchmarks.scale", *sys.argv[1:]]),
            "iterations": args.iterations,
            "few": args.few,
            "writing": made["long"],
            "start": in_turns(root, "start", partial(fresh_start, root)),
            "show": in_turns(root, "show", partial(shown, root)),
            "choice": choices(args.engines, args.samples),
        }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    grown = [name for name in ("start", "show") if report[name]["growth"] > GROWTH]
    sys.exit(f"grows by more than {GROWTH}: {grown}" if grown else 0)


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """Iterations of each run."""
    return {"short": args.few, "long": args.iterations}


def write_run(root: str, name: str, iterations: int) -> dict[str, Any]:
    """Write a run as one driver would; CPU seconds an iteration and memory at its first and its last tenth."""
    run, seconds, memory = StubRun(root, name), [], []
    process = psutil.Process()
    for index in range(run.folder.first_open_iteration(), iterations):
        began = time.process_time()
        run.iterate(index)
        seconds.append(time.process_time() - began)
        if index % 50 == 0:
            gc.collect()
            memory.append(process.memory_info().rss / 2**20)
    tenth = max(1, len(seconds) // 10)
    looks = max(1, len(memory) // 10)
    return {
        "iteration_cpu_s": {
            "first": statistics.median(seconds[:tenth] or [0.0]),
            "last": statistics.median(seconds[-tenth:] or [0.0]),
        },
        "driver_mib": {
            "first": statistics.mean(memory[:looks] or [0.0]),
            "last": statistics.mean(memory[-looks:] or [0.0]),
        },
    }


def in_turns(root: str, what: str, measure: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Both runs measured in turns: the fastest of each, and their ratio."""
    found: dict[str, list[dict[str, Any]]] = {"short": [], "long": []}
    for _ in range(REPEATS):
        for name, results in found.items():
            results.append(measure(name))
    best = {name: min(results, key=lambda result: result["cpu_s"]) for name, results in found.items()}
    return {**best, "growth": best["long"]["cpu_s"] / best["short"]["cpu_s"]}


def fresh_start(root: str, name: str) -> dict[str, Any]:
    """A process that reads of a run what a driver reads before its first task."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.scale", "--reader", f"{root}/{name}"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def start_of(root: str, name: str) -> dict[str, Any]:
    """CPU seconds by what a start reads, and its operations on storage."""
    operations: Counter[str] = Counter()
    plain = storage_files.retried

    def counted(verb: str, *args: Any, **options: Any) -> Any:
        operations[verb] += 1
        return plain(verb, *args, **options)

    parts: dict[str, float] = {}
    folder, used = RunFolder(root, name), time.process_time()
    with patch.object(storage_files, "retried", counted):
        for part, read in reads(folder):
            began = time.process_time()
            read()
            parts[part] = time.process_time() - began
    whole = time.process_time()
    return {
        "cpu_s": whole,  # of the process, imports included
        "read_s": whole - used,
        "parts": parts,
        "storage": dict(operations),
        "mib": psutil.Process().memory_info().rss / 2**20,
    }


def reads(folder: RunFolder) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a start reads of a run's folder, in its order."""
    yield "find", partial(folder.first_open_iteration, strict=False)
    yield "commit_again", partial(commit_again, folder)
    yield "clean", folder.clean
    yield "take_over", folder.first_open_iteration
    ledger = Ledger(StubRun.SEED, StubRun.plans())
    yield "ledger", lambda: ledger.extend(folder.history())
    yield "draw", lambda: ledger.draw(ledger.next_iteration, StubRun.PROMPTS, StubRun.RESERVE)
    yield "curves", partial(Curves().read, folder)


def shown(root: str, name: str) -> dict[str, Any]:
    """CPU and wall seconds of `millrace show`, start of the command included."""
    before, began = os.times(), time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", "millrace.flows.commands", "show", name, "--root", root]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu_s": used, "wall_s": time.perf_counter() - began}


def choices(engines: int, samples: int) -> dict[str, float]:
    """Microseconds of a choice of an engine, by a look at each and as the dispatcher chooses."""
    clients = [SglangClient("http://nowhere", f"engine-{index}") for index in range(engines)]
    least, running = LeastLoad(clients), []
    began = time.process_time()
    for _ in range(samples):
        chosen = least.choose()
        chosen.in_flight += 1
        running.append(chosen)
        if len(running) > 8 * engines:
            done = running.pop(0)
            done.in_flight -= 1
            least.ended(done)
    ours = time.process_time() - began
    few = max(1, samples // 100)
    began = time.process_time()
    for _ in range(few):
        min(clients, key=lambda engine: (engine.in_flight, engine.engine_id))
    plain = time.process_time() - began
    return {
        "engines": engines,
        "samples": samples,
        "us": ours / samples * 1e6,
        "us_by_a_look_at_each": plain / few * 1e6,
    }


if __name__ == "__main__":
    main()
