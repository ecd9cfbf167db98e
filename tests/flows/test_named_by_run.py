"""Code and addresses that a run's folder names: what `eval` and `replay` say before they import or join any of it."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import millrace
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.errors import ConfigError, StorageError
from millrace.flows.commands.chat import ChatCall, models_of
from millrace.flows.commands.eval import evaluate_run
from millrace.flows.commands.named_by_run import named_by_run
from millrace.flows.commands.replay import own_configuration, replay_run
from tests.support.flow_runs import Workplace
from tests.support.stored_run import CONFIG, write_run


def configured(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({**CONFIG, **sections})


def test_what_a_configuration_names_is_said_with_its_field() -> None:
    assert named_by_run(configured()) == []
    config = configured(
        run={**CONFIG["run"], "import_from": ["/elsewhere"]},
        reward={"function": "theirs:score", "options": {"url": "http://judge.example/v1"}},
        placement={"ray_address": "10.0.0.9:6379", "kernel_cache": "/theirs/kernels"},
        filter={"group_filter": {"function": "their_filter:keep"}},
        engines={"sglang": {"trust_remote_code": True, "custom_weight_loader": ["theirs.load"]}},
    )
    said = named_by_run(config)
    for line in (
        "imports theirs:score (reward.function)",
        "uses http://judge.example/v1 (reward.options.url)",
        "uses 10.0.0.9:6379 (placement.ray_address)",
        "takes compiled kernels from /theirs/kernels (placement.kernel_cache)",
        "imports their_filter:keep (filter.group_filter.function)",
        "gives SGLang trust_remote_code = True (engines.sglang.trust_remote_code)",
        "gives SGLang custom_weight_loader = ['theirs.load'] (engines.sglang.custom_weight_loader)",
        "looks for modules in /elsewhere (run.import_from)",
    ):
        assert line in said, said


def test_code_of_millraces_own_is_not_said() -> None:
    assert named_by_run(configured(reward={"function": "millrace.core.rewards.math:math"})) == []


class Said(StorageError):
    """Ends a command at the moment when it says something."""


def stops(lines: list[str]) -> None:
    raise Said("; ".join(lines))


NOWHERE = Path("nowhere")
COMMANDS: dict[str, Callable[[str, RunConfig | None], object]] = {
    "eval": lambda root, own: evaluate_run(root, "a", 0, [], None, own, stops),
    "chat": lambda root, own: models_of(
        ChatCall("a", 0, None, False, None, None, None, None, root), NOWHERE, stops
    ),
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


THEIRS = "theirs.module:hook"
SETS = CONFIG["evaluation"]["sets"]
SOURCES = CONFIG["data"]["sources"]

# Every field that may name a function, with a section that does. Nothing else of a configuration is imported.
HOOKS: dict[str, dict[str, Any]] = {
    "run.prepare": {"run": {**CONFIG["run"], "prepare": THEIRS}},
    "data.sources.rows": {"data": {"sources": [{"name": "made", "rows": THEIRS}]}},
    "data.sources.reward": {"data": {"sources": [{**SOURCES[0], "reward": THEIRS}]}},
    "rollout.session.function": {"rollout": {"session": {"function": THEIRS}}},
    "rollout.session.named": {"rollout": {"session": {"named": {"other": THEIRS}}}},
    "rollout.session.environment": {"rollout": {"session": {"environment": THEIRS}}},
    "rollout.session.tools": {"rollout": {"session": {"tools": [THEIRS]}}},
    "rollout.buffer.buffer_filter": {"rollout": {"buffer": {"buffer_filter": THEIRS}}},
    "reward": {"reward": {"function": THEIRS}},
    "reward.named": {"reward": {"named": {"other": THEIRS}}},
    "filter.group_filter": {"filter": {"group_filter": THEIRS}},
    "algorithm.advantage": {"algorithm": {"advantage": {"kind": "function", "function": THEIRS}}},
    "algorithm.shaping": {"algorithm": {"shaping": THEIRS}},
    "algorithm.loss": {"algorithm": {"loss": {"kind": "function", "function": THEIRS}}},
    "algorithm.teacher_server.hint": {
        "algorithm": {"teacher_server": {"url": "http://t.example", "top_k": 4, "hint": THEIRS}}
    },
    "trainer.rank": {"trainer": {"rank": THEIRS}},
    "evaluation.sets.reward": {"evaluation": {"sets": [{**SETS[0], "reward": THEIRS}]}},
}


def functions_of(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """The fields below a section that may hold the import path of a function."""
    for name, field in model.model_fields.items():
        here = f"{path}.{name}".lstrip(".")
        forms = [form for item in field.metadata if (form := getattr(item, "pattern", None))]
        if forms and all(re.search(form, THEIRS) for form in forms):
            yield path if issubclass(model, UserFunction) else here
        for below in sections_in(field.annotation):
            yield from functions_of(below, here)


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def test_every_field_that_may_name_a_function_has_a_row() -> None:
    assert set(functions_of(RunConfig)) == set(HOOKS)


@pytest.mark.parametrize("field", HOOKS)
def test_a_function_in_any_field_is_said(field: str) -> None:
    (line,) = (line for line in named_by_run(configured(**HOOKS[field])) if line.startswith("imports"))
    said = re.fullmatch(r"imports theirs.module:hook \((.*?)(\.function)?\)", line)
    assert said, line
    assert re.sub(r"\.\d+", "", said[1]) == field


POISON = """
from pathlib import Path

Path(__file__).with_name("imported").touch()

def hook(*arguments, **options):
    return 0.0
"""


@pytest.mark.slow
def test_with_a_file_of_the_callers_nothing_of_a_poisoned_run_is_imported_or_joined(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    """Without the file, the same module is imported."""
    theirs, root = tmp_path / "theirs", tmp_path / "runs"
    theirs.mkdir()
    (theirs / "poison.py").write_text(POISON)
    shutil.copytree(whole, root / "a")
    folder = RunFolder(str(root), "a")
    record = folder.store.read_sealed("run.json")
    config = record["config"]
    config["run"] |= {"import_from": [str(theirs)], "prepare": {"function": "poison:hook"}}
    config["reward"]["function"] = "poison:hook"
    config["filter"]["group_filter"] = {"function": "poison:hook"}
    config["algorithm"]["shaping"] = {"function": "poison:hook"}
    for held_out in config["evaluation"]["sets"]:
        held_out["reward"] = {"function": "poison:hook"}
    folder.store.write_sealed("run.json", record)
    evaluated = ["eval", "a", "--at", "3", "--root", str(root)]
    said = workplace.call(*evaluated)
    assert "imports poison:hook (reward.function)" in said
    assert (theirs / "imported").exists()

    (theirs / "imported").unlink()
    config["placement"]["ray_address"] = "127.0.0.1:9"
    folder.store.write_sealed("run.json", record)
    found = [str(theirs), os.environ.get("PYTHONPATH", "")]  # so that any import of it would go well
    for command in (evaluated, ["replay", "a", "--from", "2", "--to", "3", "--root", str(root)]):
        said = workplace.call(
            *command, "--config", "run.yaml", PYTHONPATH=os.pathsep.join(filter(None, found))
        )
        assert "poison" not in said
        assert not (theirs / "imported").exists()
    assert "every weight equals the export after iteration 3, bit for bit" in said


# Every place that imports a module by a name, and who gives the name.
IMPORTS = {
    "core/config/__init__.py": "millrace: sections of its own configuration",
    "core/hooks/loading.py": "functions of the configuration, whose fields named_by_run says",
    "connectors/environments/gymnasium_text.py": "the option register of a session's environment, which named_by_run says",
    "connectors/environments/extras.py": "millrace: a package that is an extra",
    "connectors/huggingface/tokenizer.py": "transformers alone",
    "connectors/ray/task_processes.py": "modules that a driver names to its own Ray tasks",
    "core/hooks/slime/hub.py": "millrace: its own rewards",
    "core/hooks/slime/names.py": "millrace: its own names for slime's",
    "flows/commands/__init__.py": "millrace: its own commands",
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
