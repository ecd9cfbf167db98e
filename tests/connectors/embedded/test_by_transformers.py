"""A family that core.families does not know: the engine's slots compute what transformers' model computes of the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from millrace.connectors.engines.embedded.model import make_decoder, make_weights, read_shape, read_tensors
from millrace.connectors.engines.embedded.sampling import SamplingParams
from millrace.connectors.engines.embedded.slots import Request, Slots
from tests.connectors.fsdp.conftest import save_gemma3
from tests.support.trainer_ranks import VOCAB

TEXTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [2, 7], [1, 8, 2, 8])
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma3(tmp_path_factory.mktemp("gemma3"))


def decoded(folder: Path, texts: tuple[list[int], ...]) -> list[torch.Tensor]:
    """Logits [STEPS + 1, V] of each text's greedy tokens, computed together."""
    shape = read_shape(folder)
    decoder = make_decoder(make_weights(shape, read_tensors(folder, shape, None), folder))
    slots = Slots(decoder, max_running=8, max_total_tokens=1024)
    params = SamplingParams(max_new_tokens=STEPS)
    requests = [Request(str(i), list(text), params, 0, lambda _: None) for i, text in enumerate(texts)]
    rows = [slots.admit(requests)]
    for _ in range(STEPS):
        for request, logits in zip(requests, rows[-1], strict=True):
            request.output.append(int(logits.argmax()))
        rows.append(slots.step())
    return [torch.stack([row[i] for row in rows]) for i in range(len(texts))]


def test_every_step_has_the_logits_of_the_whole_text(folder: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text, logits in zip(TEXTS, decoded(folder, TEXTS), strict=True):
        tokens = torch.tensor([text + logits.argmax(-1).tolist()[:STEPS]])
        with torch.no_grad():
            expected = plain(tokens).logits[0, len(text) - 1 :]
        assert logits.shape == (STEPS + 1, VOCAB)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_row_depends_on_no_other(folder: Path) -> None:
    together = decoded(folder, TEXTS)
    for number, text in enumerate(TEXTS):
        assert torch.equal(decoded(folder, (text,))[0], together[number])
