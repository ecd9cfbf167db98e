"""The experts in an engine's answers: those that Hugging Face's routers choose, each from the request that first fed its token."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.connectors.engines.client import AskedExperts, GenerateRequest, Generation
from millrace.connectors.engines.dispatcher import Dispatcher
from millrace.connectors.engines.dispatching.pieces import ended_at_stop, joined, segment
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.engines.sglang.wire.answer_body import read_answer
from millrace.core.errors import EngineError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.routed_experts import RoutedRows, RoutingFormat
from tests.support.engine_process import embedded_engine, peaked_model

PROMPT = [10, 20, 30, 40, 50]
SHORT = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 5}
FORM = RoutingFormat(layers=2, expert_layers=(1,), experts=4, used=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("routed")
    return [peaked_model(folder / str(seed), seed, experts=4) for seed in (0, 1)]


@pytest.fixture(scope="module")
def form(models: list[Path]) -> RoutingFormat:
    found = RoutingFormat.of(architecture(read_hf_config(str(models[0]))))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def engine(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("engine") / "log"
    with embedded_engine(models[0], "--dtype", "float32", log=log) as (url, _):
        yield url


@pytest.fixture
async def client(engine: str, models: list[Path]) -> AsyncIterator[SglangClient]:
    made = SglangClient(engine, "engine-0")
    await made.weights.update_from_disk(str(models[0]), 0)
    yield made
    await made.close()


def request(ids: Sequence[int], form: RoutingFormat, first: int = 0, **changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {"sampling_params": SHORT, "rid": "r", "progress_timeout_s": 60.0}
    return GenerateRequest(input_ids=ids, experts=AskedExperts(form, first), **{**values, **changes})


def of_hugging_face(model: Path, form: RoutingFormat, ids: Sequence[int]) -> np.ndarray:
    """The experts that its routers choose, sorted, [tokens, layers, k]."""
    made: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    layers: list[torch.Tensor] = []
    for layer in made.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _gate, _given, out: layers.append(out[-1]))
    with torch.no_grad():
        made(torch.tensor([list(ids)]))
    return np.sort(torch.stack(layers, dim=1).numpy(), -1)


def experts(made: Generation, form: RoutingFormat) -> np.ndarray:
    assert made.routed is not None
    return np.sort(form.read(made.routed.data, made.routed.count + 1, 0), -1)


async def test_an_answer_has_the_experts_of_all_tokens_but_the_last(
    client: SglangClient, form: RoutingFormat, models: list[Path]
) -> None:
    """Of the prompt's too, whether another request has filled the cache with it or not."""
    await client.flush()
    for number in range(2):
        made = await client.generate(request(PROMPT, form, rid=f"r{number}"))
        whole = [*PROMPT, *made.output_ids.tolist()]
        assert (experts(made, form) == of_hugging_face(models[0], form, whole[:-1])).all()
    assert made.cached_tokens, "the second one had the prompt from the cache"


async def test_a_part_begins_with_the_token_that_is_named(client: SglangClient, form: RoutingFormat) -> None:
    whole = await client.generate(request(PROMPT, form))
    for first in (1, len(PROMPT) - 1, len(PROMPT)):
        part = await client.generate(request(PROMPT, form, first))
        assert part.routed
        assert whole.routed
        assert part.routed.data == whole.routed.data[first * form.width :]


async def test_an_answer_that_goes_on_under_other_weights_keeps_the_experts_of_its_first_part(
    client: SglangClient, form: RoutingFormat, models: list[Path]
) -> None:
    """The last token of the first part is fed by the second request alone, so its experts are those of the new weights."""
    params = {**SHORT, "max_new_tokens": 8}
    first = await client.generate(request(PROMPT, form, sampling_params=params))
    await client.weights.update_from_disk(str(models[1]), 1)
    ids = [*PROMPT, *first.output_ids.tolist()]
    assert first.routed is not None
    second = await client.generate(request(ids, form, first.routed.count, continued=8))
    both = joined(first, second)
    whole = [*ids, *second.output_ids.tolist()]
    old, new = (of_hugging_face(model, form, whole[:-1]) for model in models)
    held = len(ids) - 1
    assert (experts(both, form)[:held] == old[:held]).all()
    assert (experts(both, form)[held:] == new[held:]).all()
    assert (old != new).any(axis=(1, 2))[:held].any(), "the models choose differently"


async def test_a_dispatcher_asks_again_only_for_tokens_without_experts(
    client: SglangClient, form: RoutingFormat
) -> None:
    """Requests that another process ends go on, and the answer is the undisturbed one."""
    params = {**SHORT, "max_new_tokens": 200}
    engines, asked = dispatcher(client, attempts=500), AskedExperts(form, 0)
    wanted = await engines.generate(PROMPT, params, rid="calm", session=None, experts=asked)
    calm = asyncio.Event()

    async def disturb() -> None:
        while not calm.is_set():
            await client.abort()
            await asyncio.sleep(0.05)

    disturbing = asyncio.create_task(disturb())
    made = await engines.generate(PROMPT, params, rid="torn", session=None, experts=asked)
    calm.set()
    await disturbing
    assert made.pieces > 1
    assert made.output_ids.tolist() == wanted.output_ids.tolist()
    assert made.routed
    assert wanted.routed
    assert made.routed.data == wanted.routed.data


async def test_an_engine_that_pauses_and_computes_its_cache_again_keeps_the_experts_of_the_first_pass(
    client: SglangClient, form: RoutingFormat, models: list[Path]
) -> None:
    params = {**SHORT, "max_new_tokens": 400}
    asking = asyncio.create_task(client.generate(request(PROMPT, form, sampling_params=params)))
    await asyncio.sleep(0.3)
    await client.pause("retract")
    await client.weights.update_from_disk(str(models[1]), 1)
    await client.resume()
    made = await asking
    ((_, _), (cut, _)) = made.weight_versions
    whole = [*PROMPT, *made.output_ids.tolist()]
    fed = len(PROMPT) + cut - 1
    assert (experts(made, form)[:fed] == of_hugging_face(models[0], form, whole[:fed])).all()
    assert made.routed
    assert made.routed.count == len(whole) - 1


def answer(routed: Any, retractions: int = 0, tokens: int = 2) -> bytes:
    meta = {
        "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "0",
        "output_token_logprobs": [[-0.5, 7, None]] * tokens,
        "num_retractions": retractions,
        **({} if routed is None else {"routed_experts": routed}),
    }
    return orjson.dumps({"text": "", "output_ids": [7] * tokens, "meta_info": meta})


def wire(rows: int, expert: int = 1) -> str:
    numbers = np.zeros((rows, FORM.layers, FORM.used), "<i4")
    numbers[:, 1] = [expert, 0]
    return base64.b64encode(numbers.tobytes()).decode()


WRONG = {
    "no experts": (None, "the answer has no routed experts"),
    "a row too many": (wire(5), "80 bytes; 4 rows"),
    "an expert that does not exist": (wire(4, expert=4), "row 0 has expert 4"),
    "one twice": (wire(4, expert=0), "one of them twice"),
}


@pytest.mark.parametrize(("routed", "reason"), WRONG.values(), ids=list(WRONG))
def test_an_answer_with_wrong_experts_is_refused_by_name(routed: Any, reason: str) -> None:
    client = SglangClient("http://nowhere", "engine-0")
    with pytest.raises(EngineError, match=f"engine-0: .*{reason}") as caught:
        client._generation(read_answer(answer(routed)), request([1, 2, 3], FORM), None)
    assert "--enable-return-routed-experts" in str(caught.value)


class Retracts(SglangClient):
    """An engine that returns answers as SGLang sends them."""

    def __init__(self, answers: list[bytes]) -> None:
        super().__init__("http://nowhere", "engine-0")
        self.answers, self.asked = answers, list[GenerateRequest]()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request)
        return self._generation(read_answer(self.answers.pop(0)), request, None)


def dispatcher(engine: SglangClient, attempts: int = 3) -> Dispatcher:
    async def nothing(version: int) -> None:
        """It serves."""

    return Dispatcher(
        lambda: [engine],
        nothing,
        lambda engine, error: None,
        version=0,
        attempts=attempts,
        progress_timeout_s=1,
    )


async def test_an_answer_that_was_retracted_is_made_again() -> None:
    engine = Retracts([answer(wire(4), retractions=1), answer(None, retractions=2), answer(wire(4))])
    asked = AskedExperts(FORM, 0)
    made = await dispatcher(engine).generate([1, 2, 3], SHORT, rid="r", session=None, experts=asked)
    assert made.routed
    assert made.routed.count == 4
    assert [each.input_ids for each in engine.asked] == [[1, 2, 3]] * 3
    engine = Retracts([answer(wire(4), retractions=1)])
    with pytest.raises(EngineError, match="its KV cache was full and it computed tokens again"):
        await dispatcher(engine, attempts=1).generate([1, 2, 3], SHORT, rid="r", session=None, experts=asked)
    engine = Retracts([answer(None, retractions=1)])
    made = await dispatcher(engine, attempts=1).generate([1, 2, 3], SHORT, rid="r", session=None)
    assert made.routed is None, "without replay a retracted answer is as good as any"


def test_cut_answers_keep_the_experts_of_the_tokens_that_they_keep() -> None:
    ids = np.arange(6, dtype=np.int32)
    rows = RoutedRows(1, bytes(range(8)))  # of three tokens of a prompt, and five of the six
    made = Generation(ids, -ids.astype(float), "", "length", [(0, 0)], "engine-0", 0, routed=rows)
    whole, rest = segment(made, 0), segment(made, 4)
    assert whole.routed
    assert rest.routed
    assert (whole.routed.data, rest.routed.data) == (rows.data, bytes([6, 7]))
    cut = replace(made, cuts=(2,))
    ended = ended_at_stop([], cut, {"stop": ["2 3"]}, lambda ids: " ".join(map(str, ids)))
    assert ended.output_ids.tolist() == [0, 1, 2, 3]
    assert ended.routed
    assert ended.routed.data == rows.data[:6]
