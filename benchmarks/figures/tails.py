"""Figures of runs whose answers are of very different lengths, as rows of benchmarks/README.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def long_tail_rows(row: Callable[..., Any]) -> Iterator[Any]:
    """Rows of the table of figures, each made by `row`."""
    start = "python -m benchmarks.whole_runs.long_tails --shape 1.7b --median 600 --longest 8192"
    both, partial = "--staleness 8 --modes both", "--staleness 8 --modes partial"
    kill = "--kill --flush-tokens 1024"
    cases = [
        ("one GPU", "sync", "--modes sync"),
        ("one GPU", "partial, max_staleness 3", "--modes partial"),
        ("one GPU, 64 samples", "sync", f"--prompts 8 --modes sync {kill}"),
        ("one GPU, 64 samples", "partial, max_staleness 8", f"--prompts 8 {partial}"),
        ("one GPU, 64 samples", "partial, max_staleness 8, reserve 1", f"--prompts 8 --reserve 1 {partial}"),
        ("one GPU, 128 samples", "sync", "--prompts 16 --modes sync"),
        ("one GPU, 128 samples", "partial, max_staleness 8", f"--prompts 16 {partial}"),
        ("two GPUs", "sync, shared", "--gpus 2 --modes sync"),
        ("two GPUs", "both, apart, max_staleness 3", "--apart --modes both"),
        ("two GPUs, 64 samples", "sync, apart", "--apart --prompts 8 --modes sync"),
        ("two GPUs, 64 samples", "one ahead, apart", "--apart --prompts 8 --modes ahead"),
        ("two GPUs, 64 samples", "both, apart, max_staleness 8", f"--apart --prompts 8 {both} {kill}"),
        ("two GPUs, 64 samples", "eager, apart", "--prompts 8 --modes eager"),
        ("two GPUs, 128 samples", "sync, shared", f"--gpus 2 --prompts 16 --modes sync {kill}"),
        (
            "two GPUs, 128 samples",
            "partial, shared, max_staleness 8",
            f"--gpus 2 --prompts 16 {partial} {kill}",
        ),
        ("four GPUs", "sync, shared", "--gpus 4 --modes sync"),
        ("four GPUs", "partial, shared, max_staleness 8", f"--gpus 4 {partial} --kill"),
        ("four GPUs", "both, 2 + 2 GPUs, max_staleness 8", f"--apart 2+2 {both} {kill}"),
    ]
    for gpus, mode, options in cases:

        def tail(result: Any, gpus: str = gpus, mode: str = mode) -> str | None:
            found = result.get(gpus, {}).get(mode)
            return _tail(found) if found else None

        what = f"answers of lognormal lengths to 8,192, 1.7B, {gpus}, {mode}"
        target = "≥ 1.4 times sync" if mode.startswith(("partial", "both")) else ""
        yield row("long_tails", what, target, f"{start} {options}", tail)


def _tail(case: Any) -> str:
    shown = f"{case['samples_s']:.1f} samples/s"
    if "times_sync" in case:
        shown += f", {case['times_sync']:.2f} times sync"
    if "planned_iteration_s" in case:
        shown += f"; {case['iteration_s']:.1f} s an iteration, planned {case['planned_iteration_s']:.1f} s"
    if case.get("share_by_age"):
        mean_age = sum(int(age) * share for age, share in case["share_by_age"].items())
        shown += f"; tokens are {mean_age:.2f} versions old"
    if "kill" in case:
        lost, held = case["kill"]["lost"], case["kill"]["tokens"]
        shown += f"; a kill -9 lost {lost:,} of {held:,} tokens under way"
    if "gpu_busy" in case:
        shown += f"; GPU busy {', '.join(f'{share:.0%}' for share in case['gpu_busy'])}"
    return shown
