"""The pages on own data and own rewards: their files make a project, whose check finds nothing, from any folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.storage.prompts import read_source
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.hooks import load
from millrace.core.rewards.scoring import score_sample
from millrace.flows.preflight.check import check
from millrace.flows.tools.sql import answer
from tests.support.doc_commands import blocks
from tests.support.stored_run import write_run

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the page's files and a tiny model; commands start in another one."""
    for name in ("sums", "elsewhere"):
        (tmp_path / name).mkdir()
    build_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "sums"


def checked(project: Path, page: str) -> RunConfig:
    text, *_ = blocks(page, "yaml")
    (project / "run.yaml").write_text(text)
    few = ["model.path=../model", "rollout.prompts=2", "rollout.samples_per_prompt=2"]
    config = load_config(str(project / "run.yaml"), few)
    assert check(config) == []
    return config


def test_the_files_of_the_page_on_data_are_read_whole(project: Path) -> None:
    (lines,), (row,) = blocks("own-data", "jsonl"), blocks("own-data", "json")
    for name in ("train", "test"):
        (project / f"{name}.jsonl").write_text(lines)
    pq.write_table(pa.Table.from_pylist([json.loads(row)]), project / "level.parquet")
    config = checked(project, "own-data")
    assert [source.path for source in config.data.sources] == [
        f"{project}/train.jsonl",
        f"{project}/level.parquet",
    ]
    rows, quarantined = read_source(config.data.sources[1])
    assert (rows[0].label, quarantined) == ("72", [])
    assert rows[0].metadata["extra_info.index"] == 0
    assert rows[0].metadata["data_source"] == "sums"


def modules_of(project: Path, page: str) -> None:
    """Write the page's modules, each with its name in its first line."""
    for block in blocks(page, "python"):
        name = block.partition("\n")[0].removeprefix("# ")
        (project / name).write_text(block)


def test_the_reward_of_the_page_is_found_beside_its_file_and_scores(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("")  # the search path is put back at the end
    modules_of(project, "rewards")
    (project / "train.jsonl").write_text(blocks("own-data", "jsonl")[0])
    config = checked(project, "rewards")
    row = {"prompt": '"17+48="', "label": '"65"', "metadata": None, "response": " 65 "}
    row |= {"response_length": 2, "status": "completed"}
    scored = score_sample(config.reward.function, config.reward.options, row)
    assert scored == {"reward": 1.2, "parts": {"exact": 1.0, "digits": 1.0}}
    for name in ("lookup", "shortest", "for_slime"):
        assert (project / f"{name}.py").is_file()


NEEDS_A_SERVER = ("millrace.connectors.rewards.http:http", "millrace.connectors.rewards.judge:judge")


@pytest.mark.parametrize("number", range(1, len(blocks("rewards", "yaml"))))
def test_each_configuration_of_the_page_on_rewards_is_right(
    project: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Those that ask a server, which is not there, are refused for that alone."""
    for key in ("SCORER_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(key, "k")
    monkeypatch.syspath_prepend("")
    modules_of(project, "rewards")
    (project / "train.jsonl").write_text(blocks("own-data", "jsonl")[0])
    whole, *fragments = blocks("rewards", "yaml")
    (project / "run.yaml").write_text(whole.partition("reward:")[0])
    (project / "more.yaml").write_text(f"base: run.yaml\n{fragments[number - 1]}")
    few = ["model.path=../model", "rollout.prompts=2", "rollout.samples_per_prompt=2"]
    config = load_config(str(project / "more.yaml"), few)
    found = check(config)
    if config.reward.function in NEEDS_A_SERVER:
        (problem,) = found
        assert problem.field == "reward.function"
        assert "cannot be reached" in problem.reason
    else:
        assert found == []


def test_the_page_on_rewards_lists_those_that_ship() -> None:
    text = (DOCS / "rewards.md").read_text(encoding="utf-8")
    table = text.partition("## Rewards that ship")[2].partition("## If")[0]
    named = re.findall(r"`([\w.]+:\w+)`", table)
    assert len(named) >= 12
    for name in named:
        load(f"millrace.core.rewards.{name}")


@pytest.mark.parametrize("page", ["own-data", "rewards", "debugging"])
def test_every_query_of_the_pages_is_answered(page: str, tmp_path: Path) -> None:
    write_run(str(tmp_path), "mine")
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    commands = re.findall(r"millrace sql mine (\"[^\"]+\")", text)
    assert len(commands) >= 2
    for command in commands:
        found = answer(str(tmp_path), "mine", *shlex.split(command))
        assert found.rows or "status = 'failed'" in command, (
            command
        )  # of the run no sample failed to be generated
