"""Every example is run: two short iterations with a random model, and what its function did is in the stored rows."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace import RewardInput
from millrace.connectors.rewards.judge import judge
from tests.examples.test_agent_examples import teach
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import Workplace, make_workplace

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = [  # the quickstart's recipe, cut down to two iterations of two steps that a random model gets some reward in
    "run.prepare=null",
    "run.iterations=2",
    "model.path=model",
    "data.sources.0.path=train.jsonl",
    "rollout.prompts=8",
    "rollout.samples_per_prompt=4",
    "rollout.part_groups=2",
    "rollout.sampling.max_new_tokens=16",
    "trainer.global_batch=16",
    "trainer.max_pack_tokens=512",
    "checkpoint.every=2",
    "evaluation.every=2",
    "evaluation.sets.0.path=held_out.jsonl",
]
SOME_REWARD = ["reward.function=millrace.core.rewards.text:contains"]
SESSION_LENGTH = "rollout.session.max_tokens=64"
NO_WARM_UP = "trainer.schedule.warmup_steps=0"  # a warm-up begins at rate 0, and its first step moves nothing


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = make_workplace(tmp_path_factory.mktemp("examples"))
    place.call("server", "start")
    yield place
    place.call("server", "stop")


def iterations(
    workplace: Workplace, folder: str, name: str, *overrides: str, short: Sequence[str] = SHORT
) -> list[Path]:
    """Run the example as its README says, from a folder that holds its module; the folders of its iterations."""
    for module in (EXAMPLES / folder).glob("*.py"):
        shutil.copy(module, workplace.folder)
    root = Path(tempfile.mkdtemp(dir=workplace.folder))  # two tests may run one example
    config = str(EXAMPLES / folder / f"{name}.yaml")
    workplace.call("train", config, f"storage.root={root}", f"run.name={name}", *short, *overrides)
    found = sorted((root / name / "iterations").iterdir())
    assert len(found) == 2
    return found


def rows(iteration: Path, table: str = "batch") -> list[dict[str, Any]]:
    return pq.read_table(iteration / f"{table}.parquet").to_pylist()  # type: ignore[no-any-return]


def groups(iteration: Path) -> list[list[dict[str, Any]]]:
    """The rows of each prompt of the batch."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows(iteration):
        found[row["group_id"]].append(row)
    return list(found.values())


@pytest.mark.slow
def test_the_parts_of_the_reward_are_stored(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "reward", "near_miss"):
        for row in rows(iteration):
            parts = dict(row["reward_parts"])
            assert set(parts) == {"closeness", "length"}
            assert parts["length"] == pytest.approx(-0.02 * row["response_length"])
            assert row["reward"] == pytest.approx(sum(parts.values()))
            assert row["shaped_reward"] == row["reward"]


@pytest.mark.slow
def test_the_groups_that_the_filter_drops_are_replaced_and_keep_its_reason(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "group_filter", "spread", *SOME_REWARD):
        verdicts = rows(iteration, "verdicts")
        reasons = {row["reason"] for row in verdicts if row["verdict"] == "dropped"}
        assert reasons == {"rewards are only 0 apart"}
        batch = rows(iteration)
        assert len(batch) == 8 * 4
        for group in {row["group_id"] for row in batch}:
            assert {row["reward"] for row in batch if row["group_id"] == group} == {0.0, 1.0}


@pytest.mark.slow
def test_a_tournament_ranks_the_answers_of_each_prompt(workplace: Workplace) -> None:
    no_sets = [override for override in SHORT if not override.startswith("evaluation")]
    for iteration in iterations(workplace, "tournament", "closer", short=no_sets):
        for ranked in groups(iteration):
            numbers = [row for row in ranked if row["response"].lstrip("-").isdigit()]
            assert sum(row["reward"] for row in ranked) == pytest.approx(2.0)  # four samples
            for row in ranked:
                parts = dict(row["reward_parts"])
                assert (parts["place"], parts["meetings"]) == (row["reward"], 3)
                assert numbers or (row["reward"], parts["win_rate"]) == (0.5, 0.5)


@pytest.mark.slow
def test_a_reward_of_groups_sees_what_the_other_samples_say(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "group_reward", "rarity"):
        for group in groups(iteration):
            said = [row["response"] for row in group]
            for row in group:
                found, alone = (
                    float(row["response"] == json.loads(row["label"])),
                    1 / said.count(row["response"]),
                )
                assert dict(row["reward_parts"]) == {"right": found, "alone": alone}
                assert row["reward"] == pytest.approx(found + 0.2 * alone)


@pytest.mark.slow
def test_programs_are_rewarded_by_their_tests_in_the_sandbox(workplace: Workplace) -> None:
    from examples.code_reward.warm_up import task

    tasks = [task("+", 5, 3), task("*", 5, 3)] * 8
    (workplace.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    teach(workplace.folder / "coder", [row["prompt"] for row in tasks[:2]], ["x+5", "x*5", "y", "x+"])
    settings = ["model.path=coder", "data.sources.0.path=tasks.jsonl", "evaluation.sets.0.path=tasks.jsonl"]
    seen: set[tuple[str, float]] = set()
    for iteration in iterations(workplace, "code_reward", "programs", *settings):
        for row in rows(iteration):
            parts = dict(row["reward_parts"])
            assert parts["tests"] == 2
            assert row["reward"] == (parts["passed"] == 2)
            said = row["response"].strip()
            if said in ("x+5", "x*5", "y", "x+"):
                right = said == json.loads(row["label"])
                assert row["reward"] == right
                assert parts["passed" if right else "wrong" if said in ("x+5", "x*5") else "raised"] >= 1
                seen.add((said, row["reward"]))
    assert {("x+5", 1.0), ("x+5", 0.0), ("x*5", 1.0), ("x*5", 0.0)} & seen
    assert {said for said, _ in seen} >= {"y", "x+"}


@pytest.mark.slow
async def test_a_judge_with_a_rubric_scores_over_the_engines_endpoint(
    workplace: Workplace, tmp_path: Path
) -> None:
    from examples.judge.make_judge import RUBRIC, make

    make(tmp_path / "judge", steps=8)  # it has learnt to give a score, and hardly which
    with embedded_engine(tmp_path / "judge", "--dtype", "float32", log=tmp_path / "engine.log") as (url, _):
        address = f"reward.options.url={url}/v1"
        found = [
            row for iteration in iterations(workplace, "judge", "even", address) for row in rows(iteration)
        ]
        for row in found:
            assert dict(row["reward_parts"]) == {"score": 10 * row["reward"]}
            assert "core" in dict(row["reward_texts"])["words"]
        for row in found[::16]:
            sample = RewardInput(json.loads(row["prompt"]), row["response"], label=json.loads(row["label"]))
            again = await judge(sample, url=f"{url}/v1", model="judge", rubric=RUBRIC, max_tokens=16)
            assert again.reward == row["reward"]


@pytest.mark.slow
def test_the_advantages_are_the_functions(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "advantage", "best_of_group", *SOME_REWARD):
        batch = rows(iteration)
        mixed = {
            group
            for group in {row["group_id"] for row in batch}
            if len({row["reward"] for row in batch if row["group_id"] == group}) == 2
        }
        assert mixed
        for row in batch:
            best = row["group_id"] in mixed and row["reward"] == 1.0
            assert row["advantage"] == (0.5 if best else 0.0)


@pytest.mark.slow
def test_the_metric_of_the_loss_is_stored_with_each_step(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "loss", "bounded", *SOME_REWARD, NO_WARM_UP):
        steps = json.loads((iteration / "step.json").read_text())["steps"]
        assert steps[0]["bounded_share"] == 0.0  # the first step is on policy
        assert steps[1]["bounded_share"] > 0.0
        assert all(step["grad_norm"] > 0 for step in steps)


@pytest.mark.slow
def test_a_second_try_is_a_second_turn_of_the_same_rollout(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "generation", "second_try", "rollout.session.max_tokens=48"):
        for row in rows(iteration):
            second = row["turns"] == 2
            assert row["reward"] in ((0.0, 0.5) if second else (1.0,))
            # not trained: two role tokens, the three characters between them, and the end of a turn that was cut off
            assert row["response_length"] - sum(row["loss_mask"]) in ((5, 6) if second else (0,))
            roles = [message["role"] for message in json.loads(row["dialogue"])]
            assert roles == ["user", "assistant"] * row["turns"]


@pytest.mark.slow
def test_a_client_of_your_own_makes_turns_that_go_on_from_one_another(workplace: Workplace) -> None:
    for iteration in iterations(workplace, "openai_client", "two_tries", SESSION_LENGTH):
        batch = rows(iteration)
        assert len(batch) == 8 * 4  # a sample of each rollout: no request was taken for a branch
        for row in batch:
            assert row["reward"] == {1: 1.0, 2: row["reward"]}[row["turns"]]
            assert row["reward"] in (0.0, 0.5, 1.0)
            assert [message["role"] for message in json.loads(row["dialogue"])] == [
                "user",
                "assistant",
            ] * row["turns"]
        assert {row["turns"] for row in batch} >= {2}


@pytest.mark.slow
def test_the_levels_of_a_source_follow_the_policy(workplace: Workplace) -> None:
    early = ["data.sources.growing.levels.groups=2", "data.sources.growing.levels.raise_from=0.0"]
    found = iterations(workplace, "levels", "growing", *SOME_REWARD, *early)
    first, second = ([row for row in rows(each, "prompts") if row["source"] == "growing"] for each in found)
    assert {row["level"] for row in first} == {0}
    assert len({row["level"] for row in second}) > 1
    for row in second:
        assert max(map(int, json.loads(row["prompt"]).strip("=").split("+"))) < 5 * (row["level"] + 1)
    assert "nothing is wrong" in workplace.call("verify", "growing", "--root", str(found[0].parents[2]))


@pytest.mark.slow
def test_solved_and_hopeless_rows_of_the_fixed_set_rest(workplace: Workplace) -> None:
    """Eight usable rows, drawn six an iteration: from the first row of the second pass on pools decide."""
    rest = [f"data.sources.fixed.pools.{name}_share=1.0e-9" for name in ("solved", "unsolved")]
    few = [
        "data.sources.fixed.path=train.jsonl@[:10]",
        "data.sources.fixed.weight=9",
        "filter.refill_factor=0",
    ]
    found = iterations(workplace, "levels", "growing", *SOME_REWARD, *few, *rest)
    seen: dict[str, float] = {}
    passes: list[tuple[int, float | None]] = []
    for iteration in found:
        judged = [row for row in rows(iteration, "verdicts") if row["verdict"] != "returned"]
        rewards = {row["group_id"]: row["group_reward"] for row in judged}
        drawn = [row for row in rows(iteration, "prompts") if row["source"] == "fixed"]
        passes += [(row["epoch"], seen.get(row["prompt_id"])) for row in drawn]
        seen |= {row["prompt_id"]: rewards[row["group_id"]] for row in drawn if row["group_id"] in rewards}
    again = [score for epoch, score in passes if epoch]
    assert again
    assert all(score is None or 0.0 < score < 1.0 for score in again)


@pytest.mark.slow
def test_questions_of_two_generators_come_at_levels(workplace: Workplace) -> None:
    pytest.importorskip("reasoning_gym")
    of_files = ("data.", "evaluation.", "trainer.max_pack_tokens")
    short = [override for override in SHORT if not override.startswith(of_files)]
    early = [
        f"data.sources.{name}.levels.{at}"
        for name in ("sums", "words")
        for at in ("groups=1", "raise_from=0.0")
    ]
    found = iterations(workplace, "puzzles", "puzzles", "evaluation.sets=[]", *early, short=short)
    first, second = ({row["source"]: row["level"] for row in rows(each, "prompts")} for each in found)
    assert first == {"sums": 0, "words": 0}
    assert set(second) == {"sums", "words"}
    assert max(second.values()) == 1
    assert "nothing is wrong" in workplace.call("verify", "puzzles", "--root", str(found[0].parents[2]))
