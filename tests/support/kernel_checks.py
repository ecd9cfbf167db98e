"""Checks of millrace.connectors.trainers.ops.kernels on random inputs, for a device with Triton: python kernel_checks.py cpu|cuda.

Each compares a kernel's values and gradients with the definition's in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from millrace.connectors.trainers.megatron.model import (
    attention,
    expert_kernels,
    grouped_experts,
)
from millrace.connectors.trainers.ops import dense_attention, fused, kernels
from tests.support.distances import distance


def exact(x: Tensor) -> Tensor:
    return x.double().cpu().requires_grad_()


def norm(draw: Callable[..., Tensor], bound: float) -> None:
    for shape in ((37, 96), (5, 3, 128), (1100, 64)):
        for together in (False, True):
            x, weight, grad = draw(*shape), draw(shape[-1]) + 1, draw(*shape)
            added, passed = (draw(*shape), draw(*shape)) if together else (None, None)
            out, total = kernels.norm(x, weight, 1e-6, added)
            assert distance(total, x if added is None else x + added) == 0
            slow = exact(total), exact(weight)
            expected = fused.rms_norm(*slow, 1e-6)
            expected.backward(grad.double().cpu())
            if passed is not None:
                slow[0].grad.add_(passed.double().cpu())
            assert distance(out, expected) < bound
            found = kernels.norm_backward(total, weight, grad, 1e-6, passed)
            assert max(distance(f, s.grad) for f, s in zip(found, slow, strict=True)) < bound


def silu(draw: Callable[..., Tensor], bound: float) -> None:
    for shape in ((7, 48), (5, 1, 256)):
        x, grad = draw(*shape), draw(*shape[:-1], shape[-1] // 2)
        slow = exact(x)
        expected = fused.gated_silu(slow)
        expected.backward(grad.double().cpu())
        assert distance(kernels.gated_silu(x), expected) < bound
        assert distance(kernels.gated_silu_backward(x, grad), slow.grad) < bound


def silu_product(draw: Callable[..., Tensor], bound: float) -> None:
    for shape in ((7, 48), (5, 1, 256), (0, 8)):
        gate, up, grad = (draw(*shape) for _ in range(3))
        slow = exact(gate), exact(up)
        expected = fused.silu_product(*slow)
        expected.backward(grad.double().cpu())
        assert distance(kernels.silu_product(gate, up), expected) < bound
        for found, each in zip(kernels.silu_product_backward(gate, up, grad), slow, strict=True):
            assert distance(found, each.grad) < bound


def rotate(draw: Callable[..., Tensor], bound: float) -> None:
    for tokens, count, dim in ((45, 3, 32), (3, 1, 8), (0, 2, 16)):
        angles = torch.rand(tokens, dim // 2, dtype=torch.float64) * 6
        table = torch.stack([angles.cos(), angles.sin()])
        # heads before tokens in memory, as a projection of one sequence that was transposed
        x, grad = draw(count, tokens, dim).transpose(0, 1), draw(tokens, count, dim)
        slow = exact(x)
        expected = fused.rotate(slow, table)
        expected.backward(grad.double().cpu())
        short = table.float().to(x.device)
        assert distance(kernels.rotate(x, *short, 1.0), expected) < bound
        assert distance(kernels.rotate(grad, *short, -1.0), slow.grad) < bound


def heads(draw: Callable[..., Tensor], bound: float) -> None:
    tokens, groups, per, dim = 45, 2, 3, 32
    angles = torch.rand(50, 1, 1, dim // 2, dtype=torch.float64) * 6
    frequencies = torch.cat((angles, angles), dim=-1)
    table = fused.rotary_table(frequencies, torch.randint(50, (tokens,)))
    for normed in (True, False):
        mixed = draw(tokens, groups * (per + 2) * dim)
        weights = [draw(dim) + 1, draw(dim) + 1] if normed else [None, None]
        slow = exact(mixed), *(None if w is None else exact(w) for w in weights)
        expected = fused.query_key_value(*slow, table, per_group=per, head_dim=dim, eps=1e-6)
        short = table.float().to(mixed.device)
        found = kernels.heads(mixed, *weights, short, per, 1e-6)
        assert max(distance(f, e) for f, e in zip(found, expected, strict=True)) < bound
        grads = [draw(*e.shape) for e in expected]
        torch.autograd.backward(expected, [g.double().cpu() for g in grads])
        back = kernels.heads_backward(mixed, *weights, short, per, 1e-6, *grads)
        for f, s in zip(back, slow, strict=True):
            assert (f is None) == (s is None)
            assert f is None or distance(f, s.grad) < bound


def softmax(draw: Callable[..., Tensor], bound: float) -> None:
    rows, width, live, start, temperature = 9, 301, 290, 1000, 0.7
    logits = draw(rows, width) * 3
    logits[:, 5] = float("-inf")
    targets = torch.randint(live, (rows,), device=logits.device) + start
    targets[0], targets[1] = 3, start + width + 5  # other ranks' tokens
    slow = exact(logits)
    x = slow[:, :live] / temperature
    kept = x.masked_fill(x == float("-inf"), 0)
    p = x.softmax(-1)
    top, total, picked, moment = kernels.softmax_sums(logits, targets, start, live, temperature, True)
    assert distance(top + total.log(), x.logsumexp(-1)) < bound
    assert distance(moment / total, (p * kept).sum(-1)) < bound
    mine = torch.arange(2, rows)
    own = kept[mine, targets.cpu()[mine] - start]
    assert distance(picked[2:], own) < bound
    assert picked[:2].abs().max() == 0
    g, h = draw(rows).float(), draw(rows).float()
    logsum = x.logsumexp(-1)
    entropies = logsum - (p * kept).sum(-1)
    fully = torch.cat((-logsum[:2], own - logsum[2:]))
    ((fully * g.double().cpu()).sum() + (entropies * h.double().cpu()).sum()).backward()
    given = [t.detach().float().to(logits.device) for t in (logsum, entropies)]
    found = kernels.softmax_gradient(
        logits.clone(), targets, given[0], g, given[1], h, start, live, temperature, True
    )
    assert found[:, live:].abs().max() == 0
    assert distance(found[:, :live], slow.grad[:, :live].nan_to_num(0)) < bound


def put(draw: Callable[..., Tensor], bound: float) -> None:
    x, places = draw(5, 24), torch.tensor([3, 0, 8, 4, 7])
    expected = torch.zeros(9, 24, dtype=x.dtype, device=x.device)
    expected[places] = x
    out = torch.zeros_like(expected)
    given = torch.cat((x, torch.full_like(x[:1], 7.0)))
    places = torch.cat((places, torch.tensor([-1]))).to(x.device)
    assert torch.equal(kernels.put_rows(given, places, out), expected)
    taken = kernels.take_rows(expected, places)
    assert torch.equal(taken[:-1], x)
    assert taken[-1].abs().max() == 0


def expert_sums(draw: Callable[..., Tensor], bound: float) -> None:
    for tokens, choices, width in ((7, 3, 40), (5, 1, 2048), (0, 2, 8)):
        values, places = draw(tokens * choices, width), torch.randperm(tokens * choices).view(tokens, choices)
        weights = draw(tokens, choices).float()
        for each in (None, weights):
            found = expert_kernels.sum_rows(values, places.to(values.device), each)
            slow = values.double().cpu()[places] * (1 if each is None else each.double().cpu()[..., None])
            assert distance(found, slow.sum(1)) < bound


def gates(draw: Callable[..., Tensor], bound: float) -> None:
    for limit in (None, 1.5):
        for rows, width in ((9, 24), (4, 1500), (0, 8)):
            x, grad, weights = draw(rows, 2 * width) * 2, draw(rows, width), draw(rows).float()
            slow, factors = exact(x), exact(weights)
            out = grouped_experts.activated(slow, limit)
            assert distance(expert_kernels.gate(x, limit), out) < bound
            (out * factors[:, None] * grad.double().cpu()).sum().backward()
            of_x, weighted, dots = expert_kernels.gate_backward(x, grad, weights, limit)
            assert distance(of_x, slow.grad) < bound
            assert distance(weighted, out * factors[:, None]) < bound
            assert distance(dots, factors.grad) < bound


def parts(draw: Callable[..., Tensor], bound: float) -> None:
    lengths = [1500, 7, 1030, 1400, 3, 1024]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tensors = [draw(bounds[-1], heads, 8).requires_grad_() for heads in (2, 1, 1)]
    grad = draw(bounds[-1], 2, 8)

    def dense(q: Tensor, k: Tensor, v: Tensor, part: Any, scale: float | None) -> Tensor:
        assert part.length in (1024, 1152, 1408, 1536)
        return each(q, k, v, range(0, len(q) + 1, part.length))

    def varlen(q: Tensor, k: Tensor, v: Tensor, part: Any, scale: float | None) -> Tensor:
        return each(q, k, v, part.bounds)

    def each(q: Tensor, k: Tensor, v: Tensor, ends: Any) -> Tensor:
        return torch.cat([attention.whole(q[a:b], k[a:b], v[a:b], None) for a, b in pairwise(ends)])

    out = dense_attention.attend(*tensors, bounds, None, varlen=varlen, dense=dense)
    out.backward(grad)
    slow = [exact(x.detach()) for x in tensors]
    expected = each(*slow, bounds)
    expected.backward(grad.double().cpu())
    assert distance(out, expected) < bound
    for found, plain in zip(tensors, slow, strict=True):
        assert distance(found.grad, plain.grad) < 2 * bound


def mend_interpreter() -> None:
    """Triton's interpreter counts loops by arrays of one element, which newer versions of numpy do not take."""
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = mended


def main(device: str) -> None:
    """All checks in fp32, and in bf16 where kernels are compiled."""
    torch.manual_seed(0)
    if device == "cpu":
        mend_interpreter()
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):
        if dtype == torch.bfloat16 and device == "cpu":
            continue  # the interpreter has no bf16 arithmetic

        def draw(*shape: int, dtype: Any = dtype) -> Tensor:
            return torch.randn(shape).to(device, dtype)

        for check in (norm, silu, silu_product, rotate, heads, softmax, put, expert_sums, gates, parts):
            check(draw, bound)
            print(check.__name__, dtype, "ok")


if __name__ == "__main__":
    main(sys.argv[1])
