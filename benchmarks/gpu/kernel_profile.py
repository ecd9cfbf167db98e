"""Where a step's time goes on the device, by kind of kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

KINDS: list[tuple[str, tuple[str, ...]]] = [
    ("grouped products", ("groupproblemshape", "grouped_gemm")),
    ("rows of experts", ("_take_rows", "_sum_rows", "searchsorted")),
    ("attention", ("flash", "fmha", "sdpa", "cudnn_generated", "attn")),
    ("optimizer", ("multi_tensor_apply", "adam")),
    ("log-probabilities", ("_softmax_sums", "_softmax_gradient", "softmax", "cross_entropy", "nll")),
    ("norms, heads, activation", ("_norm_", "_heads_", "_silu_", "rms", "layer_norm", "_put_rows")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "splitk")),
    ("embedding", ("embedding", "radixsort", "indexing", "index", "scatter", "gather")),
    ("communication", ("nccl",)),
    ("copies and fills", ("memcpy", "memset", "fill", "copy")),
    ("reductions", ("reduce",)),
]


def kind_of(kernel: str) -> str:
    """Which row of the table a kernel belongs to."""
    lower = kernel.lower()
    return next((kind for kind, marks in KINDS if any(mark in lower for mark in marks)), "other elementwise")


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of the device by kind of kernel, and the heaviest kernels, in one step."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as watched:
        step()
        torch.cuda.synchronize()
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    spans = []
    for event in watched.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(
            event, "is_user_annotation", False
        ):
            by_kernel[event.name][0] += event.time_range.elapsed_us() / 1e3
            by_kernel[event.name][1] += 1
            spans.append((event.time_range.start, event.time_range.end))
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    for name, (ms, calls) in by_kernel.items():
        kinds[kind_of(name)][0] += ms
        kinds[kind_of(name)][1] += calls
    heaviest = sorted(by_kernel.items(), key=lambda item: -item[1][0])[:40]
    figures = {
        "span_ms": (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3,
        "busy_ms": sum(ms for ms, _ in by_kernel.values()),
        "kinds_ms": {kind: round(ms, 2) for kind, (ms, _) in sorted(kinds.items(), key=lambda i: -i[1][0])},
        "kinds_calls": {kind: calls for kind, (_, calls) in kinds.items()},
        "kernels": [{"name": n[:120], "ms": round(ms, 3), "calls": c} for n, (ms, c) in heaviest],
    }
    print(
        f"profile: busy {figures['busy_ms']:.1f} of {figures['span_ms']:.1f} ms",
        figures["kinds_ms"],
        flush=True,
    )
    return figures
