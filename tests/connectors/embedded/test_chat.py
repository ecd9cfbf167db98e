"""Chat completions of the embedded engine: what a judge or a client of OpenAI's library gets."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.engine_process import embedded_engine

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[str]:
    log = tmp_path_factory.mktemp("chat") / "engine.log"
    with embedded_engine(tiny_model, log=log) as (address, _):
        yield address


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_answers_what_generate_gives_for_the_rendered_messages(url: str, tiny_model: Path) -> None:
    asked = {"model": "judge", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    status, answer = post(url, "/v1/chat/completions", asked)
    text = AutoTokenizer.from_pretrained(tiny_model).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    params = {"temperature": 0, "max_new_tokens": 8}
    _, native = post(url, "/generate", {"text": text, "sampling_params": params})
    (choice,) = answer["choices"]
    assert status == 200
    assert (answer["object"], answer["model"]) == ("chat.completion", "judge")
    assert choice["message"]["content"] == native["text"]
    assert choice["finish_reason"] == native["meta_info"]["finish_reason"]["type"]
    assert answer["usage"]["prompt_tokens"] == native["meta_info"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == native["meta_info"]["completion_tokens"]


def test_openais_library_reads_it_and_a_seed_repeats_it(url: str) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    found = {
        client.chat.completions.create(model="m", messages=MESSAGES, seed=seed, max_completion_tokens=12)
        .choices[0]
        .message.content
        for seed in (1, 1, 2)
    }
    assert len(found) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages: a list of messages is wanted"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: it is int, not text or parts"),
        ({"tools": [{}]}, "tools: not supported by this engine"),
        ({"stream": True}, "n, stream: one completion is given"),
        ({"temperature": -1}, "sampling_params.temperature = -1: must be in [0, "),
        ({"max_tokens": 10**6}, ""),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_field(url: str, change: dict[str, Any], says: str) -> None:
    status, answer = post(url, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4} | change)
    assert status == 400
    assert says in answer["message"]
