"""The gated delta rule and the short convolution before it, over packs of sequences, in plain PyTorch.

A head remembers a sequence in a matrix S of values by keys. Each token lets it fade, and replaces what is stored under its key:

    S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T        o_t = S_t q_t        (arXiv:2412.06464, equation 10)

Chunks of tokens are computed at once: a product of such steps is a sum of outer products, in the WY form of DeltaNet (arXiv:2406.06484,
sections 3.2 and 3.3; with decays, arXiv:2412.06464, section 3.3). Only the matrix between chunks goes from one to the next,
for all sequences of the pack together. It starts at zero in each sequence. The backward pass computes the forward pass of a layer
again, so that no matrix between chunks is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from millrace.core.families.delta_net import CHUNK, EPS


def short_convolution(x: Tensor, weight: Tensor, bounds: Sequence[int]) -> Tensor:
    """Each channel of x [T, C] convolved with the tokens before it in its sequence. weight: [C, 1, tokens], the last for its own."""
    before = weight.shape[-1] - 1
    places = _places(tuple(bounds), before, x.device)
    # zeros before each sequence, so that it sees none of the tokens before
    spread = x.new_zeros(len(x) + before * (len(bounds) - 1), x.shape[1]).index_copy(0, places, x)
    out = F.conv1d(spread.t()[None], weight, groups=x.shape[1])[0].t()
    return out.index_select(0, places - before)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, bounds: Sequence[int]
) -> Tensor:
    """What each token of a pack reads. query, key: [T, key heads, d]; value: [T, heads, dv]; returns as value.

    decay: logarithms of a, at most 0; beta: b; both [T, heads]. Queries and keys are made one long, and queries divided by the root
    of d. A key head serves heads that are neighbours. Computes in float32, or in the inputs' type if that is wider.
    """
    out: Tensor = checkpoint(
        _read, query, key, value, decay, beta, tuple(bounds), use_reentrant=False, preserve_rng_state=False
    )
    return out


@dataclass(frozen=True)
class _Chunks:
    """A pack cut into chunks: the first chunks of all sequences come first, then the second ones; long sequences before short ones.

    `tokens`: the position of each chunk's tokens [chunks * CHUNK], T behind a sequence's end. `places`: where each token of the pack
    is among these. `steps`: bounds of the chunks that follow each other.
    """

    tokens: Tensor
    places: Tensor
    steps: tuple[int, ...]


@lru_cache(maxsize=16)
def _cut(bounds: tuple[int, ...], device: torch.device) -> _Chunks:
    spans = sorted(
        (span for span in pairwise(bounds) if span[0] < span[1]), key=lambda span: span[0] - span[1]
    )
    starts: list[list[tuple[int, int]]] = []
    for start, end in spans:
        for number, at in enumerate(range(start, end, CHUNK)):
            if number == len(starts):
                starts.append([])
            starts[number].append((at, min(at + CHUNK, end)))
    flat = torch.tensor([chunk for step in starts for chunk in step])
    tokens = flat[:, :1] + torch.arange(CHUNK)
    tokens = torch.where(tokens < flat[:, 1:], tokens, bounds[-1]).flatten()
    places = torch.empty(bounds[-1] + 1, dtype=torch.long)
    places[tokens] = torch.arange(len(tokens))
    steps = torch.tensor([0, *map(len, starts)]).cumsum(0).tolist()
    return _Chunks(tokens.to(device), places[:-1].to(device), tuple(steps))


@lru_cache(maxsize=16)
def _places(bounds: tuple[int, ...], before: int, device: torch.device) -> Tensor:
    """The place of each token if `before` zeros stand before each sequence. [T]"""
    lengths = torch.tensor([end - start for start, end in pairwise(bounds)])
    numbers = torch.arange(1, len(bounds)).repeat_interleave(lengths)
    return (torch.arange(bounds[-1]) + before * numbers).to(device)


def _read(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, bounds: tuple[int, ...]
) -> Tensor:
    """See `gated_delta_rule`. N: chunks, G: key heads, R: heads of each, C: tokens of a chunk."""
    wide = torch.promote_types(value.dtype, torch.float32)
    chunks, groups = _cut(bounds, value.device), key.shape[1]

    def cut(x: Tensor) -> Tensor:
        """[T, heads, ...] -> [N, G, R, C, ...], zeros behind a sequence's end."""
        padded = F.pad(x.to(wide), (0, 0) * (x.ndim - 1) + (0, 1)).index_select(0, chunks.tokens)
        by_chunk: Tensor = padded.unflatten(0, (-1, CHUNK)).unflatten(2, (groups, -1)).movedim(1, 3)
        return by_chunk

    q, k = (
        cut(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)) for x in (query.to(wide), key.to(wide))
    )
    q = q * query.shape[-1] ** -0.5
    v, b = cut(value), cut(beta)[..., None]
    total = cut(decay).cumsum(-1)  # of a chunk's tokens up to each
    between = (total[..., :, None] - total[..., None, :]).tril()
    between = between.exp().tril()  # what is left at a row's token of what a column's token stored
    # U = v - S w: what a chunk's tokens store, in which each has what the tokens before it stored under its key taken out
    stored = torch.cat([b * v, b * total[..., None].exp() * k], dim=-1)
    overlap = b * (k @ k.transpose(-1, -2)) * between
    v, w = torch.linalg.solve_triangular(overlap, stored, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    seen = (q @ k.transpose(-1, -2)) * between
    q = q * total[..., None].exp()
    last = total[..., -1:]
    k, last = (k * (last - total).exp()[..., None]).transpose(-1, -2), last.exp()[..., None]
    state = v.new_zeros(chunks.steps[1], *v.shape[1:3], key.shape[-1], value.shape[-1])
    read = []
    for start, end in pairwise(chunks.steps):
        step = slice(start, end)
        state = state[: end - start]  # the others' sequences have ended
        fresh = v[step] - w[step] @ state
        read.append(q[step] @ state + seen[step] @ fresh)
        state = state * last[step] + k[step] @ fresh
    out = torch.cat(read).movedim(3, 1).flatten(0, 1).flatten(1, 2).index_select(0, chunks.places)
    return out.to(value.dtype)
