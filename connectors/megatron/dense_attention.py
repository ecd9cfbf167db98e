"""Long sequences of a pack through cuDNN's attention, which takes equal lengths only and is twice as fast as what takes any.

A pack is cut into parts: sequences of nearly one length, each padded to that length at its end (harmless under a causal
mask), and the short ones, left to variable-length attention. cuDNN plans anew for every shape, which takes it tens of
milliseconds: lengths are rounded up and counts are powers of two, so that shapes recur.

Owns the cut and the way of rows there and back; knows nothing of heads' making.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

SHORTEST = 1024  # tokens: padding and moving shorter sequences costs what cuDNN gains
STEPS = 8  # lengths in an octave: sequences grow by an eighth at most


@dataclass(frozen=True)
class Part:
    """`rows`: the pack's row at each place, -1 for padding. Dense: count * length places; else `bounds` of sequences."""

    rows: list[int]
    count: int = 0
    length: int = 0
    bounds: tuple[int, ...] = ()


def rounded(length: int) -> int:
    """The length up to which a sequence is padded."""
    step = max(64, (1 << (length - 1).bit_length()) // (2 * STEPS)) if length > 1 else 64
    return -(-length // step) * step


@lru_cache(maxsize=16)
def cut(bounds: tuple[int, ...]) -> tuple[Part, ...]:
    """Parts of a pack whose sequences lie between `bounds`; each row is in one part, once."""
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
        parts.append(Part(rows, bounds=tuple(ends)))
    for length, spans in sorted(kinds.items()):
        while spans:
            count = 1 << (len(spans).bit_length() - 1)
            rows = []
            for start, end in spans[:count]:
                rows += [*range(start, end), *[-1] * (length - (end - start))]
            parts.append(Part(rows, count, length))
            spans = spans[count:]
    return tuple(parts)


def usable(query: Tensor) -> bool:
    """Whether cuDNN's attention takes these heads, on a GPU where it is the faster one."""
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
    query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int], scale: float | None, varlen: Any
) -> Tensor:
    """Causal attention within each sequence of a pack [T, heads, d]; `varlen` for the short ones."""
    parts = cut(tuple(bounds))
    if len(parts) == 1 and len(parts[0].rows) == len(query):  # as it lies
        only = _dense if parts[0].length else partial(_short, varlen=varlen)
        found: Tensor = only(query, key, value, parts[0], scale)
        return found
    rows = _on_device(tuple(bounds), query.device)
    pieces = zip(parts, *(_Split.apply(x, *rows) for x in (query, key, value)), strict=True)
    outs = [
        _dense(q, k, v, part, scale) if part.length else _short(q, k, v, part, scale, varlen)
        for part, q, k, v in pieces
    ]
    out: Tensor = _Join.apply(len(query), rows, *outs)
    return out


@lru_cache(maxsize=16)
def _on_device(bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(part.rows, device=device) for part in cut(bounds))


def _dense(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None) -> Tensor:
    q, k, v = (x.unflatten(0, (part.count, part.length)).transpose(1, 2) for x in (query, key, value))
    attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = attention(q, k, v, None, True, 0.0, True, False, scale=scale)[0]
    return out.transpose(1, 2).flatten(0, 1)


def _short(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None, varlen: Any) -> Tensor:
    cu = _bounds_on_device(part.bounds, query.device)
    longest = max(b - a for a, b in pairwise(part.bounds))
    out: Tensor = varlen(query, key, value, cu, cu, longest, longest, scale)
    return out


@lru_cache(maxsize=64)
def _bounds_on_device(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=device)


class _Split(torch.autograd.Function):
    """[T, heads, d] -> a tensor a part, with zeros for padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        from connectors.megatron import kernels

        ctx.rows, ctx.count = rows, len(x)
        return tuple(kernels.take_rows(x, each) for each in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _joined(ctx.count, ctx.rows, grads), *[None] * len(ctx.rows)


class _Join(torch.autograd.Function):
    """The parts' rows back in the pack's order: [T, heads, d]."""

    @staticmethod
    def forward(ctx: Any, count: int, rows: tuple[Tensor, ...], *parts: Tensor) -> Tensor:
        ctx.rows = rows
        return _joined(count, rows, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from connectors.megatron import kernels

        grad = grads[0].contiguous()
        return None, None, *[kernels.take_rows(grad, each) for each in ctx.rows]


def _joined(count: int, rows: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    from connectors.megatron import kernels

    out = parts[0].new_empty(count, *parts[0].shape[1:])
    for each, part in zip(rows, parts, strict=True):
        kernels.put_rows(part.contiguous(), each, out)
    return out
