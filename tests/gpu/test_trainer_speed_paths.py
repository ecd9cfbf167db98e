"""The trainer's fast ways on a GPU equal the plain ones: kernels, packed attention, log-probabilities, optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from millrace.connectors.trainers.megatron.model import attention
from millrace.connectors.trainers.ops import dense_attention, logprobs, pack_attention
from millrace.core.contracts.task_records import StepRequest
from tests.support import kernel_checks, trainer_ranks  # noqa: E402
from tests.support.distances import distance  # noqa: E402

LENGTHS = [[128], [1, 700, 33, 64, 256, 2], [512, 512, 512]]


class Alone:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def test_kernels_compute_their_definitions_and_gradients() -> None:
    kernel_checks.main("cuda")


def assert_attends_to_each_sequence_alone(
    fast: Callable[..., Tensor], lengths: list[int], kv_heads: int, head_dim: int
) -> None:
    """fast(q, k, v, bounds) and its gradients are those of a call of its own for each sequence, in fp32."""
    torch.manual_seed(0)
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    shapes = [(bounds[-1], heads, head_dim) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    grad = torch.randn_like(q)
    out = fast(q, k, v, bounds)
    out.backward(grad)
    slow = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = torch.cat([attention.whole(*(x[a:b] for x in slow), None) for a, b in pairwise(bounds)])
    expected.backward(grad.float())
    assert distance(out, expected) < 1e-2
    for given, plain in zip((q, k, v), slow, strict=True):
        assert given.grad is not None
        assert plain.grad is not None
        assert distance(given.grad, plain.grad) < 2e-2


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_attention_is_that_of_each_sequence_alone(lengths: list[int], kv_heads: int) -> None:
    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
        cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        return pack_attention.varlen(q, k, v, cu, cu, max(lengths), max(lengths), None)

    assert_attends_to_each_sequence_alone(varlen, lengths, kv_heads, head_dim=64)


@pytest.mark.parametrize("lengths", [[1024, 1024], [1500, 7, 1030, 3000, 1400, 3, 1024], [1100]])
def test_long_sequences_are_attended_to_as_alone_whatever_lies_beside_them(lengths: list[int]) -> None:
    def dense(q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
        if not dense_attention.usable(q):
            pytest.skip("this GPU is left to variable-length attention")
        ways = {"varlen": pack_attention.short, "dense": dense_attention.cudnn}
        return dense_attention.attend(q, k, v, bounds, None, **ways)

    assert_attends_to_each_sequence_alone(dense, lengths, kv_heads=2, head_dim=128)


def test_queries_of_a_part_attend_to_all_keys_before_their_end() -> None:
    torch.manual_seed(0)
    queries, keys = [64, 100], [192, 100]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32).cuda()
        for n in (queries, keys)
    )
    q = torch.randn(164, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(292, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = attention.varlen(q, k, v, cu_q, cu_k, 100, 192, None)
    for part in range(2):
        a, b, s, e = (int(cu[part + i]) for cu in (cu_q, cu_k) for i in (0, 1))
        expected = attention.whole(q[a:b].float(), k[s:e].float(), v[s:e].float(), None)
        assert distance(found[a:b], expected) < 1e-2


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
def test_fused_log_probabilities_and_gradients_are_those_of_a_softmax(entropy: bool, main_grad: bool) -> None:
    torch.manual_seed(0)
    count, hidden_size, vocab, padded, temperature = 300, 64, 1000, 1008, 0.8
    hidden = torch.randn(count, hidden_size, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(padded, hidden_size, device="cuda") * 0.2).bfloat16().requires_grad_()
    targets = torch.randint(vocab, (count,), device="cuda")
    if main_grad:
        weight.main_grad = torch.ones(weight.shape, device="cuda")  # type: ignore[attr-defined]
    found, entropies, _ = logprobs.token_logprobs(
        hidden,
        weight,
        targets,
        vocab=vocab,
        group=Alone(),
        temperature=temperature,
        chunk=32,
        entropy=entropy,
    )
    g = torch.randn_like(found)
    ((found * g).sum() + (0 if entropies is None else (entropies * g).sum())).backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logp = (h @ w[:vocab].t() / temperature).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0]
    total = (expected * g.double()).sum()
    if entropies is not None:
        entropy_expected = -(logp.exp() * logp).sum(-1)
        total = total + (entropy_expected * g.double()).sum()
        assert distance(entropies, entropy_expected) < 5e-3
    total.backward()
    assert distance(found, expected) < 5e-3
    assert hidden.grad is not None
    assert h.grad is not None
    assert distance(hidden.grad, h.grad) < 2e-2
    given = weight.main_grad - 1 if main_grad else weight.grad  # type: ignore[attr-defined]
    assert (weight.grad is None) == main_grad
    assert w.grad is not None
    assert distance(given, w.grad) < 2e-2


def weights_after(settings: dict[str, Any], urls: list[str], fast: bool) -> tuple[list[Tensor], list[float]]:
    from millrace.connectors.trainers.megatron.rank import TrainerRank

    rank = TrainerRank(settings, 0, 1)
    rank.setup(rank.address())
    try:
        assert rank.learner.policy._fused
        if not fast:
            rank.learner.policy._fused = False
            for part in rank.optimizer.chained_optimizers:
                vars(part).pop("_copy_main_params_to_model_params", None)
                for group in part.optimizer.param_groups:
                    group["fused"] = False
        norms = [rank.train(StepRequest(i + 1, url))["grad_norm"] for i, url in enumerate(urls)]
        mains = [p.detach().clone() for group in rank.optimizer.param_groups for p in group["params"]]
        return mains + [p.detach().clone() for p in rank.policy.parameters()], norms
    finally:
        rank.shutdown()


@pytest.mark.parametrize("clip", [0.05, 1e6])
@pytest.mark.parametrize("distributed", [False, True])
def test_the_fast_optimizer_step_is_megatrons(tmp_path: Path, clip: float, distributed: bool) -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**sizes, **heads, vocab_size=trainer_ranks.VOCAB)
    ).save_pretrained(tmp_path / "model")
    settings = trainer_ranks.configuration(
        tmp_path / "model",
        device="cuda",
        dtype="bfloat16",
        max_pack_tokens=256,
        optimizer={"clip_grad": clip, "distributed": distributed},
    )
    urls = [
        trainer_ranks.write_batch(tmp_path / str(step), trainer_ranks.samples(step)) for step in (1, 2, 3)
    ]
    fast, fast_norms = weights_after(settings, urls, fast=True)
    plain, plain_norms = weights_after(settings, urls, fast=False)
    assert fast_norms == pytest.approx(plain_norms, rel=1e-2)
    for one, other in zip(fast, plain, strict=True):
        assert distance(one, other) < 5e-3
