"""The trainer's step of a mixture over several GPUs: experts on each rank, tokens exchanged between ranks.

`benchmarks.gpu.trainer --shape 30b-a3b-4 --ep 2` calls it. Each rank has a process and a GPU, and trains as many tokens a step as
one rank does alone, so that shares of peak compare. Of the device's time in one step rank 0 tells what communication took, waiting
included; of rows, how much fuller the fullest expert and the fullest rank are than the mean.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.gpu.expert_parts import layers_alone, pack_of
from benchmarks.gpu.two_ways import from_ranks, set_up
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.core.contracts.task_records import StepRequest

WARM_UP = 2


class Job(NamedTuple):
    """What every rank does. batches: URL of each step's batch; packs: lengths of the samples of a rank's pack."""

    config: dict[str, Any]
    batches: list[str]
    lengths: list[int]
    work: tuple[float, float]  # operations of a rank's share of a step, and of its layers
    peak: float


def measured(job: Job) -> dict[str, Any]:
    """Figures of rank 0, after all ranks have made their steps."""
    trainer = job.config["trainer"]
    return from_ranks(_rank, trainer["device"], trainer["world_size"], job)


def _rank(rank: int, job: Job, addresses: Any, results: Any) -> None:
    world = job.config["trainer"]["world_size"]
    trainer = TrainerRank(job.config, rank, world)
    started = time.perf_counter()
    set_up(trainer, rank, world, addresses)
    ready_s = time.perf_counter() - started
    figures = figures_of(trainer, job)
    if rank == 0:
        results.put({**figures, "ready_s": ready_s})
        results.close()
        results.join_thread()
    trainer.shutdown()


def figures_of(trainer: Any, job: Job) -> dict[str, Any]:
    """Steps, layers alone and a profile, on each rank at once."""
    import torch

    gpu = trainer.device.type == "cuda"
    made: list[dict[str, Any]] = []

    def step() -> None:
        made.append(trainer.train(StepRequest(len(made) + 1, job.batches[len(made)])))

    steps = [seconds_together(step, gpu=gpu) for _ in job.batches[:-1]][WARM_UP:]
    figures = {"whole": _share(statistics.median(steps), job.work[0], job)}
    profiled = _profile(step, trainer.rank) if gpu else step()
    pack = pack_of(trainer, job.lengths)
    layers = [seconds_together(lambda: _layers(trainer, pack), gpu=gpu) for _ in range(WARM_UP + 5)][WARM_UP:]
    trainer.learner.policy.zero_grad()
    figures["layers"] = _share(statistics.median(layers), job.work[1], job)
    if trainer.rank == 0:
        for name, each in figures.items():
            text = f"{each['seconds'] * 1e3:9.1f} ms {each['tokens_per_second'] / 1e3:8.1f}k tok/s a GPU"
            print(f"{name:<8}{text}  {each['share_of_peak']:.1%} of peak", flush=True)
    last = made[-1]
    figures |= {
        name: last[name] for name in ("expert_imbalance", "expert_wait", "loss", "grad_norm", "seconds")
    }
    print({name: figures[name] for name in ("expert_imbalance", "expert_wait", "seconds")}, flush=True)
    return {
        **figures,
        "profile": profiled,
        "all_seconds": steps,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0,
    }


def _share(seconds: float, work: float, job: Job) -> dict[str, float]:
    return {
        "seconds": seconds,
        "tokens_per_second": sum(job.lengths) / seconds,
        "share_of_peak": work / seconds / job.peak,
    }


def seconds_together(turn: Callable[[], Any], *, gpu: bool) -> float:
    """How long a turn takes that all ranks start together."""
    import torch

    torch.distributed.barrier()
    if gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    turn()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _profile(step: Callable[[], None], rank: int) -> dict[str, Any] | None:
    from benchmarks.gpu.kernel_profile import profile

    if rank:
        step()
        return None
    return profile(step)


def _layers(trainer: Any, pack: Any) -> None:
    from millrace.connectors.trainers.megatron.optim.optimizer import accumulating

    # gradients of the head are missing, without which megatron would wait to reduce the others
    with trainer._working("layers"), accumulating(trainer.learner.policy.models):
        layers_alone(trainer, pack)
