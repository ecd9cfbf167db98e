"""A served teacher in the reward task: what is stored of its answers, and what another start asks it again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.parts import read_parts, write_part
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.sample import ScoredSample
from millrace.core.contracts.task_records import Cut
from millrace.core.errors import BudgetError
from millrace.core.metrics import teacher_metrics
from millrace.tasks.batching.deferred_groups import join
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import filter_groups
from millrace.tasks.reward import reward, take_back_failures
from millrace.tasks.runtime.hints import with_hint
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.stream import Stream
from tests.support.engine_process import CLOSE, peaked_model, reference_logits, reference_logprobs
from tests.support.stored_samples import drawn_group, sample_of
from tests.support.teacher_server import TeacherServer, teacher_server

pytestmark = pytest.mark.usefixtures("one_credit_worker")

BAD = 77  # the first token of prompts that the teacher fails on


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peaked_model(tmp_path_factory.mktemp("teacher") / "model", seed=1)


@pytest.fixture
async def server(tiny_model: Path) -> AsyncIterator[TeacherServer]:
    async with teacher_server(tiny_model) as made:
        yield made


@pytest.fixture
def start(
    make_config: Callable[..., RunConfig], server: TeacherServer, tiny_model: Path
) -> Callable[..., IterationContext]:
    """start(**reward): the context of another start, of an iteration of two groups of four whose filter has settled."""

    def make(hint: Any = None, **settings: Any) -> IterationContext:
        teacher = {
            "url": server.url,
            "protocol": "vllm",
            "model": "teacher",
            "attempts": 1,
            "top_k": 2,
            "hint": hint,
        }
        algorithm = {"preset": "opd", "teacher_server": teacher}
        function = {"function": "millrace.core.rewards.text:contains", **settings}
        config = make_config(reward=function, algorithm=algorithm, model={"path": str(tiny_model)})
        ctx = IterationContext(Runtime(config), 1, Stream(released=2))
        ctx.stream.settled = True
        return ctx

    return make


def generate(ctx: IterationContext, *numbers: int, bad: tuple[int, ...] = (), **group: Any) -> None:
    """Store these samples as a part, each with tokens of its own. group: what their groups have."""
    rows = [
        sample_of(
            drawn_group(number // 4, **group),
            number % 4,
            str(number),
            length=2,
            tokens=[BAD if number in bad else 10, 20, 30 + number, 40],
        )
        for number in numbers
    ]
    write_part(ctx.folder, "rollouts", schema.to_table(rows, "rollouts"), "rollouts")


def stored(ctx: IterationContext) -> dict[str, dict[str, Any]]:
    rows = read_parts(ctx.folder, "rewards", "rewards").to_pylist()
    return {row["sample_id"]: row for row in rows}


def asked(server: TeacherServer) -> list[list[int]]:
    return sorted(body["prompt"] for body in server.asked)


async def test_what_is_stored_is_not_asked_again_and_reaches_the_batch(
    start: Callable[..., IterationContext], server: TeacherServer, tiny_model: Path
) -> None:
    first = start()
    first.folder.write_table(
        "prompts.parquet", schema.to_table([drawn_group(0), drawn_group(1)], "prompts"), "prompts"
    )
    generate(first, 0, 1, 2)
    await reward.fn(first)
    assert asked(server) == [[10, 20, 30 + number, 40] for number in (0, 1, 2)]
    before = stored(first)
    first.runtime.scoring.close()

    server.asked.clear()
    second = start()
    generate(second, 3, 4, 5, 6, 7)
    record = await reward.fn(second)
    assert record["scored"] == 8
    assert asked(server) == [[10, 20, 30 + number, 40] for number in (3, 4, 5, 6, 7)]
    after = stored(second)
    assert {name: after[name] for name in before} == before
    for number, row in enumerate(row for _, row in sorted(after.items())):
        expected = reference_logprobs(tiny_model, [10, 20], [30 + number, 40])
        assert row["teacher_logprobs"] == pytest.approx(expected, abs=CLOSE)
        assert row["teacher_s"] > 0
        tops = reference_logits(tiny_model, [10, 20], [30 + number, 40]).log_softmax(-1).topk(2)
        assert row["teacher_top_tokens"] == tops.indices.flatten().tolist()
        assert row["teacher_top_logprobs"] == pytest.approx(tops.values.flatten().tolist(), abs=CLOSE)
    figures = teacher_metrics(read_parts(second.folder, "rewards", "rewards"))
    assert figures["teacher/failed_share"] == 0
    assert figures["teacher/seconds_mean"] > 0

    second.stream = Stream(released=2)
    await filter_groups.fn(second)
    second.runtime.scoring.close()
    for row in second.folder.read_table("batch.parquet", "batch").to_pylist():
        for name in ("teacher_logprobs", "teacher_top_tokens", "teacher_top_logprobs"):
            assert row[name] == after[row["sample_id"]][name]


async def test_a_sample_without_an_answer_has_failed_and_is_asked_about_again(
    start: Callable[..., IterationContext], server: TeacherServer
) -> None:
    def fails_on_bad(answer: Any) -> Any:
        return {"error": "no"} if server.asked[-1]["prompt"][0] == BAD else answer

    server.spoil = fails_on_bad
    first = start(max_failed_share=0.25)
    generate(first, *range(8), bad=(1, 2, 5))
    with pytest.raises(
        BudgetError,
        match=r"3 samples could not be scored.*algorithm\.teacher_server: .*the server of algorithm",
    ):
        await reward.fn(first)
    first.runtime.scoring.close()
    failed = {row["sample_id"] for row in stored(first).values() if row["scoring"] == "failed"}
    assert len(failed) == 3
    for name in failed:
        row = stored(first)[name]
        assert (row["reward"], row["teacher_logprobs"]) == (None, None)
        assert row["reason"].startswith("algorithm.teacher_server: ")
    figures = teacher_metrics(read_parts(first.folder, "rewards", "rewards"))
    assert figures["teacher/failed_share"] == pytest.approx(3 / len(stored(first)))

    kept = {name: row for name, row in stored(first).items() if name not in failed}
    server.spoil = None
    server.asked.clear()
    second = start(max_failed_share=0.25)
    await take_back_failures(second)
    record = await reward.fn(second)
    second.runtime.scoring.close()
    assert record["scored"] == 8
    assert len(server.asked) == 8 - len(kept)
    assert {name: stored(second)[name] for name in kept} == kept


RANKED = {"function": "tests.support.reward_forms:rank", "group": True, "max_failed_share": 0.25}
RANKS = [0.0, 0.0, 2.0, 2.0]  # of the responses 8, 9, 10, 11, by length


async def test_a_group_that_one_call_scores_is_scored_again_as_a_whole(
    start: Callable[..., IterationContext], server: TeacherServer
) -> None:
    """The sample that the teacher had failed on was scored again in a call of its own: the first among itself."""
    server.spoil = lambda answer: {"error": "no"} if server.asked[-1]["prompt"][0] == BAD else answer
    first = start(**RANKED)
    generate(first, 0, 1, 2, 3, 8, 9, 10, 11, bad=(10,))
    assert (await reward.fn(first))["failed"] == 1
    first.runtime.scoring.close()
    others = {name: row for name, row in stored(first).items() if row["group_id"] == "g0"}
    assert len(others) == 4

    server.spoil = None
    for _ in range(2):  # the second time nothing is left to take back
        second = start(**RANKED)
        await take_back_failures(second)
        assert {name: row for name, row in stored(second).items() if row["group_id"] == "g0"} == others
        assert (await reward.fn(second))["scored"] == 8
        second.runtime.scoring.close()
        again = [row["reward"] for _, row in sorted(stored(second).items()) if row["group_id"] == "g2"]
        assert again == RANKS


async def test_a_group_of_which_a_kill_has_left_a_part_is_taken_back_too(
    start: Callable[..., IterationContext], server: TeacherServer
) -> None:
    """Parts without a failure go first: the one with the failure says which group it is."""
    ctx = start(**RANKED)
    generate(ctx, 8, 9, 10, 11)
    await reward.fn(ctx)
    ctx.runtime.scoring.close()
    rows = [ScoredSample(**row) for _, row in sorted(stored(ctx).items())]
    for path in ctx.folder.list("rewards"):
        ctx.folder.remove(path)
    failed = replace(rows[2], scoring="failed", reward=None, reason="no answer")
    for part in ([*rows[:2], failed], rows[3:]):
        write_part(ctx.folder, "rewards", schema.to_table(part, "rewards"), "rewards")
    removed: list[int] = []
    remove = type(ctx.folder).remove

    def counted(store: Store, path: str) -> None:
        removed.append(store.read_table(path, "rewards").num_rows)
        remove(store, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "remove", counted)
        await take_back_failures(ctx)
    assert removed == [1, 3]
    assert stored(ctx) == {}


@pytest.mark.parametrize("group", [False, True])
async def test_a_deferred_group_brings_no_scores_where_one_call_scores_it_and_a_sample_failed(
    start: Callable[..., IterationContext], group: bool
) -> None:
    ctx = start(
        **RANKED | ({} if group else {"function": "millrace.core.rewards.text:contains", "group": False})
    )
    ctx.runtime.scoring.close()
    before = ctx.run_folder.iteration(0)
    rows = [sample_of(drawn_group(2, iteration=0), index, str(8 + index)) for index in range(4)]
    scores = [
        ScoredSample(
            sample_id=row.sample_id,
            group_id=row.group_id,
            reward=None if row.index == 2 else 1.0,
            reward_parts=[],
            scoring="failed" if row.index == 2 else "scored",
            reason="no answer" if row.index == 2 else None,
            scoring_s=0.0,
        )
        for row in rows
    ]
    cut = Cut(trained=[], deferred={"g2": 1}, parts=[])
    files = [
        before.write_table(
            "prompts.parquet", schema.to_table([drawn_group(2, iteration=0)], "prompts"), "prompts"
        ),
        write_part(before, "rewards", schema.to_table(scores, "rewards"), "rewards"),
        before.write_table("deferred.parquet", schema.to_table(rows, "rollouts"), "rollouts"),
        before.write_sealed("cut.json", cut.model_dump()),
    ]
    record = {"metadata": {}, "result": json.dumps({"files": [file.record() for file in files]})}
    before.write_sealed(record_path("rollout"), record)
    joined = join(ctx)
    assert set(joined.finished) == {row.sample_id for row in rows}
    assert set(joined.scores) == (set() if group else {row.sample_id for row in rows if row.index != 2})


PROMPTS = {  # a prompt, and what the teacher reads in its place
    "text": ("1+1=", "1+1=\n\nThe answer is 2."),
    "messages": (
        [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "Well,"}],
        [{"role": "user", "content": "1+1=\n\nThe answer is 2."}, {"role": "assistant", "content": "Well,"}],
    ),
}


@pytest.mark.parametrize("form", PROMPTS)
async def test_a_hint_follows_the_users_last_message_and_is_stored(
    start: Callable[..., IterationContext], server: TeacherServer, tiny_model: Path, form: str
) -> None:
    given, hinted = PROMPTS[form]
    ctx = start({"function": "tests.support.teacher_hints:label_of"})
    generate(ctx, 0, prompt=json.dumps(given), label='"2"')
    generate(ctx, 4, prompt=json.dumps(given), label='"3"')
    await reward.fn(ctx)
    ctx.runtime.scoring.close()
    (told,) = ctx.runtime.prompts.tokenizer.encode_prompts([hinted], chat=True)
    assert asked(server) == sorted([[*told, 30, 40], [10, 20, 34, 40]])
    first, second = (row for _, row in sorted(stored(ctx).items()))
    assert (first["teacher_hint"], second["teacher_hint"]) == ("The answer is 2.", None)
    assert first["teacher_logprobs"] == pytest.approx(
        reference_logprobs(tiny_model, told, [30, 40]), abs=CLOSE
    )


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", "ValueError: no hint for 0"),
        ("number", "returned a int; return text, or None for no hint"),
        ("label_of", "the prompt has no message of a user"),
    ],
)
async def test_a_hint_that_cannot_be_given_is_the_samples_failure(
    start: Callable[..., IterationContext], server: TeacherServer, function: str, said: str
) -> None:
    ctx = start({"function": f"tests.support.teacher_hints:{function}"}, max_failed_share=1.0)
    generate(ctx, 0, prompt='[{"role": "system", "content": "Be brief."}]', label='"2"')
    await reward.fn(ctx)
    ctx.runtime.scoring.close()
    (row,) = stored(ctx).values()
    assert row["scoring"] == "failed"
    assert row["reason"].startswith("algorithm.teacher_server.hint: ")
    assert said in row["reason"]
    assert server.asked == []


def test_a_hint_comes_before_a_plain_text() -> None:
    assert with_hint("1+1=", "It is 2.", chat=False) == "It is 2.\n\n1+1="
