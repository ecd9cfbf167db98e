"""What pages show: bars of time, tables of samples with reasons, texts and pictures, from figures and from a stored run."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.core.contracts.sample import GeneratedSample
from millrace.tasks.pages.curves import Curves
from millrace.tasks.pages.pictures import curves_png
from millrace.tasks.pages.sample_rows import by_turns, sample_rows, spread
from millrace.tasks.pages.texts import iteration_text, run_text
from millrace.tasks.pages.time_bars import WIDTH, covered, sparkline, time_bars, time_shares
from tests.support.stored_run import write_run

OVERLAPPING = {
    "sample_prompts": (10.0, 11.0),
    "rollout": (11.0, 15.0),
    "reward": (12.0, 16.0),
    "filter": (11.0, 16.0),
    "train_step": (16.0, 19.0),
    "sync_weights": (19.5, 20.0),
}


def test_each_bar_lies_where_its_task_lay() -> None:
    lines = time_bars(OVERLAPPING)
    assert [line.split()[0] for line in lines] == [
        "sample_prompts", "rollout", "filter", "reward", "train_step", "sync_weights",
    ]  # fmt: skip
    bars = {line.split()[0]: line[len("sample_prompts ") :][:WIDTH] for line in lines}
    assert all(len(bar) == WIDTH for bar in bars.values())
    assert bars["sample_prompts"].rstrip() == "█" * 5
    assert bars["train_step"].index("█") == 28  # 6 of 10 seconds
    assert bars["sync_weights"].endswith("█")
    assert lines[-1].endswith("    0.50 s")
    assert time_bars({}) == []
    assert time_bars({"rollout": (1.0, 1.0)}) == [f"rollout █{' ' * (WIDTH - 1)}     0.00 s"]


def test_tasks_that_overlap_count_once_in_their_phase() -> None:
    shares = time_shares(OVERLAPPING)
    assert shares == pytest.approx({"generation": 0.5, "training": 0.3, "sync": 0.05, "other": 0.15})
    assert time_shares({}) == {}


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [([], 0), ([(0, 1), (2, 4)], 3), ([(0, 3), (1, 2)], 3), ([(2, 4), (0, 3)], 4), ([(1, 1)], 0)],
)
def test_covered_seconds(intervals: list[tuple[float, float]], seconds: float) -> None:
    assert covered(intervals) == seconds


def test_a_sparkline_shows_the_newest_values_between_their_lowest_and_highest() -> None:
    assert sparkline([0, 1, 0.5]) == "▁█▄"
    assert sparkline([2, 2]) == "▅▅"
    assert sparkline([]) == ""
    assert len(sparkline(range(100))) == 40


def test_rows_are_chosen_from_all_over_and_of_each_reason_in_turn() -> None:
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread(range(3), 8) == [0, 1, 2]
    assert spread([], 4) == []
    assert spread(range(3), 0) == []
    assert by_turns(["a", "a", "a", "b", None], 3) == [0, 3, 4]
    assert by_turns(["a", "a"], 3) == [0, 1]
    assert by_turns([], 3) == []


def test_the_table_has_kept_samples_and_dropped_ones_with_their_reasons(tmp_path: Path) -> None:
    folder = write_run(str(tmp_path)).iteration(0)
    rows = sample_rows(folder, 4)
    assert [(row["verdict"], row["reason"]) for row in rows] == [
        ("kept", None), ("kept", None), ("dropped", "zero_variance"), ("dropped", "zero_variance"),
    ]  # fmt: skip
    assert [row["advantage"] for row in rows] == [0.5, -0.5, None, None]
    assert rows[0]["prompt"] == "1+2="
    assert rows[2]["prompt"].splitlines()[0] == "system: Think."
    assert rows[2]["reward"] == 0.0
    assert {row["response"] for row in rows} == {"3", "4"}
    assert [row["verdict"] for row in sample_rows(folder, 1)] == ["kept"]


def curves() -> Curves:
    made = Curves()
    made.add({"eval/sums/reward_mean": 0.25}, 0)
    for step in (1, 2):
        tokens = {
            "tokens/generated": 100.0,
            "tokens/trained": 75.0,
            "tokens/dropped": 25.0,
            "tokens/dropped_x": 25.0,
        }
        made.add({"reward/mean": step / 4, "train/grad_norm": 1.0, "other": 1.0, **tokens}, step)
    made.add({"eval/sums/reward_mean": 0.5}, 2)
    return made


def test_an_iterations_page_has_its_figures_and_where_its_time_went() -> None:
    metrics = {
        "reward/mean": 0.5,
        "eval/sums/reward_mean": 0.5,
        "eval/sums/samples": 8.0,
        "time/rollout_s": 4.0,
    }
    lines = iteration_text(
        "a: iteration 2 of 2", metrics, OVERLAPPING, curves(), {"files": "`f`"}
    ).splitlines()
    assert lines[0] == "# a: iteration 2 of 2"
    assert "reward/mean after iteration 1 and later: ▁█ 0.5" in lines
    assert [line for line in lines if line.startswith("| ")][1:] == [
        "| reward/mean | 0.5 |", "| eval/sums/reward_mean | 0.5 |",
    ]  # fmt: skip
    assert "Time: generation 50%, training 30%, sync 5%, other 15%" in lines
    assert lines[-1] == "files: `f`  "


def test_a_runs_page_has_held_out_sets_and_the_account_of_its_tokens() -> None:
    lines = run_text("a: 2 of 2", curves(), {}).splitlines()
    assert (
        "| sums/reward_mean | 0.25 (before training) | 0.5 (after iteration 2) | 0.5 (after iteration 2) |"
        in lines
    )
    assert [line for line in lines if line.endswith("% |")] == [
        "| generated | 200 | 100.0% |", "| trained | 150 | 75.0% |", "| dropped | 50 | 25.0% |",
    ]  # fmt: skip


def test_curves_of_a_stored_run_are_read_from_its_manifests(tmp_path: Path) -> None:
    made = Curves()
    made.read(write_run(str(tmp_path)))
    assert made.points("train/loss") == [(1, 0.5), (2, 0.25)]
    assert made.points("eval/easy/reward_mean") == [(2, 1.0)]
    assert curves_png(made).startswith(b"\x89PNG")
    assert curves_png(Curves()).startswith(b"\x89PNG")


def test_the_table_shows_what_a_reward_found_and_said(tmp_path: Path) -> None:
    shown = sample_rows(write_run(str(tmp_path)).iteration(0), 4)
    assert {row["verdict"]: row["reward_texts"] for row in shown if row["reward"] == 1} == {
        "kept": "words: It is 1."
    }
    assert all(row["answer"] == row["response"] for row in shown)


def test_the_table_names_columns_that_there_are() -> None:
    from millrace.tasks.pages.sample_rows import GENERATED

    assert set(GENERATED) <= set(GeneratedSample.__slots__)
