"""Triton kernels of the trainer on a GPU: norms, rotary positions, gated SiLU and log-probabilities of tokens.

Only pointers and launches: `fused`, `logprobs` and `dense_attention` make autograd functions of them. All arithmetic is in
fp32 for any dtype; sums over rows have a fixed order, so that repeated runs are equal. Imported only if there is a GPU.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 256  # programs, each of which sums the gradient of a norm's weight over its share of rows


@triton.jit
def _norm_forward(x, added, weight, out, total, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    live = at < width
    values = tl.load(x + row + at, mask=live, other=0.0)
    if ADD:
        more = tl.load(added + row + at, mask=live, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(total + row + at, values, mask=live)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    w = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row + at, values * scale * w, mask=live)


@triton.jit
def _norm_backward(
    x, weight, grad, passed, grad_x, grad_weight, rows, width, eps, per_part,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < width
    w = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(part * per_part, tl.minimum((part + 1) * per_part, rows)):
        values = tl.load(x + row * width + at, mask=live, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + at, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
        normed = values * scale
        total += g * normed
        g = g * w
        mean = tl.sum(g * normed, 0) / width
        g = (g - normed * mean) * scale
        if ADD:
            g += tl.load(passed + row * width + at, mask=live, other=0.0).to(tl.float32)
        tl.store(grad_x + row * width + at, g, mask=live)
    tl.store(grad_weight + part * width + at, total, mask=live)


def norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RMS norm of the last dimension of x, or of x + added, and the norm's input; all contiguous."""
    width = x.shape[-1]
    rows, out = x.numel() // width, torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    if rows:
        _norm_forward[(rows,)](
            x, x if added is None else added, weight, out, total, width, eps,
            ADD=added is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, total


def norm_backward(
    x: Tensor, weight: Tensor, grad: Tensor, eps: float, passed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm` to x, plus `passed`, and in fp32 to the weight."""
    width = x.shape[-1]
    rows, grad_x = x.numel() // width, torch.empty_like(x)
    per_part = max(1, -(-rows // (4 * PARTS)))
    parts = -(-rows // per_part)
    sums = torch.empty(parts, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    if rows:
        _norm_backward[(parts,)](
            x, weight, grad, grad if passed is None else passed, grad_x, sums, rows, width, eps, per_part,
            ADD=passed is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return grad_x, sums.sum(0)


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@triton.jit
def _heads_forward(
    mixed, q_weight, k_weight, cos, sin, q, k, v, tokens, stride, kv_heads, eps,
    PER: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    live = (t < tokens)[:, None]
    t = t.to(tl.int64)[:, None]
    d = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + t * HALF + d, mask=live, other=0.0)
    s = tl.load(sin + t * HALF + d, mask=live, other=0.0)
    base = mixed + t * stride + group * (PER + 2) * 2 * HALF + d
    for head in tl.static_range(PER + 1):
        a = tl.load(base + head * 2 * HALF, mask=live, other=0.0).to(tl.float32)
        b = tl.load(base + head * 2 * HALF + HALF, mask=live, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
            weight = q_weight if head < PER else k_weight
            a = a * scale * tl.load(weight + d).to(tl.float32)
            b = b * scale * tl.load(weight + HALF + d).to(tl.float32)
        if head < PER:
            to = q + ((t * kv_heads + group) * PER + head) * 2 * HALF + d
        else:
            to = k + (t * kv_heads + group) * 2 * HALF + d
        tl.store(to, a * c - b * s, mask=live)
        tl.store(to + HALF, b * c + a * s, mask=live)
    to = v + (t * kv_heads + group) * 2 * HALF + d
    tl.store(to, tl.load(base + (PER + 1) * 2 * HALF, mask=live), mask=live)
    tl.store(to + HALF, tl.load(base + (PER + 1) * 2 * HALF + HALF, mask=live), mask=live)


@triton.jit
def _heads_backward(
    mixed, q_weight, k_weight, cos, sin, dq, dk, dv, grad, sums, tokens, stride, kv_heads, eps, per_part,
    PER: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, group = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, HALF)[None, :]
    q_low = tl.zeros([HALF], dtype=tl.float32)
    q_high = tl.zeros([HALF], dtype=tl.float32)
    k_low = tl.zeros([HALF], dtype=tl.float32)
    k_high = tl.zeros([HALF], dtype=tl.float32)
    for start in range(part * per_part, tl.minimum((part + 1) * per_part, tokens), BLOCK):
        t = start + tl.arange(0, BLOCK)
        live = (t < tokens)[:, None]
        t = t.to(tl.int64)[:, None]
        c = tl.load(cos + t * HALF + d, mask=live, other=0.0)
        s = tl.load(sin + t * HALF + d, mask=live, other=0.0)
        place = t * stride + group * (PER + 2) * 2 * HALF + d
        for head in tl.static_range(PER + 1):
            if head < PER:
                upstream = dq + ((t * kv_heads + group) * PER + head) * 2 * HALF + d
            else:
                upstream = dk + (t * kv_heads + group) * 2 * HALF + d
            ga = tl.load(upstream, mask=live, other=0.0).to(tl.float32)
            gb = tl.load(upstream + HALF, mask=live, other=0.0).to(tl.float32)
            da = ga * c + gb * s
            db = gb * c - ga * s
            to = place + head * 2 * HALF
            if NORM:
                a = tl.load(mixed + to, mask=live, other=0.0).to(tl.float32)
                b = tl.load(mixed + to + HALF, mask=live, other=0.0).to(tl.float32)
                scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
                a, b = a * scale, b * scale
                if head < PER:
                    q_low += tl.sum(da * a, 0)
                    q_high += tl.sum(db * b, 0)
                    weight = q_weight
                else:
                    k_low += tl.sum(da * a, 0)
                    k_high += tl.sum(db * b, 0)
                    weight = k_weight
                da = da * tl.load(weight + d).to(tl.float32)
                db = db * tl.load(weight + HALF + d).to(tl.float32)
                mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / (2 * HALF))[:, None]
                da = (da - a * mean) * scale
                db = (db - b * mean) * scale
            tl.store(grad + to, da, mask=live)
            tl.store(grad + to + HALF, db, mask=live)
        to = place + (PER + 1) * 2 * HALF
        upstream = dv + (t * kv_heads + group) * 2 * HALF + d
        tl.store(grad + to, tl.load(upstream, mask=live), mask=live)
        tl.store(grad + to + HALF, tl.load(upstream + HALF, mask=live), mask=live)
    if NORM:
        at = sums + (part * kv_heads + group) * 4 * HALF + tl.arange(0, HALF)
        tl.store(at, q_low)
        tl.store(at + HALF, q_high)
        tl.store(at + 2 * HALF, k_low)
        tl.store(at + 3 * HALF, k_high)


TOKENS, HEAD_WARPS = 32, 4  # of a tile of heads
HEAD_PARTS = 128  # programs per group of heads, each of which sums its share of the weights' gradients


def heads(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, rope: Tensor, per: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads of [T, groups * (per + 2) * d], rotated, after a norm if weights are given."""
    tokens, half = mixed.shape[0], rope.shape[-1]
    groups = mixed.shape[1] // ((per + 2) * 2 * half)
    q = mixed.new_empty(tokens, groups * per, 2 * half)
    k, v = (mixed.new_empty(tokens, groups, 2 * half) for _ in range(2))
    normed = q_weight is not None
    _heads_forward[(triton.cdiv(tokens, TOKENS), groups)](
        mixed, q_weight if normed else mixed, k_weight if normed else mixed, rope[0], rope[1], q, k, v,
        tokens, mixed.stride(0), groups, eps, PER=per, HALF=half, NORM=normed, BLOCK=TOKENS, num_warps=HEAD_WARPS,
    )  # fmt: skip
    return q, k, v


def heads_backward(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, rope: Tensor, per: int, eps: float,
    dq: Tensor, dk: Tensor, dv: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of `heads` to mixed and, in fp32, to the norms' weights."""
    tokens, half = mixed.shape[0], rope.shape[-1]
    groups = mixed.shape[1] // ((per + 2) * 2 * half)
    grad = torch.empty_like(mixed)
    normed = q_weight is not None
    per_part = triton.cdiv(triton.cdiv(tokens, TOKENS), HEAD_PARTS) * TOKENS
    parts = triton.cdiv(tokens, per_part)
    sums = torch.empty(parts * groups, 2, 2 * half, dtype=torch.float32, device=mixed.device)
    _heads_backward[(parts, groups)](
        mixed, q_weight if normed else mixed, k_weight if normed else mixed, rope[0], rope[1], dq, dk, dv, grad,
        sums, tokens, mixed.stride(0), groups, eps, per_part, PER=per, HALF=half, NORM=normed, BLOCK=TOKENS, num_warps=HEAD_WARPS,
    )  # fmt: skip
    if not normed:
        return grad, None, None
    total = sums.sum(0)
    return grad, total[0], total[1]


@triton.jit
def _silu_forward(gates, ups, out, width, stride, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    place = at // width * stride + at % width
    gate = tl.load(gates + place, mask=live, other=0.0).to(tl.float32)
    up = tl.load(ups + place, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, gate * tl.sigmoid(gate) * up, mask=live)


@triton.jit
def _silu_backward(gates, ups, grad, grad_gates, grad_ups, width, stride, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    place = at // width * stride + at % width
    gate = tl.load(gates + place, mask=live, other=0.0).to(tl.float32)
    up = tl.load(ups + place, mask=live, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=live, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(grad_gates + place, g * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=live)
    tl.store(grad_ups + place, g * gate * sigmoid, mask=live)


def gated_silu(x: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension; x contiguous."""
    return _silu(*x.chunk(2, dim=-1), x.shape[-1])


def gated_silu_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `gated_silu`."""
    grad_x = torch.empty_like(x)
    _silu_gradients(*x.chunk(2, dim=-1), grad, *grad_x.chunk(2, dim=-1), x.shape[-1])
    return grad_x


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; both contiguous."""
    return _silu(gate, up, gate.shape[-1])


def silu_product_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `silu_product`; all contiguous."""
    grads = torch.empty_like(gate), torch.empty_like(up)
    _silu_gradients(gate, up, grad, *grads, gate.shape[-1])
    return grads


def _silu(gate: Tensor, up: Tensor, stride: int) -> Tensor:
    """stride: numbers from one row of both to the next."""
    out = gate.new_empty(gate.shape)
    if count := out.numel():
        _silu_forward[(triton.cdiv(count, 1024),)](gate, up, out, gate.shape[-1], stride, count, BLOCK=1024)
    return out


def _silu_gradients(
    gate: Tensor, up: Tensor, grad: Tensor, grad_gate: Tensor, grad_up: Tensor, stride: int
) -> None:
    if count := grad.numel():
        _silu_backward[(triton.cdiv(count, 1024),)](
            gate, up, grad, grad_gate, grad_up, gate.shape[-1], stride, count, BLOCK=1024
        )


@triton.jit
def _rotate(
    x, cos, sin, out, tokens, heads, token_stride, head_stride, angle_stride, sign,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (t < tokens)[:, None]
    t = t.to(tl.int64)[:, None]
    d = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + t * angle_stride + d, mask=live, other=0.0).to(tl.float32)
    s = tl.load(sin + t * angle_stride + d, mask=live, other=0.0).to(tl.float32) * sign
    for head in range(heads):
        place = x + t * token_stride + head * head_stride + d
        a = tl.load(place, mask=live, other=0.0).to(tl.float32)
        b = tl.load(place + HALF, mask=live, other=0.0).to(tl.float32)
        to = out + (t * heads + head) * 2 * HALF + d
        tl.store(to, a * c - b * s, mask=live)
        tl.store(to + HALF, b * c + a * s, mask=live)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Heads [T, heads, d] rotated by angles with these cosines and sines [T, d / 2]; sign -1: by the negative angles.

    The last dimensions are contiguous, and all of the result.
    """
    tokens, heads, width = x.shape
    out = x.new_empty(x.shape)
    if out.numel():
        _rotate[(triton.cdiv(tokens, TOKENS),)](
            x, cos, sin, out, tokens, heads, x.stride(0), x.stride(1), cos.stride(0), sign,
            HALF=width // 2, BLOCK=TOKENS, num_warps=HEAD_WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _softmax_sums(
    logits, targets, sums, rows, stride, start, live, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    totals = tl.zeros([BLOCK], dtype=tl.float32)
    moments = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, live, BLOCK):
        x = tl.load(logits + row * stride + first + at, mask=first + at < live, other=float("-inf"))
        x = x.to(tl.float32) * scale
        higher = tl.maximum(tops, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        before, now = tl.exp(tops - shift), tl.exp(x - shift)
        totals = totals * before + now
        if ENTROPY:
            moments = moments * before + now * tl.where(now > 0, x, 0.0)
        tops = higher
    top = tl.max(tops, 0)
    factor = tl.exp(tops - top)
    tl.store(sums + row, top)
    tl.store(sums + rows + row, tl.sum(totals * factor, 0))
    if ENTROPY:
        tl.store(sums + 3 * rows + row, tl.sum(moments * factor, 0))
    target = tl.load(targets + row) - start
    mine = (target >= 0) & (target < live)
    x = tl.load(logits + row * stride + target, mask=mine, other=0.0).to(tl.float32) * scale
    tl.store(sums + 2 * rows + row, x)


@triton.jit
def _softmax_gradient(
    logits, targets, logsum, grad, entropies, grad_entropy, stride, width, start, live, scale,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, mask=at < live, other=float("-inf")).to(tl.float32)
    logp = x * scale - tl.load(logsum + row)
    p = tl.exp(logp)
    g = tl.load(grad + row)
    target = tl.load(targets + row) - start
    d = tl.where(at == target, g, 0.0) - g * p
    if ENTROPY:
        inner = tl.where(p > 0, logp, 0.0) + tl.load(entropies + row)
        d -= tl.load(grad_entropy + row) * p * inner
    d = tl.where(at < live, d * scale, 0.0)
    tl.store(logits + row * stride + at, d, mask=at < width)


def softmax_sums(
    logits: Tensor, targets: Tensor, start: int, live: int, temperature: float, entropy: bool
) -> Tensor:
    """fp32 [4, n] of this rank's logits: the maximum, the sum of exponentials relative to it, the target's logit (0 if another
    rank has it) and, with `entropy`, the sum of logits weighted by these exponentials."""
    rows = logits.shape[0]
    sums = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    _softmax_sums[(rows,)](
        logits, targets, sums, rows, logits.stride(0), start, live, 1 / temperature,
        ENTROPY=entropy, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return sums


def softmax_gradient(
    logits: Tensor, targets: Tensor, logsum: Tensor, grad: Tensor, entropies: Tensor, grad_entropy: Tensor,
    start: int, live: int, temperature: float, entropy: bool,
) -> Tensor:  # fmt: skip
    """Overwrite the logits with their gradient."""
    rows, width = logits.shape
    _softmax_gradient[(rows, triton.cdiv(width, 4096))](
        logits, targets, logsum, grad, entropies, grad_entropy, logits.stride(0), width, start, live,
        1 / temperature, ENTROPY=entropy, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return logits


@triton.jit
def _put_rows(source, places, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    to = tl.load(places + row)
    if to >= 0:
        for first in range(0, width, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(source + row * width + at, mask=at < width)
            tl.store(out + to * width + at, values, mask=at < width)


@triton.jit
def _take_rows(x, places, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + place * width + at, mask=(at < width) & (place >= 0), other=0.0)
        tl.store(out + row * width + at, values, mask=at < width)


def put_rows(source: Tensor, places: Tensor, out: Tensor) -> Tensor:
    """Write row i of `source` to row places[i] of `out`, skipping negative places; both contiguous."""
    if len(places):
        width = source[0].numel()
        _put_rows[(len(places),)](source, places, out, width, BLOCK=min(2048, triton.next_power_of_2(width)))
    return out


def take_rows(x: Tensor, places: Tensor) -> Tensor:
    """Row i is x[places[i]], or zeros for a negative place; x contiguous."""
    out = x.new_empty(len(places), *x.shape[1:])
    if len(places):
        width = out[0].numel()
        _take_rows[(len(places),)](x, places, out, width, BLOCK=min(2048, triton.next_power_of_2(width)))
    return out
