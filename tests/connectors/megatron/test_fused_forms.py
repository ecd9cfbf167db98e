"""The plain forms of the trainer's fused operations are what their names say: against float64, and megatron's rotary."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from millrace.connectors.trainers.ops import fused


def test_the_norm_divides_by_the_root_mean_square() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 16), torch.randn(16)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-6).double(), expected, atol=1e-6, rtol=1e-6)


def test_the_activation_gates_the_second_half_by_the_first() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 12)
    wide = x.double()
    expected = wide[:, :6] * wide[:, :6].sigmoid() * wide[:, 6:]
    torch.testing.assert_close(fused.gated_silu(x).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 12])
def test_rotary_positions_start_anew_with_each_sequence_of_a_pack_as_megatrons_do(
    interleaved: bool, width: int
) -> None:
    """Also of heads of which only a part turns, and by neighbouring dimensions."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    torch.manual_seed(0)
    angles = torch.outer(torch.arange(9.0), torch.rand(4))
    frequencies = torch.cat((angles, angles), dim=-1)[:, None, None]
    theirs = angles.repeat_interleave(2, dim=-1)[:, None, None] if interleaved else frequencies
    lengths = [4, 9, 1]
    positions = torch.cat([torch.arange(n) for n in lengths])
    x = torch.randn(14, 3, width)
    found = fused.rotate(x, fused.rotary_table(frequencies, positions), interleaved)
    expected = [
        _apply_rotary_pos_emb_bshd(part[:, None], theirs[: len(part)], rotary_interleaved=interleaved)[:, 0]
        for part in x.split(lengths)
    ]
    assert torch.equal(found, torch.cat(expected))


def test_heads_are_split_by_group_then_normed_and_turned_and_values_are_neither() -> None:
    torch.manual_seed(0)
    tokens, groups, per, dim = 6, 2, 3, 8
    mixed, q_weight, k_weight = (
        torch.randn(tokens, groups * (per + 2) * dim),
        torch.rand(dim),
        torch.rand(dim),
    )
    angles = torch.rand(tokens, dim // 2)
    table = torch.stack((angles.cos(), angles.sin()))
    query, key, value = fused.query_key_value(
        mixed, q_weight, k_weight, table, per_group=per, head_dim=dim, eps=1e-6
    )
    blocks = mixed.view(tokens, groups, per + 2, dim)
    for group in range(groups):
        for number in range(per):
            expected = fused.rotate(
                F.rms_norm(blocks[:, group, number], (dim,), q_weight, 1e-6)[:, None], table
            )
            torch.testing.assert_close(query[:, group * per + number], expected[:, 0])
        expected = fused.rotate(F.rms_norm(blocks[:, group, per], (dim,), k_weight, 1e-6)[:, None], table)
        torch.testing.assert_close(key[:, group], expected[:, 0])
        assert torch.equal(value[:, group], blocks[:, group, per + 1])
    assert torch.allclose(
        query.norm(dim=-1),
        F.rms_norm(blocks[:, :, :per].reshape(tokens, -1, dim), (dim,), q_weight, 1e-6).norm(dim=-1),
    )  # turning keeps lengths
