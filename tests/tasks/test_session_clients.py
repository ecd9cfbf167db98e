"""Clients that send whole histories, over real processes, HTTP, dialogues and records: engines alone are scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millrace.connectors.engines.client import AskedExperts, Generation
from millrace.connectors.engines.dispatching.pieces import Flush
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.config import RunConfig
from millrace.core.config.rollout import Sampling, SessionSection
from millrace.core.contracts.images import SentImages
from millrace.core.contracts.turns import TurnRow
from millrace.core.hooks.slime.arguments import OF_GENERATION
from millrace.tasks.generation.failures import FailureBudget
from millrace.tasks.generation.sessions.runner import MadeSample, SessionRunner, session_task
from millrace.tasks.generation.sessions.session_rollout import Opening
from millrace.tasks.generation.single_samples import SampleGenerator
from tests.support.scripted_engines import ScriptedEngines, generation
from tests.support.slow_members import slow_but

TOKENIZER = PromptTokenizer(build_tokenizer())
TURNS = {  # of the branch and the turn: what is generated
    "00.0000": "one",
    "00.0001": "two",
    "01.0000": "three",
    "01.0001": "four",
    "02.0000": "five",
}
Run = Callable[..., Any]
SLIME = "slime:tests.support.slime_functions."
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Engines(ScriptedEngines):
    """Generates the text of a branch's turn, ended as the model ends turns."""

    async def generate(
        self,
        input_ids: Sequence[int],
        params: Mapping[str, Any],
        *,
        rid: str,
        session: str | None,
        continued: int = 0,
        priority: int | None = None,
        flush: Flush | None = None,
        experts: AskedExperts | None = None,
        images: SentImages | None = None,
    ) -> Generation:
        await super().generate(input_ids, params, rid=rid, session=session)
        text = TURNS[rid.partition(".")[2]] + "<eos>"
        ids = TOKENIZER.tokenizer(text, add_special_tokens=False)["input_ids"]
        return generation(ids, [-0.5] * len(ids), text)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pools() -> AsyncIterator[dict[str, SessionPool]]:
    """A process of each function and its options: to start one takes seconds."""
    started: dict[str, SessionPool] = {}
    yield started
    for pool in started.values():
        pool.close()


@pytest.fixture
def run_function(
    make_config: Callable[..., RunConfig], pools: dict[str, SessionPool], model_folder: Path
) -> Run:

    async def made(
        function: str, stored: Sequence[TurnRow] = (), metadata: Any = None, **options: Any
    ) -> tuple[list[MadeSample], list[TurnRow], Engines]:
        settings = SessionSection.model_validate({"function": {"function": function, "options": options}})
        key = f"{function} {options}"
        pool = pools[key] = pools.get(key) or SessionPool(settings)
        engines, rows, sampling = Engines(), list[TurnRow](), Sampling()

        async def ready() -> Engines:
            return engines

        async def write(row: TurnRow) -> None:
            rows.append(row)

        budget = FailureBudget("field", 0.5, 4, what="failed", where="here", remedy="fix it")
        generator = SampleGenerator(make_config(), sampling, ready, budget)
        dialogues, model = Dialogues(TOKENIZER, []), str(model_folder)
        runner = SessionRunner(
            settings, sampling, pool, dialogues, generator, {**OF_GENERATION, "hf_checkpoint": model}
        )
        prompt = [{"role": "user", "content": "1+1="}]
        ids = TOKENIZER.encode_prompts([prompt], chat=True)[0]
        opening = Opening("g-0000", "g", prompt, ids, seed=7, chat=True, longest=512)
        task = session_task('"1+1="', '"2"', json.dumps(metadata or {}), "s", 0)
        samples, _, _ = await runner.run(opening, task, stored, write)
        return samples, rows, engines

    return made


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run_slime(run_function: Run) -> Run:
    """Runs one of slime's functions, all in one process."""

    def made(name: str, stored: Sequence[TurnRow] = (), metadata: Any = None) -> Any:
        row = {**(metadata or {}), "function": name}
        return run_function(f"{SLIME}chosen", stored, metadata=row, seen="<user>4<assistant>")

    return made


@pytest.fixture
def run(run_function: Run) -> Run:
    return partial(run_function, "tests.support.client_functions:compacts")


def shown(ids: Sequence[int]) -> str:
    return "".join(TOKENIZER.tokenizer.convert_ids_to_tokens(list(ids)))


async def test_what_was_generated_stays_as_it_is_and_is_trained_once(run: Run) -> None:
    samples, _, _ = await run()
    assert [sample.reason for sample in samples] == [None, None, None]
    assert [(shown(sample.prompt_ids), shown(sample.response_ids)) for sample in samples] == [
        ("<user>1+1=<assistant>", "one<eos><user>again<assistant>two<eos>"),
        ("<user>in short: 2<assistant>", "three<eos><user>go on<assistant>four<eos>"),
        ("<user>1+1=<assistant>one<eos><user>otherwise<assistant>", "five<eos>"),
    ]
    trained = [
        shown([token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask])
        for sample in samples
    ]
    assert trained == ["one<eos>two<eos>", "three<eos>four<eos>", "five<eos>"]
    assert [sample.reward for sample in samples] == [1.0, 1.0, 1.0]


async def test_the_messages_of_a_branch_end_where_it_began(run: Run) -> None:
    samples, _, _ = await run()
    assert '"otherwise"' in samples[2].dialogue
    assert '"two"' not in samples[2].dialogue


@pytest.mark.parametrize("kept", range(6))
async def test_a_rollout_that_begins_again_generates_only_what_is_not_recorded(run: Run, kept: int) -> None:
    samples, rows, _ = await run()
    again, more, engines = await run(rows[:kept])
    assert again == samples
    assert [(row.branch, row.event, row.kind) for row in more] == [
        (row.branch, row.event, row.kind) for row in rows[kept:]
    ]
    assert len(engines.requests) == len(rows) - kept


def trained(sample: MadeSample) -> str:
    mask = sample.trained_mask or sample.loss_mask
    return shown([token for token, each in zip(sample.response_ids, mask, strict=True) if each])


@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({}, (0.5, [])),
        pytest.param({"reward_key": "score"}, (1.5, [("length", 9.0)]), marks=pytest.mark.slow),
    ],
)
async def test_slimes_function_trains_what_it_was_given_token_for_token(
    run_function: Run, run_slime: Run, options: dict[str, Any], reward: Any
) -> None:
    seen = "<user>4<assistant>"
    run = (
        partial(run_function, f"{SLIME}two_turns", seen=seen, **options)
        if options
        else partial(run_slime, "two_turns")
    )
    samples, rows, engines = await run()
    assert [sample.reason for sample in samples] == [None]
    (sample,) = samples
    assert shown(sample.prompt_ids) == "<user>1+1=<assistant>"
    assert shown(sample.response_ids) == f"one<eos>{seen}two<eos>"
    assert trained(sample) == "one<eos>two<eos>"
    assert (sample.reward, sample.parts) == (reward[0], reward[1] and [("length", len(sample.response_ids))])
    again, more, engines = await run(rows)
    assert (again, more, engines.requests) == (samples, [], [])


async def test_equal_requests_of_slimes_function_are_one_turn(run_slime: Run) -> None:
    (sample,), rows, _ = await run_slime("retries")
    assert (sample.reason, trained(sample), sample.reward) == (None, "one<eos>", 0.0)
    assert len(rows) == 1


async def test_what_slimes_function_fans_out_are_branches_with_their_rewards(run_slime: Run) -> None:
    samples, _, _ = await run_slime("fans_out")
    assert [(shown(each.prompt_ids), trained(each), each.reward) for each in samples] == [
        ("<user>1+1=<assistant>", "one<eos>", 1.0),
        ("<user>in short<assistant>", "three<eos>", 2.0),
    ]


# what is asked of the function, and why it fails
ALTERED: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({}, "sample.tokens are not those that were sent and generated: they differ from token"),
    "status": ({}, "the function returned a sample that is aborted"),
    "unknown": ({}, "args has no n_samples_per_prompt here: give it in the function's options"),
    "temperature": ({"temperature": 0.1}, "the run samples with 1.0: set rollout.sampling.temperature"),
    "regex": ({"regex": "a+"}, "sampling_params.regex: it is 'a+', the run samples with None"),
    "no field": ({"no_field": 1}, "sampling_params.no_field: it is not known here"),
}


async def test_what_is_not_what_was_generated_fails_with_its_reason(run_slime: Run) -> None:
    for what, (sampling, reason) in ALTERED.items():
        metadata = {"what": what, "sampling": sampling}
        (sample,), _, _ = await run_slime("alters", metadata=metadata)
        assert sample.status == "failed", what
        assert reason in (sample.reason or ""), what


FIRST, SECOND = "one<eos>", "two<eos>"
# what a function leaves out of its two turns: what is trained then, and the status
LEFT_OUT: dict[str, tuple[str, str]] = {
    "nothing": (FIRST + SECOND, "completed"),
    "first turn": ("<eos>", "completed"),
    "all by mask": ("", "completed"),
    "removed": ("", "completed"),
    "removed with other tokens": ("", "completed"),
    "short mask": (SECOND, "completed"),
    "short response": (SECOND, "completed"),
    "no mask": (FIRST + SECOND, "completed"),
    "no tokens": (FIRST + SECOND, "completed"),
    "cut before the second turn": (FIRST, "completed"),
    "cut within the first turn": ("e", "completed"),
    "truncated": (FIRST + SECOND, "truncated"),
    "status as text": (FIRST + SECOND, "truncated"),
}
REFUSED = {
    "an observed token": "sample.loss_mask trains a token that was not generated",
    "a mask of another length": "sample.loss_mask has 1 values, sample.response_length is",
    "nothing returned": "the function returned a NoneType: return the sample, or a list of samples",
    "an empty list": "the function returned no sample",
    "another type": "the function returned a dict",
}


async def test_what_a_function_leaves_out_is_stored_and_not_trained(run_slime: Run) -> None:
    wanted = None
    for what, (left, status) in LEFT_OUT.items():
        (sample,), rows, _ = await run_slime("leaves_out", metadata={"what": what})
        assert (sample.reason, sample.reward, sample.status) == (None, 1.0, status), what
        assert trained(sample) == left, what
        wanted = wanted or sample.response_ids
        assert sample.response_ids == wanted, what
        assert shown([t for t, m in zip(wanted, sample.loss_mask, strict=True) if m]) == FIRST + SECOND, what
        assert (sample.trained_mask is None) == (left == FIRST + SECOND), what
        again, more, engines = await run_slime("leaves_out", rows, metadata={"what": what})
        assert (again, more, engines.requests) == ([sample], [], []), what
    for what, reason in REFUSED.items():
        (sample,), _, _ = await run_slime("leaves_out", metadata={"what": what})
        assert sample.status == "failed", what
        assert reason in (sample.reason or ""), what


@pytest.mark.parametrize(
    ("function", "reward"),
    slow_but(
        [("of_a_list", 2.0), ("of_a_list_and_sampling", 3.0), ("by_slimes_own", 8.0)], ("by_slimes_own", 8.0)
    ),
)
async def test_slimes_other_forms_make_the_same_sample(
    run_function: Run, function: str, reward: float
) -> None:
    options = {"n_samples_per_prompt": 8} if function == "by_slimes_own" else {}
    (sample,), _, _ = await run_function(f"{SLIME}{function}", **options)
    assert (sample.reason, trained(sample), sample.reward) == (None, FIRST, reward)


async def test_a_branch_that_is_not_returned_is_not_trained(run_slime: Run) -> None:
    first, second = (await run_slime("returns_one_of_two"))[0]
    assert (trained(first), first.reward) == (FIRST, 1.5)
    assert (trained(second), second.reward) == ("", 1.5)


@pytest.mark.parametrize("characters", [900_000, 3_000_000])
async def test_a_message_that_no_context_holds_is_not_tokenised(
    run_function: Run, characters: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """60 MB of text took the run's driver to 20 GB, to find that it was too long."""
    tokenised: list[int] = []
    encode = TOKENIZER.encode_texts
    monkeypatch.setattr(
        TOKENIZER, "encode_texts", lambda texts: tokenised.append(len("".join(texts))) or encode(texts)
    )
    seen = tmp_path / "seen"
    (sample,), rows, _ = await run_function(
        "tests.support.client_functions:posts_much", characters=characters, seen=str(seen)
    )
    far = characters > 1 << 20
    said = "the messages have 30000" if far else "rollout.session.max_tokens = 2048"
    assert said in str(sample.reason)
    assert seen.read_text().startswith("413 " if far else "400 ")
    assert rows == []
    assert any(count > characters / 2 for count in tokenised) != far
