"""What a way of working on several GPUs gains: the trainer's step with it and with the other, in turns.

    python -m benchmarks.gpu.two_ways gradients|context [--shape 0.6b] [--ranks 2] [--samples 16] [--length 2048] [--rounds 4] [--out FILE]

gradients: data parallel ranks reduce gradients while the backward pass runs, or afterwards.
context: context parallel ranks exchange heads for tokens around attention, or gather keys and values.

Ranks, one to a GPU, train on the same batches; steps of both ways take turns, so that they see the same host. Each figure is
the median of its steps after the first round. `--device cpu --shape tiny` runs the same over gloo, to try it. JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.batch_rows import batch_row, write_batch
from benchmarks.gpu.shapes import command_line
from millrace.connectors.trainers.megatron.model.attention import PackedAttention
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.connectors.trainers.rank import Rank
from millrace.core.contracts.task_records import StepRequest

PROMPT, PACK = 64, 16384
WAYS = {"gradients": ("overlapped", "afterwards"), "context": ("heads exchanged", "keys gathered")}


def main() -> None:
    """Start the ranks, have them make the steps, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16, help="of a step, over all ranks")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each way, after one that warms up")
    parser.add_argument("--models", type=Path, default=None, help="where model folders are kept")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = _model(options.shape, options.models or Path(scratch))
        found = from_ranks(_rank, options.device, options.ranks, options, str(model), scratch)
        report = {"command": command_line(), "ranks": options.ranks, "shape": options.shape, **found}
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def from_ranks(work: Callable[..., None], device: str, world: int, *arguments: Any) -> dict[str, Any]:
    """What rank 0 found. work: of a rank, given its number, the arguments, and queues for the address and for what rank 0 finds."""
    context = get_context("spawn")
    addresses, results = context.Queue(), context.Queue()
    ranks = [
        context.Process(target=work, args=(rank, *arguments, addresses, results)) for rank in range(world)
    ]
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    for process, gpu in zip(ranks, gpus_of(device, world), strict=True):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # its imports may ask CUDA what there is
        process.start()
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if own is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = own
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit("a rank failed; see above")
    found: dict[str, Any] = results.get()
    return found


def set_up(trainer: Rank, rank: int, world: int, addresses: Any) -> None:
    """Have the ranks find each other by the address of rank 0."""
    if rank == 0:
        master = trainer.address()
        for _ in range(world - 1):
            addresses.put(master)
    else:
        master = addresses.get()
    trainer.setup(master)


def gpus_of(device: str, ranks: int) -> list[str]:
    """The GPU that each rank sees."""
    if device == "cpu":
        return [""] * ranks
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(rank) for rank in range(ranks)]
    if len(gpus) < ranks:
        raise SystemExit(f"{ranks} ranks: CUDA_VISIBLE_DEVICES={visible} names fewer GPUs")
    return gpus[:ranks]


def _model(shape: str, folder: Path) -> Path:
    if shape == "tiny":
        from millrace.connectors.huggingface.tiny import build_tiny_model

        build_tiny_model(folder / shape)
        return folder / shape
    from benchmarks.gpu.shapes import model_folder

    return model_folder(shape, folder / shape)


def _rank(
    rank: int, options: argparse.Namespace, model: str, scratch: str, addresses: Any, results: Any
) -> None:
    import torch

    from benchmarks.gpu.shapes import device_name
    from millrace.core.config import RunConfig

    gpu = options.device == "cuda"
    shards = options.ranks if options.what == "context" else 1
    config = RunConfig.model_validate(
        {
            "run": {"name": "benchmark", "iterations": 1000},
            "model": {"path": model, "dtype": "bfloat16" if gpu else "float32"},
            "data": {"sources": [{"path": "none"}]},
            "trainer": {
                "device": options.device,
                "threads": 1,
                "world_size": options.ranks,
                "max_pack_tokens": max(PACK, options.length) // shards,
                "parallel": {"context": shards},
                "deterministic": False,
                "optimizer": {"lr": 1e-5},
            },
        }
    )
    trainer = TrainerRank(config.model_dump(mode="json"), rank, options.ranks)
    set_up(trainer, rank, options.ranks, addresses)
    new, other = WAYS[options.what]
    seconds: dict[str, list[float]] = {new: [], other: []}
    compute: dict[str, list[float]] = {new: [], other: []}
    version = 0
    for turn in range(options.rounds + 1):
        for way in (new, other):
            version += 1
            url = _batch(options, Path(scratch) / f"{rank}-{version}", version)
            _take(trainer.learner.policy.model, options.what, new=way == new)
            torch.distributed.barrier()
            started = time.perf_counter()
            answer = trainer.train(StepRequest(version, url))
            if gpu:
                torch.cuda.synchronize()
            if turn:
                seconds[way].append(time.perf_counter() - started)
                compute[way].append(answer["seconds"]["compute"])
    trainer.shutdown()
    if rank:
        return
    medians = {way: statistics.median(of) for way, of in seconds.items()}
    results.put(
        {
            "device": device_name() if gpu else "cpu",
            "median_s": medians,
            "ratio": round(medians[new] / medians[other], 4),
            "compute_median_s": {way: statistics.median(of) for way, of in compute.items()},
            "seconds": seconds,
        }
    )


def _take(ddp: Any, what: str, *, new: bool) -> None:
    """Have the model make its next step one way."""
    if what == "gradients":
        ddp.ddp_config.overlap_grad_reduce = new
        return
    for module in ddp.modules():
        if isinstance(module, PackedAttention):
            module.by_heads = new


def _batch(options: argparse.Namespace, folder: Path, step: int) -> str:
    """URL of a step's batch, the same for every rank."""
    draw = random.Random(step)
    rows = [
        batch_row(step, i, draw.choices(range(90), k=options.length), options.length - PROMPT, draw.uniform(-1, 1), -11.9)
        for i in range(options.samples)
    ]  # fmt: skip
    return write_batch(folder, rows)


if __name__ == "__main__":
    main()
