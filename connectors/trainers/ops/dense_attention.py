"""Long sequences of a pack through cuDNN's attention, which needs equal lengths and is twice as fast as variable-length attention.

A pack is cut into parts: sequences of similar length, each padded at its end to a common length (harmless under a causal
mask), and the short sequences, which use variable-length attention. cuDNN plans each new shape for tens of milliseconds, so
lengths are rounded up and counts are powers of two to make shapes recur.

Owns the cut, and moving rows into parts and back. Knows nothing of projections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Attention = Callable[
    [Tensor, Tensor, Tensor, "DensePart", float | None], Tensor
]  # query, key, value, part, scale

SHORTEST = 1024  # tokens; for shorter sequences, padding and moving cost more than cuDNN gains
STEPS = 8  # lengths per power of two, so that padding adds at most an eighth


@dataclass(frozen=True)
class DensePart:
    """`rows`: the pack's row at each position, -1 for padding. A dense part has count * length rows, another `bounds`."""

    rows: list[int]
    count: int = 0
    length: int = 0
    bounds: tuple[int, ...] = ()


def rounded(length: int) -> int:
    """The length that a sequence is padded to."""
    step = max(64, (1 << (length - 1).bit_length()) // (2 * STEPS)) if length > 1 else 64
    return -(-length // step) * step


@lru_cache(maxsize=16)
def cut(bounds: tuple[int, ...]) -> tuple[DensePart, ...]:
    """Cut a pack, whose sequences are between `bounds`, into parts; each row is in exactly one part."""
    kinds: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(bounds):
        kinds.setdefault(rounded(end - start) if end - start >= SHORTEST else 0, []).append((start, end))
    parts = []
    short = kinds.pop(0, [])
    if short:
        rows = [row for start, end in short for row in range(start, end)]
        ends = [0]
        for start, end in short:
            ends.append(ends[-1] + end - start)
        parts.append(DensePart(rows, bounds=tuple(ends)))
    for length, spans in sorted(kinds.items()):
        while spans:
            count = 1 << (len(spans).bit_length() - 1)
            rows = []
            for start, end in spans[:count]:
                rows += [*range(start, end), *[-1] * (length - (end - start))]
            parts.append(DensePart(rows, count, length))
            spans = spans[count:]
    return tuple(parts)


def usable(query: Tensor) -> bool:
    """Whether cuDNN's attention supports these heads, and is faster on this GPU."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 128
        and _hopper(query.device.index)
    )


@lru_cache
def _hopper(device: int) -> bool:
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Sequence[int],
    scale: float | None,
    *,
    varlen: Attention,
    dense: Attention,
) -> Tensor:
    """Causal attention within each sequence of a pack [T, heads, d]: `dense` for dense parts, `varlen` for the others."""
    parts = cut(tuple(bounds))
    attentions = [dense if part.length else varlen for part in parts]
    if len(parts) == 1 and len(parts[0].rows) == len(query):  # no rows to move
        return attentions[0](query, key, value, parts[0], scale)
    rows = _on_device(tuple(bounds), query.device)
    sizes = [len(part.rows) for part in parts]
    taken: tuple[Tensor, Tensor, Tensor] = _Take.apply(rows, query, key, value)
    queries, keys, values = (x.split(sizes) for x in taken)
    outs = [
        attention(q, k, v, part, scale)
        for attention, part, q, k, v in zip(attentions, parts, queries, keys, values, strict=True)
    ]
    out: Tensor = _Put.apply(rows, torch.cat(outs), len(query))
    return out


@lru_cache(maxsize=16)
def _on_device(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """The concatenated rows of all parts."""
    return torch.tensor([row for part in cut(bounds) for row in part.rows], device=device)


def cudnn(query: Tensor, key: Tensor, value: Tensor, part: DensePart, scale: float | None) -> Tensor:
    """Attention within the sequences of a dense part."""
    q, k, v = (x.unflatten(0, (part.count, part.length)).transpose(1, 2) for x in (query, key, value))
    attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = attention(q, k, v, None, True, 0.0, True, False, scale=scale)[0]
    return out.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=64)
def cumulative(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """Bounds on the device, in the form for variable-length attention."""
    return torch.tensor(bounds, dtype=torch.int32, device=device)


class _Take(torch.autograd.Function):
    """Takes rows of each tensor [T, ...], with zeros for padding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        from millrace.connectors.trainers.ops import kernels

        ctx.rows, ctx.count = rows, len(tensors[0])
        return tuple(kernels.take_rows(x.contiguous(), rows) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_put(ctx.rows, grad, ctx.count) for grad in grads)


class _Put(torch.autograd.Function):
    """Puts rows of all parts back into the pack's order: [T, ...]; drops padding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, x: Tensor, count: int) -> Tensor:
        ctx.rows = rows
        return _put(rows, x, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from millrace.connectors.trainers.ops import kernels

        return None, kernels.take_rows(grads[0].contiguous(), ctx.rows), None


def _put(rows: Tensor, x: Tensor, count: int) -> Tensor:
    from millrace.connectors.trainers.ops import kernels

    return kernels.put_rows(x.contiguous(), rows, x.new_empty(count, *x.shape[1:]))
