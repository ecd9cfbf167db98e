"""Prompts with pictures on their way to an engine: one token a picture, and a count that must be the run's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.connectors.engines.client import GenerateRequest, OutputTokens
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.contracts.images import SentImage, SentImages
from millrace.core.errors import EngineError

PICTURES = SentImages(9, (SentImage(b"a", 3), SentImage(b"b", 2)))
IDS = [1, 9, 9, 9, 2, 9, 9, 3]


class Engine(SglangClient):
    """Keeps what is posted, and answers that the prompt had so many tokens."""

    def __init__(self, prompt_tokens: int) -> None:
        super().__init__("http://127.0.0.1:1", "engine-0")
        self.prompt_tokens = prompt_tokens
        self.posted: list[dict[str, Any]] = []

    async def post(self, path: str, body: Any, **_: Any) -> Any:
        self.posted.append(body)
        tokens = OutputTokens(np.array([5], dtype=np.int32), np.array([-0.5]))
        meta = {"finish_reason": {"type": "length"}, "weight_version": "0", "output_token_logprobs": tokens}
        return {"text": "", "meta_info": {**meta, "prompt_tokens": self.prompt_tokens}}


def request(images: SentImages | None) -> GenerateRequest:
    return GenerateRequest(
        input_ids=IDS, sampling_params={}, rid="a~00@b", progress_timeout_s=10, images=images
    )


async def test_an_engine_gets_one_token_and_a_file_for_each_picture() -> None:
    engine = Engine(len(IDS))
    await engine._ask(request(PICTURES))
    (body,) = engine.posted
    assert body["input_ids"] == [1, 9, 2, 9, 3]
    assert body["image_data"] == ["data:image/png;base64,YQ==", "data:image/png;base64,Yg=="]


async def test_a_prompt_of_text_is_sent_as_before() -> None:
    engine = Engine(len(IDS))
    await engine._ask(request(None))
    assert engine.posted[0]["input_ids"] == IDS
    assert "image_data" not in engine.posted[0]


async def test_an_engine_that_counts_others_is_refused_with_both_counts() -> None:
    with pytest.raises(EngineError, match="took 7 tokens for a prompt with pictures that has 8") as raised:
        await Engine(7)._ask(request(PICTURES))
    assert "preprocessor_config.json" in raised.value.remedy
    await Engine(7)._ask(request(None))
