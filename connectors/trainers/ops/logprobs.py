"""Log-probabilities and entropies of given tokens from hidden states, over a vocabulary split by tensor parallelism.

Holds the logits of one chunk of tokens at a time; the backward pass computes them again, chunk by chunk. On a GPU, the logits of
a chunk keep the model's dtype and are read once, their gradient overwrites them, and the output layer's gradient is added in fp32
to the optimizer's buffer. Also on a GPU, logits of chunks are kept while the device has memory to spare.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.connectors.trainers.ops.fused import add_product, has_kernels


class TokenLogprobs(NamedTuple):
    """The output layer's values for N tokens: fp32, or fp64 for an fp64 layer."""

    targets: Tensor  # [N] log-probabilities
    entropies: Tensor | None  # [N]
    others: Tensor | None  # [N, k] log-probabilities


class WholeVocabulary:
    """The group of a rank that holds the whole output layer."""

    def rank(self) -> int:
        """The rank's number."""
        return 0

    def size(self) -> int:
        """The number of ranks."""
        return 1


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab: int,
    group: Any,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    entropy_gradient: bool = True,
    others: Tensor | None = None,
) -> TokenLogprobs:
    """log softmax(hidden @ weight.T / temperature)[target], and with `entropy` the distribution's entropy.

    hidden [N, H]; weight [V / tp, H], this rank's rows; targets [N]; vocab: number of real tokens (later rows are padding);
    others [N, k]: further tokens, distinct within a row. Gradients go to the weight and, as this rank's part of a sum, to
    hidden; without `entropy_gradient` the entropy has none. With `others`, the kernels are not used, even on a GPU.
    """
    start = group.rank() * weight.shape[0]
    live = max(0, min(weight.shape[0], vocab - start))
    settings = start, live, group, temperature, chunk, entropy, entropy and entropy_gradient
    if has_kernels(hidden) and others is None:
        logprobs, entropies = _FusedTokenLogprobs.apply(
            hidden, weight, targets, *settings, torch.is_grad_enabled()
        )
        of_others = None
    else:
        logprobs, entropies, of_others = _TokenLogprobs.apply(hidden, weight, targets, others, *settings)
    return TokenLogprobs(logprobs, entropies if entropy else None, of_others)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        others: Tensor | None,
        start: int,
        live: int,
        group: Any,
        temperature: float,
        chunk: int,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        count = hidden.shape[0]
        dtype = _dtype_of_logits(hidden)
        of_others = None if others is None else hidden.new_zeros(others.shape, dtype=dtype)
        logsum = torch.zeros(count, dtype=dtype, device=hidden.device)
        picked = torch.zeros_like(logsum)
        entropies = torch.zeros_like(logsum)
        for at in range(0, count, chunk):
            span = slice(at, at + chunk)
            logits = _logits(hidden[span], weight, live, temperature)
            local = targets[span] - start
            mine = (local >= 0) & (local < live)
            top = _reduce(logits.amax(-1), dist.ReduceOp.MAX, group)
            exps = (logits - top[:, None]).exp_()
            own = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
            sums = [exps.sum(-1), torch.where(mine, own, torch.zeros_like(own))]
            reduced = _reduce(torch.stack(sums), dist.ReduceOp.SUM, group)
            logsum[span] = top + reduced[0].log()
            picked[span] = reduced[1]
            if others is not None and of_others is not None:
                own = _picked(logits, others[span] - start, live)
                of_others[span] = _reduce(own, dist.ReduceOp.SUM, group) - logsum[span, None]
            if (
                entropy
            ):  # a separate sum, so that log-probabilities have the same bits with and without entropy
                moment = (exps * logits.masked_fill(exps == 0, 0)).sum(-1)
                entropies[span] = logsum[span] - _reduce(moment, dist.ReduceOp.SUM, group) / reduced[0]
        ctx.save_for_backward(hidden, weight, targets, others, logsum, entropies)
        ctx.settings = (start, live, temperature, chunk, entropy_gradient)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return picked - logsum, entropies, of_others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, others, logsum, entropies = ctx.saved_tensors
        start, live, temperature, chunk, entropy_gradient = ctx.settings
        grad, grad_entropy, grad_others = grads
        grad_hidden = torch.empty_like(hidden)
        total = None
        if ctx.needs_input_grad[1]:
            total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for at in range(0, hidden.shape[0], chunk):
            span = slice(at, at + chunk)
            logits = _logits(hidden[span], weight, live, temperature)
            logp = logits - logsum[span, None]
            p = logp.exp()
            d = -grad[span, None] * p
            local = targets[span] - start
            mine = ((local >= 0) & (local < live)).nonzero()[:, 0]
            d[mine, local[mine]] += grad[span][mine]
            if others is not None:
                _add_gradient(d, grad_others[span], p, others[span] - start, live)
            if entropy_gradient:
                inner = logp.masked_fill(p == 0, 0) + entropies[span, None]
                d -= grad_entropy[span, None] * p * inner
            d = (d / temperature).to(hidden.dtype)
            grad_hidden[span] = d @ weight
            if total is not None:
                total += (d.t() @ hidden[span]).float()
        return grad_hidden, None if total is None else total.to(weight.dtype), *[None] * 9


def _picked(logits: Tensor, local: Tensor, live: int) -> Tensor:
    """Logits [n, k] of these rows' tokens, 0 for tokens of other ranks."""
    own = logits.gather(1, local.clamp(0, logits.shape[1] - 1))
    return torch.where((local >= 0) & (local < live), own, torch.zeros_like(own))


def _add_gradient(d: Tensor, grad: Tensor, p: Tensor, local: Tensor, live: int) -> None:
    """Add the gradient of the log-probabilities [n, k] of further tokens to the logits' gradient d [n, V / tp].

    The order of the sum is fixed, since a row's tokens are distinct.
    """
    d -= grad.sum(-1, keepdim=True) * p
    mine = (local >= 0) & (local < live)
    d.scatter_add_(1, local.clamp(0, d.shape[1] - 1), torch.where(mine, grad, torch.zeros_like(grad)))


# plain: 16 bytes per logit; fused: 2. Four chunks at once still take half the memory.
FUSED_CHUNKS = 4


class _FusedTokenLogprobs(torch.autograd.Function):
    """The same with the Triton kernels.

    If the weight has a `main_grad`, its gradient is added there in fp32, and autograd gets none. While the device has memory
    to spare, the logits of chunks are kept for the backward pass instead of computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        start: int,
        live: int,
        group: Any,
        temperature: float,
        chunk: int,
        entropy: bool,
        entropy_gradient: bool,
        graded: bool,
    ) -> tuple[Tensor, Tensor]:
        from millrace.connectors.trainers.ops import kernels

        chunk *= FUSED_CHUNKS
        count = hidden.shape[0]
        kept: dict[int, Tensor] = {}
        sums = torch.zeros(4, count, dtype=torch.float32, device=hidden.device)
        for at in range(0, count, chunk):
            span = slice(at, at + chunk)
            logits = hidden[span] @ weight.t()
            if graded and _memory_to_spare(logits):
                kept[at] = logits
            sums[:, span] = kernels.softmax_sums(logits, targets[span], start, live, temperature, entropy)
        top = _reduce(sums[0].clone(), dist.ReduceOp.MAX, group)
        factor = (sums[0] - top).exp()
        total, picked, moment = _reduce(
            torch.stack([sums[1] * factor, sums[2], sums[3] * factor]), dist.ReduceOp.SUM, group
        )
        logsum = top + total.log()
        entropies = logsum - moment / total if entropy else torch.zeros_like(logsum)
        ctx.save_for_backward(hidden, weight, targets, logsum, entropies)
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.settings = (start, live, temperature, chunk, entropy_gradient)
        ctx.kept = kept
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return picked - logsum, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from millrace.connectors.trainers.ops import kernels

        hidden, weight, targets, logsum, entropies = ctx.saved_tensors
        start, live, temperature, chunk, entropy_gradient = ctx.settings
        grad, grad_entropy = (g.contiguous() for g in grads)
        total = ctx.main_grad
        if total is None and ctx.needs_input_grad[1]:
            total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_hidden = torch.empty_like(hidden)
        for at in range(0, hidden.shape[0], chunk):
            span = slice(at, at + chunk)
            logits = ctx.kept.pop(at, None)
            d = kernels.softmax_gradient(
                hidden[span] @ weight.t() if logits is None else logits, targets[span], logsum[span], grad[span], entropies[span],
                grad_entropy[span], start, live, temperature, entropy_gradient,
            )  # fmt: skip
            torch.mm(d, weight, out=grad_hidden[span])
            if total is not None:
                add_product(total, d.t(), hidden[span])
        if ctx.main_grad is not None:
            mark_gradient_added(weight)
            return grad_hidden, *[None] * 10
        return grad_hidden, None if total is None else total.to(weight.dtype), *[None] * 9


def mark_gradient_added(weight: Tensor) -> None:
    """Mark for DDP that `main_grad` already holds the weight's gradient; DDP reduces it when autograd has finished with the weight.

    DDP still requires a gradient, so it gets a view of one element. A tied weight is not marked: autograd yields the embedding's
    part of its gradient, which DDP must add.
    """
    tied = getattr(weight, "zero_out_wgrad", False)  # megatron's mark of a tied weight
    if hasattr(weight, "grad_added_to_main_grad") and not tied:
        weight.grad = weight.new_empty(1).expand(weight.shape)
        weight.grad_added_to_main_grad = True


def _memory_to_spare(tensor: Tensor) -> bool:
    """Whether a third of the memory of the tensor's device is free; PyTorch's cache counts as free."""
    free, total = torch.cuda.mem_get_info(tensor.device)
    cached = torch.cuda.memory_reserved(tensor.device) - torch.cuda.memory_allocated(tensor.device)
    return free + cached > total // 3


def _logits(hidden: Tensor, weight: Tensor, live: int, temperature: float) -> Tensor:
    """Logits [n, V / tp], fp32 or fp64; padding rows of the vocabulary are minus infinity."""
    logits = (hidden @ weight.t()).to(_dtype_of_logits(hidden))
    if temperature != 1.0:
        logits = logits / temperature
    if live < weight.shape[0]:
        logits[:, live:] = float("-inf")
    return logits


def _dtype_of_logits(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _reduce(values: Tensor, op: Any, group: Any) -> Tensor:
    if group.size() > 1:
        values = values.contiguous()
        dist.all_reduce(values, op=op, group=group)
    return values
