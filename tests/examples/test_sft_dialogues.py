"""The example of dialogues is checked, trained, killed and continued; what is learnt is in the held-out loss."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from math import exp
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.flow_runs import Workplace, final_weights, make_workplace, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_dialogues"
SMALL = ["run.iterations=3", "rollout.prompts=128", "evaluation.every=2", "checkpoint.every=2"]
SET = "prompt_key: messages, tools_key: tools"
TWO_SETS = (
    f'evaluation.sets=[{{name: first, path: "price-list-files/held_out.jsonl@[:10]", {SET}, loss_on: assistant}}, '
    f'{{name: second, path: "price-list-files/held_out.jsonl@[10:30]", {SET}, loss_on: last_assistant}}]'
)
OTHER = [*SMALL, TWO_SETS, "checkpoint.keep_best=eval/second/loss"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = make_workplace(tmp_path_factory.mktemp("dialogues"))
    for file in EXAMPLE.glob("price_list.*"):
        shutil.copy(file, place.folder)
    place.call("server", "start")
    yield place
    place.call("server", "stop")


@pytest.fixture(scope="module")
def whole(workplace: Workplace) -> Path:
    """A run that nothing interrupted."""
    workplace.call("train", "price_list.yaml", "storage.root=whole", *OTHER)
    return workplace.folder / "whole" / "price-list"


def losses(workplace: Workplace, root: str) -> dict[int, dict[str, Any]]:
    shown = json.loads(workplace.call("show", "price-list", "--root", root, "--json"))["rows"]
    return {row["iteration"]: row for row in shown}


def evaluated(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_held_out_loss_falls_and_is_the_mean_over_tokens(workplace: Workplace, whole: Path) -> None:
    rows = losses(workplace, "whole")
    assert [number for number, row in rows.items() if row["eval/first/loss"] is not None] == [0, 2, 3]
    for name in ("first", "second"):
        values = [rows[number][f"eval/{name}/loss"] for number in (0, 2, 3)]
        assert 4.2 < values[0] < 4.9  # ln 96 is 4.56
        assert values[0] > values[1] > values[2]
        stored = evaluated(whole / "eval" / name / "000003.parquet")
        tokens = sum(row["loss_tokens"] for row in stored)
        assert values[2] == pytest.approx(sum(row["loss"] * row["loss_tokens"] for row in stored) / tokens)
        assert rows[3][f"eval/{name}/perplexity"] == pytest.approx(exp(values[2]))
    assert {row["loss_tokens"] for row in evaluated(whole / "eval" / "second" / "000003.parquet")} <= {4, 5}


@pytest.mark.slow
def test_only_what_the_assistant_says_is_trained(whole: Path) -> None:
    corrected = 0
    for row in pq.read_table(whole / "iterations" / "000000" / "batch.parquet").to_pylist():
        messages = json.loads(row["prompt"])
        said = [
            message.get("content") or f"price(item={messages[0]['content'].split()[2]})"
            for message in messages
            if message["role"] == "assistant" and message.get("train") is not False
        ]
        assert sum(row["loss_mask"]) == sum(len(text) + 1 for text in said)  # a token a character, and <eos>
        assert row["turns"] == len(said) == 3
        corrected += len(messages) > 6
    assert 0 < corrected < 128


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_measures_goes_on_and_measures_nothing_twice(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    reached, run = tmp_path / "reached", workplace.folder / "killed" / "price-list"
    command = ["train", "price_list.yaml", "storage.root=killed", *OTHER]
    process = workplace.start(
        *command, MILLRACE_KILL_POINT="1/held_out_loss/in", MILLRACE_KILL_POINT_FILE=str(reached)
    )
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert reached.exists(), process.communicate()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (part,) = (run / "iterations" / "000001" / "evaluations").glob("part-*.parquet")
    assert {row["set"] for row in evaluated(part)} == {"first"}
    assert "3 iterations complete, 2 of them now" in workplace.call(*command)
    parts = list((run / "iterations" / "000001" / "evaluations").glob("part-*.parquet"))
    assert part in parts
    assert sorted(row["set"] for each in parts for row in evaluated(each)) == ["first"] * 10 + ["second"] * 20
    for name in ("first", "second"):
        for done in (0, 2, 3):
            file = f"eval/{name}/{done:06d}.parquet"
            assert evaluated(run / file) == evaluated(whole / file)
    assert final_weights(run) == final_weights(whole)
    verdict = workplace.call("verify", "price-list", "--root", "killed")
    assert "nothing is wrong" in verdict
    assert "no manifest names" not in verdict


@pytest.mark.slow
def test_the_check_shows_a_dialogue_with_what_is_trained(workplace: Workplace, whole: Path) -> None:
    shown = workplace.call("check", "price_list.yaml", *SMALL)
    assert "⟦price(item=" in shown
    assert ")<eos>⟧<tool>" in shown


@pytest.mark.slow
def test_the_example_learns_as_its_page_says(workplace: Workplace) -> None:
    workplace.call("train", "price_list.yaml", "storage.root=page")
    rows = losses(workplace, "page")
    assert rows[0]["eval/held_out/loss"] == pytest.approx(4.585, abs=0.01)
    assert rows[10]["eval/held_out/loss"] == pytest.approx(0.094, abs=0.02)
