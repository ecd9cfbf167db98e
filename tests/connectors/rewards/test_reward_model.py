"""A reward model behind HTTP: a tiny sequence classifier that is served in the forms of three servers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from millrace.connectors.http.posting import RefusedError, UnreadableError
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.rewards.reward_model import reward_model
from millrace.core.errors import ConfigError
from millrace.core.hooks.protocols import RewardInput
from tests.support.loopback import listening

SAMPLE = RewardInput(prompt="1+1=", response="2")


class Served:
    """The model, its folder, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        build_tokenizer().save_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(0)
        size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
        config = Qwen3Config(
            vocab_size=len(self.tokenizer),
            num_attention_heads=2,
            num_key_value_heads=2,
            num_labels=1,
            pad_token_id=0,
            **size,
        )
        self.model = Qwen3ForSequenceClassification(config).eval()
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    def score(self, text: str) -> float:
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            return float(self.model(input_ids=ids).logits[0, 0])

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(body := await request.json())
        match request.path:
            case "/classify":
                return web.json_response({"embedding": [self.score(body["text"])], "meta_info": {}})
            case "/pooling":
                return web.json_response({"data": [{"index": 0, "data": [self.score(body["input"])]}]})
            case "/predict":
                return web.json_response([{"score": self.score(body["inputs"]), "label": "LABEL_0"}])
            case "/two/classify":
                return web.json_response({"embedding": [0.5, 0.5]})
        return web.Response(status=404, text="no such path")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    async with listening(made.answer) as made.url:
        yield made


@pytest.mark.parametrize("server", ["sglang", "vllm", "tei"])
async def test_each_server_gives_the_models_score(served: Served, server: Any) -> None:
    expected = served.score("1+1=2")
    assert expected != served.score("1+1=3")
    result = await reward_model(SAMPLE, url=served.url, server=server)
    assert result.reward == pytest.approx(expected)
    assert result.parts == {"score": result.reward}
    bent = await reward_model(SAMPLE, url=f"{served.url}/", server=server, transform="sigmoid")
    assert bent.reward == pytest.approx(1 / (1 + math.exp(-expected)))


async def test_the_dialogue_is_rendered_by_the_reward_models_template(served: Served) -> None:
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    text = served.tokenizer.apply_chat_template(messages, tokenize=False)
    for prompt in ("1+1=", messages[:1]):
        await reward_model(RewardInput(prompt, "2"), url=served.url, tokenizer=served.folder)
        assert served.asked[-1]["text"] == text.removeprefix(served.tokenizer.bos_token or "")
    await reward_model(RewardInput("", "2", messages=messages), url=served.url, tokenizer=served.folder)
    assert served.asked[-1] == served.asked[0]


async def test_what_is_no_score_and_a_server_of_another_form_are_named(served: Served) -> None:
    with pytest.raises(UnreadableError, match="holds no single score"):
        await reward_model(SAMPLE, url=f"{served.url}/two")
    with pytest.raises(RefusedError, match="404"):
        await reward_model(SAMPLE, url=f"{served.url}/nowhere")
    with pytest.raises(ConfigError, match="nothing says how to render them"):
        await reward_model(RewardInput([{"role": "user", "content": "?"}], "2"), url=served.url)
    with pytest.raises(ConfigError, match="tgi is not a choice; give sglang or vllm or tei"):
        await reward_model(SAMPLE, url=served.url, server="tgi")  # type: ignore[arg-type]
