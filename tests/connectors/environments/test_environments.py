"""Environments by hand and of other packages: an episode of each in a process of rollouts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.core.hooks.protocols import RewardInput
from millrace.core.sessions.pipe import End
from millrace.core.sessions.tree import BranchReward
from tests.connectors.environments.conftest import Play
from tests.support.doc_commands import blocks

HERE = "millrace.connectors.environments"


def reward_of(end: End) -> float:
    assert end.status == "completed", end
    return end.rewards[0].value


async def test_a_calculator_by_hand(play: Play) -> None:
    end, shown = await play(
        "tests.support.text_environments:Calculator",
        {"ask": "compute"},
        ["hm", "compute 17 * 3", "answer 51"],
        label=51,
    )
    assert reward_of(end) == 1.0
    assert shown == ["", "write compute and a sum, or answer and a number", "51"]


async def test_the_environment_of_the_page_is_played(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = (block for block in blocks("generation#environments", "python") if "class Guess" in block)
    (tmp_path / "guess_of_the_page.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    end, shown = await play("guess_of_the_page:Guess", {"top": 1}, ["7", "0"], label=None)
    assert reward_of(end) == 1.0
    assert shown == ["Guess a number below 1.", "lower"]


async def test_an_option_may_refer_to_a_secret(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD_OF_OURS", "sesame")
    end, shown = await play(
        "tests.support.text_environments:Calculator",
        {"ask": "${env:WORD_OF_OURS}"},
        ["hm", "answer 2"],
        label=1,
    )
    assert reward_of(end) == 0.0
    assert shown[1].startswith("write sesame and")


# Reasoning Gym

GYM = f"{HERE}.reasoning_gym:ReasoningGym"


async def test_a_question_of_reasoning_gym_is_shown_and_scored(play: Play) -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    entry = factory.create_dataset("leg_counting", seed=0, size=100)[7]
    options = {"generator": "leg_counting", "size": 100}
    end, shown = await play(
        GYM, options, [f"so <answer>{entry['answer']}</answer>"], metadata={"index": 7}, prompt="Answer."
    )
    assert reward_of(end) == 1.0
    assert entry["question"] in shown[0]
    end, _ = await play(GYM, options, ["<answer>-1</answer>"], metadata={"index": 7})
    assert reward_of(end) < 0.5


async def test_written_prompts_are_the_questions_that_are_scored(play: Play, tmp_path: Path) -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    from millrace.connectors.environments.reasoning_gym import write_prompts

    write_prompts(tmp_path / "p.jsonl", "chain_sum", 3, {"max_terms": 3, "seed": 5}, first=40, size=50)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["metadata"]["index"] for row in rows] == [40, 41, 42]
    entry = factory.create_dataset("chain_sum", max_terms=3, seed=5, size=50)[42]
    end, shown = await play(GYM, {"size": 50}, [entry["answer"]], **rows[2])
    assert reward_of(end) == 1.0
    assert shown == [""]  # the prompt has it already


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": "legs"}, "Reasoning Gym has no generator of this name; it has ab, acre, "),
        ({"generator": "leg_counting", "config": {"legs": 3}}, "leg_counting does not take it: "),
        ({"generator": "composite"}, "composite has no 'datasets'; list the generators"),
        (
            {"generator": "composite", "config": {"datasets": [{"name": "legs"}]}},
            "composite does not take it: ",
        ),
    ],
)
async def test_a_wrong_generator_is_named(play: Play, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("reasoning_gym")
    end, _ = await play(GYM, options, ["1"])
    assert message in end.reason


def test_a_composite_draws_from_its_generators_and_scores_each_by_its_own() -> None:
    pytest.importorskip("reasoning_gym")
    from millrace.connectors.environments.reasoning_gym import _questions, rows, score

    config = {"datasets": [{"name": "chain_sum", "weight": 2, "config": {"max_terms": 2}}, {"name": "gcd"}]}
    drawn = rows("composite", config, 200)
    backwards = [drawn[number] for number in (150, 9, 5)]
    _questions.cache_clear()
    again = rows("composite", config, 200)
    assert [again[number] for number in (5, 9, 150)] == backwards[::-1]
    entries = _questions("composite", json.dumps(config, sort_keys=True), 200)
    for number in range(40):
        row, answer = again[number], str(entries[number]["answer"])
        assert score(RewardInput(row["prompt"], answer, metadata=row["metadata"])).reward == 1
    assert {entries[number]["metadata"]["source_dataset"] for number in range(40)} == {"chain_sum", "gcd"}


def test_every_generator_makes_a_question_that_its_own_answer_solves() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    from millrace.connectors.environments.reasoning_gym import _questions

    unsolved = []
    for generator in sorted(factory.DATASETS):
        if generator == "composite":  # it needs others by its config
            continue
        questions = _questions(generator, "{}", 5)
        entry = questions[3]
        if entry["answer"] is not None and questions.score_answer(entry["answer"], entry) < 0.9:
            unsolved.append(generator)
    assert unsolved == []


# Gymnasium

TEXT = f"{HERE}.gymnasium_text:GymnasiumText"


async def test_a_game_of_text_is_played_to_its_end(play: Play) -> None:
    pytest.importorskip("gymnasium")
    options = {"id": "tests/Guess-v0", "register": "tests.support.guess_env", "instructions": "Guess."}
    texts = ["I think\nriver", "or mill?\nmill", "wheel", "stone"]
    end, shown = await play(TEXT, options, texts, metadata={"seed": 3})
    assert shown[0].startswith("Guess.\n\nIt begins with ")
    assert set(shown[1:]) <= {"wrong"}
    assert reward_of(end) == pytest.approx(1.0 - 0.1 * (len(shown) - 1))
    again, _ = await play(TEXT, options, texts, metadata={"seed": 3})
    assert again == end


async def test_a_rendered_game_takes_named_actions(play: Play) -> None:
    pytest.importorskip("gymnasium")
    options = {
        "id": "FrozenLake-v1",
        "make": {"is_slippery": False},
        "show": "render",
        "action": r"\[(\w+)\]",
        "actions": {"left": 0, "down": 1, "right": 2, "up": 3},
    }
    way = [f"I go [{step}]" for step in ("down", "down", "right", "right", "down", "right")]
    end, shown = await play(TEXT, options, ["I fly [north]", *way])
    assert reward_of(end) == 1.0
    assert "FFFH" in shown[0]
    assert shown[1] == "There is no action 'north'; choose left or down or right or up."


async def test_numbers_are_the_actions_where_the_environment_takes_numbers(play: Play) -> None:
    pytest.importorskip("gymnasium")
    options = {"id": "FrozenLake-v1", "make": {"is_slippery": False}}
    end, shown = await play(TEXT, options, ["go", "9", "1", "2"])
    assert reward_of(end) == 0.0  # into a hole
    assert shown == ["0", "'go' is no action; an action is one of Discrete(4).", shown[2], "4"]
    assert shown[2].startswith("'9' is no action")


# OpenEnv


@pytest.fixture
def server() -> Iterator[str]:
    pytest.importorskip("openenv")
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.openenv_server", str(port)], env=os.environ
    )
    try:
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_an_episode_on_an_openenv_server(play: Play, server: str) -> None:
    texts = ["seven", '{"name": 1}', '{"number": 2}', '{"number": 9}', '{"number": 7}']
    options = {"url": server, "show": "hint"}
    end, shown = await play(f"{HERE}.openenv:OpenEnv", options, texts, metadata={"seed": 7})
    assert shown[0] == "a number below ten"
    assert shown[1].startswith("The action is not JSON")
    assert shown[2].startswith("The action is refused")
    assert shown[3:] == ["too low", "too high"]
    assert reward_of(end) == 0.5


async def test_the_text_of_a_turn_may_be_one_field_of_the_action(play: Play, server: str) -> None:
    options = {"url": server, "action": "number", "reward": "last"}
    end, shown = await play(f"{HERE}.openenv:OpenEnv", options, ["1", "3"], metadata={"reset": {"seed": 3}})
    assert shown == ['{"hint": "a number below ten"}', '{"hint": "too low"}']
    assert reward_of(end) == 1.0


# verifiers

RUN = f"{HERE}.verifiers:run"


@pytest.fixture
def taskset(monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "support"))
    return "verifiers-numbers"


async def test_verifiers_runs_its_turns_in_the_session(play: Play, taskset: str, tmp_path: Path) -> None:
    from millrace.connectors.environments.verifiers import write_prompts

    write_prompts(tmp_path / "p.jsonl", taskset, 8)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 8
    assert [message["role"] for message in rows[7]["prompt"]] == ["system", "user"]
    end, shown = await play(RUN, {"taskset": taskset}, ["2", "9", "7"], wired="function", **rows[7])
    assert end.status == "completed", end
    assert end.rewards == {0: BranchReward(1.0, {"guesses": 3.0, "right": 1.0})}
    assert shown == ["", "too low", "too high"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Guess.", "metadata": {"index": 1}}, "begins with other messages than the row's prompt"),
        ({"metadata": {"index": 99}}, "index = 99 in a row's metadata: there are 10 tasks"),
    ],
)
async def test_a_row_of_another_taskset_fails_its_rollout(
    play: Play, taskset: str, row: dict[str, Any], reason: str
) -> None:
    end, _ = await play(RUN, {"taskset": taskset}, ["1"], wired="function", **row)
    assert end.status == "failed"
    assert reason in end.reason


async def test_what_verifiers_raises_fails_the_rollout(play: Play, taskset: str, tmp_path: Path) -> None:
    from millrace.connectors.environments.verifiers import write_prompts

    write_prompts(tmp_path / "p.jsonl", taskset, 1)
    row = json.loads((tmp_path / "p.jsonl").read_text(encoding="utf-8"))
    end, _ = await play(RUN, {"taskset": taskset}, ["no number"], wired="function", **row)
    assert end.status == "failed"
    assert "invalid literal for int()" in end.reason


async def test_what_a_seat_asks_for_that_the_run_does_not_do_is_refused_with_its_field(
    play: Play, taskset: str, tmp_path: Path
) -> None:
    from millrace.connectors.environments.verifiers import write_prompts

    write_prompts(tmp_path / "p.jsonl", taskset, 1)
    row = json.loads((tmp_path / "p.jsonl").read_text(encoding="utf-8"))
    options = {"taskset": taskset, "config": {"player": {"sampling": {"reasoning_effort": "low"}}}}
    end, _ = await play(RUN, options, ["0"], wired="function", **row)
    assert end.status == "failed"
    assert "reasoning_effort: it is not known here" in end.reason
    options["config"]["player"] = {"sampling": {"max_tokens": 3}}
    end, _ = await play(RUN, options, ["0"], wired="function", **row)
    assert end.status == "completed", end
