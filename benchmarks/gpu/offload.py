"""The trainer's step with its optimizer on the host in part, against all of it on the GPU: time, memory, and whether they are equal.

`benchmarks.gpu.trainer --offload 0,0.5,1` calls it. Every fraction starts from the same weights and trains the same batches.
The fp32 weights after the first step differ by the rounding of AdamW, and by that of gradients, since attention's backward pass adds
in another order each time: how far, in units of their last place, and how many do. A gradient of nearly zero may change its sign, and
so moves its weight by a step either way.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

LAST_PLACE = 2.0**-23  # of an fp32 number, relative to its power of two
GIB = 2**30


def compared(
    fractions: Sequence[float], side_of: Callable[[float], Any], prepared: Sequence[Any], device: str = "cuda"
) -> list[dict[str, Any]]:
    """Figures of each fraction. side_of: a trainer that has made no step. prepared: the batches of its steps."""
    found: list[dict[str, Any]] = []
    first: list[Tensor] = []
    for fraction in fractions:
        started = time.perf_counter()
        side = side_of(fraction)
        figures: dict[str, Any] = {"offload": fraction, "ready_s": time.perf_counter() - started}
        steps = []
        for number, batch in enumerate(prepared):
            if number == 2 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _settle(device)
            begun = time.perf_counter()
            metrics = side.step(batch)
            _settle(device)
            steps.append({**metrics, "seconds": time.perf_counter() - begun})
            if number == 0 and first:
                figures["first_step"] = differences(
                    first, list(fp32_weights(side.rank)), device, learning_rate(side.rank)
                )
            elif number == 0:
                # .cpu() would copy nothing that is there already
                first = [torch.empty_like(each, device="cpu").copy_(each) for each in fp32_weights(side.rank)]
        settled = steps[2:] or steps
        figures |= {
            "seconds": statistics.median(step["seconds"] for step in settled),
            "phases": {
                name: statistics.median(step["phases"][name] for step in settled)
                for name in steps[0]["phases"]
            },
            "loss": [step["loss"] for step in steps],
            "grad_norm": [step["grad_norm"] for step in steps],
            "gpu_peak_gib": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0,
            "host_gib": psutil.Process().memory_info().rss / GIB,
            "on_host": side.rank.learner.policy.host.elements if fraction else 0,
        }
        found.append(figures)
        _say(figures)
        side.close()
        del side
        gc.collect()  # megatron's objects name each other
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def fp32_weights(rank: Any) -> Iterator[Tensor]:
    """The weights that a rank's optimizer steps, flat, wherever they are."""
    for part in rank.optimizer.chained_optimizers:
        for group in part.param_groups:
            yield from (parameter.detach().flatten() for parameter in group["params"])


def learning_rate(rank: Any) -> float:
    """What AdamW changes a weight by at most in its first step."""
    return max(
        float(group["lr"]) for part in rank.optimizer.chained_optimizers for group in part.param_groups
    )


def differences(
    before: Sequence[Tensor], after: Sequence[Tensor], device: str, step: float
) -> dict[str, float]:
    """The largest difference in units of the last place of what was added, and the share of weights that differ at all.

    step: the largest change of a weight in an optimizer step. Where it takes a weight close to zero, the sum rounds in its place.
    """
    largest, unequal, count = 0.0, 0, 0
    for one, other in zip(before, after, strict=True):
        here = one.to(device)
        gap = (here - other.to(device)).abs()
        place = 2.0 ** here.abs().clamp(min=step).log2().floor() * LAST_PLACE
        largest = max(largest, float((gap / place).max()))
        unequal += int((gap > 0).sum())
        count += gap.numel()
    return {"last_places": largest, "unequal": unequal / count}


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _say(figures: dict[str, Any]) -> None:
    equal = figures.get("first_step")
    against = (
        f"first step: {equal['unequal']:.2%} of weights differ, by at most {equal['last_places']:.1f} last places"
        if equal
        else ""
    )
    print(
        f"offload {figures['offload']:<4g} {figures['seconds'] * 1e3:8.1f} ms a step  GPU peak {figures['gpu_peak_gib']:.1f} GiB  "
        f"host {figures['host_gib']:.1f} GiB  ready in {figures['ready_s']:.1f} s  {figures['phases']}\n"
        f"    loss {figures['loss']}\n    grad_norm {figures['grad_norm']}\n    {against}",
        flush=True,
    )
