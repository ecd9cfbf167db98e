"""Checks of the head against float64: python -m tests.support.head_checks plain|interpreted|cuda RANKS.

plain: its form on a CPU. interpreted: its Triton kernels on a CPU. cuda: these on a GPU, which the ranks share.

Each compares log-probabilities, entropies and the gradients of both with their definition, where the vocabulary is split
over RANKS processes, the last of which may hold padding.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from millrace.connectors.trainers.ops import logprobs
from tests.support.distances import distance

# (tokens that count, rows with padding): just above one block, a share of eight ranks, and the whole of Qwen3's
VOCABULARIES = ((4097, 4098), (18_985, 18_992), (151_936, 151_936))
TOKENS, WIDTH, TEMPERATURE = 9, 32, 0.7
CHUNK = 1  # of tokens; the fused head takes four of them at once, so that TOKENS are three chunks
# of log-probabilities and entropies, and of gradients: that of the hidden states is a sum over the vocabulary
BOUNDS = {torch.float32: (1e-6, 5e-5), torch.bfloat16: (1e-3, 1e-2)}


def definition(hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, ...]:
    """Log-probabilities of the targets and entropies, by log_softmax over the tokens that count."""
    logp = ((hidden @ weight[:vocab].t()) / TEMPERATURE).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def head(
    hidden: Tensor, weight: Tensor, targets: Tensor, others: Tensor, vocab: int, group: Any, form: str
) -> tuple[Tensor, ...]:
    """Log-probabilities and entropies by one form of the head, of the plain one log-probabilities of other tokens, too.

    On a GPU it keeps logits for the backward pass.
    """
    start = group.rank() * weight.shape[0]
    live = max(0, min(weight.shape[0], vocab - start))
    settings = start, live, group, TEMPERATURE, CHUNK, True, True  # the entropy, and its gradient
    forms: Any = logprobs._TokenLogprobs, logprobs._FusedTokenLogprobs
    found: tuple[Tensor, ...]
    if form == "plain":
        found = forms[0].apply(hidden, weight, targets, others, *settings)
    else:
        found = forms[1].apply(hidden, weight, targets, *settings, form == "cuda")
    return found


def check(vocab: int, rows: int, form: str, dtype: torch.dtype, tied: bool) -> None:
    """One vocabulary: this rank's rows of the weight, beside an embedding of the same weight if `tied`."""
    group, device = dist.group.WORLD, "cuda" if form == "cuda" else "cpu"
    assert group is not None
    torch.manual_seed(vocab)
    full = (torch.randn(rows, WIDTH) / 4).to(dtype)
    given = torch.randn(TOKENS, WIDTH).to(dtype)
    targets = torch.randint(vocab, (TOKENS,))
    targets[0], targets[1], targets[2] = 0, vocab - 1, 4096  # both ends, and the first of the second block
    others = torch.stack([torch.randperm(vocab - 3)[:3] + 1 for _ in range(TOKENS)])
    others[0, 0], others[1, 1] = targets[0], targets[1]  # a target may be among them
    g, h, q = torch.randn(TOKENS), torch.randn(TOKENS), torch.randn(TOKENS, 3)
    slow_weight, slow_hidden = full.double().requires_grad_(), given.double().requires_grad_()
    expected = definition(slow_hidden, slow_weight, targets, vocab)
    wanted = (expected[0] * g.double()).sum() + (expected[1] * h.double()).sum()
    if form == "plain":
        logp = ((slow_hidden @ slow_weight[:vocab].t()) / TEMPERATURE).log_softmax(-1)
        expected = *expected, logp.gather(1, others)
        wanted = wanted + (expected[2] * q.double()).sum()
    wanted.backward()
    assert slow_weight.grad is not None
    assert slow_hidden.grad is not None

    mine = slice(group.rank() * rows // group.size(), (group.rank() + 1) * rows // group.size())
    weight: Any = full[mine].to(device).requires_grad_()
    hidden = given.to(device).requires_grad_()
    before = torch.randn(weight.shape, device=device)
    if form != "plain":  # as megatron's DDP marks a weight; its gradient is added there in fp32
        weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = before.clone(), False, tied
    found = head(hidden, weight, targets.to(device), others.to(device), vocab, group, form)
    weighted = zip(found, (g, h, q), strict=False)
    loss = torch.stack([(value * by.to(device)).sum() for value, by in weighted]).sum()
    embedded = torch.zeros_like(before)
    if tied:  # the embedding's part comes by autograd, and DDP adds it to the head's
        loss = loss + F.embedding(torch.arange(3, device=device), weight).sum()
        embedded[:3] = 1
    loss.backward()
    if form == "plain":
        gradient = weight.grad - embedded
    else:
        gradient = weight.main_grad - before
        assert weight.grad_added_to_main_grad is not tied
        assert not tied or torch.equal(weight.grad.float(), embedded)
    assert hidden.grad is not None
    whole = hidden.grad.float().cpu()
    dist.all_reduce(whole, group=group)
    names = ("log-probabilities", "entropies", "of other tokens")
    values = {
        name: distance(*pair) for name, pair in zip(names, zip(found, expected, strict=True), strict=False)
    }
    gradients = {
        "weight": distance(gradient, slow_weight.grad[mine]),
        "hidden states": distance(whole, slow_hidden.grad),
    }
    print(vocab, rows, group.size(), form, dtype, "tied" if tied else "", values, gradients, flush=True)
    of_values, of_gradients = BOUNDS[dtype]
    assert max(values.values()) < of_values, values
    assert max(gradients.values()) < of_gradients, gradients


def run(rank: int, ranks: int, form: str, meeting: str) -> None:
    """All checks of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    if form == "interpreted":
        from tests.support.kernel_checks import mend_interpreter

        mend_interpreter()
    for dtype in (torch.float32,) if form == "interpreted" else BOUNDS:  # the interpreter has no bf16
        for vocab, rows in VOCABULARIES:
            for tied in (False, True):
                check(vocab, rows, form, dtype, tied)
    dist.destroy_process_group()


def main(form: str, ranks: int) -> None:
    """All checks in as many processes."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        torch.multiprocessing.spawn(run, (ranks, form, meeting), nprocs=ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
