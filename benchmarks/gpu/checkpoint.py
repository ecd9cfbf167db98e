"""How long a checkpoint stops the trainer, and how fast it is written, beside `dd` on the same disk.

    python -m benchmarks.gpu.checkpoint [--shape 4b] [--folder FOLDER] [--tokens 16384] [--rounds 2] [--at-once]

One rank on a GPU. After some steps it begins a checkpoint that another process writes, and goes on training. Given are: seconds
until it may train again (the stall; the first also waits for the memory that is taken since the rank's start), steps beside the writing against steps
without, bytes and seconds of the writing, and the commit. `dd` writes as many bytes, at most 16 GiB, in one stream and in as
many as the writer has files, and syncs them. --at-once also saves in the old way. JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import command_line, device_name, model_folder, versions
from benchmarks.gpu.trainer import Millrace, lengths_of, timed
from millrace.connectors.trainers.checkpoint.background import FILES

MIB = 2**20


def main() -> None:
    """Train, save, train on, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    report: dict[str, Any] = {"command": command_line(), "device": device_name(), "versions": versions()}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        side = Millrace(
            model_folder(options.shape, folder / "model"), folder, options.tokens, "full", saves=True
        )
        lengths = lengths_of(options.tokens, 2048)
        number = 0

        def step() -> float:
            nonlocal number
            number += 1
            return float(timed(side, number, lengths)["seconds"])

        alone = [step() for _ in range(5)][2:]
        report |= {"step_s": round(statistics.median(alone), 3), "rounds": []}
        for index in range(options.rounds):
            report["rounds"].append(_round(side, folder / f"checkpoint-{index}", step))
            print(json.dumps(report["rounds"][-1]), file=sys.stderr, flush=True)
        if options.at_once:
            started = time.perf_counter()
            side.rank.save(str(folder / "at-once"))
            report["at_once_s"] = round(time.perf_counter() - started, 2)
            shutil.rmtree(folder / "at-once")
        side.close()
        written = report["rounds"][-1]["bytes"]
        report["dd_mib_s"] = {str(streams): dd(folder, written, streams) for streams in (1, FILES)}
        report["share_of_dd"] = round(report["rounds"][-1]["mib_s"] / max(report["dd_mib_s"].values()), 3)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def _round(side: Millrace, target: Path, step: Any) -> dict[str, Any]:
    """One checkpoint beside training."""
    started = time.perf_counter()
    side.rank.begin_save(str(target))
    stall = time.perf_counter() - started
    print(f"the trainer waited {stall:.2f} s", file=sys.stderr, flush=True)
    beside = []
    while (state := side.rank.state()["saving"])["state"] == "writing":
        beside.append(step())
    assert state["state"] == "written", state["reason"]
    began = time.perf_counter()
    wrote = side.rank.commit_save()
    commit = time.perf_counter() - began
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    shutil.rmtree(target)
    return {
        "stall_s": round(stall, 3),
        "write_s": round(wrote, 2),
        "commit_s": round(commit, 3),
        "bytes": size,
        "mib_s": round(size / MIB / wrote, 1),
        "steps_beside_s": [round(seconds, 3) for seconds in beside],
    }


def dd(folder: Path, size: int, streams: int) -> float:
    """MiB/s of `dd` with that many streams, synced to the disk."""
    count = min(size, 16 * 2**30) // streams // MIB
    started = time.perf_counter()
    writers = [
        subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={folder / f'dd-{number}'}", "bs=1M", f"count={count}", "conv=fsync"],
            stderr=subprocess.DEVNULL,
        )
        for number in range(streams)
    ]
    for writer in writers:
        if writer.wait():
            raise SystemExit("dd failed")
    seconds = time.perf_counter() - started
    for number in range(streams):
        (folder / f"dd-{number}").unlink()
    return round(streams * count / seconds, 1)


if __name__ == "__main__":
    main()
