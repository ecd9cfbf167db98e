"""A real pretrained model is the same after a conversion there and back, and answers as in transformers."""

from __future__ import annotations

import filecmp
import os
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.connectors.huggingface.pretrained import make_smollm2
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import Workplace

PROMPTS, ANSWER = 50, 32

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name, reason="pip install 'millrace[pretrained]'")
    folder, file = tmp_path_factory.mktemp("smollm2") / "model", os.environ.get("MILLRACE_SMOLLM2")
    make_smollm2(folder, Path(file) if file else None)
    return folder


def test_there_and_back_it_is_the_same_file_for_file(smollm2: Path, tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    said = place.call("convert", str(smollm2), "there", "--verify")
    assert f"there: equal to {smollm2}, bit for bit" in " ".join(said.split())
    place.call("convert", "there", "back")
    names = [path.name for path in smollm2.iterdir()]
    _, other, missing = filecmp.cmpfiles(smollm2, tmp_path / "back", names, shallow=False)
    assert missing == []
    assert [name for name in other if not name.endswith(".safetensors")] == []
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
        for folder in (smollm2, tmp_path / "back")
    )
    assert theirs.keys() == ours.keys()
    assert all(
        torch.equal(tensor, ours[name]) and tensor.dtype == ours[name].dtype
        for name, tensor in theirs.items()
    )


def test_the_embedded_engine_gives_transformers_greedy_answers(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    chats = [
        [{"role": "user", "content": f"What is {3 * n + 4} + {7 * n % 90 + 3}?"}] for n in range(PROMPTS)
    ]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    greedy = {"temperature": 0, "max_new_tokens": ANSWER}
    with embedded_engine(smollm2, "--dtype", "float32", log=tmp_path / "engine.log") as (url, _):
        body = {"input_ids": prompts, "sampling_params": [greedy] * PROMPTS}
        answers = httpx.post(f"{url}/generate", json=body, timeout=600).raise_for_status().json()
    by_length: dict[int, list[int]] = {}  # prompts of a length need no padding
    for at, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(at)
    for length, places in by_length.items():
        batch = torch.tensor([prompts[at] for at in places])
        whole = model.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=ANSWER
        )
        for at, row in zip(places, whole[:, length:].tolist(), strict=True):
            expected = row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row
            assert answers[at]["output_ids"] == expected
