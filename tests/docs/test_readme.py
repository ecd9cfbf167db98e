"""The run and the reward that the README shows are a run that the check accepts, and its list of pages is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.core.config.model import Model
from millrace.core.config.reading.load import load_config
from millrace.core.families.registry import BUILT_IN
from millrace.flows.preflight.check import checked
from millrace.flows.quickstart import arithmetic, write_rows

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return str(found)


def test_the_run_and_the_reward_on_the_page_pass_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build_tiny_model(tmp_path / "model")
    rows = arithmetic(0)
    write_rows(tmp_path / "train.jsonl", rows[:20])
    write_rows(tmp_path / "held_out.jsonl", rows[20:40])
    (tmp_path / "run.yaml").write_text(block("yaml"))
    (tmp_path / "rewards.py").write_text(block("python"))
    found = checked(load_config("run.yaml"))
    assert found.problems == []
    (answers, *_) = found.rewards
    assert answers.given["the label"]["reward"] == 1.0  # type: ignore[index]


def test_the_figures_beside_plain_pytorch_are_those_of_the_measured_rows() -> None:
    rows = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    found = re.findall(r"(\d × [\d,]+) tokens,? (?:it )?is ([\d.]+) times", README)
    assert len(found) == 2
    for lengths, times in found:
        (row,) = [row for row in rows if row.startswith(f"| trainer's step, 0.6B, {lengths} tokens |")]
        assert f"{times} times Hugging Face's speed" in row.split("|")[3]  # of the H200
    assert re.findall(r"`(python -m benchmarks.gpu.trainer .*?)`", README)[0] in "\n".join(rows)


def test_every_page_is_listed_once() -> None:
    listed = re.findall(r"^\| \[[^]]+\]\(docs/([\w-]+)\.md\)", README, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def test_what_there_is_not_is_what_the_code_refuses() -> None:
    said = README.split("## What there is not")[1].split("\n## ")[0]
    (families,) = re.findall(r"Other architectures than (.*)\.", said)
    assert re.split(r", | and ", families) == [family.title for family in BUILT_IN]
    (types,) = re.findall(r"`model.dtype` is (\w+) or (\w+)", said)
    assert {*types, "auto"} == set(Model.model_json_schema()["properties"]["dtype"]["enum"])
