"""Where an iteration's time goes on shared GPUs, and how busy the first one is.

    python -m benchmarks.gpu.end_to_end [--shape 0.6b] [--lengths 512 2048] [--samples 128] [--iterations 4] [--gpus 2]
    python -m benchmarks.gpu.end_to_end --shape 4b --gpus 2 --iterations 8 --save-every 3    # and what checkpoints cost

Runs `millrace train` with a model of random weights, SGLang and Megatron sharing each GPU, and gives the mean split of the
iterations after the second (with two, of the second): in the first kernels are tuned and host memory is pinned for the
trainer's state, in the second the driver tidies up what its imports left.

Generation: at least one request is out, less the wait for engines. Training: what the ranks report. Memory: engines rest,
the trainer offloads and reloads, the KV cache comes back. Sync: weights to the engine. Checkpoint: the task that begins
one. What is left is the orchestration: prompts, scoring that outlasts generation, filter, Parquet, records, Prefect, MLflow,
manifest. What goes on beside one of the others does not count: scoring beside generation, the writing of the batch beside
memory. GPU-busy: mean of NVML's utilisation over the same iterations.

--save-every also gives, of each checkpoint, how long the iteration waited for it, how long it was written meanwhile, and
its bytes; and, once the run has ended, what `dd` writes to the same disk, at most 16 GiB in as many streams as the ranks have
files.
JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.checkpoint import MIB, dd
from benchmarks.gpu.shapes import SGLANG, command_line, configuration, device_name, model_folder, versions
from benchmarks.whole_runs.iteration_overhead import iteration_split
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.trainers.checkpoint.background import FILES
from tests.support.ctrl_c import heed_ctrl_c

SAMPLE_S = 0.1
GROUP = 8
PHASES = ("reload", "prepare", "compute", "apply")  # of a train step


def main() -> None:
    """Run each length, read what it stored, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of a response")
    parser.add_argument("--samples", type=int, default=128, help="samples of an iteration")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument(
        "--gpus", type=int, default=1, help="that trainer and engines share, a rank and an engine on each"
    )
    parser.add_argument(
        "--save-every", type=int, help="iterations from one checkpoint to the next; none by itself"
    )
    parser.add_argument("--models", type=Path, default=None, help="where model folders are kept")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value of the configuration")
    options = parser.parse_args()
    heed_ctrl_c()  # by which runs are ended
    report: dict[str, Any] = {"command": command_line(), "device": device_name(), "versions": versions()}
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(options.shape, (options.models or Path(scratch)) / options.shape)
        for length in options.lengths:
            report[str(length)] = measured = _measured(options, model, Path(scratch), length)
            keep(report, options.out)
            if "checkpoints" in measured:
                measured |= _beside_dd(measured, Path(scratch), options.gpus)
                keep(report, options.out)
    print(json.dumps(report, indent=1))


def keep(report: dict[str, Any], path: Path | None) -> None:
    """Write what is known so far to the file, if one was asked for."""
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _measured(options: argparse.Namespace, model: Path, folder: Path, length: int) -> dict[str, Any]:
    name = f"e2e-{length}"
    values = configuration(
        model,
        folder,
        run={"name": name, "iterations": options.iterations + 100},  # ended before
        rollout={
            "prompts": options.samples // GROUP,
            "samples_per_prompt": GROUP,
            "max_concurrency": options.samples,
            "sampling": {"max_new_tokens": length},
        },
        trainer={"max_pack_tokens": max(16384, 8 * length), "world_size": options.gpus},
        engines={
            "sglang": {**SGLANG, "mem_fraction_static": 0.4, "cuda_graph_max_bs_decode": 256},
            "count": options.gpus,
        },
        **({"checkpoint": {"every": options.save_every}} if options.save_every else {}),
    )
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    millrace = [sys.executable, "-m", "millrace.flows.commands"]
    # the reward's module is in this checkout, and the command runs in another folder
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "MILLRACE_HOME": str(folder / "home"), "PYTHONPATH": paths}
    run = RunFolder(str(folder / "runs"), name)
    with Busy() as busy:
        try:
            command = [*millrace, "train", f"{name}.yaml", *options.overrides]
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr)
            until_whole(process, run, options.iterations - 1)
            process.send_signal(signal.SIGINT)  # its last iteration would save a checkpoint
            process.wait(timeout=120)
        finally:
            subprocess.run(
                [*millrace, "server", "stop"], cwd=folder, env=environment, check=False, stdout=sys.stderr
            )
    splits = [split(run, index) for index in range(1, options.iterations)]
    settled = splits[1:] or splits
    mean = {part: sum(one[part] for one in settled) / len(settled) for part in settled[0]}
    wall = mean["iteration_s"]
    parts = ("generation_s", "training_s", "memory_s", "sync_s", "checkpoint_s", "orchestration_s")
    first = run.manifest(options.iterations - len(settled) - 1)
    last = run.manifest(options.iterations - 1)
    assert first is not None
    assert last is not None
    return {
        "samples": options.samples,
        "mean": {part: round(value, 4) for part, value in mean.items()},
        "share": {part: round(mean[part] / wall, 4) for part in parts},
        "gpu_busy": busy.mean(first.tasks["committed"], last.tasks["committed"]),
        "iterations": [{part: round(value, 4) for part, value in one.items()} for one in splits],
        **(_checkpoints(options, run, folder) if options.save_every else {}),
    }


def until_whole(process: subprocess.Popen[bytes], run: RunFolder, index: int) -> None:
    """Wait until an iteration is whole. Exits if the run ends before."""
    while run.manifest(index) is None:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode}")
        time.sleep(SAMPLE_S)


def _checkpoints(options: argparse.Namespace, run: RunFolder, folder: Path) -> dict[str, Any]:
    """What checkpoints cost."""
    records = [checkpoint_record(run, index) for index in range(options.iterations)]
    waits = {record["begun"]: record["seconds"] for record in records if record.get("begun")}
    counted = [record for record in records if record.get("committed")]
    newest = folder / "runs" / run.name / counted[-1]["committed"]
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())  # of each of them
    found = [
        {
            "wait_s": round(waits[record["committed"]], 3),
            "count_s": round(record["seconds"], 3),
            "write_s": round(record["write_s"], 2),
            "mib_s": round(size / MIB / record["write_s"], 1),
        }
        for record in counted
    ]
    return {"checkpoint_bytes": size, "checkpoints": found}


def _beside_dd(measured: dict[str, Any], folder: Path, gpus: int) -> dict[str, Any]:
    """What `dd` makes of the same disk, and the last checkpoint's share of it."""
    streams = FILES * gpus
    rate = dd(folder, measured["checkpoint_bytes"], streams)
    share = round(measured["checkpoints"][-1]["mib_s"] / rate, 3)
    return {"dd_mib_s": {str(streams): rate}, "share_of_dd": share}


def checkpoint_record(run: RunFolder, index: int) -> Any:
    """What the task `checkpoint` of an iteration recorded."""
    record = IterationFiles(run, index).record("checkpoint")
    assert record is not None
    return record


def split(run: RunFolder, index: int) -> dict[str, float]:
    """Seconds of one iteration by part, from what it stored; what moves between engines and trainer is a part of its own."""
    whole = iteration_split(run, index)
    manifest = run.manifest(index)
    assert manifest is not None
    folder = run.iteration(index)
    lengths = read_parts(folder, "rollouts", "rollouts", columns=["response_length"])["response_length"]
    step = folder.read_json("step.json")
    phases = {f"{name}_s": sum(one["seconds"][name] for one in step["steps"]) for name in PHASES}
    engines_s = _metric(folder.read_json("results/rollout.json"), "engines_s")
    offload = manifest.tasks["metrics"].get("time/sync_offload_s", 0.0)
    handed = step.get("handed_s", step["rest_s"])  # beside what is left of the batch, if it can
    record = checkpoint_record(run, index)
    begins = record.get("begun") or record["saved"]  # else the task is beside the sync
    saving = record["seconds"] if begins else 0.0
    generation, training = whole["generation"] - engines_s, whole["training"] - phases["reload_s"]
    return {
        "iteration_s": whole["iteration"],
        "generation_s": generation,
        "training_s": training,
        "memory_s": engines_s + handed + phases["reload_s"] + offload,
        "handed_s": handed,
        "rest_s": step["rest_s"],
        **phases,
        "offload_s": offload,
        "engines_s": engines_s,
        "sync_s": whole["sync"] - offload,
        "checkpoint_s": saving,
        "orchestration_s": whole["overhead"] - handed - saving,
        "rollout_tokens_s": sum(lengths.to_pylist()) / generation,
        "train_tokens_s": sum(one["tokens"] for one in step["steps"]) / training,
        "logprob_gap_mean": manifest.tasks["metrics"]["train/logprob_gap_mean"],
    }


def _metric(value: Any, name: str) -> float:
    """A figure of a task's record, which Prefect wraps."""
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, dict):
        if name in value:
            return float(value[name])
        for inner in value.values():
            try:
                return _metric(inner, name)
            except (KeyError, ValueError):
                continue
    raise KeyError(name)


class Busy:
    """Samples the utilisation of the first GPUs that this process sees, in a thread."""

    def __init__(self, gpus: int = 1) -> None:
        self._gpus = gpus
        self._samples: list[tuple[float, list[int]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Busy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self._gpus)))
        devices = [
            pynvml.nvmlDeviceGetHandleByIndex(int(index)) for index in visible.split(",")[: self._gpus]
        ]
        while not self._ended.wait(SAMPLE_S):
            shares = [pynvml.nvmlDeviceGetUtilizationRates(device).gpu for device in devices]
            self._samples.append((time.time(), shares))

    def each(self, start: float, end: float) -> list[float]:
        """Of each GPU, the mean share of the time between two clock readings in which a kernel ran."""
        chosen = [shares for at, shares in self._samples if start <= at <= end]
        return [round(sum(of_one) / len(chosen) / 100, 4) for of_one in zip(*chosen, strict=True)]

    def mean(self, start: float, end: float) -> float | None:
        """The same of the first."""
        return next(iter(self.each(start, end)), None)


if __name__ == "__main__":
    main()
