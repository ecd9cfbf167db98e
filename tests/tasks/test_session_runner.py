"""Rollouts of several turns over real processes and real dialogues: engines alone are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.sglang.client import Generation
from millrace.connectors.workers import session_pool
from millrace.connectors.workers.session_pool import SessionPool
from millrace.core.config import RunConfig
from millrace.core.config.rollout import Sampling, Session
from millrace.core.contracts.ids import turn_seed
from millrace.core.contracts.turns import TurnRow
from millrace.core.errors import BudgetError
from millrace.core.sessions.tools import load_tools
from millrace.tasks.samples.failures import FailureBudget
from millrace.tasks.samples.generation import SampleGenerator
from millrace.tasks.sessions.record import stored_events
from millrace.tasks.sessions.runner import MadeSample, SessionRunner, session_task
from millrace.tasks.sessions.session_rollout import Opening
from tests.support.chat_templates import tokenizer_of
from tests.support.scripted_engines import ScriptedEngines

FUNCTIONS = "tests.support.session_functions"
MakeConfig = Callable[..., RunConfig]
TOKENIZER = PromptTokenizer(tokenizer_of("chatml"))
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


class Engines(ScriptedEngines):
    """Generates texts in turn, each ended as the model ends turns; remembers what it was sent."""

    def __init__(self, *texts: str, fails: Callable[[str], bool] = lambda _: False) -> None:
        super().__init__(fails)
        self.texts = texts

    async def generate(
        self, input_ids: Sequence[int], params: Mapping[str, Any], *, rid: str, session: str | None
    ) -> Generation:
        await super().generate(input_ids, params, rid=rid, session=session)
        turn = int(rid.rpartition(".")[2])
        text = self.texts[min(turn, len(self.texts) - 1)] + "<|im_end|>"
        ids = TOKENIZER.tokenizer(text, add_special_tokens=False)["input_ids"][: params["max_new_tokens"]]
        finish = "stop" if len(ids) < params["max_new_tokens"] else "length"
        return Generation(ids, [-0.5] * len(ids), text, finish, [(0, 3)], "engine-0", 0)


class Place:
    """A task's runner, and what it wrote."""

    def __init__(self, config: RunConfig, engines: Engines, **settings: Any) -> None:
        tools = [f"{FUNCTIONS}:{name}" for name in settings.pop("tools", ())]
        for form in ("function", "environment"):
            if form in settings:
                function, options = (
                    settings[form] if isinstance(settings[form], tuple) else (settings[form], {})
                )
                settings[form] = {"function": f"{FUNCTIONS}:{function}", "options": options}
        self.settings = Session.model_validate({"timeout_s": 2, "tools": tools, **settings})
        self.pool = SessionPool(self.settings)
        self.engines, self.rows = engines, list[TurnRow]()
        schemas = [tool.schema for tool in load_tools(self.settings.tools).values()]

        async def ready() -> Engines:
            return engines

        budget = FailureBudget(
            "rollout.max_failed_share", 0.5, 4, what="failed", where="here", remedy="fix it"
        )
        sampling = Sampling(max_new_tokens=200)
        self.generator = SampleGenerator(config, sampling, ready, budget)
        self.runner = SessionRunner(
            self.settings, sampling, self.pool, Dialogues(TOKENIZER, schemas), self.generator, "no folder"
        )

    async def run(
        self, stored: Sequence[TurnRow] = (), rollout: str = "g-0000", longest: int = 512
    ) -> list[MadeSample]:
        prompt = [{"role": "user", "content": "1+1="}]
        ids = TOKENIZER.encode_prompts([prompt], chat=True)[0]
        opening = Opening(rollout, "g", prompt, ids, seed=7, chat=True, longest=longest)

        async def write(row: TurnRow) -> None:
            self.rows.append(row)

        samples, _, _ = await self.runner.run(
            opening, session_task('"1+1="', '"2"', None, "s", 0), stored, write
        )
        return samples


@pytest.fixture
async def make(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Place]]:
    monkeypatch.setattr(session_pool, "GRACE_S", 0.5)
    places: list[Place] = []

    def made(*texts: str, fails: Callable[[str], bool] = lambda _: False, **settings: Any) -> Place:
        places.append(Place(make_config(), Engines(*texts, fails=fails), **settings))
        return places[-1]

    yield made
    for place in places:
        place.pool.close()


def shown(ids: Sequence[int]) -> str:
    text: str = TOKENIZER.tokenizer.decode(list(ids))
    return text


async def test_the_next_prompt_is_all_tokens_so_far_and_the_new_message(make: Callable[..., Place]) -> None:
    place = make("one", "two", "three", function="three_turns")
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


@pytest.mark.parametrize(
    ("limits", "longest", "turns", "reason"),
    [
        ({"max_turns": 2}, 512, 2, "rollout.session.max_turns = 2"),
        ({"max_tokens": 9}, 40, 1, "rollout.session.max_tokens = 9"),
    ],
)
async def test_a_limit_ends_a_rollout_as_truncated(
    make: Callable[..., Place], limits: dict[str, Any], longest: int, turns: int, reason: str
) -> None:
    place = make("one", function="for_ever", **limits)
    (sample,) = await place.run(longest=longest)
    assert (sample.status, sample.turns, sample.reason) == ("truncated", turns, reason)
    assert len(sample.prompt_ids) + len(sample.response_ids) <= longest


async def test_a_rollout_of_one_turn_asks_for_the_very_sample_that_no_session_would(
    make: Callable[..., Place],
) -> None:
    place = make("one", function="one_turn")
    (sample,) = await place.run()
    ((_, ids, params, session),) = place.engines.requests
    assert (ids, params["sampling_seed"], params["max_new_tokens"]) == (sample.prompt_ids, 7, 200)
    assert session == "g"


async def test_tools_alone_go_on_until_no_turn_calls_one(make: Callable[..., Place]) -> None:
    texts = [
        CALL % ("add", '{"a": 1, "b": 2}') + "\n" + CALL % ("add", '{"a": "x", "b": 2}'),
        CALL % ("unknown", "{}"),
        '<tool_call>{"name"',
        "It is 3.",
    ]
    place = make(*texts, tools=["add"], max_tokens=1000)
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


async def test_branches_are_samples_of_their_own_that_train_nothing_twice(make: Callable[..., Place]) -> None:
    place = make("one", function="branches")
    first, critic = await place.run()
    assert (first.sample_id, critic.sample_id) == ("g-0000", "g-0000.01")
    assert (first.samples, critic.samples, critic.role) == (2, 2, "critic")
    assert (first.reward, critic.reward, critic.parts) == (1.0, 0.25, [("kind", 1.0)])
    assert shown(critic.prompt_ids).startswith("<|im_start|>user\njudge: one<|im_end|>")
    assert critic.loss_mask == [1] * len(critic.response_ids)


CUTS = [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["Countdown", "SavedCountdown", "calls"])
async def test_a_rollout_taken_up_at_any_event_is_the_one_that_was_never_cut(
    make: Callable[..., Place], tmp_path: Path, kind: str, cut: int
) -> None:
    notes = tmp_path / "notes"
    settings: dict[str, Any] = (
        {"function": ("calls", {"tool": "count", "path": str(notes)}), "tools": ["count"]}
        if kind == "calls"
        else {"environment": (kind, {"steps": 3, "notes": str(notes)})}
    )
    whole = make("one", "two", "three", **settings)
    expected = await whole.run()
    first_notes = notes.read_text()
    notes.unlink()
    stored = whole.rows[:cut]
    resumed = make("one", "two", "three", **settings)
    assert await resumed.run(stored) == expected
    turns = sum(row.kind == "segment" for row in stored)
    assert len(resumed.engines.requests) == len(whole.engines.requests) - turns
    recorded = sum(row.kind == "call" for row in stored)
    again = notes.read_text() if notes.exists() else ""
    assert again == (first_notes if kind == "Countdown" else first_notes[recorded:])
    assert [row.order for row in [*stored, *resumed.rows]] == list(range(len(whole.rows)))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
async def test_calls_side_by_side_are_recorded_each_in_its_place(
    make: Callable[..., Place], tmp_path: Path, cut: int
) -> None:
    notes = tmp_path / "notes"
    settings: dict[str, Any] = {
        "function": ("calls_side_by_side", {"path": str(notes)}),
        "tools": ["count_later"],
    }
    whole = make("one", "two", **settings)
    expected = await whole.run()
    assert [row.event for row in whole.rows] == [0, 3, 2, 1, 4]
    notes.unlink()
    resumed = make("one", "two", **settings)
    assert await resumed.run(whole.rows[:cut]) == expected
    assert (notes.read_text() if notes.exists() else "") == "x" * (4 - cut)


async def test_a_branch_makes_one_turn_at_a_time(make: Callable[..., Place]) -> None:
    (sample,) = await make("one", function="two_turns_at_once").run()
    assert sample.status == "failed"
    assert "a branch makes one turn after the other" in (sample.reason or "")


async def test_a_stateless_environment_is_reset_again_and_its_recorded_steps_are_not_made(
    make: Callable[..., Place], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    settings = {"environment": ("Echo", {"notes": str(notes)})}
    whole = make("one", "four", "eleven more", **settings, max_turns=6)
    expected = await whole.run()
    made = notes.read_text()
    notes.unlink()
    resumed = make("one", "four", "eleven more", **settings, max_turns=6)
    assert await resumed.run(whole.rows[:2]) == expected
    assert notes.read_text() == "r" + made[2:]


async def test_what_differs_after_a_restart_is_generated_again_and_the_record_says_so(
    make: Callable[..., Place],
) -> None:
    first = make("one", "two", "three", function=("three_turns", {"add": "again"}))
    await first.run()
    other = make("one", "four", "five", function=("three_turns", {"add": "once more"}))
    (sample,) = await other.run(first.rows)
    trained = [t for t, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert shown(trained) == "one<|im_end|>four<|im_end|>five<|im_end|>"
    assert [row.kind for row in other.rows] == ["diverged", "segment", "segment"]
    third = make("none", function=("three_turns", {"add": "once more"}))
    assert await third.run([*first.rows, *other.rows]) == [sample]
    assert third.engines.requests == []


@pytest.mark.parametrize("lost", [0, 1])
async def test_what_follows_a_gap_is_generated_again_and_never_taken_for_what_was(
    make: Callable[..., Place], lost: int
) -> None:
    first = make("one", "two", "three", function="three_turns")
    await first.run()
    left = [row for row in first.rows if row.order != lost]
    second = make("uno", "due", "tre", function="three_turns")
    (sample,) = await second.run(stored_events(left)["g-0000"])
    assert len(second.engines.requests) == 3 - lost
    assert [(row.order, row.kind, row.event) for row in second.rows][:2] == [
        (3, "resumed", lost),
        (4, "segment", lost),
    ]
    third = make("none", function="three_turns")
    assert await third.run([*left, *second.rows]) == [sample]
    assert third.engines.requests == []
    assert third.rows == []


async def test_a_tool_that_takes_its_process_with_it_is_answered_so_and_the_rollout_goes_on(
    make: Callable[..., Place],
) -> None:
    place = make("one", "two", function=("calls", {"tool": "crash"}), tools=["crash"])
    (sample,) = await place.run()
    (call,) = [row for row in place.rows if row.kind == "call"]
    assert call.text == "crash failed: its process ended itself with exit code 1"
    assert (call.failed, sample.status, sample.turns) == (True, "completed", 2)
    assert len(place.engines.requests) == 2


async def test_neighbours_of_a_bad_rollout_lose_nothing(make: Callable[..., Place]) -> None:
    place = make("one", "two", "three", function=("bad_or_good", {"bad": "exits"}))
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


@pytest.mark.parametrize("function", ["raises", "gives_text", "sleeps"])
async def test_a_rollout_that_fails_has_its_reason_and_counts(
    make: Callable[..., Place], function: str
) -> None:
    place = make("one", function=function)
    (sample,) = await place.run()
    assert sample.status == "failed"
    assert sample.reason
    assert sample.response_ids == []
    await place.run()
    with pytest.raises(BudgetError, match="3 samples failed, more than rollout.max_failed_share"):
        await place.run()


async def test_an_engine_that_cannot_generate_is_the_reason_of_its_rollout(
    make: Callable[..., Place],
) -> None:
    place = make("one", fails=lambda rid: rid.endswith(".0001"), function="three_turns")
    (sample,) = await place.run()
    assert (sample.status, sample.reason) == ("failed", "engine-0: died")


async def test_a_thousand_turns_end_at_the_limit(make: Callable[..., Place]) -> None:
    place = make("x", function="for_ever", max_turns=1000)
    (sample,) = await place.run(longest=100_000)
    assert (sample.turns, sample.status) == (1000, "truncated")


@pytest.mark.parametrize(
    ("times", "status", "reason"),
    [(1, "completed", None), (2, "failed", "its process died of signal 9 (Killed)")],
)
async def test_a_rollout_whose_process_is_killed_fails_only_if_it_is_killed_alone_too(
    make: Callable[..., Place], tmp_path: Path, times: int, status: str, reason: str | None
) -> None:
    place = make("one", function=("is_killed", {"times": times, "path": str(tmp_path / "seen")}))
    (sample,) = await place.run()
    assert (sample.status, sample.reason) == (status, reason)
    assert len(place.engines.requests) == 1


@pytest.mark.parametrize("times", [1, 2])
async def test_a_call_whose_process_is_killed_is_made_once_more(
    make: Callable[..., Place], tmp_path: Path, times: int
) -> None:
    call = {"tool": "kills", "path": str(tmp_path / "seen"), "times": times}
    place = make("one", "two", function=("calls", call), tools=["kills"])
    (sample,) = await place.run()
    (row,) = [row for row in place.rows if row.kind == "call"]
    assert (sample.status, sample.turns) == ("completed", 2)
    assert row.text == ("done" if times == 1 else "kills failed: its process died of signal 9 (Killed)")
