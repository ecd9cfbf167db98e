"""Seconds that weights take from the trainer to SGLang on the same GPU, by phase, against a device copy.

    python -m benchmarks.gpu.sync [--shapes 0.6b 4b] [--repeats 5] [--bucket-mib 512] [--out FILE]

Weights are random on both sides. A pass is what an iteration does after its train step: engines sleep, then the trainer's
weights go to them in buckets by CUDA IPC (wake, pause, load = gather + transfer, resume, confirm). The trainer is offloaded
before; benchmarks.gpu.end_to_end shows what that takes. `serve` is what follows when the next rollout asks for engines: the
KV cache comes back. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.shapes import (
    SGLANG,
    command_line,
    configuration,
    device_name,
    model_folder,
    versions,
    weight_bytes,
)
from millrace.core.accounts.staleness import VersionRange

if TYPE_CHECKING:
    from millrace.tasks.runtime.runtime import Runtime

TARGETS = {"0.6b": 0.15, "4b": 0.6}
KV_SHARE = {"0.6b": 0.2, "1.7b": 0.2, "4b": 0.25}


def main() -> None:
    """Measure each shape in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "4b"], help="shapes of models")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--models", type=Path, default=None, help="where model folders are kept")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    from millrace.connectors.prefect.server import ensure_server

    os.environ["PREFECT_API_URL"] = ensure_server()
    report: dict[str, Any] = {"command": command_line(), "device": device_name(), "versions": versions()}
    with tempfile.TemporaryDirectory() as scratch:
        for shape in options.shapes:
            models = options.models or Path(scratch)
            model = model_folder(shape, models / shape)
            report[shape] = asyncio.run(_measured(shape, model, Path(scratch), options))
            print(json.dumps({shape: report[shape]}), file=sys.stderr)
            if options.out:
                options.out.write_text(json.dumps(report, indent=1))
    report["device_copy_gb_s"] = device_copy()
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


async def _measured(shape: str, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from millrace.core.config import RunConfig
    from millrace.tasks.runtime.runtime import Runtime

    sglang = {**SGLANG, "mem_fraction_static": KV_SHARE[shape], "cuda_graph_max_bs_decode": 16}
    config = RunConfig.model_validate(
        configuration(
            model,
            folder,
            run={"name": f"sync-{shape}"},
            engines={"sglang": {**sglang, "load_format": "dummy"}},
            sync={"kind": "ipc", "bucket_mib": options.bucket_mib},
        )
    )
    runtime = Runtime(config)
    await runtime.open()
    try:
        started = time.perf_counter()
        await runtime.memory.for_engines(VersionRange.only(0))
        first = time.perf_counter() - started
        passes = [await _one_pass(runtime) for _ in range(options.repeats)]
    finally:
        await runtime.close(end_actors=True)
    middle = {name: round(statistics.median(p[name] for p in passes), 5) for name in passes[0]}
    size = weight_bytes(model)
    return {
        "bytes": size,
        "bucket_mib": options.bucket_mib,
        "start_and_first_sync_s": round(first, 2),
        "median_s": middle,
        "transfer_gb_s": round(size / middle["transfer"] / 1e9, 1),
        "whole_gb_s": round(size / middle["sync"] / 1e9, 1),
        "target_s": TARGETS.get(shape),
        "passes": [{name: round(value, 5) for name, value in p.items()} for p in passes],
    }


async def _one_pass(runtime: Runtime) -> dict[str, float]:
    marks = [time.perf_counter()]
    async with runtime.memory.for_trainer():  # engines sleep
        marks.append(time.perf_counter())
    phases = await runtime.memory.update_engines(0)
    marks.append(time.perf_counter())
    await runtime.memory.for_engines(VersionRange.only(0))
    marks.append(time.perf_counter())
    sleep, sync, serve = (b - a for a, b in itertools.pairwise(marks))
    return {"sleep": sleep, "sync": sync, "serve": serve, **phases}


def device_copy(mib: int = 512, times: int = 20) -> float:
    """GB/s of a copy within the GPU's memory, its bytes counted once."""
    import torch

    source = torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        target.copy_(source)
    torch.cuda.synchronize()
    return round(times * source.numel() / (time.perf_counter() - started) / 1e9, 1)


if __name__ == "__main__":
    main()
