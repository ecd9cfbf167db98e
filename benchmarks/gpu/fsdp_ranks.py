"""FSDP's trainer on several GPUs beside one: tokens/s of all ranks over those of one, each with as many tokens a step.

    python -m benchmarks.gpu.fsdp_ranks [--shape 1.7b] [--ranks 2] [--tokens 16384] [--length 2048] [--steps 5] [--recompute none] [--out FILE]

One rank trains, then so many, on the same weights. Each figure is the median of the steps after two that warm up. `--device cpu --shape tiny-a3b --tokens 1024 --length 256`
runs the same over gloo, to try it. JSON to stdout. Target: 1.8 times with two ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.batch_rows import write_batch
from benchmarks.gpu.expert_parallel import seconds_together
from benchmarks.gpu.shapes import command_line, device_name, model_folder
from benchmarks.gpu.trainer import WARM_UP, lengths_of, make_rows, rank_config
from benchmarks.gpu.two_ways import from_ranks, set_up
from millrace.connectors.trainers.fsdp.rank import FsdpRank
from millrace.core.contracts.task_records import StepMetrics, StepRequest


def main() -> None:
    """Measure one rank and all of them, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="1.7b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384, help="of a rank's step, one pack")
    parser.add_argument("--length", type=int, default=2048, help="of a sample")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", type=Path, help="where model folders are kept")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(options.shape, (options.models or Path(scratch)) / options.shape)
        found = {str(ranks): of_ranks(ranks, model, Path(scratch), options) for ranks in (1, options.ranks)}
    one, several = (found[str(ranks)]["tokens_per_s"] for ranks in (1, options.ranks))
    report = {
        "command": command_line(),
        "device": device_name() if options.device == "cuda" else "cpu",
        "ranks": found,
        "times_one": round(several / one, 3),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def of_ranks(ranks: int, model: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of so many ranks."""
    lengths = lengths_of(options.tokens, options.length) * ranks
    batches = [
        write_batch(scratch / f"{ranks}-{step}", make_rows(step, lengths))
        for step in range(1, options.steps + WARM_UP + 1)
    ]
    trainer = {"kind": "fsdp", "device": options.device, "world_size": ranks, "deterministic": False}
    config = rank_config(model, options.tokens, options.recompute, {}, **trainer)
    found = from_ranks(_rank, options.device, ranks, config, batches)
    return {"tokens_per_s": round(sum(lengths) / found["step_s"]), **found}


def _rank(number: int, config: dict[str, Any], batches: list[str], addresses: Any, results: Any) -> None:
    import torch

    world = config["trainer"]["world_size"]
    trainer = FsdpRank(config, number, world)
    set_up(trainer, number, world, addresses)
    gpu = config["trainer"]["device"] == "cuda"
    made: list[StepMetrics] = []

    def step() -> None:
        made.append(trainer.train(StepRequest(len(made) + 1, batches[len(made)])))

    seconds = [seconds_together(step, gpu=gpu) for _ in batches]
    if number == 0:
        held = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
        figures = {
            "step_s": statistics.median(seconds[WARM_UP:]),
            "all_s": seconds,
            "held_gib": round(held, 1),
        }
        results.put({**figures, "loss": made[-1]["loss"], "grad_norm": made[-1]["grad_norm"]})
        results.close()
        results.join_thread()
    trainer.shutdown()


if __name__ == "__main__":
    main()
