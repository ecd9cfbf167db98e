"""Parts of transformers' models that are computed in one pass: each family's model gives the same logits and gradients."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers

from millrace.connectors.trainers.fsdp.adapters import LinearPair, pairs_of
from millrace.connectors.trainers.fsdp.fused_parts import FAMILIES, ROTATED, fuse
from millrace.connectors.trainers.fsdp.packed_model import move

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 8},
    "Mistral": {"head_dim": 8},
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8, "num_experts": 4, "mlp_only_layers": [0]},
    "DeepseekV3": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
}


def test_each_family_has_a_model_here() -> None:
    assert set(OF_FAMILY) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_fused_model_is_the_same_function(
    family: str, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **OF_FAMILY[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", own := modeling.apply_rotary_pos_emb)
    tokens = torch.randint(64, (1, 11))
    if adapted:
        for name, part in [*model.model.named_modules()]:
            if isinstance(part, torch.nn.Linear):
                a, b = torch.randn(2, part.in_features), torch.randn(part.out_features, 2)
                LinearPair(name, part, a, b, 0.1)

    def passed() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(tokens, use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        return [logits.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    before = passed()
    assert all(part.A.grad is not None and part.A.grad.abs().sum() > 0 for part in pairs_of(model))
    fuse(model)
    for found, expected in zip(passed(), before, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    replaced = {type(part).__name__ for part in model.modules() if "forward" in vars(part)}
    assert {name.removeprefix(family) for name in replaced} == {"RMSNorm", "MLP"}
    assert (modeling.apply_rotary_pos_emb is not own) == (family in ROTATED)


def test_another_activation_stays() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "hidden_act": "gelu"})
    model = transformers.LlamaForCausalLM(config)
    fuse(model.model.layers[0].mlp)
    assert "forward" not in vars(model.model.layers[0].mlp)


def test_frozen_parameters_are_cast_and_trained_ones_and_buffers_are_not() -> None:
    config = transformers.DeepseekV3Config(**{**SIZES, **OF_FAMILY["DeepseekV3"]})
    model = transformers.DeepseekV3ForCausalLM(config)
    model.requires_grad_(False).lm_head.requires_grad_(True)
    move(list(model.modules()), torch.device("cpu"), torch.bfloat16)
    assert {each.dtype for each in model.model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight.dtype == torch.float32
    biases = [each.dtype for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases == [torch.float32]
