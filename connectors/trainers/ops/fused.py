"""Operations of the model in one pass over memory: Triton kernels on a GPU, otherwise plain PyTorch with autograd.

The plain form of each function is its definition; tests compare the kernels with it.

`drop` frees the memory of a tensor between the forward pass that made it and the backward pass that reads it: only its storage is
freed, and later filled with the same bits. megatron has this too, but only with Transformer Engine.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.core.families.decoder import GATE_SLOPE

_plain = False


@contextlib.contextmanager
def plain_forms() -> Iterator[None]:
    """A context in which the plain forms are used on every device, for any type."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def in_plain_forms() -> bool:
    """Whether a context of `plain_forms` is entered."""
    return _plain


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels are used for a tensor."""
    return x.is_cuda and not _plain


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    if has_kernels(x):
        out: Tensor = _Norm.apply(x, None, weight, eps)[0]
        return out
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + added, and that sum, which is a layer's residual. The gradients of both are added in one pass."""
    if has_kernels(x):
        out: tuple[Tensor, Tensor] = _Norm.apply(x, added, weight, eps)
        return out
    total = x if added is None else x + added
    return rms_norm(total, weight, eps), total


def gated_silu(x: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension."""
    if has_kernels(x):
        out: Tensor = _GatedSilu.apply(x)
        return out
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if has_kernels(gate):
        out: Tensor = _SiluProduct.apply(gate, up)
        return out
    return F.silu(gate) * up


def clamped_gate(x: Tensor, limit: float) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), of the halves of the last dimension: gate up to `limit`, up within both limits."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(GATE_SLOPE * gate) * (up + 1)


def rotary_table(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Cosine and sine of each token's angles. frequencies [S, ..., d] with equal halves, positions [T] -> [2, T, d / 2]."""
    angles = frequencies.reshape(frequencies.shape[0], -1)[:, : frequencies.shape[-1] // 2]
    return torch.stack([angles.cos()[positions], angles.sin()[positions]])


def rotate(x: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """Heads [T, heads, d] rotated by their tokens' angles, in x's dtype. Dimensions beyond the table's pass unchanged.

    `interleaved`: whether neighbours rotate together, instead of dimensions half the table apart.
    """
    half = table.shape[-1]
    if has_kernels(x) and x.shape[-1] == 2 * half and half & (half - 1) == 0 and not interleaved:
        turned: Tensor = _Rotate.apply(x, *table)
        return turned
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        cos, sin = (part.repeat_interleave(2, dim=-1).to(x.dtype)[:, None] for part in table)
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        cos, sin = (torch.cat((part, part), dim=-1).to(x.dtype)[:, None] for part in table)
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    out = (x * cos) + (rotated * sin)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out


def query_key_value(
    mixed: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    table: Tensor,
    *,
    per_group: int,
    head_dim: int,
    eps: float,
    interleaved: bool = False,
    gated: bool = False,
) -> tuple[Tensor, ...]:
    """Split a fused projection [T, groups * (per_group + 2) * d] into heads: per group its queries, its key, its value.

    Rotates queries and keys, after a norm if weights are given. Returns [T, heads, d] and twice [T, groups, d]. gated: a gate for
    each query stands after a group's queries; gates [T, heads, d] are returned last.
    """
    whole = head_dim == 2 * table.shape[-1] and not interleaved and not gated
    if has_kernels(mixed) and whole and head_dim & (head_dim - 1) == 0:
        heads: tuple[Tensor, Tensor, Tensor] = _Heads.apply(mixed, q_weight, k_weight, table, per_group, eps)
        return heads
    wide = per_group * head_dim
    sizes = [wide, *([wide] if gated else []), head_dim, head_dim]
    query, *gate, key, value = mixed.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
    query = query.reshape(len(mixed), -1, head_dim)
    gates = [each.reshape(len(mixed), -1, head_dim) for each in gate]
    if q_weight is not None and k_weight is not None:
        query, key = rms_norm(query, q_weight, eps), rms_norm(key.contiguous(), k_weight, eps)
    return rotate(query, table, interleaved), rotate(key, table, interleaved), value, *gates


def take_rows(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices] of [T, H]; indices must not repeat."""
    if has_kernels(x):
        out: Tensor = _TakeRows.apply(x, indices)
        return out
    return x[indices]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        from millrace.connectors.trainers.ops import kernels

        x = x.contiguous()
        out, total = kernels.norm(x, weight, eps, None if added is None else added.contiguous())
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.added = eps, added is not None
        ctx.set_materialize_grads(False)
        return out, total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from millrace.connectors.trainers.ops import kernels

        x, weight = ctx.saved_tensors
        grad, grad_total = (None if g is None else g.contiguous() for g in grads)
        if grad is None:  # the norm was not used
            return grad_total, grad_total if ctx.added else None, None, None
        grad_x, grad_weight = kernels.norm_backward(x, weight, grad, ctx.eps, grad_total)
        return grad_x, grad_x if ctx.added else None, grad_weight.to(weight.dtype), None


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from millrace.connectors.trainers.ops import kernels

        x = x.contiguous()
        ctx.save_for_backward(x)
        return kernels.gated_silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from millrace.connectors.trainers.ops import kernels

        (x,) = ctx.saved_tensors
        return kernels.gated_silu_backward(x, grads[0].contiguous())


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from millrace.connectors.trainers.ops import kernels

        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return kernels.silu_product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from millrace.connectors.trainers.ops import kernels

        gate, up = ctx.saved_tensors
        return kernels.silu_product_backward(gate, up, grads[0].contiguous())


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from millrace.connectors.trainers.ops import kernels

        ctx.save_for_backward(cos, sin)
        return kernels.rotate(x if x.stride(-1) == 1 else x.contiguous(), cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from millrace.connectors.trainers.ops import kernels

        (cos, sin), grad = ctx.saved_tensors, grads[0]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        return kernels.rotate(grad, cos, sin, -1.0), None, None


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        table: Tensor,
        per_group: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from millrace.connectors.trainers.ops import kernels

        mixed = mixed.contiguous()
        ctx.save_for_backward(mixed, q_weight, k_weight, table)
        ctx.per_group, ctx.eps = per_group, eps
        return kernels.heads(mixed, q_weight, k_weight, table, per_group, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from millrace.connectors.trainers.ops import kernels

        mixed, q_weight, k_weight, table = ctx.saved_tensors
        dq, dk, dv = (grad.contiguous() for grad in grads)
        grad, *weights = kernels.heads_backward(
            mixed, q_weight, k_weight, table, ctx.per_group, ctx.eps, dq, dk, dv
        )
        dqw, dkw = (None if dw is None else dw.to(q_weight.dtype) for dw in weights)
        return grad, dqw, dkw, None, None, None


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = x.shape
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from millrace.connectors.trainers.ops import kernels

        grad = grads[0].contiguous()
        (indices,) = ctx.saved_tensors
        return kernels.put_rows(grad, indices, grad.new_zeros(ctx.shape)), None


def drop(tensor: Tensor, recompute: Callable[[], Tensor], before: Tensor) -> None:
    """Free `tensor`, which the rest of the forward pass must not read. `recompute` computes its values again.

    The memory is filled again when the gradient of `before` arrives, so all readers of the tensor must come before `before`.
    """
    if not before.requires_grad:
        return  # autograd keeps no tensors
    storage = tensor.untyped_storage()
    assert storage.nbytes() == tensor.nbytes, "the storage holds another tensor too"
    size, pending = (
        storage.nbytes(),
        [(tensor.data, recompute)],
    )  # .data: autograd does not notice writes to it
    storage.resize_(0)

    def fill(_: Tensor) -> None:
        dropped, make = pending.pop()  # so that the graph does not hold both until the backward pass ends
        with torch.no_grad():
            values = make()
            dropped.untyped_storage().resize_(size)
            dropped.copy_(values)

    before.register_hook(fill)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without first rounding the product to the factors' dtype."""
    if not right.numel():
        return  # an expert without tokens
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


def accumulate(layer_input: Tensor, grad_output: Tensor, total: Tensor) -> None:
    """Add a linear layer's weight gradient to `total`. Has the signature of Apex's function."""
    add_product(total, grad_output.t(), layer_input)
