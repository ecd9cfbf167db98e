"""A run with checkpoints and held-out evaluations that is killed again and again: how soon it works again, and what it lost.

    python -m benchmarks.whole_runs.interrupted [--victims driver trainer everything]                 # a tiny model on CPU
    python -m benchmarks.whole_runs.interrupted --shape 4b --gpus 2 --median 2000 --longest 8192      # trainer and engines share them

Every second iteration is saved and evaluated. Half-way through the rollout of an iteration that follows a saved and an unsaved
one, the victim gets `kill -9`: the driver, the trainer's first rank, or everything (Ray's head and all on it too). Whatever ended with
it is started again by the same command.

Each iteration draws the same prompts; lengths are lognormal, one of a prompt, and one is the longest. Of each kill: seconds until that
iteration was whole and, beside them, those of the one before it, and the tokens of unfinished answers, stored and lost. Of the
last kill also the phases of the recovery, as the run recorded them. At the end the run must have ended well, its account close and
`millrace verify` find nothing wrong: else the command ends with 1. JSON to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.gpu.end_to_end import keep, until_whole
from benchmarks.gpu.shapes import SGLANG, command_line, configuration, device_name, laid_over, versions
from benchmarks.gpu.shapes import model_folder as shape_folder
from benchmarks.whole_runs.killed_driver import EmbeddedEngines, Engines, SGLangEngines, held_after, lost
from benchmarks.whole_runs.long_tails import with_this_folder
from benchmarks.whole_runs.recovery_time import MILLRACE
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.storage.run_folder import RunFolder

NAME = "interrupted"
VICTIMS = ("driver", "trainer", "everything")
EVERY = 2  # iterations from one checkpoint, and from one evaluation, to the next
HELD_OUT = 16  # prompts
HELD_OUT_SHARE = 4  # of the longest answer: no held-out one is longer than that part


def main() -> None:
    """Run, kill, start again, read, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--shape", help="of the model, on GPUs; a tiny model on CPU when not given")
    parser.add_argument("--gpus", type=int, default=1, help="that trainer and engines share")
    parser.add_argument("--prompts", type=int, default=8, help="of an iteration, 8 samples each")
    parser.add_argument("--median", type=int, default=60, help="length of an answer, tokens")
    parser.add_argument("--longest", type=int, default=800)
    parser.add_argument("--flush-tokens", type=int, help="`rollout.flush_tokens`")
    parser.add_argument("--models", type=Path, help="where model folders are kept")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value of the configuration")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    report: dict[str, Any] = {"command": command_line(), "kills": {}}
    if options.shape:
        report |= {"device": device_name(), "versions": versions()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.shape:
            model = shape_folder(options.shape, (options.models or folder) / options.shape)
        else:  # with so many tokens the one that ends an answer is rarely drawn
            model = build_tiny_model(folder / "model", vocab_size=16384, max_positions=4096)
        (folder / f"{NAME}.yaml").write_text(yaml.safe_dump(_settings(options, model, folder)))
        environment = {**os.environ, "MILLRACE_HOME": str(folder / "home"), "PYTHONPATH": with_this_folder()}
        try:
            _killed(options, model, folder, environment, report)
        finally:
            _millrace(folder, environment, "server", "stop")
    print(json.dumps(report, indent=1))
    sys.exit(any(report[check] for check in ("exit", "ledger", "verify")))


def _killed(
    options: argparse.Namespace,
    model: Path,
    folder: Path,
    environment: dict[str, str],
    report: dict[str, Any],
) -> None:
    """Each kill in turn, then the checks; `report` gets what was measured as soon as it is known."""
    run = RunFolder(str(folder / "runs"), NAME)
    command = [*MILLRACE, "train", f"{NAME}.yaml", *options.overrides]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr)

    process = start()
    for number, victim in enumerate(options.victims):
        index = EVERY * (number + 1) + 1  # the one before it is not saved
        until_whole(process, run, index - 1)
        engines: Engines = (
            SGLangEngines(str(folder / "runs"), NAME) if options.shape else EmbeddedEngines(model)
        )
        held = held_after(engines, _rollout_s(run, index - 1) / 2)
        killed = time.time()
        for one in _processes(victim, process, folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        tokens = {}
        if victim != "trainer":
            process.wait()
            tokens = lost(run, index, index, held)
            process = start()
        until_whole(process, run, index)
        report["kills"][victim] = {
            "iteration": index,
            "whole_after_s": round(_committed(run, index) - killed, 1),
            "iteration_before_s": round(_committed(run, index - 1) - _committed(run, index - 2), 1),
            "tokens": tokens,
        }
        keep(report, options.out)
    report["exit"] = process.wait()
    report["recovery"] = _recovery(folder / "runs" / NAME / "run.json")
    report["evaluated"] = _evaluated(run, index)
    for check in ("ledger", "verify"):
        report[check] = _millrace(folder, environment, check, NAME)
    keep(report, options.out)


def _settings(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    pack = max(16384 if options.shape else 2048, options.longest + 64)
    for name, count in (("train", options.prompts), ("held_out", HELD_OUT)):
        (folder / f"{name}.jsonl").write_text(_rows(options, name, count))
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": NAME, "iterations": EVERY * (len(options.victims) + 1)},
        "data": {
            "sources": [
                {"name": "tails", "path": str(folder / "train.jsonl"), "sampling_key": "sampling"},
            ],
            "max_prompt_tokens": 64,
            "shuffle": False,
        },
        "rollout": {
            "prompts": options.prompts,
            "samples_per_prompt": 8,
            "part_groups": 1,
            "flush_tokens": options.flush_tokens,
            "sampling": {"max_new_tokens": options.longest},
        },
        "algorithm": {"preset": "grpo"},
        "trainer": {"max_pack_tokens": pack},
        "evaluation": {
            "every": EVERY,
            "sets": [
                {
                    "name": "held-out",
                    "path": str(folder / "held_out.jsonl"),
                    "sampling_key": "sampling",
                    "sampling": {"max_new_tokens": options.longest // HELD_OUT_SHARE},
                }
            ],
        },
        "checkpoint": {"every": EVERY, "keep_last": 1},  # a disk need not hold three of a large model
    }
    if options.shape:
        engines = {
            "sglang": {**SGLANG, "mem_fraction_static": 0.4, "cuda_graph_max_bs_decode": 256},
            "count": options.gpus,
        }
        layout = {**settings, "engines": engines}
        layout["trainer"] = {**settings["trainer"], "world_size": options.gpus}
        return laid_over(configuration(model, folder), layout)
    alone = {"model": {"path": str(model)}, "storage": {"root": str(folder / "runs")}}
    return {**alone, **settings, "reward": {"function": "benchmarks.gpu.shapes:coin"}}


def _rows(options: argparse.Namespace, name: str, count: int) -> str:
    """Prompts, each with the length of its answers, as JSON lines."""
    draw = random.Random(name)
    longest = options.longest if name == "train" else options.longest // HELD_OUT_SHARE
    lengths = [min(longest, round(options.median * draw.lognormvariate(0, 1))) for _ in range(count)]
    lengths[0] = longest  # at least one is as long as any may be
    return "".join(
        json.dumps({"prompt": f"{number}+{count}=", "label": "0", "sampling": {"max_new_tokens": max(4, n)}})
        + "\n"
        for number, n in enumerate(lengths)
    )


def _millrace(folder: Path, environment: dict[str, str], *words: str) -> int:
    return subprocess.run(
        [*MILLRACE, *words], cwd=folder, env=environment, check=False, stdout=sys.stderr
    ).returncode


def _processes(victim: str, driver: subprocess.Popen[bytes], folder: Path) -> list[psutil.Process]:
    """The processes to kill."""
    heads = [psutil.Process(pid) for pid in json.loads((folder / "home" / "ray.json").read_text())["pids"]]
    below = [child for head in heads for child in head.children(recursive=True)]
    if victim == "everything":
        return [psutil.Process(driver.pid), *heads, *below]
    if victim == "trainer":
        ranks = [process for process in below if _is_rank(process)]
        assert ranks, "no actor below Ray's head is a trainer's rank"
        return ranks[:1]
    return [psutil.Process(driver.pid)]


def _is_rank(process: psutil.Process) -> bool:
    """Whether an actor has PyTorch: a trainer's rank has, the one that keeps an engine has not."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        if process.cmdline()[0].startswith("ray::Host"):
            return any("libtorch" in mapped.path for mapped in process.memory_maps())
    return False


def _committed(run: RunFolder, index: int) -> float:
    manifest = run.manifest(index)
    assert manifest is not None
    return float(manifest.tasks["committed"])


def _rollout_s(run: RunFolder, index: int) -> float:
    manifest = run.manifest(index)
    assert manifest is not None
    return float(manifest.tasks["metrics"]["time/rollout_s"])


def _recovery(record: Path) -> dict[str, float]:
    """Seconds of the newest start by phase."""
    found = json.loads(record.read_text())["attempts"][-1].get("recovery", {})
    return {phase: round(seconds, 2) for phase, seconds in found.items()}


def _evaluated(run: RunFolder, last: int) -> list[int]:
    """The iterations that were evaluated."""
    manifests = [run.manifest(index) for index in range(last + 1)]
    return [
        index
        for index, manifest in enumerate(manifests)
        if manifest and any(name.startswith("eval/") for name in manifest.tasks["metrics"])
    ]


if __name__ == "__main__":
    main()
