"""Adapters of a real model's sizes to a PEFT folder, as each sync of adapters by name writes them: seconds by phase.

    python -m benchmarks.adapter_export [--shape 4b] [--rank 32] [--repeats 5] [--folder DIR] [--out FILE]

One rank holds the adapters of every layer, and no weights: on the GPU if there is one, in bfloat16. `gather`: from ranks and layers to
one buffer; `copy`: to the host; `write`: to a folder, in shared memory by default. `load`: the embedded engine reads the folder. The
first pass warms up, and the median of the others counts. `memcpy` copies as many bytes by one thread to memory that is in use: no
single writer to a folder is faster. The other ways write them to a file there: by calls, by a mapping whose pages come while it is
written, or by one whose pages are there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from benchmarks.gpu.shapes import SHAPES, command_line, device_name, model_config, versions
from millrace.connectors.engines.embedded.adapters import read_adapter
from millrace.connectors.host.own_folders import SHARED_MEMORY
from millrace.connectors.trainers.adapters import CHUNK, write_peft
from millrace.connectors.trainers.megatron.model.adapters import Adapters
from millrace.connectors.trainers.megatron.model.pairs import Pair
from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.connectors.trainers.megatron.process import cpu_shim, distributed
from millrace.connectors.trainers.megatron.weights.adapter_tensors import gathered
from millrace.core.config.trainer import Lora
from millrace.core.families.adapters import targeted
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import resolved


def main() -> None:
    """Measure one shape, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=SHARED_MEMORY, help="where the folders are written")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with distributed_alone() as device:
        report = measured(device, options)
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


@contextlib.contextmanager
def distributed_alone() -> Iterator[torch.device]:
    """Megatron's parallel state of one rank."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cpu":
        cpu_shim.install()
    with distributed.device_context(device):
        mpu.initialize_model_parallel()
        try:
            yield device
        finally:
            distributed.leave()


def measured(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of some passes over the adapters of a shape."""
    hf = resolved(model_config(options.shape).to_dict(), options.shape)
    lora = Lora(rank=options.rank, alpha=options.rank)
    model = adapters_alone(hf, lora, device)
    size = sum(each.nbytes for each in model.parameters())
    passes = [
        export_phases(model, hf, lora, options.folder)
        | {"memcpy": memcpy(size)}
        | writes(size, options.folder)
        for _ in range(options.repeats + 1)
    ]
    found = {name: [each[name] for each in passes[1:]] for name in passes[0]}
    return {
        "command": command_line(),
        "device": device_name() if device.type == "cuda" else "cpu",
        "versions": versions(),
        "mib": round(size / 2**20, 1),
        "tensors": sum(1 for _ in model.parameters()),
        "median_s": {name: round(statistics.median(values), 4) for name, values in found.items()},
        "passes_s": {name: [round(value, 4) for value in values] for name, values in found.items()},
    }


def adapters_alone(hf: dict[str, Any], lora: Lora, device: torch.device) -> RankModel:
    """The adapters of a model, without its weights."""
    like, pairs = torch.empty(0, dtype=torch.bfloat16, device=device), Adapters(lora)
    for matrix in targeted(architecture(hf), lora.targets):
        pair = Pair(matrix, lora.rank, like=like, sequence=False)
        with torch.no_grad():
            for weight in pair.parameters():
                weight.normal_()
        pairs.add(matrix.name, pair)
    stage: Any = torch.nn.Module()
    stage.adapters = pairs
    return RankModel([stage])


def export_phases(model: RankModel, hf: dict[str, Any], lora: Lora, place: Path) -> dict[str, float]:
    """Seconds of the phases of writing a model's adapters, and of reading them."""
    arch, marks = architecture(hf), [time.perf_counter()]

    def mark() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory(dir=place) as name:
        pairs = gathered(model)
        assert pairs is not None, "rank 0 has them"
        mark()
        pairs = pairs.on_host()
        mark()
        write_peft(Path(name), pairs, lora, arch, "base")
        mark()
        read_adapter("a", Path(name), arch, torch.bfloat16)
        mark()
    seconds = dict(zip(("gather", "copy", "write", "load"), map(operator.sub, marks[1:], marks), strict=True))
    return seconds | {"export": marks[3] - marks[0]}


def writes(size: int, place: Path) -> dict[str, float]:
    """Seconds of each way to write so many bytes to a new file, by threads."""
    source = torch.ones(size, dtype=torch.uint8)
    seconds = {}
    for threads in (1, 4, 8):
        spans = [slice(at, at + CHUNK) for at in range(0, size, CHUNK)]
        for way in ("calls", "mapping", "mapping before"):
            with (
                tempfile.TemporaryFile(dir=place, buffering=0) as file,
                ThreadPoolExecutor(threads, initializer=time.sleep, initargs=(0.01,)) as pool,
            ):
                write = _writer(way, source, file.fileno())
                list(pool.map(time.sleep, [0.02] * threads))  # all threads are there
                started = time.perf_counter()
                list(pool.map(write, spans))
                seconds[f"{way}, {threads} threads"] = time.perf_counter() - started
                del write
    return seconds


def _writer(way: str, source: torch.Tensor, file: int) -> Callable[[slice], object]:
    """Writes a part of the source to a file."""
    if way == "calls":
        values = source.numpy().data
        return lambda span: os.pwrite(file, values[span], span.start)
    os.truncate(file, len(source))
    target = torch.frombuffer(mmap.mmap(file, len(source)), dtype=torch.uint8)
    if way == "mapping before":
        target.fill_(0)
    return lambda span: target[span].copy_(source[span])


def memcpy(size: int) -> float:
    """Seconds of a copy of so many bytes to memory that is in use already."""
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
