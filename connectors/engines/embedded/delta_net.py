"""Gated delta net in the engine: its memory of each text, and its arithmetic, a token after the other.

As the recurrence is written (arXiv:2412.06464, equation 10), so that a row's result depends only on that row, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.core.families.delta_net import EPS, DeltaNet


@dataclass(frozen=True)
class DeltaWeights:
    """The tensors of a layer, as the trainer's parameters of these names, whole."""

    sizes: DeltaNet
    in_proj: Tensor
    conv: Tensor  # [channels, 1, tokens]
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor

    def read(
        self, x: Tensor, window: Tensor, state: Tensor, lengths: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What tokens [B, S, H] give, after texts that are remembered as `window` and `state`, and what is remembered then.

        window: the last inputs of the convolution [B, tokens - 1, channels]; state: [B, heads, d, dv]. lengths: the tokens of
        each row that count [B]; tokens behind change nothing that is remembered.
        """
        d, span = self.sizes, x.shape[1]
        sizes = [d.channels, d.values, d.value_heads, d.value_heads]
        mixed, gate, beta, alpha = (
            F.linear(x.flatten(0, 1), self.in_proj).unflatten(0, x.shape[:2]).split(sizes, -1)
        )
        inputs = torch.cat([window, mixed], dim=1)
        rows = lengths[:, None] + torch.arange(d.kernel - 1)
        window = inputs.gather(1, rows[..., None].expand(-1, -1, d.channels))
        convolved = inputs[:, :span] * self.conv[:, 0, 0]
        for place in range(1, d.kernel):
            convolved = convolved + inputs[:, place : place + span] * self.conv[:, 0, place]
        query, key, value = F.silu(convolved).float().split([d.keys, d.keys, d.values], -1)
        query, key = (self._direction(part) for part in (query, key))
        query, value = query * d.key_dim**-0.5, value.unflatten(-1, (d.value_heads, -1))
        decay = (-self.a_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())).exp()
        beta = beta.float().sigmoid()
        counts = (torch.arange(span) < lengths[:, None])[..., None]
        decay, beta = decay.where(counts, torch.ones(())), beta.where(counts, torch.zeros(()))
        out = []
        for at in range(span):
            state = state * decay[:, at, :, None, None]
            known = (state * key[:, at, ..., None]).sum(-2)
            fresh = (value[:, at] - known) * beta[:, at, :, None]
            state = state + key[:, at, ..., None] * fresh[..., None, :]
            out.append((state * query[:, at, ..., None]).sum(-2))
        read = torch.stack(out, dim=1).to(x.dtype).float()
        read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + eps)
        read = self.norm * read.to(x.dtype) * F.silu(gate.unflatten(-1, (d.value_heads, -1)).float())
        given = F.linear(read.to(x.dtype).flatten(2).flatten(0, 1), self.out_proj)
        return given.unflatten(0, x.shape[:2]), window, state

    def _direction(self, x: Tensor) -> Tensor:
        """Keys or queries [B, S, keys] as vectors of length 1 of each value head [B, S, heads, d]."""
        x = x.unflatten(-1, (self.sizes.key_heads, -1))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
        return x.repeat_interleave(self.sizes.ratio, dim=2)


def empty_memory(sizes: DeltaNet, texts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The window and the state of texts without a token."""
    window = torch.zeros(texts, sizes.kernel - 1, sizes.channels, dtype=dtype)
    return window, torch.zeros(texts, sizes.value_heads, sizes.key_dim, sizes.value_dim)
