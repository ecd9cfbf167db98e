"""The pages on own data and own rewards: their files make a project, whose check finds nothing, from any folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.huggingface.tiny import TOOL_TEMPLATE, build_tiny_model
from millrace.connectors.storage.prompts import read_source
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.hooks.loading import load
from millrace.core.rewards.scoring import score_sample
from millrace.flows.commands.sql import answer
from millrace.flows.preflight.check import check
from millrace.flows.preflight.check import checked as checked_whole
from millrace.flows.preflight.plan_seen import prompt
from tests.support.doc_commands import blocks, section
from tests.support.stored_run import write_run

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC = "data#if-you-have-a-public-format"


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
    (lines,), (row, *_) = blocks("data", "jsonl"), blocks("data", "json")
    for name in ("train", "test"):
        (project / f"{name}.jsonl").write_text(lines)
    pq.write_table(pa.Table.from_pylist([json.loads(row)]), project / "level.parquet")
    config = checked(project, "data")
    assert [source.path for source in config.data.sources] == [
        f"{project}/train.jsonl",
        f"{project}/level.parquet",
    ]
    rows, quarantined = read_source(config.data.sources[1])
    assert (rows[0].label, quarantined) == ("72", [])
    assert rows[0].metadata["extra_info.index"] == 0
    assert rows[0].metadata["data_source"] == "sums"


def test_the_dialogue_of_the_page_on_supervised_training_is_trained_as_it_says(project: Path) -> None:
    build_tiny_model(project / "tools", tools=True)
    (row,) = blocks("models#supervised-training", "json")
    for name in ("dialogues", "held_out"):
        (project / f"{name}.jsonl").write_text(row)
    for name, text in zip(("sft", "dialogues"), blocks("models#supervised-training", "yaml"), strict=False):
        (project / f"{name}.yaml").write_text(text)
    config = load_config(
        str(project / "dialogues.yaml"), [f"model.path={project / 'tools'}", "data.max_prompt_tokens=1024"]
    )
    found = checked_whole(config)
    assert found.problems == []
    (shown,) = [text for name, text in prompt(found) if name == "a dialogue"]
    assert shown.endswith(
        "<user>What do pens cost?<assistant>⟦price(item=pens)<eos>⟧<tool>7<assistant>9<eos><user>Look again."
        "<assistant>⟦7<eos>⟧"
    )
    assert "19 of them trained" in shown


SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
FORMATS: dict[str, tuple[Any, Any, set[str]]] = {  # prompt, label, and keys of the metadata
    "gsm8k": ("Ann has 3 pens and buys 4. How many has she?", "3+4=<<3+4=7>>7\n#### 7", set()),
    "dapo": (
        [{"role": "user", "content": "What is 48/2? The last line is Answer: and the number."}],
        "24",
        set(),
    ),
    "math": ("What is 2+3?", "We add and get $\\boxed{5}$.", {"level", "type"}),
    "gpqa": ("Which is a noble gas?", "neon", {f"Incorrect Answer {number}" for number in (1, 2, 3)}),
    "ifeval": ("Write a title of less than 10 words.", None, {"instruction_id_list", "kwargs"}),
    "sharegpt": (SAID, "7", set()),
    "openai": (
        [
            {"role": "user", "content": "What is 3+4?"},
            {"role": "assistant", "tool_calls": [CALL], "content": ""},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
        ],
        "It is 7.",
        {"tools"},
    ),
}
RIGHT = {  # an answer for which the reward of the page gives 1
    "gsm8k": "It is 7.",
    "dapo": "Answer: 24",
    "math": "\\boxed{5}",
    "gpqa": "It is neon.",
    "ifeval": "Spring",
    "sharegpt": "7",
    "openai": "It is 7. Yes.",
}


def test_the_page_has_these_formats() -> None:
    assert [re.findall(r"name: (\w+)", block) for block in blocks(PUBLIC, "yaml")] == [
        [name] for name in FORMATS
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stored", ["jsonl", "parquet"])
def test_rows_of_public_formats_are_read_checked_and_scored_with_settings_alone(
    project: Path, name: str, stored: str
) -> None:
    number = list(FORMATS).index(name)
    row, source = blocks(PUBLIC, "json")[number], blocks(PUBLIC, "yaml")[number]
    path = re.findall(r"path: (\S+)", source)[0]
    source = source.replace(path, f"{name}.{stored}")
    if stored == "parquet":
        pq.write_table(pa.Table.from_pylist([json.loads(row)]), project / f"{name}.parquet")
    else:
        (project / f"{name}.jsonl").write_text(json.dumps(json.loads(row)) + "\n")
    (project / "tools.jinja").write_text(TOOL_TEMPLATE)
    (project / "run.yaml").write_text(
        "run: {name: format}\nmodel: {path: ../model, chat_template: tools.jinja}\n"
        'reward: {function: "millrace.core.rewards.number:arithmetic"}\n' + source
    )
    config = load_config(str(project / "run.yaml"), ["rollout.prompts=2", "rollout.samples_per_prompt=2"])
    (read,), quarantined = read_source(config.data.sources[0])
    prompt, label, metadata = FORMATS[name]
    assert (read.prompt, read.label, set(read.metadata)) == (prompt, label, metadata)
    assert quarantined == []
    assert check(config) == []
    reward = config.data.sources[0].reward
    assert reward is not None
    sample = {"prompt": json.dumps(read.prompt), "metadata": json.dumps(read.metadata)}
    sample |= {"label": None if label is None else json.dumps(label), "status": "completed"}
    answer = {"response": RIGHT[name], "response_length": 9}
    assert score_sample(reward.function, reward.options, sample | answer)["reward"] == 1.0


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
    (project / "train.jsonl").write_text(blocks("data", "jsonl")[0])
    config = checked(project, "rewards")
    row = {"prompt": '"17+48="', "label": '"65"', "metadata": None, "response": " 65 "}
    row |= {"response_length": 2, "status": "completed"}
    scored = score_sample(config.reward.function, config.reward.options, row)
    assert scored == {"reward": 1.2, "parts": {"exact": 1.0, "digits": 1.0}, "answer": None}
    for name in ("lookup", "shortest", "for_slime"):
        assert (project / f"{name}.py").is_file()


NEEDS_A_SERVER = (
    "millrace.connectors.rewards.http:http",
    "millrace.connectors.rewards.judge:judge",
    "millrace.core.rewards.tournament.group_reward:tournament",
)
PROBLEM = {
    "prompt": "Write add(a, b).",
    "label": "",
    "input_output": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
}


@pytest.mark.parametrize("fragment", blocks("rewards#if-you-need-more", "yaml"))
def test_each_configuration_of_the_page_on_rewards_is_right(
    project: Path, monkeypatch: pytest.MonkeyPatch, fragment: str
) -> None:
    """Those that ask a server, which is not there, are refused for that alone."""
    for key in ("SCORER_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(key, "k")
    monkeypatch.syspath_prepend("")
    modules_of(project, "rewards")
    (project / "train.jsonl").write_text(blocks("data", "jsonl")[0])
    (project / "problems.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    whole, *_ = blocks("rewards", "yaml")
    (project / "run.yaml").write_text(whole.partition("reward:")[0])
    (project / "more.yaml").write_text(f"base: run.yaml\n{fragment}")
    few = ["model.path=../model", "rollout.prompts=2", "rollout.samples_per_prompt=2"]
    config = load_config(str(project / "more.yaml"), few)
    found = check(config)
    if config.reward.function in NEEDS_A_SERVER:
        (problem,) = found
        assert problem.field == "reward.function"
        assert "cannot be reached" in problem.reason
    else:
        assert found == []


@pytest.mark.parametrize("part", ["rows-that-a-function-makes", "what-is-drawn-when"])
def test_the_files_of_rows_by_code_and_of_a_curriculum_are_right(
    project: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The other configuration of the first part needs the package reasoning-gym; tests/connectors/environments has it."""
    monkeypatch.syspath_prepend("")
    (project / "growing.py").write_text(blocks("data#rows-that-a-function-makes", "python")[0])
    (project / "train.jsonl").write_text(blocks("data", "jsonl")[0])
    (project / "run.yaml").write_text(blocks("data", "yaml")[0].partition("data:")[0])
    (project / "more.yaml").write_text(f"base: run.yaml\n{blocks(f'data#{part}', 'yaml')[0]}")
    few = ["model.path=../model", "rollout.prompts=2", "rollout.samples_per_prompt=2"]
    config = load_config(str(project / "more.yaml"), few)
    assert check(config) == []
    assert config.data.sources[0].rows is not None


def test_the_page_on_rewards_lists_those_that_ship() -> None:
    table = section((DOCS / "rewards.md").read_text(encoding="utf-8"), "rewards-that-ship")
    named = re.findall(r"`([\w.]+:\w+)`", table)
    assert len(named) >= 12
    for name in named:
        load(f"millrace.core.rewards.{name}")


@pytest.mark.parametrize("page", ["data", "rewards", "looking"])
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
