"""What pages show: bars of time, tables of samples with reasons, texts and pictures, from figures and from a stored run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from markdown_it import MarkdownIt

from millrace.core.contracts.sample import BatchSample, GeneratedSample, ScoredSample
from millrace.core.metric_names import name_part
from millrace.tasks.reporting.pictures import Curves, curves_png, drawn
from millrace.tasks.reporting.sample_groups import (
    LONGEST,
    _Group,
    _group_lines,
    by_turns,
    code_block,
    samples_text,
    spread,
)
from millrace.tasks.reporting.texts import iteration_text, run_text
from millrace.tasks.reporting.time_bars import WIDTH, covered, sparkline, time_bars, time_shares
from tests.support.odd_texts import ODD_TEXTS
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


def test_groups_have_their_prompt_best_and_worst_answer_rewards_and_reason(tmp_path: Path) -> None:
    folder = write_run(str(tmp_path)).iteration(0)
    text = samples_text(folder, "Samples of iteration 1", 4, {"sums": "Be brief."})
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Samples of iteration 1", "## 2 samples, kept", "## 2 samples, dropped: zero_variance",
    ]  # fmt: skip
    kept, dropped = text.split("## 2 samples")[1:]
    assert "rewards 1, 0." in kept
    assert "```text\nsystem: Be brief.\nuser: 1+2=\n```" in kept
    assert (
        "**Best**: reward 1 (exact 1, format 1), advantage 0.5, 1 tokens, truncated; answer `3`\n\n```text\n3\n```"
        in kept
    )
    assert (
        "**Worst**: reward 0 (exact 0, format 1), advantage -0.5, 1 tokens, completed; answer `4`\n\n```text\n4\n```"
        in kept
    )
    assert "```text\nsystem: Think.\nuser: 1+1=\nassistant: 2\nuser: 2+3=\n```" in dropped
    assert "advantage" not in dropped
    assert samples_text(folder, "x", 1).count("**Best**") == 1
    assert "dropped" not in samples_text(folder, "x", 2)


@pytest.mark.parametrize(
    "written",
    ["plain", "```\n# not a title\n```", "````", "<img src='http://x/y.png'>", "![x](http://x/y.png)", "~~~", "`" * 40,
     "a\r```\r<b>", "", "\u2028```", "x" * (LONGEST + 10)],
)  # fmt: skip
def test_what_a_model_wrote_never_leaves_its_code_block(written: str) -> None:
    fence, *inside, end = code_block(written)
    assert fence == f"{end}text"
    assert set(end) == {"`"}
    assert not any(line.strip().startswith(end) for line in inside)
    assert len("\n".join(inside)) < LONGEST + 60


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


def test_names_from_data_break_no_page() -> None:
    made = Curves()
    for step in (1, 2):
        made.add({f"eval/test/{name_part(text)}/reward_mean": 0.5 for text in ODD_TEXTS}, step)
    assert curves_png(made).startswith(b"\x89PNG")
    rows = [line for line in run_text("x", made, {}).splitlines() if line.startswith("| test/")]
    assert len(rows) == len(ODD_TEXTS)
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}


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


def test_what_a_reward_found_and_said_is_shown(tmp_path: Path) -> None:
    kept = samples_text(write_run(str(tmp_path)).iteration(0), "x", 4).split("dropped")[0]
    assert "**Best**: reward 1 (exact 1, format 1), advantage 0.5, 1 tokens, truncated; answer `3`" in kept
    assert "words:" in kept
    assert "```text\nIt is 1.\n```" in kept


def test_groups_that_wait_since_earlier_iterations_are_counted_and_not_shown(tmp_path: Path) -> None:
    folder = write_run(str(tmp_path)).iteration(0)
    judged = folder.read_table("verdicts.parquet", "verdicts")
    rows = judged.to_pylist()
    others = [row | {"sample_id": f"w{at}", "group_id": "waits"} for at, row in enumerate(rows)]
    waiting = pa.Table.from_pylist(others, judged.schema)
    folder.write_table("verdicts.parquet", pa.concat_tables([waiting, judged]), "verdicts")
    text = samples_text(folder, "x", 4)
    assert "2 of 3 groups" in text
    assert "waits" not in text
    assert "**Best**" in text


def test_samples_are_read_by_columns_that_there_are() -> None:
    from millrace.tasks.reporting.sample_groups import GENERATED, KEPT, SCORED

    assert set(GENERATED) <= set(GeneratedSample.__slots__)
    names = {field.name for field in dataclasses.fields(BatchSample)}
    assert set(KEPT) | set(GENERATED) <= names
    assert set(SCORED) <= set(ScoredSample.__slots__)


async def test_pictures_at_once_open_no_font_more_than_one_does() -> None:
    """matplotlib keeps fonts open for each thread that drew: a long run's descriptors grew with its executor's threads."""
    curves = Curves()
    curves.add({"train/loss": 1.0}, 1)

    def fonts() -> int:
        return sum(file.path.endswith(".ttf") for file in psutil.Process().open_files())

    await drawn(curves_png, curves)
    opened = fonts()
    await asyncio.gather(*(drawn(curves_png, curves) for _ in range(4)))
    assert fonts() == opened > 0


HOSTILE = (
    "![x](http://evil.example/a.png) [y](http://evil.example/b) <img src=http://evil.example/c> <script>d()</script>\n"
    "```\n~~~\n![z](http://evil.example/e.png)\n<http://evil.example/f> `<img src=http://evil.example/g>` \n\n# h\n\n|a|b|\n|-|-|\n"
)
RENDERED = {"image", "link_open", "html_inline", "html_block", "table_open"}


def tokens(text: str) -> list[str]:
    """Kinds of what a page makes of a text."""
    found = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return [inner.type for token in found for inner in [token, *(token.children or ())]]


@pytest.mark.parametrize(
    "field",
    ["prompt", "response", "label", "reason", "status", "answer", "reward_parts", "reward_texts", "dropped"],
)
def test_what_others_wrote_is_text_on_a_page(field: str, tmp_path: Path) -> None:
    assert {"image", "html_inline"} <= set(tokens(HOSTILE)), "the page would render it"
    row = {
        "prompt": json.dumps("1+1="),
        "source": "sums",
        "label": json.dumps("2"),
        "response": "2",
        "dialogue": None,
        "response_length": 1,
        "status": "completed",
        "reason": None,
    }
    score: dict[str, Any] = {"reward": 1.0, "reward_parts": [("exact", 1.0)], "answer": "2", "advantage": 0.5}
    if field in row:
        row[field] = json.dumps(HOSTILE) if field in ("prompt", "label") else HOSTILE
    elif field == "reward_parts":
        score[field] = [(HOSTILE, 1.0)]
    elif field == "reward_texts":
        score[field] = [(HOSTILE, HOSTILE)]
    else:
        score[field] = HOSTILE
    group = _Group("g", ("a",), HOSTILE if field == "dropped" else None)
    text = "\n".join(_group_lines(group, {"a": "Best"}, {"a": row}, {"a": score}, {}))
    assert "evil.example" in text
    assert RENDERED & set(tokens(text)) == set()
