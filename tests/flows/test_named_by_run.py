"""Code and addresses that a run's folder names: what `eval` and `replay` say before they import or join any of it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millrace
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError, StorageError
from millrace.flows.tools.evaluate import evaluate_run, own_configuration
from millrace.flows.tools.named_by_run import named_by_run
from millrace.flows.tools.replay import replay_run
from tests.support.stored_run import CONFIG, write_run


def configured(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({**CONFIG, **sections})


def test_what_a_configuration_names_is_said_with_its_field() -> None:
    assert named_by_run(configured()) == []
    config = configured(
        run={**CONFIG["run"], "import_from": ["/elsewhere"]},
        reward={"function": "theirs:score", "options": {"url": "http://judge.example/v1"}},
        placement={"ray_address": "10.0.0.9:6379"},
        filter={"group_filter": {"function": "their_filter:keep"}},
    )
    said = named_by_run(config)
    for line in (
        "imports theirs:score (reward.function)",
        "uses http://judge.example/v1 (reward.options.url)",
        "uses 10.0.0.9:6379 (placement.ray_address)",
        "imports their_filter:keep (filter.group_filter.function)",
        "looks for modules in /elsewhere (run.import_from)",
    ):
        assert line in said, said


def test_code_of_millraces_own_is_not_said() -> None:
    assert named_by_run(configured(reward={"function": "millrace.core.rewards.math:math"})) == []


class Said(StorageError):
    """Ends a command at the moment when it says something."""


def stops(lines: list[str]) -> None:
    raise Said("; ".join(lines))


COMMANDS: dict[str, Callable[[str, RunConfig | None], object]] = {
    "eval": lambda root, own: evaluate_run(root, "a", 0, [], None, own, stops),
    "replay": lambda root, own: replay_run(root, "a", 0, 1, own, stops),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_a_stored_run_say_it_before_anything_is_imported_or_joined(
    tmp_path: Path, command: str
) -> None:
    folder = write_run(str(tmp_path))
    record = folder.store.read_sealed("run.json")
    record["config"]["reward"]["function"] = "no_such_module:score"
    record["config"]["placement"]["ray_address"] = "nowhere.example:6379"
    folder.store.write_sealed("run.json", record)
    with pytest.raises(
        Said, match=r"imports no_such_module:score \(reward.function\).*nowhere.example"
    ) as said:
        COMMANDS[command](str(tmp_path), None)
    assert "(placement.ray_address)" in str(said.value)


def test_a_file_of_the_callers_stands_in_place_of_the_stored_configuration(tmp_path: Path) -> None:
    write_run(str(tmp_path))
    own = configured(evaluation={"sets": []})  # the stored one has two
    with pytest.raises(ConfigError, match="no held-out sets"):
        COMMANDS["eval"](str(tmp_path), own)
    assert own_configuration(None, []) is None


# Every place that imports a module by a name, and who gives the name.
IMPORTS = {
    "core/hooks.py": "functions of the configuration, whose fields named_by_run says",
    "connectors/environments/gymnasium_text.py": "the option register of a session's environment, which named_by_run says",
    "connectors/environments/extras.py": "millrace: a package that is an extra",
    "connectors/huggingface/tokenizer.py": "transformers alone",
    "connectors/ray/task_processes.py": "modules that a driver names to its own Ray tasks",
    "core/slime/hub.py": "millrace: its own rewards",
    "core/slime/names.py": "millrace: its own names for slime's",
}


def test_every_place_that_imports_by_a_name_has_a_row() -> None:
    root = Path(millrace.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for folder in ("core", "connectors", "tasks", "flows")
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2]
        in ("import_module", "__import__", "run_path", "run_module")
    }
    assert found == set(IMPORTS)
