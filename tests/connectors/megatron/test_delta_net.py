"""Gated delta net over packs: chunks give what the recurrence gives, and no sequence sees another, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from millrace.connectors.trainers.megatron.model.delta_rule import gated_delta_rule, short_convolution
from millrace.core.config import RunConfig
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.delta_net import CHUNK, DeltaNet
from millrace.flows.preflight.check_model import ReadModel, check_model
from tests.connectors.megatron.test_layout_parity import gradients, stored
from tests.support.gpu_families import PlainModel, gaps
from tests.support.trainer_ranks import Workers, configuration, log_probabilities, samples, write_batch

LENGTHS = [3, CHUNK, 1, 3 * CHUNK + 7, CHUNK + 1, 2]
KEY_HEADS, HEADS, KEY, VALUE = 2, 6, 5, 7


def bounds_of(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def drawn(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, logarithms of decays and betas: some tokens forget nearly all, some nothing."""
    torch.manual_seed(0)
    query, key = (torch.randn(tokens, KEY_HEADS, KEY, dtype=dtype) for _ in range(2))
    value, decay, beta = (torch.randn(tokens, HEADS, *more, dtype=dtype) for more in ((VALUE,), (), ()))
    return [x.requires_grad_() for x in (query, key, value, -decay.exp().square(), beta.sigmoid())]


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One sequence, a token after the other, as equation 10 of arXiv:2412.06464 says."""
    query, key = (F.normalize(x, dim=-1).repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (query, key))
    state, out = torch.zeros(HEADS, VALUE, KEY, dtype=value.dtype), []
    for q, k, v, a, b in zip(query, key, value, decay.exp(), beta, strict=True):
        erased = torch.eye(KEY, dtype=k.dtype) - b[:, None, None] * k[:, :, None] * k[:, None, :]
        state = a[:, None, None] * state @ erased + b[:, None, None] * v[:, :, None] * k[:, None, :]
        out.append((state @ q[:, :, None])[..., 0] / math.sqrt(KEY))
    return torch.stack(out)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-5), (torch.float32, 5e-5)])
def test_chunks_of_a_pack_are_the_recurrence_of_each_sequence_and_so_are_gradients(
    dtype: torch.dtype, close: float
) -> None:
    """Close, not equal: lengths of keys have a small number under their root."""
    inputs = drawn(sum(LENGTHS), dtype)
    found = gated_delta_rule(*inputs, bounds_of(LENGTHS))
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    expected = torch.cat([recurrence(*part) for part in parts])
    torch.testing.assert_close(found, expected, atol=close, rtol=0)
    weights = torch.randn(found.shape, dtype=dtype)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for ours, grad in zip(torch.autograd.grad((found * weights).sum(), inputs), theirs, strict=True):
        torch.testing.assert_close(ours, grad, atol=10 * close, rtol=10 * close)


def test_a_sequence_gives_the_same_alone_and_in_any_pack() -> None:
    inputs = drawn(sum(LENGTHS))
    bounds = bounds_of(LENGTHS)
    packed = gated_delta_rule(*inputs, bounds)
    weight = torch.randn(4, 1, 3, dtype=torch.float64)
    x = torch.randn(sum(LENGTHS), 4, dtype=torch.float64)
    convolved = short_convolution(x, weight, bounds)
    for start, end in pairwise(bounds):
        alone = gated_delta_rule(*(each[start:end] for each in inputs), [0, end - start])
        torch.testing.assert_close(packed[start:end], alone, atol=1e-12, rtol=0)
        padded = F.pad(x[start:end].t()[None], (2, 0))
        expected = F.conv1d(padded, weight, groups=4)[0].t()
        torch.testing.assert_close(convolved[start:end], expected, atol=1e-12, rtol=0)


def test_a_long_memory_has_no_gradient_that_is_not_finite() -> None:
    """The logarithms of what is left after a chunk are far below those that float32 has an exponential of."""
    inputs = drawn(3 * CHUNK, torch.float32)
    inputs[3] = (100 * inputs[3].detach()).requires_grad_()
    out = gated_delta_rule(*inputs, [0, 3 * CHUNK])
    assert out.isfinite().all()
    for grad in torch.autograd.grad(out.square().sum(), inputs):
        assert grad.isfinite().all()


def test_rows_are_found_by_key_head() -> None:
    delta = DeltaNet((0,), key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel=4)
    sizes = {"q": 3, "k": 3, "v": 10, "z": 10, "b": 2, "a": 2}
    stored_rows = [
        f"{name}{head}.{row}"
        for names in ("qkvz", "ba")
        for head in range(2)
        for name in names
        for row in range(sizes[name])
    ]
    assert [stored_rows[row] for row in delta.rows_by_key_head()] == [
        f"{name}{head}.{row}" for name in "qkvzba" for head in range(2) for row in range(sizes[name])
    ]


@pytest.mark.parametrize(
    "parallel", [{}, pytest.param({"tensor": 2, "sequence": True, "context": 2}, marks=pytest.mark.slow)]
)
def test_texts_of_several_chunks_in_a_pack_are_those_of_hugging_face(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, parallel: dict[str, Any]
) -> None:
    folder = model("qwen3_next", max_position_embeddings=512)
    rows = samples(1, longest=3 * CHUNK)
    assert max(len(row["tokens"]) for row in rows) > 2 * CHUNK
    plain = PlainModel(folder, torch.float32, "cpu")
    expected, grads = plain.scored(rows), plain.gradients(rows, tmp_path / "plain")
    url = write_batch(tmp_path / "batch", rows)
    config = configuration(
        folder, 4 if parallel else 1, parallel=parallel, max_pack_tokens=512, optimizer={"distributed": False}
    )
    with workers.group(config) as group:
        found = {name: torch.tensor(each) for name, each in group.run(log_probabilities, url)[0].items()}
        group.run(gradients, url, str(tmp_path / "gradients"))
    assert gaps(found, expected)[1] < 1e-4
    ours = stored(tmp_path / "gradients")
    for name, grad in grads.items():
        assert float((ours[name] - grad).abs().max()) < 1e-4 * max(1e-2, float(grad.abs().max())), name


REFUSED: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "more ranks than key heads": (
        8,
        {"tensor": 8, "sequence": True},
        "trainer.parallel.tensor",
        "does not divide the 4 key heads of the model's delta net",
    ),
    "more context parallel ranks than a rank's key heads": (
        8,
        {"context": 4, "tensor": 2, "sequence": True},
        "trainer.parallel.context",
        "does not divide the 2 key heads of the model's delta net on a tensor parallel rank",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_cannot_cut_the_heads_are_refused(model: Callable[..., Path], name: str) -> None:
    ranks, parallel, field, reason = REFUSED[name]
    folder = model("qwen3_next", num_attention_heads=8, num_key_value_heads=8)
    config = configuration(folder, ranks, parallel=parallel)
    problems = [*check_model(RunConfig.model_validate(config), False, ReadModel())]
    assert [problem.field for problem in problems if reason in problem.reason] == [field]


def test_a_token_costs_the_operations_of_its_layers(model: Callable[..., Path]) -> None:
    """The memory does not grow with a text: its operations by token are the same at every length."""
    folder = model("qwen3_next")
    arch = architecture(read_hf_config(str(folder)))
    full = architecture({**read_hf_config(str(folder)), "linear_layers": []})
    assert arch.delta_layers == (0,)
    assert arch.delta is not None
    assert arch.flops(1000) == by_hand(arch, 1000)
    assert full.kv_bytes(4, 1, latents=False) == 2 * arch.kv_bytes(4, 1, latents=False)


def by_hand(arch: Architecture, tokens: int) -> int:
    d = arch.delta
    assert d is not None
    attention = arch.heads * 2 * arch.head_dim * tokens**2  # of the one layer that has it
    within = 2 * d.key_heads * 2 * CHUNK * d.key_dim + d.value_heads * CHUNK * (d.key_dim + 3 * d.value_dim)
    memory = d.value_heads * 3 * 2 * d.key_dim * d.value_dim
    convolution = 2 * d.kernel * d.channels
    return 2 * tokens * arch.products + attention + tokens * (within + memory + convolution)
