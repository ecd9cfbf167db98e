"""The fused head on a GPU: against float64, and against the logits of a plain model in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import transformers  # noqa: E402

from millrace.connectors.trainers.ops import logprobs
from tests.support import head_checks  # noqa: E402
from tests.support.distances import distance  # noqa: E402

TOLERANCE = 1e-3  # mean distance of log-probabilities and entropies
GRADIENTS = 2e-2  # relative, of two backward passes in bfloat16
TOKENS, TEMPERATURE = 256, 0.7


class Alone:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_and_gradients_are_those_of_float64(ranks: int) -> None:
    """Two ranks share the GPU."""
    head_checks.main("cuda", ranks)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [4097, 18_992, 151_936])
def test_the_fused_head_is_that_of_a_plain_model_in_bfloat16(vocab: int, tied: bool) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).to("cuda", torch.bfloat16)
    tokens = torch.randint(vocab, (1, TOKENS + 1), device="cuda")
    targets = tokens[0, 1:]
    g, h = torch.randn(2, TOKENS, device="cuda")

    logits = model(tokens[:, :-1]).logits[0]
    logp = (logits.float() / TEMPERATURE).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    wanted = _gradients(model, expected, g, h)

    hidden = model.model(tokens[:, :-1]).last_hidden_state[0]
    found = logprobs.token_logprobs(
        hidden, model.lm_head.weight, targets,
        vocab=vocab, group=Alone(), temperature=TEMPERATURE, chunk=16, entropy=True,
    )  # fmt: skip
    assert found[1] is not None
    for ours, plain in zip(found[:2], expected, strict=True):
        assert (ours - plain).abs().mean() < TOLERANCE
    got = _gradients(model, (found[0], found[1]), g, h)
    assert {name for name in wanted if distance(got[name], wanted[name]) > GRADIENTS} == set()


def _gradients(model: Any, values: tuple[Tensor, Tensor], g: Tensor, h: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters, by name, of a weighted sum of log-probabilities and entropies."""
    model.zero_grad()
    ((values[0] * g).sum() + (values[1] * h).sum()).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
