"""What /generate answers: tokens, log-probabilities, stopping, streams, batches, refusals."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import torch

from millrace.core.contracts.handles import CONTINUED
from tests.support.engine_process import CLOSE, logprobs_of, reference_logits, reference_logprobs

PROMPT = [10, 20, 30, 40, 50]
NOT_SGLANGS = pytest.mark.embedded_only("SGLang knows no such field, and goes by without it")
ENDS_SGLANG = pytest.mark.embedded_only("SGLang looks at no such number, and its scheduler ends with it")
ENDS_SGLANG_0_5_17 = pytest.mark.embedded_only(
    "SGLang 0.5.17 looks at no bias, and its scheduler ends with it"
)
SGLANG_TAKES_IDS = pytest.mark.embedded_only("SGLang takes the ids and leaves the text")


def ids_of(answer: dict[str, Any]) -> list[int]:
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


async def test_an_answer_holds_tokens_text_and_their_account(http: Any) -> None:
    answer = await http.generate(PROMPT, max_new_tokens=7, ignore_eos=True, top={"rid": "mine"})
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 7
    assert ids_of(answer) == answer["output_ids"]
    assert all(text is None for _, _, text in meta["output_token_logprobs"])
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert isinstance(meta["weight_version"], str)
    assert isinstance(answer["text"], str)
    assert meta["e2e_latency"] > 0


async def test_no_logprobs_come_unless_asked_for(http: Any) -> None:
    answer = await http.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert not answer["meta_info"].get("output_token_logprobs")
    assert answer["output_ids"]


async def test_text_in_logprobs_comes_when_asked_for(http: Any) -> None:
    answer = await http.generate(PROMPT, max_new_tokens=3, top={"return_text_in_logprobs": True})
    assert all(isinstance(text, str) for _, _, text in answer["meta_info"]["output_token_logprobs"])


async def test_text_can_be_sent_instead_of_ids(http: Any) -> None:
    body = {"text": "1+2=", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    assert (await http.post("/generate", body))["meta_info"]["prompt_tokens"] == 4


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
async def test_logprobs_are_those_of_a_plain_forward_at_the_temperature(
    http: Any, temperature: float
) -> None:
    answer = await http.generate(PROMPT, max_new_tokens=40, temperature=temperature, ignore_eos=True)
    expected = reference_logprobs(http.model, PROMPT, answer["output_ids"], temperature)
    assert logprobs_of(answer) == pytest.approx(expected, abs=CLOSE)


async def test_greedy_takes_the_likeliest_token(http: Any) -> None:
    answer = await http.generate(PROMPT, max_new_tokens=40, temperature=0, ignore_eos=True)
    logits = reference_logits(http.model, PROMPT, answer["output_ids"])
    chosen = logits.gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
    assert torch.allclose(chosen, logits.max(-1).values, atol=CLOSE)


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}], ids=lambda cut: next(iter(cut))
)
async def test_cut_sampling_stays_in_the_kept_set_and_reports_the_uncut_logprob(
    http: Any, cut: dict[str, float]
) -> None:
    temperature = 1.5
    answers = await asyncio.gather(
        *(
            http.generate(PROMPT, max_new_tokens=16, temperature=temperature, ignore_eos=True, **cut)
            for _ in range(8)
        )
    )
    for answer in answers:
        output = answer["output_ids"]
        expected = reference_logprobs(http.model, PROMPT, output, temperature)
        assert logprobs_of(answer) == pytest.approx(expected, abs=CLOSE)
        probabilities = (reference_logits(http.model, PROMPT, output) / temperature).softmax(-1)
        own = probabilities.gather(1, torch.tensor(output)[:, None])[:, 0]
        above = torch.where(probabilities > own[:, None] + CLOSE / 10, probabilities, torch.zeros(())).sum(-1)
        rank = (probabilities > own[:, None] + CLOSE / 10).sum(-1)
        if "top_k" in cut:
            assert bool((rank < cut["top_k"]).all())
        elif "top_p" in cut:
            assert bool((above <= cut["top_p"] + CLOSE).all())
        else:
            assert bool((own >= cut["min_p"] * probabilities.max(-1).values - CLOSE / 10).all())


@pytest.mark.parametrize("start", [0, 2, 4])
@pytest.mark.parametrize("new", [0, 1])
async def test_prompt_logprobs_come_from_a_start(http: Any, start: int, new: int) -> None:
    """At temperature 1, whatever the request's. With nothing to generate the prompt is scored all the same."""
    answer = await http.generate(
        PROMPT, max_new_tokens=new, temperature=0.5, top={"logprob_start_len": start}
    )
    first, *rest = answer["meta_info"]["input_token_logprobs"]
    assert first[:2] == [None, PROMPT[start]]
    expected = reference_logprobs(http.model, PROMPT[: start + 1], PROMPT[start + 1 :])
    assert [value for value, _, _ in rest] == pytest.approx(expected, abs=CLOSE)
    assert [token for _, token, _ in rest] == PROMPT[start + 1 :]
    assert len(answer["output_ids"]) <= 1


async def test_the_tokens_of_a_text_are_shown_with_its_logprobs(http: Any) -> None:
    body = {"text": "1+2=", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    answer = await http.post("/generate", {**body, "logprob_start_len": 0, "return_text_in_logprobs": True})
    assert [text for _, _, text in answer["meta_info"]["input_token_logprobs"]] == list("1+2=")


async def test_prompts_are_scored_while_others_generate(http: Any) -> None:
    generating = [
        http.generate([20 + n, 30], max_new_tokens=40, temperature=0, ignore_eos=True) for n in range(8)
    ]
    scoring = [
        http.generate([*PROMPT, 10 + n], max_new_tokens=0, top={"logprob_start_len": 0}) for n in range(24)
    ]
    answers = await asyncio.gather(*generating, *scoring)
    assert all(len(answer["output_ids"]) == 40 for answer in answers[:8])
    for number, answer in enumerate(answers[8:]):
        found = [value for value, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]
        expected = reference_logprobs(http.model, PROMPT[:1], [*PROMPT[1:], 10 + number])
        assert found == pytest.approx(expected, abs=CLOSE)


@pytest.mark.embedded_only("SGLang heeds sampling_seed only with --enable-deterministic-inference")
async def test_a_seed_gives_the_same_tokens_alone_and_among_64_others(http: Any) -> None:
    mine = {"max_new_tokens": 48, "temperature": 1.2, "sampling_seed": 7, "ignore_eos": True}
    alone = await http.generate(PROMPT, **mine)
    others = [
        http.generate([9 + n % 60] * (1 + 3 * n), max_new_tokens=1 + n, temperature=1.0, ignore_eos=True)
        for n in range(64)
    ]
    among, *_ = await asyncio.gather(http.generate(PROMPT, **mine), *others)
    assert among["output_ids"] == alone["output_ids"]
    assert logprobs_of(among) == logprobs_of(alone)
    other_seed = await http.generate(PROMPT, **{**mine, "sampling_seed": 8})
    assert other_seed["output_ids"] != alone["output_ids"]


GOES_ON: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("cold", {"temperature": 0.0}),
    ("cut off", {"top_p": 0.7, "top_k": 9}),
    ("penalised", {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.2}),
    ("at least", {"min_new_tokens": 20, "ignore_eos": False}),
]


@pytest.mark.parametrize(("name", "extra"), GOES_ON, ids=[name for name, _ in GOES_ON])
@pytest.mark.embedded_only("SGLang counts penalties and the least length from the start of a request")
async def test_an_answer_that_was_cut_anywhere_goes_on_as_if_it_had_not_been(
    http: Any, name: str, extra: dict[str, Any]
) -> None:
    length = 24
    settings = {"temperature": 1.0, "ignore_eos": True, "sampling_seed": 11, **extra}
    whole = await http.generate(PROMPT, max_new_tokens=length, **settings)
    ids, values = ids_of(whole), logprobs_of(whole)
    least = settings.pop("min_new_tokens", 0)
    for cut in range(1, len(ids)):
        left = {"max_new_tokens": length - cut, "min_new_tokens": max(0, least - cut)}
        rest = await http.generate([*PROMPT, *ids[:cut]], headers={CONTINUED: str(cut)}, **settings, **left)
        assert ids_of(rest) == rest["output_ids"] == ids[cut:]
        assert logprobs_of(rest) == pytest.approx(values[cut:], abs=CLOSE)
        (span,) = rest["meta_info"]["weight_versions"]
        assert (span["start"], span["end"]) == (0, len(ids) - cut)
        assert rest["meta_info"]["completion_tokens"] == len(ids) - cut
        assert rest["meta_info"]["prompt_tokens"] == len(PROMPT) + cut


@pytest.mark.embedded_only("SGLang has priorities where it is started with them")
async def test_waiting_requests_come_in_the_order_of_their_priority(http: Any) -> None:
    await http.post("/pause_generation", {"mode": "in_place"})
    order: list[int] = []

    async def ask(priority: int) -> None:
        await http.generate(PROMPT, max_new_tokens=1, top={"priority": priority, "rid": f"urgent-{priority}"})
        order.append(priority)

    asking = []
    for priority in (5, 1, 3, 1, 0):
        asking.append(asyncio.create_task(ask(priority)))
        await asyncio.sleep(0.05)
    waiting = (await http.get("/server_info"))["load"]["waiting"]
    await http.post("/continue_generation")
    await asyncio.gather(*asking)
    assert waiting == 5
    assert sorted(order) == [0, 1, 1, 3, 5]


async def test_a_stop_token_ends_the_request_and_stays_in_the_ids(http: Any) -> None:
    free = await http.generate(PROMPT, max_new_tokens=20, temperature=0, ignore_eos=True)
    stop = free["output_ids"][5]
    first = free["output_ids"].index(stop)
    answer = await http.generate(PROMPT, max_new_tokens=20, temperature=0, stop_token_ids=[stop])
    assert answer["output_ids"] == free["output_ids"][: first + 1]
    assert len(logprobs_of(answer)) == first + 1
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_a_stop_string_ends_the_text_before_it_unless_trimming_is_off(http: Any) -> None:
    free = await http.generate(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True)
    stop = free["text"][6:8]
    before = free["text"][: free["text"].index(stop)]
    trimmed = await http.generate(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True, stop=[stop])
    kept = await http.generate(
        PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True, stop=stop, no_stop_trim=True
    )
    assert trimmed["text"] == before
    assert kept["text"] == before + stop
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert trimmed["output_ids"] == kept["output_ids"]
    assert len(logprobs_of(trimmed)) == len(trimmed["output_ids"])


async def test_no_stop_token_comes_before_the_least_length(http: Any) -> None:
    free = await http.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    stop = free["output_ids"][0]
    answer = await http.generate(
        PROMPT, max_new_tokens=12, min_new_tokens=6, temperature=0, stop_token_ids=[stop], ignore_eos=False
    )
    assert stop not in answer["output_ids"][:6]
    assert len(answer["output_ids"]) >= 6


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}],
    ids=lambda p: next(iter(p)),
)
async def test_penalties_make_repetition_rarer(http: Any, penalty: dict[str, float]) -> None:
    plain = await http.generate([60] * 8, max_new_tokens=40, temperature=0, ignore_eos=True)
    punished = await http.generate([60] * 8, max_new_tokens=40, temperature=0, ignore_eos=True, **penalty)
    assert len(set(punished["output_ids"])) > len(set(plain["output_ids"]))


async def test_a_bias_forces_a_token(http: Any) -> None:
    answer = await http.generate(PROMPT, max_new_tokens=5, ignore_eos=True, logit_bias={"33": 100.0})
    assert answer["output_ids"] == [33] * 5


TOKENS = 40  # so many and changes so strong that no sample's log-probabilities are the policy's, by a multiple of CLOSE
ENDERS = [1, *range(40, 96)]
RESHAPED: list[dict[str, Any]] = [
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"logit_bias": {"33": 9.0, "34": -3.0}},
    {"min_new_tokens": TOKENS, "stop_token_ids": ENDERS},
]


def _reshaped(logits: torch.Tensor, counted: list[int], change: dict[str, Any]) -> torch.Tensor:
    """Logits [T, V] as the change leaves them, token by token; at each, penalties see the `counted` tokens before it."""
    logits = logits.clone()
    for at in range(len(logits)):
        for token in set(counted[:at]):
            logits[at, token] -= change.get("frequency_penalty", 0) * counted[:at].count(token)
            logits[at, token] -= change.get("presence_penalty", 0)
        for token, bias in change.get("logit_bias", {}).items():
            logits[at, int(token)] += bias
        if at < change.get("min_new_tokens", 0):
            logits[at, change["stop_token_ids"]] = float("-inf")
    return logits


@pytest.mark.parametrize("change", RESHAPED, ids=lambda change: next(iter(change)))
async def test_logprobs_are_of_the_changed_distribution_at_the_temperature(
    http: Any, change: dict[str, Any]
) -> None:
    """Hence they are not the policy's: what trains may not be made so."""
    answer = await http.generate(PROMPT, max_new_tokens=TOKENS, temperature=1.5, ignore_eos=True, **change)
    output = answer["output_ids"]
    raw = reference_logits(http.model, PROMPT, output)
    # SGLang prepares a step before it has the last one's token: it counts each a step late, the prompt's last one first
    counts = [output] if http.own else [output, [PROMPT[-1], *output]]
    expected = []
    for counted in counts:
        changed = (_reshaped(raw, counted, change) / 1.5).log_softmax(-1)
        values = changed.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
        expected.append(pytest.approx(values, abs=CLOSE))
    assert logprobs_of(answer) in expected
    assert logprobs_of(answer) != pytest.approx(
        reference_logprobs(http.model, PROMPT, output, 1.5), abs=CLOSE
    )


async def test_a_regular_expression_ends_the_request(http: Any) -> None:
    free = await http.generate(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True)
    pattern = re.escape(free["text"][6]) + "[^a]"
    end = re.search(pattern, free["text"]).end()  # type: ignore[union-attr]
    kept = await http.generate(
        PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True, stop_regex=[pattern], no_stop_trim=True
    )
    assert kept["text"] == free["text"][:end]
    assert kept["meta_info"]["finish_reason"]["type"] == "stop"
    assert kept["output_ids"] == free["output_ids"][: len(kept["output_ids"])]
    assert len(logprobs_of(kept)) == len(kept["output_ids"])


@pytest.mark.parametrize(
    "grammar",
    [{"json_schema": '{"type": "object"}'}, {"regex": "[0-9]+"}, {"ebnf": 'root ::= "a"'}],
    ids=lambda grammar: next(iter(grammar)),
)
@pytest.mark.embedded_only("SGLang has grammar backends")
async def test_a_grammar_is_refused_with_a_sentence(http: Any, grammar: dict[str, str]) -> None:
    body = {"input_ids": PROMPT, "sampling_params": grammar}
    answer = await http.post("/generate", body, status=400)
    assert f"sampling_params.{next(iter(grammar))}: this engine has no grammar backend" in json.dumps(answer)


async def test_a_batch_answers_in_order_with_its_own_params_and_rids(http: Any) -> None:
    prompts = [[10, 11], [20, 21, 22], [30]]
    params = [{"max_new_tokens": n, "temperature": 0, "ignore_eos": True} for n in (2, 5, 3)]
    body = {"input_ids": prompts, "sampling_params": params, "rid": ["a", "b", "c"], "return_logprob": True}
    answers = await http.post("/generate", body)
    assert [a["meta_info"]["id"] for a in answers] == ["a", "b", "c"]
    assert [len(a["output_ids"]) for a in answers] == [2, 5, 3]
    for prompt, answer, p in zip(prompts, answers, params, strict=True):
        alone = await http.post("/generate", {"input_ids": prompt, "sampling_params": p})
        assert alone["output_ids"] == answer["output_ids"]


async def test_n_samples_come_prompt_by_prompt(http: Any) -> None:
    answers = await http.generate([[10, 11], [20, 21, 22]], n=2, max_new_tokens=3, ignore_eos=True)
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [2, 2, 3, 3]


async def test_a_stream_grows_to_the_plain_answer_and_ends_with_done(http: Any) -> None:
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    plain = await http.generate(PROMPT, **params)
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "stream": True}
    events = []
    async with http.session.post(http.url + "/generate", json=body) as answer:
        assert answer.content_type == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data:"):
                events.append(line[5:].strip())
    assert events[-1] == b"[DONE]"
    objects = [json.loads(event) for event in events[:-1]]
    lengths = [len(o["output_ids"]) for o in objects]
    assert lengths == sorted(lengths)
    assert len(objects) > 1
    assert objects[0]["meta_info"]["finish_reason"] is None
    assert objects[-1]["output_ids"] == plain["output_ids"]
    assert objects[-1]["text"] == plain["text"]
    assert logprobs_of(objects[-1]) == pytest.approx(logprobs_of(plain), abs=CLOSE)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input_ids": [10] * 5000, "sampling_params": {"max_new_tokens": 4}}, ""),
        ({"input_ids": [10], "sampling_params": {"max_new_tokens": 10**6}}, ""),
        ({"input_ids": [10], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [10], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [10], "sampling_params": {"unheard_of": 1}}, "unheard_of"),
        ({"sampling_params": {}}, "input_ids"),
    ],
    ids=["long prompt", "long answer", "temperature", "top_p", "unknown", "nothing"],
)
async def test_what_cannot_be_served_is_refused_with_a_message(
    http: Any, body: dict[str, Any], named: str
) -> None:
    older = named == "unheard_of" and not http.own  # SGLang before 0.5.21 answers 500 and says nothing
    answer = await http.post("/generate", body, status=(400, 500) if older else 400)
    assert older or (named in json.dumps(answer) and answer["error"]["message"])


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": PROMPT, "priority": "high"},
        pytest.param({"input_ids": [10**6]}, marks=ENDS_SGLANG),
        pytest.param({"input_ids": [-1]}, marks=ENDS_SGLANG),
        {"input_ids": []},
        {"input_ids": ["a"]},
        pytest.param({"input_ids": [10], "text": "a"}, marks=SGLANG_TAKES_IDS),
        {"input_ids": [10], "sampling_params": "hot"},
        pytest.param({"input_ids": [10], "sampling_params": {"stop_regex": ["("]}}, marks=ENDS_SGLANG),
        {"input_ids": [10], "sampling_params": [{}, {}]},
        {"input_ids": [10], "sampling_params": {"temperature": "hot"}},
        {"input_ids": [10], "sampling_params": {"temperature": float("nan")}},
        {"input_ids": [10], "sampling_params": {"logit_bias": {"100000": 1.0}}},
        {"input_ids": [10], "sampling_params": {"logit_bias": {"a": 1.0}}},
        pytest.param(
            {"input_ids": [10], "sampling_params": {"logit_bias": {"1": "a"}}}, marks=ENDS_SGLANG_0_5_17
        ),
        pytest.param(
            {"input_ids": [10], "sampling_params": {"stop_token_ids": [10**6], "min_new_tokens": 2}},
            marks=ENDS_SGLANG,
        ),
        pytest.param(
            {"input_ids": [10], "return_logprob": True, "top_logprobs_num": 10**6}, marks=ENDS_SGLANG
        ),
        {"input_ids": [10], "return_logprob": True, "top_logprobs_num": "a"},
        {"input_ids": [10], "return_logprob": True, "logprob_start_len": "a"},
        {"input_ids": [[10], [10]], "rid": ["only one"]},
    ],
    ids=json.dumps,
)
async def test_a_malformed_request_is_refused_and_hurts_nobody_else(http: Any, body: dict[str, Any]) -> None:
    answer = await http.post("/generate", body, status=400 if http.own else (400, 500))
    assert not http.own or answer["error"]["message"]
    assert len((await http.generate(PROMPT, max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


@pytest.mark.parametrize("given", ["5", "-1", "a", ""])
@NOT_SGLANGS
async def test_an_answer_goes_on_after_some_of_the_tokens_that_are_sent(http: Any, given: str) -> None:
    assert len(PROMPT) <= 5
    answer = await http.post("/generate", {"input_ids": PROMPT}, status=400, headers={CONTINUED: given})
    assert CONTINUED in answer["error"]["message"]


async def test_a_temperature_next_to_nothing_is_greedy(http: Any) -> None:
    greedy = await http.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    cold = await http.generate(PROMPT, max_new_tokens=12, temperature=1e-9, ignore_eos=True)
    assert cold["output_ids"] == greedy["output_ids"]
    assert logprobs_of(cold) == pytest.approx(logprobs_of(greedy), abs=CLOSE)
