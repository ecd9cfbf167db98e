"""A teacher on a server: its log-probabilities in each protocol, what an answer must hold, and whose tokenizer it has."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from millrace.connectors.http.posting import RefusedError, UnreachableError, UnreadableError
from millrace.connectors.teachers.served_teacher import ServedTeacher
from millrace.connectors.teachers.teacher_tokenizer import UnprovenError, differing_text
from millrace.core.config.algorithm.section import TeacherServer as Settings
from millrace.core.errors import ConfigError
from millrace.tasks.scoring.teacher_scores import ask_teacher
from tests.support.engine_process import CLOSE, embedded_engine, reference_logits, reference_logprobs
from tests.support.teacher_server import TeacherServer, teacher_server

TOKENS, RESPONSE = [10, 20, 30, 40, 50, 60, 12, 13], 5
PROTOCOLS = ["sglang", "vllm", "openai"]


@pytest.fixture
async def server(tiny_model: Path) -> AsyncIterator[TeacherServer]:
    async with teacher_server(tiny_model) as made:
        yield made


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("teacher") / "engine.log"
    with embedded_engine(tiny_model, "--dtype", "float32", log=log) as (url, _):
        yield url


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def asking(url: str, protocol: str = "openai", **changes: Any) -> ServedTeacher:
    model = None if protocol == "sglang" else "teacher"
    values = {"url": url, "protocol": protocol, "model": model, "attempts": 1, **changes}
    return ServedTeacher(Settings.model_validate(values))


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_logprobs_are_those_of_a_plain_forward_pass(
    server: TeacherServer, engine: str, tiny_model: Path, protocol: str
) -> None:
    teacher = asking(engine if protocol == "sglang" else server.url, protocol)
    found = await teacher.logprobs(TOKENS, RESPONSE)
    expected = reference_logprobs(tiny_model, TOKENS[:-RESPONSE], TOKENS[-RESPONSE:])
    assert found.logprobs == pytest.approx(expected, abs=CLOSE)
    assert (found.top_tokens, found.top_logprobs) == (None, None)


@pytest.mark.parametrize("k", [1, 7])
@pytest.mark.parametrize("protocol", ["sglang", "vllm"])
async def test_the_likeliest_tokens_are_those_of_a_plain_forward_pass(
    server: TeacherServer, engine: str, tiny_model: Path, protocol: str, k: int
) -> None:
    teacher = asking(engine if protocol == "sglang" else server.url, protocol, top_k=k)
    found = await teacher.logprobs(TOKENS, RESPONSE)
    logprobs = reference_logits(tiny_model, TOKENS[:-RESPONSE], TOKENS[-RESPONSE:]).log_softmax(-1)
    values, ids = logprobs.topk(k)
    assert found.top_logprobs == pytest.approx(values.flatten().tolist(), abs=CLOSE)
    assert found.top_tokens is not None
    by_token = [sorted(found.top_tokens[at : at + k]) for at in range(0, RESPONSE * k, k)]
    assert by_token == [sorted(row) for row in ids.tolist()]
    expected = reference_logprobs(tiny_model, TOKENS[:-RESPONSE], TOKENS[-RESPONSE:])
    assert found.logprobs == pytest.approx(expected, abs=CLOSE)


async def test_a_busy_server_is_asked_again_and_gets_the_key(
    server: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    server.refuse = 1
    teacher = asking(server.url, key="${env:TEACHER_KEY}", attempts=2)
    assert len((await teacher.logprobs(TOKENS, RESPONSE)).logprobs) == RESPONSE
    assert server.keys == ["Bearer secret"] * 2
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(ConfigError, match=r"algorithm.teacher_server.key.*TEACHER_KEY"):
        await teacher.logprobs(TOKENS, RESPONSE)


def shorter(answer: Any) -> Any:
    answer["choices"][0]["prompt_logprobs"].pop()
    return answer


def other_token(answer: Any) -> Any:
    answer["choices"][0]["prompt_logprobs"][-1] = {"3": {"logprob": -1.0, "rank": 1}}
    return answer


def no_number(answer: Any) -> Any:
    answer["choices"][0]["prompt_logprobs"][-1]["13"]["logprob"] = None
    return answer


def too_few(answer: Any) -> Any:
    entry = answer["choices"][0]["prompt_logprobs"][-2]
    entry.pop(list(entry)[1])  # the first is the prompt's own
    return answer


def no_likelihood(answer: Any) -> Any:
    entry = answer["choices"][0]["prompt_logprobs"][-3]
    min(entry.values(), key=lambda each: each["rank"])["logprob"] = float("-inf")
    return answer


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (too_few, "2 likeliest tokens for token 3 of the response, not 3"),
        (no_likelihood, "likeliest token for token 2 of the response has no finite log-probability"),
    ],
)
async def test_likeliest_tokens_that_are_missing_are_a_refusal(
    server: TeacherServer, spoil: Any, said: str
) -> None:
    server.spoil = spoil
    with pytest.raises(UnreadableError, match=said):
        await asking(server.url, "vllm", top_k=3).logprobs(TOKENS, RESPONSE)
    server.spoil = None
    with pytest.raises(RefusedError, match="up to 20 log-probabilities"):
        await asking(server.url, "vllm", top_k=21).logprobs(TOKENS, RESPONSE)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (shorter, "about other tokens than were sent"),
        (other_token, "about other tokens than were sent"),
        (no_number, "token 13, number 4 of the response, has log-probability None"),
        (lambda answer: {"choices": []}, "no log-probabilities of the prompt"),
        (lambda answer: 3, "no log-probabilities of the prompt"),
    ],
)
async def test_an_answer_about_something_else_is_refused(
    server: TeacherServer, spoil: Any, said: str
) -> None:
    server.spoil = spoil
    with pytest.raises(UnreadableError, match=said):
        await asking(server.url, "vllm").logprobs(TOKENS, RESPONSE)


async def test_no_server_and_no_echo_are_failures(server: TeacherServer) -> None:
    with pytest.raises(UnreachableError):
        await asking("http://127.0.0.1:9").logprobs(TOKENS, RESPONSE)
    with pytest.raises(RefusedError, match=r"404.*settings of algorithm.teacher_server"):
        await asking(f"{server.url}/v2").logprobs(TOKENS, RESPONSE)
    server.spoil = lambda answer: {**answer, "usage": {"prompt_tokens": 9}}
    with pytest.raises(UnreadableError, match=r"other tokens.*look at algorithm.teacher_server.protocol"):
        await asking(server.url).logprobs(TOKENS, RESPONSE)


async def test_a_failed_request_is_the_samples_failure_and_names_no_secret(
    server: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret-of-mine")
    row: Any = {"status": "completed", "tokens": TOKENS, "response_length": RESPONSE}
    server.spoil = lambda answer: {"error": server.keys[-1]}
    taught = await ask_teacher(asking(server.url, key="${env:TEACHER_KEY}"), None, row)
    assert taught.logprobs is None
    assert taught.reason is not None
    assert taught.reason.startswith("algorithm.teacher_server")
    assert "secret-of-mine" not in taught.reason
    assert "${env:TEACHER_KEY}" in taught.reason
    server.spoil = None
    assert (await ask_teacher(asking(server.url), None, {**row, "status": "failed"})).seconds is None
    assert (await ask_teacher(asking(server.url), None, row)).reason is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_models_own_tokenizer_is_recognised(
    server: TeacherServer, engine: str, tokenizer: Any, protocol: str
) -> None:
    teacher = asking(engine if protocol == "sglang" else server.url, protocol)
    assert await differing_text(teacher, tokenizer) is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("change", ["moved", "special"])
async def test_another_tokenizer_is_found_out(
    server: TeacherServer, engine: str, tiny_model: Path, tmp_path: Path, protocol: str, change: str
) -> None:
    """One whose ids are moved by one, and one that lacks a special token alone."""
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    file = tmp_path / "tokenizer.json"
    text = file.read_text()
    changed = text.replace('"f": ', '"g": ', 1) if change == "moved" else text.replace("<user>", "<person>")
    assert changed != text
    file.write_text(changed)
    teacher = asking(engine if protocol == "sglang" else server.url, protocol)
    assert await differing_text(teacher, Tokenizer.from_file(str(file))) is not None


async def test_a_server_that_shows_no_tokens_proves_nothing(server: TeacherServer, tokenizer: Any) -> None:
    def nameless(answer: Any) -> Any:
        shown = answer["choices"][0]["logprobs"]
        shown["tokens"] = [f"token_id:{at}" for at in range(len(shown["tokens"]))]
        return answer

    server.spoil = nameless
    with pytest.raises(UnprovenError):
        await differing_text(asking(server.url), tokenizer)
    assert await differing_text(asking(server.url, same_tokenizer=True), tokenizer) is None
    with pytest.raises(UnprovenError):
        await differing_text(asking(server.url), None)
