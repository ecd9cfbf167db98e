"""The engine's process: where it listens, how it fails, how it ends, stop strings over its tokenizer."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from millrace.connectors.engines.client import GenerateRequest
from millrace.connectors.engines.embedded.sampling import SamplingParams
from millrace.connectors.engines.embedded.text import Text
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.errors import EngineError
from tests.support.chat_templates import tokenizer_of
from tests.support.engine_process import embedded_engine


def test_it_listens_on_loopback_only_and_ends_when_told(tiny_model: Path, tmp_path: Path) -> None:
    with embedded_engine(tiny_model, log=tmp_path / "log") as (url, process):
        listening = [c for c in psutil.Process(process.pid).net_connections("inet") if c.status == "LISTEN"]
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
        with urllib.request.urlopen(url + "/server_info", timeout=30) as answer:
            assert json.load(answer)["pid"] == process.pid
        process.terminate()
        assert process.wait(timeout=30) == 0


async def test_a_prompt_that_gives_no_finite_logits_is_refused_where_its_answer_enters_and_no_other(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][50] = math.inf
    save_file(tensors, file, metadata={"format": "pt"})

    def request(rid: str, ids: list[int]) -> GenerateRequest:
        params = {"max_new_tokens": 4, "sampling_seed": 1}
        return GenerateRequest(input_ids=ids, sampling_params=params, rid=rid, progress_timeout_s=60)

    with embedded_engine(tmp_path / "model", log=tmp_path / "log") as (url, _):
        client = SglangClient(url, "engine-0")
        try:
            for number in range(2):
                with pytest.raises(
                    EngineError, match=r"request bad.*output token 0 is nan.*no finite logits"
                ):
                    await client.generate(request(f"bad{number}", [10, 50]))
                good = await client.generate(request(f"good{number}", [10, 20]))
                assert len(good.logprobs) == 4
        finally:
            await client.close()


def test_a_wrong_model_path_ends_it_with_the_path_and_no_traceback(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "millrace.connectors.engines.embedded",
        "--model-path",
        str(tmp_path / "nowhere"),
        "--port",
        "0",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert str(tmp_path / "nowhere") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def text(tiny_model: Path) -> Text:
    return Text(tiny_model)


@pytest.mark.parametrize(
    ("output", "stop", "expected"),
    [
        ("12=3\nrest", ["\n"], "12=3"),
        ("abcabc", ["ca", "bc"], "a"),
        ("abc", ["x"], None),
        ("aaaa", ["aa"], ""),
    ],
)
def test_stop_strings_cut_the_text_before_the_first_of_them(
    text: Text, output: str, stop: list[str], expected: str | None
) -> None:
    found = text.find_stop(text.encode(output), SamplingParams(stop=stop))
    assert (found.text if found else None) == expected


def test_without_trimming_the_text_stays_whole(text: Text) -> None:
    found = text.find_stop(text.encode("12=3\n"), SamplingParams(stop=["\n"], no_stop_trim=True))
    assert found is not None
    assert found.text == "12=3\n"


@pytest.mark.parametrize("stop", ["本" * 20, "🙂" * 6, "é!"], ids=["kanji", "emoji", "letters"])
def test_a_stop_text_is_found_whose_tokens_are_its_bytes(tmp_path: Path, stop: str) -> None:
    tokenizer_of("chatml").save_pretrained(tmp_path)
    of_bytes = Text(tmp_path)
    tokens = of_bytes.encode(f"the answer {stop} and")
    params = SamplingParams(stop=[stop], no_stop_trim=True)
    found = (of_bytes.find_stop(tokens[:end], params) for end in range(1, len(tokens)))
    assert next(each.text for each in found if each) == f"the answer {stop}"


def test_end_of_sequence_ids_come_from_the_checkpoint(text: Text) -> None:
    assert text.eos == {1}
