"""Adapters on one GPU: the trainer's step beside that of all weights, its memory beside the plan's, and a sync amid requests.

    python -m benchmarks.gpu.adapters [--shape 4b] [--rank 32] [--tokens 16384] [--length 2048] [--steps 5] [--syncs 4] [--out FILE]
    python -m benchmarks.gpu.adapters --shape 4b --halves train --tokens 16384 --length 16384 --limit-gib 78
    python -m benchmarks.gpu.adapters --shape 30b-a3b --experts --apart --rank 16 --recompute full --tokens 8192

Weights are random. `train`: tokens/s of a step (the median after two that warm up) with adapters and with all weights, each in a
process of its own, and the most memory that PyTorch held beside what `millrace check` plans. `serve`: SGLang serves adapters by name
beside the trainer. `export`: seconds of a sync's export by phase (`benchmarks.adapter_export`). Requests stream while each version is made and sent: seconds of export and load, and the longest wait for a part
of an answer during a sync and at other times. `gap`: of the log-probabilities of engine and trainer after the last sync, nats a token.
Targets: syncs of 0.05 s, memory within 10 % of the plan, 1.3 times the tokens/s.

`--experts`: the experts of a mixture have adapters too. `--apart`: trainer and engine have a GPU each, for shapes of which one GPU
does not hold both; all weights are not trained then. `--halves train`, `--halves serve`: one half alone; `--models DIR` keeps the
weights for the other. `--limit-gib`: PyTorch may hold no more GPU memory while adapters train, and all weights are not trained; CUDA's
context comes to it. `--sglang`: more options of the engine, as JSON. The embedded engine serves the same on a CPU:

    python -m benchmarks.gpu.adapters --device cpu --shape tiny-a3b --experts --apart --tokens 1024 --length 256 --streams 2 --answer 400
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.shapes import (
    SGLANG,
    VOCAB,
    command_line,
    configuration,
    device_name,
    model_folder,
    versions,
)

if TYPE_CHECKING:
    from millrace.connectors.engines.client import EngineClient, Generation
    from millrace.core.config import RunConfig
    from millrace.tasks.runtime.runtime import Runtime

SIDES = ("adapters", "whole")
EXPERTS = r"model\.layers\.\d+\.(self_attn|mlp(\.experts\.\d+)?)\.(q|k|v|o|gate|up|down)_proj"
TEXTS, TEXT = 4, 32  # that engine and trainer score, and tokens of one
TARGETS = {"sync_s": 0.05, "memory": 0.10, "speed": 1.3}
HALVES = ("train", "serve")
EVERY = 8  # tokens of a part of an answer
WARM_UP = 2


def main() -> None:
    """Measure one shape; or one side of its training, in a process that the first one starts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step, and of a pack")
    parser.add_argument("--length", type=int, default=2048, help="of a sample")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--syncs", type=int, default=4)
    parser.add_argument("--experts", action="store_true", help="adapters of experts too")
    parser.add_argument("--apart", action="store_true", help="trainer and engine on a GPU each")
    parser.add_argument("--recompute", default="none", help="trainer.recompute")
    parser.add_argument("--halves", nargs="+", choices=HALVES, default=HALVES)
    parser.add_argument("--limit-gib", type=float, help="of GPU memory that PyTorch may hold for a step")
    parser.add_argument("--streams", type=int, default=32, help="requests during the syncs")
    parser.add_argument("--answer", type=int, default=6000, help="tokens of an answer")
    parser.add_argument("--sglang", type=json.loads, default={}, help="more of engines.sglang, as JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", type=Path, help="where model folders are kept")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(options.shape, (options.models or Path(scratch)) / options.shape)
        if options.side:
            print(json.dumps(trained(model, Path(scratch), options)))
            return
        options.models = model.parent
        report: dict[str, Any] = {
            "command": command_line(),
            "device": device_name() if options.device == "cuda" else "cpu",
            "versions": versions(),
            "targets": TARGETS,
        }
        if "train" in options.halves:
            report["train"] = both_sides(options)
            note(report, options.out)
        if "serve" in options.halves:
            report["serve"] = served(model, Path(scratch), options)
            note(report, options.out)


def both_sides(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of adapters and of all weights; of adapters alone if not both have room."""
    if options.apart or options.limit_gib:
        return {SIDES[0]: in_process(SIDES[0], options)}
    found = {side: in_process(side, options) for side in SIDES}
    one, other = (found[side]["tokens_per_s"] for side in SIDES)
    return found | {"speed": round(one / other, 2)}


def note(report: dict[str, Any], out: Path | None) -> None:
    """Print what is known so far, and write it."""
    text = json.dumps(report, indent=1)
    print(text, flush=True)
    if out:
        out.write_text(text + "\n")


def in_process(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one side's process measured."""
    command = [sys.executable, "-m", "benchmarks.gpu.adapters", "--side", side]
    for name in ("shape", "rank", "tokens", "length", "steps", "syncs", "models", "recompute", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--experts"] if options.experts else []
    command += ["--limit-gib", str(options.limit_gib)] if options.limit_gib else []
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def run_config(
    model: Path, folder: Path, options: argparse.Namespace, *, lora: bool, **changes: Any
) -> RunConfig:
    """A run of the shape: adapters, which go by name, or all weights."""
    from millrace.core.config import RunConfig

    adapters = {"rank": options.rank, "alpha": options.rank}
    trainer = {
        "device": options.device,
        "max_pack_tokens": options.tokens,
        "recompute": options.recompute,
        "lora": {**adapters, **({"targets": EXPERTS} if options.experts else {})} if lora else None,
        "optimizer": {"lr": 1e-4},
    }
    sections = {"trainer": trainer, "run": {"name": "adapters"}, "algorithm": {"aggregation": "token_mean"}}
    return RunConfig.model_validate(configuration(model, folder, **{**sections, **changes}))


def batch_of(folder: Path, step: int, options: argparse.Namespace) -> str:
    """A step's batch: its path."""
    from benchmarks.batch_rows import write_batch
    from benchmarks.gpu.trainer import lengths_of, make_rows

    return write_batch(folder / f"batch-{step}", make_rows(step, lengths_of(options.tokens, options.length)))


def trained(model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of the median step, and the most memory held beside the plan's; GiB."""
    import torch

    from benchmarks.adapter_export import export_phases
    from millrace.connectors.host.own_folders import SHARED_MEMORY
    from millrace.connectors.trainers.megatron.rank import TrainerRank
    from millrace.core.config.plan.plan import make_plan
    from millrace.core.contracts.task_records import StepRequest

    on_gpu = options.device == "cuda"
    finish = torch.cuda.synchronize if on_gpu else int
    if on_gpu and options.limit_gib:
        whole_gpu = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.limit_gib * 2**30 / whole_gpu, 0)
    config = run_config(model, folder, options, lora=options.side == "adapters")
    rank = TrainerRank(config.model_dump(mode="json"), 0, 1)
    rank.setup(rank.address())
    seconds = []
    try:
        for step in range(1, options.steps + WARM_UP + 1):
            batch = batch_of(folder, step, options)
            finish()
            started = time.perf_counter()
            rank.train(StepRequest(step, batch))
            finish()
            seconds.append(time.perf_counter() - started)
        held, reserved, left, of = gpu_memory() if on_gpu else (0, 0, 0, 0)
        lora = config.trainer.lora
        exports = [
            export_phases(rank.policy, rank.hf, lora, SHARED_MEMORY)
            for _ in range(options.syncs + 1)
            if lora is not None
        ]
    finally:
        rank.shutdown()
    planned = {part.name: part.size for part in make_plan(config, gpus=1).trainer_memory}
    whole = sum(planned.values())
    return {
        "tokens_per_s": round(options.tokens / statistics.median(seconds[WARM_UP:])),
        "step_s": [round(each, 3) for each in seconds],
        "limit_gib": options.limit_gib,
        "held_gib": round(held / 2**30, 2),
        "reserved_gib": round(reserved / 2**30, 2),
        "gpu_used_gib": round((of - left) / 2**30, 2),
        "planned_gib": round(whole / 2**30, 2),
        "held_over_planned": round(held / whole, 3),
        "plan_gib": {name: round(size / 2**30, 2) for name, size in planned.items()},
        "export_s": [{name: round(value, 4) for name, value in each.items()} for each in exports[1:]],
    }


def gpu_memory() -> tuple[int, int, int, int]:
    """Bytes: the most that tensors took, the most that PyTorch held for them, and what of the GPU is free now and in all."""
    import torch

    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), *torch.cuda.mem_get_info()


def served(model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Syncs of adapters by name amid requests, on the GPU that trainer and engine share, or on one each."""
    from millrace.connectors.prefect.server import ensure_server

    os.environ["PREFECT_API_URL"] = ensure_server()
    share = 0.85 if options.apart else 0.3
    sglang = {**SGLANG, "mem_fraction_static": share, "cuda_graph_max_bs_decode": 2 * options.streams}
    engines = (
        {"kind": "sglang", "sglang": {**sglang, **options.sglang}}
        if options.device == "cuda"
        else {"kind": "embedded"}
    )
    together = {"colocate": True, "offload_engines": False, "offload_trainer": False}
    apart = options.apart or options.device == "cpu"
    config = run_config(
        model,
        folder,
        options,
        lora=True,
        engines=engines,
        placement={"colocate": False} if apart else together,
        sync={"lora": "names"},
        # the streams keep their version through all syncs: the embedded engine, unlike SGLang, has room for no more than a run needs
        **({"pipeline": {"max_staleness": options.syncs}} if options.device == "cpu" else {}),
    )
    return asyncio.run(measured(config, folder, options))


async def measured(config: RunConfig, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Steps and syncs while requests stream; what each sync took, and the waits of the streams."""
    from millrace.connectors.trainers.rank import Rank
    from millrace.core.accounts.staleness import VersionRange
    from millrace.core.contracts.task_records import StepRequest
    from millrace.tasks.runtime.runtime import Runtime

    runtime = Runtime(config)
    await runtime.open()
    marks: list[list[float]] = [[] for _ in range(options.streams)]
    syncs, spans = [], []
    try:
        (engine,) = (await runtime.memory.for_engines(VersionRange.only(0))).serving
        asking = [
            asyncio.create_task(stream(engine, number, options.answer, marks[number]))
            for number in range(options.streams)
        ]
        while not all(marks):  # noqa: ASYNC110 - streams tell nobody
            await asyncio.sleep(0.1)
        await asyncio.sleep(3.0)
        for step in range(1, options.syncs + 1):
            async with runtime.memory.for_trainer() as trainer:
                ranks = await trainer.at(step - 1)
                batch = batch_of(folder, step, options)
                began = time.perf_counter()
                await ranks.together(Rank.train, StepRequest(step, batch))
                step_s = time.perf_counter() - began
            await asyncio.sleep(1.0)
            started = time.perf_counter()
            phases = await runtime.memory.update_engines(step)
            spans.append((started, time.perf_counter()))
            syncs.append({**phases, "sync": spans[-1][1] - started, "step": step_s})
            await asyncio.sleep(1.0)
        running = sum(not task.done() for task in asking)
        newest = await engine.weight_version()
        gap = await gap_of(runtime, engine, options.syncs)
        await engine.abort()
        answers = await asyncio.gather(*asking)
    finally:
        await runtime.close(end_actors=True)
    return {
        "requests_through_all_syncs": running,
        "versions_of_requests": sorted({span for answer in answers for _, span in answer.weight_versions}),
        "newest_version": newest,
        "gap": round(gap, 5),
        "syncs": [{name: round(value, 4) for name, value in sync.items()} for sync in syncs],
        "sync_s": round(statistics.median(sync["export"] + sync["load"] for sync in syncs), 4),
        **waits(marks, spans),
    }


async def gap_of(runtime: Runtime, engine: EngineClient, version: int) -> float:
    """Mean absolute difference of log-probabilities of fixed texts, by engine and trainer; nats a token."""
    from millrace.connectors.trainers.rank import HeldOutSample, Rank
    from millrace.core.fixed_texts import mean_gap

    texts = [[(row * 977 + at * 31) % (VOCAB - 2) + 2 for at in range(TEXT)] for row in range(TEXTS)]
    scored = [HeldOutSample(text[: end + 1], [1]) for text in texts for end in range(1, TEXT)]
    async with runtime.memory.for_trainer() as trainer:
        losses = iter(await (await trainer.at(version)).together(Rank.losses, version, scored))
    expected = [[-next(losses) for _ in text[1:]] for text in texts]
    return mean_gap(expected, await engine.weights.logprobs(texts))


async def stream(engine: EngineClient, number: int, length: int, marks: list[float]) -> Generation:
    """An answer of so many tokens whose parts leave a mark each."""
    from millrace.connectors.engines.client import GenerateRequest

    def seen(_: Generation) -> bool:
        marks.append(time.perf_counter())
        return True

    params = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True, "sampling_seed": number}
    prompt = [(number * 977 + at * 31) % (VOCAB - 2) + 2 for at in range(64)]
    return await engine.generate(
        GenerateRequest(
            input_ids=prompt,
            sampling_params=params,
            rid=f"stream-{number}",
            progress_timeout_s=120,
            on_part=seen,
            every=EVERY,
        )
    )


def waits(marks: list[list[float]], spans: list[tuple[float, float]]) -> dict[str, float]:
    """The longest wait of a stream for a part that touches a sync, and the longest and the median one that touches none; seconds.

    Trainer and engine share the GPU, so that a part waits longest while a step is made.
    """
    inside, outside = [0.0], [0.0]
    for one in marks:
        for before, after in itertools.pairwise(one):
            touches = any(before < end and start < after for start, end in spans)
            (inside if touches else outside).append(after - before)
    return {
        "longest_wait_amid_syncs_s": round(max(inside), 4),
        "longest_wait_s": round(max(outside), 4),
        "median_wait_s": round(statistics.median(outside), 4),
    }


if __name__ == "__main__":
    main()
