"""Latent attention over the engine's cache: each next token has the logits of Hugging Face's forward pass over the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.connectors.engines.embedded.model import Decoder, Weights, read_shape, read_tensors
from millrace.connectors.engines.embedded.sampling import SamplingParams
from millrace.connectors.engines.embedded.slots import Request, Slots
from tests.support.tiny_models import save_tiny_model

VOCABULARY = 37


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "qwen3_next"])
def test_decoded_tokens_have_the_logits_of_the_whole_text(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(tmp_path / family, family, VOCABULARY)
    shape = read_shape(folder)
    slots = Slots(
        Decoder(Weights(shape, read_tensors(folder, shape, None))), max_running=16, max_total_tokens=4096
    )
    torch.manual_seed(3)
    texts = torch.randint(VOCABULARY, (2, 30))
    requests = [
        Request(str(row), text[:length].tolist(), SamplingParams(max_new_tokens=20), 0, lambda _: None)
        for row, (text, length) in enumerate(zip(texts, (11, 17), strict=True))
    ]
    found = [slots.admit(requests)]
    for step in range(10):
        for request, text in zip(requests, texts, strict=True):
            request.output.append(int(text[len(request.prompt) + step]))
        found.append(slots.step())
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(texts).logits
    for row, request in enumerate(requests):
        start = len(request.prompt) - 1
        expected = whole[row, start : start + len(found)]
        torch.testing.assert_close(torch.stack(found)[:, row], expected, atol=1e-5, rtol=0)
