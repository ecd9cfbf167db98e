"""Seconds that weights take from the trainer to SGLang on the same GPU, by phase, against a device copy.
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
    python -m benchmarks.gpu.sync [--shapes 0.6b 4b] [--repeats 5] [--bucket-mib 512] [--out FILE]
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
Weights are random on both sides. A pass is what an iteration does after its train step: engines sleep, then the trainer's
from millrace.core.staleness import VersionRange
weights go to them in buckets by CUDA IPC (wake, pause, load = gather + transfer, resume, confirm). The trainer is offloaded
from millrace.core.staleness import VersionRange
before; benchmarks.gpu.end_to_end shows what that takes. `serve` is what follows when the next rollout asks for engines: the
from millrace.core.staleness import VersionRange
KV cache comes back. Prints JSON.
from millrace.core.staleness import VersionRange
"""
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
from __future__ import annotations
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
import argparse
from millrace.core.staleness import VersionRange
import asyncio
from millrace.core.staleness import VersionRange
import itertools
from millrace.core.staleness import VersionRange
import json
from millrace.core.staleness import VersionRange
import os
from millrace.core.staleness import VersionRange
import statistics
from millrace.core.staleness import VersionRange
import sys
from millrace.core.staleness import VersionRange
import tempfile
from millrace.core.staleness import VersionRange
import time
from millrace.core.staleness import VersionRange
from pathlib import Path
from millrace.core.staleness import VersionRange
from typing import TYPE_CHECKING, Any
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
from benchmarks.gpu.shapes import (
from millrace.core.staleness import VersionRange
    SGLANG,
from millrace.core.staleness import VersionRange
    command_line,
from millrace.core.staleness import VersionRange
    configuration,
from millrace.core.staleness import VersionRange
    device_name,
from millrace.core.staleness import VersionRange
    model_folder,
from millrace.core.staleness import VersionRange
    versions,
from millrace.core.staleness import VersionRange
    weight_bytes,
from millrace.core.staleness import VersionRange
)
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
if TYPE_CHECKING:
from millrace.core.staleness import VersionRange
    from millrace.tasks.runtime.runtime import Runtime
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
TARGETS = {"0.6b": 0.15, "4b": 0.6}
from millrace.core.staleness import VersionRange
KV_SHARE = {"0.6b": 0.2, "1.7b": 0.2, "4b": 0.25}
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
def main() -> None:
from millrace.core.staleness import VersionRange
    """Measure each shape in turn."""
from millrace.core.staleness import VersionRange
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
from millrace.core.staleness import VersionRange
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "4b"], help="shapes of models")
from millrace.core.staleness import VersionRange
    parser.add_argument("--repeats", type=int, default=5)
from millrace.core.staleness import VersionRange
    parser.add_argument("--bucket-mib", type=int, default=512)
from millrace.core.staleness import VersionRange
    parser.add_argument("--models", type=Path, default=None, help="where model folders are kept")
from millrace.core.staleness import VersionRange
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
from millrace.core.staleness import VersionRange
    options = parser.parse_args()
from millrace.core.staleness import VersionRange
    from millrace.connectors.prefect.server import ensure_server
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
    os.environ["PREFECT_API_URL"] = ensure_server()
from millrace.core.staleness import VersionRange
    report: dict[str, Any] = {"command": command_line(), "device": device_name(), "versions": versions()}
from millrace.core.staleness import VersionRange
    with tempfile.TemporaryDirectory() as scratch:
from millrace.core.staleness import VersionRange
        for shape in options.shapes:
from millrace.core.staleness import VersionRange
            models = options.models or Path(scratch)
from millrace.core.staleness import VersionRange
            model = model_folder(shape, models / shape)
from millrace.core.staleness import VersionRange
            report[shape] = asyncio.run(_measured(shape, model, Path(scratch), options))
from millrace.core.staleness import VersionRange
            print(json.dumps({shape: report[shape]}), file=sys.stderr)
from millrace.core.staleness import VersionRange
            if options.out:
from millrace.core.staleness import VersionRange
                options.out.write_text(json.dumps(report, indent=1))
from millrace.core.staleness import VersionRange
    report["device_copy_gb_s"] = device_copy()
from millrace.core.staleness import VersionRange
    text = json.dumps(report, indent=1)
from millrace.core.staleness import VersionRange
    print(text)
from millrace.core.staleness import VersionRange
    if options.out:
from millrace.core.staleness import VersionRange
        options.out.write_text(text + "\n")
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
async def _measured(shape: str, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
from millrace.core.staleness import VersionRange
    from millrace.core.config import RunConfig
from millrace.core.staleness import VersionRange
    from millrace.tasks.runtime.runtime import Runtime
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
    sglang = {**SGLANG, "mem_fraction_static": KV_SHARE[shape], "cuda_graph_max_bs_decode": 16}
from millrace.core.staleness import VersionRange
    config = RunConfig.model_validate(
from millrace.core.staleness import VersionRange
        configuration(
from millrace.core.staleness import VersionRange
            model,
from millrace.core.staleness import VersionRange
            folder,
from millrace.core.staleness import VersionRange
            run={"name": f"sync-{shape}"},
from millrace.core.staleness import VersionRange
            engines={"sglang": {**sglang, "load_format": "dummy"}},
from millrace.core.staleness import VersionRange
            sync={"kind": "ipc", "bucket_mib": options.bucket_mib},
from millrace.core.staleness import VersionRange
        )
from millrace.core.staleness import VersionRange
    )
from millrace.core.staleness import VersionRange
    runtime = Runtime(config)
from millrace.core.staleness import VersionRange
    await runtime.open()
from millrace.core.staleness import VersionRange
    try:
from millrace.core.staleness import VersionRange
        started = time.perf_counter()
from millrace.core.staleness import VersionRange
        await runtime.memory.for_engines(VersionRange.only(0))
from millrace.core.staleness import VersionRange
        first = time.perf_counter() - started
from millrace.core.staleness import VersionRange
        passes = [await _one_pass(runtime) for _ in range(options.repeats)]
from millrace.core.staleness import VersionRange
    finally:
from millrace.core.staleness import VersionRange
        await runtime.close(end_actors=True)
from millrace.core.staleness import VersionRange
    middle = {name: round(statistics.median(p[name] for p in passes), 5) for name in passes[0]}
from millrace.core.staleness import VersionRange
    size = weight_bytes(model)
from millrace.core.staleness import VersionRange
    return {
from millrace.core.staleness import VersionRange
        "bytes": size,
from millrace.core.staleness import VersionRange
        "bucket_mib": options.bucket_mib,
from millrace.core.staleness import VersionRange
        "start_and_first_sync_s": round(first, 2),
from millrace.core.staleness import VersionRange
        "median_s": middle,
from millrace.core.staleness import VersionRange
        "transfer_gb_s": round(size / middle["transfer"] / 1e9, 1),
from millrace.core.staleness import VersionRange
        "whole_gb_s": round(size / middle["sync"] / 1e9, 1),
from millrace.core.staleness import VersionRange
        "target_s": TARGETS.get(shape),
from millrace.core.staleness import VersionRange
        "passes": [{name: round(value, 5) for name, value in p.items()} for p in passes],
from millrace.core.staleness import VersionRange
    }
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
async def _one_pass(runtime: Runtime) -> dict[str, float]:
from millrace.core.staleness import VersionRange
    marks = [time.perf_counter()]
from millrace.core.staleness import VersionRange
    async with runtime.memory.for_trainer():  # engines sleep
from millrace.core.staleness import VersionRange
        marks.append(time.perf_counter())
from millrace.core.staleness import VersionRange
    phases = await runtime.memory.update_engines(0)
from millrace.core.staleness import VersionRange
    marks.append(time.perf_counter())
from millrace.core.staleness import VersionRange
    await runtime.memory.for_engines(VersionRange.only(0))
from millrace.core.staleness import VersionRange
    marks.append(time.perf_counter())
from millrace.core.staleness import VersionRange
    sleep, sync, serve = (b - a for a, b in itertools.pairwise(marks))
from millrace.core.staleness import VersionRange
    return {"sleep": sleep, "sync": sync, "serve": serve, **phases}
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
def device_copy(mib: int = 512, times: int = 20) -> float:
from millrace.core.staleness import VersionRange
    """GB/s of a copy within the GPU's memory, its bytes counted once."""
from millrace.core.staleness import VersionRange
    import torch
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
    source = torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda")
from millrace.core.staleness import VersionRange
    target = torch.empty_like(source)
from millrace.core.staleness import VersionRange
    target.copy_(source)
from millrace.core.staleness import VersionRange
    torch.cuda.synchronize()
from millrace.core.staleness import VersionRange
    started = time.perf_counter()
from millrace.core.staleness import VersionRange
    for _ in range(times):
from millrace.core.staleness import VersionRange
        target.copy_(source)
from millrace.core.staleness import VersionRange
    torch.cuda.synchronize()
from millrace.core.staleness import VersionRange
    return round(times * source.numel() / (time.perf_counter() - started) / 1e9, 1)
from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange

from millrace.core.staleness import VersionRange
if __name__ == "__main__":
from millrace.core.staleness import VersionRange
    main()
from millrace.core.staleness import VersionRange
