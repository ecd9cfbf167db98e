"""The attention that transformers' models call for packs: on a CPU and in 32 bits it is transformers' own over SDPA."""

import pytest
import torch
import transformers

from millrace.connectors.trainers.fsdp import attention


@pytest.mark.parametrize("window", [None, 3])
def test_without_a_gpu_it_is_transformers_own(window: int | None) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.MistralConfig(**sizes, **heads, sliding_window=window)
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).eval()
    tokens = torch.randint(64, (1, 11))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])  # two samples
    attention.register()
    said = {}
    for name in ("sdpa", attention.PACKED):
        model.set_attn_implementation(name)
        with torch.no_grad():
            said[name] = model(tokens, position_ids=positions, use_cache=False).logits
    assert torch.equal(*said.values())
    with torch.no_grad():
        alone = model(tokens[:, 5:], position_ids=positions[:, 5:], use_cache=False).logits
    assert said["sdpa"][:, 5:] == pytest.approx(alone, abs=1e-5)
