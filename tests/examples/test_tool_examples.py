"""Every example of tools is run: a short warm-up and two iterations, and what was called and answered is in the stored rows."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace import RewardInput
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.core.rewards.text import exact_match
from tests.support.flow_runs import Workplace

ROOT = Path(__file__).parents[2]
SHORT = [  # long enough for a model that writes calls, most of them wrong ones
    "run.prepare.options.count=1200",
    "run.prepare.options.iterations=3",
    "run.iterations=2",
    "rollout.prompts=8",
    "rollout.samples_per_prompt=4",
    "rollout.part_groups=4",
    "trainer.global_batch=16",
    "checkpoint.every=2",
    "evaluation.sets=[]",
]
TOKENIZER = build_tokenizer(tools=True)
pytestmark = pytest.mark.slow  # a warm-up of 120 steps each


class Ran:
    """What two iterations of an example left."""

    def __init__(self, folder: Path, module: Any, run: Path) -> None:
        self.folder, self.module = folder, module
        found = sorted((run / "iterations").iterdir())
        assert len(found) == 2
        self.batch = [row for each in found for row in _rows(each / "batch.parquet")]
        turns = [row for each in found for part in sorted(each.glob("turns/*")) for row in _rows(part)]
        self.calls = [row for row in turns if row["kind"] == "call"]

    def arguments(self, *, failed: bool = False) -> list[tuple[dict[str, Any], str]]:
        """Arguments and answers of the calls that failed, or did not."""
        return [(json.loads(row["arguments"]), row["text"]) for row in self.calls if row["failed"] == failed]


def ran(tmp_path: Path, folder: str, name: str) -> Ran:
    """Run a copy of the example as its README says, with what every example of tools keeps to."""
    for each in (folder, "warm_ups"):
        shutil.copytree(
            ROOT / "examples" / each, tmp_path / "examples" / each, ignore=shutil.ignore_patterns("*-files")
        )
    (tmp_path / "deployments").symlink_to(ROOT / "deployments")
    place = Workplace(tmp_path / "examples" / folder)
    place.environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    place.call("server", "start")
    try:
        place.call("train", f"{name}.yaml", f"storage.root={tmp_path / 'runs'}", *SHORT)
    finally:
        place.call("server", "stop")
    spec = importlib.util.spec_from_file_location(name, place.folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = Ran(place.folder, module, tmp_path / "runs" / name)
    assert len(found.batch) == 2 * 8 * 4
    for row in found.batch:
        check_tokens(row)
    answered = Counter(m["content"] for row in found.batch for m in after_prompt(row) if m["role"] == "tool")
    assert answered
    assert answered <= Counter(row["text"] for row in found.calls)  # one at a limit has no turn after it
    return found


def check_tokens(row: dict[str, Any]) -> None:
    """What was observed has no loss, and is what the template writes of it; what the policy wrote has."""
    response = row["tokens"][-row["response_length"] :]
    masked = [token for token, mask in zip(response, row["loss_mask"], strict=True) if not mask]
    trained = [token for token, mask in zip(response, row["loss_mask"], strict=True) if mask]
    messages = after_prompt(row)
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    observed = ""
    for before, message in zip(messages, messages[1 : last + 1], strict=False):
        if message["role"] == "assistant":
            observed += "<assistant>"
        else:
            assert message["role"] == "tool" or before["role"] == "assistant"
            observed += f"<{message['role']}>{message['content']}"
    assert TOKENIZER.decode(masked) == TOKENIZER.decode(encoded(observed))
    turns = TOKENIZER.decode(trained).split("<eos>")
    assert len(turns) - (trained[-1] == TOKENIZER.eos_token_id) == row["turns"]


def after_prompt(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(row["dialogue"])
    return messages[1:]


def encoded(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def _rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]


def scored(row: dict[str, Any]) -> RewardInput:
    return RewardInput(
        row["prompt"], row["response"], json.loads(row["label"]), messages=json.loads(row["dialogue"])
    )


def test_the_calculator_answers_and_its_calls_are_counted(tmp_path: Path) -> None:
    found = ran(tmp_path, "calculator", "calculator")
    answers = found.arguments()
    assert answers
    for arguments, answer in answers:
        assert answer == str(found.module.calc(**arguments))
    for _, answer in found.arguments(failed=True):
        assert answer.startswith(
            ("calc failed: ValueError: give two numbers", "calc does not take", "there is no tool")
        )
    for row in found.batch:
        expected = found.module.right(scored(row))
        assert (row["reward"], dict(row["reward_parts"])["calls"]) == (expected["reward"], expected["calls"])
    assert sum(dict(row["reward_parts"])["calls"] for row in found.batch) == len(found.calls)


def test_a_search_finds_facts_of_the_corpus(tmp_path: Path) -> None:
    found = ran(tmp_path, "search", "search")
    answers = found.arguments()
    assert answers
    facts = (found.folder / "search-files" / "corpus.txt").read_text().splitlines()
    for arguments, answer in answers:
        assert answer in facts
        assert answer == found.module.search(**arguments)
    for row in found.batch:
        assert row["reward"] == exact_match(scored(row))


def test_the_servers_answers_are_what_its_items_cost(tmp_path: Path) -> None:
    found = ran(tmp_path, "mcp_tool", "shop")
    answers = found.arguments()
    assert answers
    for arguments, answer in answers:
        assert answer == str(found.module.cost(arguments["item"], int(arguments["count"])))
    for row in found.batch:
        assert row["reward"] == exact_match(scored(row))
