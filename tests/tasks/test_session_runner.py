"""Rollouts of several turns over real processes and real dialogues: engines alone are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millrace.core.config.data import Source
from millrace.core.contracts.ids import turn_seed
from millrace.core.contracts.turns import TurnRow
from millrace.core.errors import BudgetError
from millrace.tasks.generation.sessions.runner import MadeSample, session_task
from millrace.tasks.generation.sessions.session_rollout import Opening
from tests.support.session_place import CALL, FUNCTIONS, TOKENIZER, Place, shown
from tests.support.slow_members import slow_but


async def test_the_next_prompt_is_all_tokens_so_far_and_the_new_message(
    make_place: Callable[..., Place],
) -> None:
    place = make_place("one", "two", "three", function="three_turns")
    (sample,) = await place.run()
    prompts = [ids for _, ids, _, _ in place.engines.requests]
    for earlier, later in zip(prompts, prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert shown(prompts[-1]) == (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )
    trained = [t for t, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert shown(trained) == "one<|im_end|>two<|im_end|>three<|im_end|>"
    assert (sample.turns, sample.status, sample.reward, sample.response) == (3, "completed", 3.0, "three")
    assert [params["sampling_seed"] for _, _, params, _ in place.engines.requests] == [
        7,
        turn_seed(7, 0, 1),
        turn_seed(7, 0, 2),
    ]


async def test_a_rows_own_length_and_stops_reach_each_of_its_turns(make_place: Callable[..., Place]) -> None:
    place = make_place("one two three four", function="three_turns")
    source = Source(name="s", path="s.jsonl", sampling_key="own")
    await place.run(metadata={"sampling": {"max_new_tokens": 2, "stop": ["x"]}}, source=source)
    asked = [(params["max_new_tokens"], params["stop"]) for _, _, params, _ in place.engines.requests]
    assert asked == [(2, ["x"])] * 3
    await place.run(metadata={"sampling": {"max_new_tokens": 999}}, source=source, rollout="g-0001")
    assert place.engines.requests[3][2]["max_new_tokens"] == 200


async def test_a_row_is_made_by_the_function_that_it_names(make_place: Callable[..., Place]) -> None:
    named = [{"name": "long", "function": f"{FUNCTIONS}:three_turns", "options": {"add": "more"}}]
    place = make_place("one", function="one_turn", named=named)
    (sample,) = await place.run()
    assert sample.turns == 1
    (sample,) = await place.run(metadata={"rollout": "long"}, rollout="g-0001")
    assert sample.turns == 3
    (sample,) = await place.run(metadata={"rollout": "longer"}, rollout="g-0002")
    assert sample.status == "failed"
    assert sample.reason is not None
    assert "'longer', and rollout.session.named has long" in sample.reason


@pytest.mark.parametrize(
    ("limits", "longest", "turns", "reason"),
    [
        ({"max_turns": 2}, 512, 2, "rollout.session.max_turns = 2"),
        ({"max_tokens": 9}, 40, 1, "rollout.session.max_tokens = 9"),
    ],
)
async def test_a_limit_ends_a_rollout_as_truncated(
    make_place: Callable[..., Place], limits: dict[str, Any], longest: int, turns: int, reason: str
) -> None:
    place = make_place("one", function="for_ever", **limits)
    (sample,) = await place.run(longest=longest)
    assert (sample.status, sample.turns, sample.reason) == ("truncated", turns, reason)
    assert len(sample.prompt_ids) + len(sample.response_ids) <= longest


@pytest.mark.parametrize("most", slow_but([1, 20, 60, 61], 1, 61))
@pytest.mark.parametrize("function", ["for_ever", "branches_for_ever"])
async def test_no_dialogue_is_longer_than_the_limit_however_short_its_prompt_is(
    make_place: Callable[..., Place], most: int, function: str
) -> None:
    place = make_place("one two three", function=function, max_tokens=most, max_turns=1000)
    samples = await place.run(longest=100_000)
    assert samples
    for sample in samples:
        assert sample.reason is None or sample.reason.startswith("rollout.session.max_tokens")
        assert len(sample.response_ids) <= most
    assert len(samples) == (1 if function == "for_ever" else 2)


async def test_a_rollout_of_one_turn_asks_for_the_very_sample_that_no_session_would(
    make_place: Callable[..., Place],
) -> None:
    place = make_place("one", function="one_turn")
    (sample,) = await place.run()
    ((_, ids, params, session),) = place.engines.requests
    assert (ids, params["sampling_seed"], params["max_new_tokens"]) == (sample.prompt_ids, 7, 200)
    assert session == "g"


async def test_tools_alone_go_on_until_no_turn_calls_one(make_place: Callable[..., Place]) -> None:
    texts = [
        CALL % ("add", '{"a": 1, "b": 2}') + "\n" + CALL % ("add", '{"a": "x", "b": 2}'),
        CALL % ("unknown", "{}"),
        '<tool_call>{"name"',
        "It is 3.",
    ]
    place = make_place(*texts, tools=["add"], max_tokens=1000)
    (sample,) = await place.run(longest=4000)
    assert sample.response == "It is 3."
    said = shown(sample.response_ids)
    for answer in (
        "<tool_response>\n3\n</tool_response>",
        "add does not take these arguments: a: Input should be a valid integer",
        "there is no tool unknown; there are add",
        "The call could not be read: json parser could not parse region as JSON.",
    ):
        assert answer in said
    assert [row.failed for row in place.rows if row.kind == "call"] == [False, True, True]
    assert sample.reward is None


NAMED = {
    # family: a turn with a call, and how the answer of its tool begins in the prompt of the next one
    "kimi_k2": (
        "<think></think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:4<|tool_call_argument_begin|>"
        '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
        "<|im_system|>add<|im_middle|>## Return of functions.add:4\n3<|im_end|>",
    ),
    "harmony": (
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>',
    ),
    "mistral_json": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]</s>',
        '[TOOL_RESULTS] {"content": "3", "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    ),
}


@pytest.mark.parametrize("family", NAMED)
async def test_the_answer_of_a_tool_names_the_call_that_it_is_for(
    make_place: Callable[..., Place], family: str
) -> None:
    turn, answer = NAMED[family]
    ended = {"kimi_k2": "It is 3.<|im_end|>", "harmony": "<|channel|>final<|message|>It is 3.<|return|>"}
    place = make_place(turn, ended.get(family, "It is 3.</s>"), tools=["add"], max_tokens=1000, family=family)
    await place.run(longest=4000)
    (_, first, *_), (_, second, *_) = place.engines.requests
    decode = place.tokenizer.tokenizer.decode
    assert decode(second).startswith(decode(first) + turn + answer)


async def test_branches_are_samples_of_their_own_that_train_nothing_twice(
    make_place: Callable[..., Place],
) -> None:
    place = make_place("one", function="branches")
    first, critic = await place.run()
    assert (first.sample_id, critic.sample_id) == ("g-0000", "g-0000.01")
    assert (first.samples, critic.samples, critic.role) == (2, 2, "critic")
    assert (first.reward, critic.reward, critic.parts) == (1.0, 0.25, [("kind", 1.0)])
    assert (first.texts, critic.texts, critic.answer) == ([], [("words", "Fine.")], "yes")
    assert shown(critic.prompt_ids).startswith("<|im_start|>user\njudge: one<|im_end|>")
    assert critic.loss_mask == [1] * len(critic.response_ids)


async def test_a_branch_makes_one_turn_at_a_time(make_place: Callable[..., Place]) -> None:
    (sample,) = await make_place("one", function="two_turns_at_once").run()
    assert sample.status == "failed"
    assert "a branch makes one turn after the other" in (sample.reason or "")


async def test_a_rollout_that_generates_nothing_has_failed_whatever_it_returns(
    make_place: Callable[..., Place],
) -> None:
    (sample,) = await make_place("one", function="never_generates").run()
    assert (sample.status, sample.reason, sample.reward) == ("failed", "it generated nothing", None)


async def test_what_is_refused_leaves_the_branch_as_it_was(make_place: Callable[..., Place]) -> None:
    place = make_place("one", function="refused_then_goes_on")
    (sample,) = await place.run()
    assert (sample.status, sample.reason, sample.turns) == ("completed", None, 2)
    first, second = (ids for _, ids, _, _ in place.engines.requests)
    assert (
        shown(first)
        == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second[: len(first)] == first
    rows = [row for row in place.rows if row.kind == "segment"]
    assert [*first, *rows[0].output_ids, *rows[1].new_ids] == second


async def test_lengths_and_stops_mean_what_they_say(make_place: Callable[..., Place]) -> None:
    place = make_place("one", function="asks_wrongly")
    (sample,) = await place.run()
    assert (sample.status, sample.reason) == ("completed", None)
    assert [params["stop"] for _, _, params, _ in place.engines.requests] == [["ab"], ["ab", "c"]]


async def test_an_environment_need_not_be_async(make_place: Callable[..., Place]) -> None:
    (sample,) = await make_place("one", environment="NotAsync").run()
    assert (sample.status, sample.reason, sample.reward) == ("completed", None, 0.75)


WRONG = {
    "NoRecovery": "TypeError: NoRecovery says no recovery: it is one of stateless, snapshot, restart",
    "OddRecovery": "TypeError: OddRecovery says recovery = 'always': it is one of stateless",
    "NoSnapshot": "TypeError: NoSnapshot lacks snapshot, restore, which recovery = 'snapshot' needs",
    "NoStep": "TypeError: NoStep lacks step, close, which recovery = 'stateless' needs",
    "BytesAsState": "TypeError: snapshot returns text, not bytes",
}


@pytest.mark.parametrize("environment", WRONG)
async def test_an_environment_that_lacks_something_fails_and_says_what(
    make_place: Callable[..., Place], environment: str
) -> None:
    (sample,) = await make_place("one", environment=environment).run()
    assert sample.status == "failed"
    assert (sample.reason or "").startswith(WRONG[environment])


async def test_arguments_of_any_name_are_the_tools(make_place: Callable[..., Place]) -> None:
    call = CALL % ("add", '{"self": 1, "tool": 2, "name": 3}')
    place = make_place(call, "It is 3.", tools=["add"], max_tokens=1000)
    (sample,) = await place.run(longest=4000)
    assert (sample.status, sample.reason, sample.response) == ("completed", None, "It is 3.")
    assert "add does not take these arguments" in shown(sample.response_ids)


async def test_neighbours_of_a_bad_rollout_lose_nothing(make_place: Callable[..., Place]) -> None:
    place = make_place("one", "two", "three", function=("bad_or_good", {"bad": "exits"}))
    good = [asyncio.ensure_future(_good(place, number)) for number in range(4)]
    await asyncio.sleep(0.4)
    (bad,) = await place.run()
    assert (bad.status, bad.reason) == ("failed", "its process ended itself with exit code 3")
    for samples in await asyncio.gather(*good):
        assert (samples[0].status, samples[0].turns) == ("completed", 3)
    assert len({(rid) for rid, *_ in place.engines.requests}) == 4 * 3 + 1


async def _good(place: Place, number: int) -> list[MadeSample]:
    prompt = [{"role": "user", "content": "1+1="}]
    ids = TOKENIZER.encode_prompts([prompt], chat=True)[0]
    opening = Opening(f"g-{number + 1:04d}", "g", prompt, ids, seed=7, chat=True, longest=512)
    task = session_task('"1+1="', None, '{"good": true}', "s", number)

    async def write(row: TurnRow) -> None:
        place.rows.append(row)

    return (await place.runner.run(opening, task, [], write))[0]


@pytest.mark.parametrize("function", slow_but(["raises", "gives_text", "sleeps"], "raises", "gives_text"))
async def test_a_rollout_that_fails_has_its_reason_and_counts(
    make_place: Callable[..., Place], function: str
) -> None:
    place = make_place("one", function=function)
    (sample,) = await place.run()
    assert sample.status == "failed"
    assert sample.reason
    assert sample.response_ids == []
    await place.run(rollout="g-0001")
    await place.run(rollout="g-0001")  # the same sample, which counts once
    with pytest.raises(BudgetError, match="3 samples failed, more than rollout.max_failed_share"):
        await place.run(rollout="g-0002")


async def test_an_engine_that_cannot_generate_is_the_reason_of_its_rollout(
    make_place: Callable[..., Place],
) -> None:
    place = make_place("one", fails=lambda rid: rid.endswith(".0001"), function="three_turns")
    (sample,) = await place.run()
    assert (sample.status, sample.reason) == ("failed", "engine-0: died")


async def test_a_thousand_turns_end_at_the_limit(make_place: Callable[..., Place]) -> None:
    place = make_place("x", function="for_ever", max_turns=1000, max_tokens=100_000)
    (sample,) = await place.run(longest=100_000)
    assert (sample.turns, sample.status) == (1000, "truncated")
