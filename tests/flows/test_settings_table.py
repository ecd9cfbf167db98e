"""Every field of the configuration, in a resume and in a branch: it acts from the first step, or is refused with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

import millrace
from millrace.connectors.ray.actors import digest
from millrace.core.config import RunConfig
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.parts.menu import variants
from millrace.core.config.parts.restart import decided
from millrace.core.config.parts.section import models
from millrace.core.errors import ConfigError
from millrace.flows.driver.same_run import check_branch, check_resume
from tests.support.fields_by_mode import sections
from tests.support.settings_table import REBUILT, REFUSED, ROWS, TRAINED_WITH

FUNCTION = "package.module:function"
REQUIRED = {"addresses": ["http://host:30000"], "function": FUNCTION}
PARENT = {"run": "a", "at": 2}


def configuration(**changes: Any) -> RunConfig:
    """A configuration in which every optional section is given."""
    return RunConfig.model_validate(
        {
            "run": {"name": "a", "prepare": FUNCTION},
            "model": {"path": "model"},
            "data": {
                "sources": [
                    {"path": "train.jsonl", "reward": FUNCTION, "rows": FUNCTION, "levels": {}, "pools": {}}
                ],
                "stages": [{"weights": {"default": 1}}],
            },
            "reward": {"named": {"code": FUNCTION}},
            "filter": {"group_filter": FUNCTION},
            "rollout": {"buffer": {"buffer_filter": FUNCTION}},
            "evaluation": {"sets": [{"name": "held_out", "path": "held_out.jsonl", "reward": FUNCTION}]},
            **changes,
        }
    )


def kinds(name: str, model: type[BaseModel]) -> Iterator[dict[str, Any]]:
    for kind, section in variants(model.model_fields[name]).items():
        given = {"kind": kind, **{key: REQUIRED[key] for key in REQUIRED if key in section.model_fields}}
        yield given | ({"router": {}} if "router" in section.model_fields else {})


@cache
def bases() -> dict[str, RunConfig]:
    """By field, a configuration that has it: each kind of every choice occurs in one."""
    found: dict[str, RunConfig] = {}
    algorithm = {
        "overlong": {},
        "shaping": FUNCTION,
        "teacher_server": {"url": "http://host", "hint": FUNCTION},
    }
    made = [configuration(engines=engines) for engines in kinds("engines", RunConfig)]
    made += [configuration(sync=sync) for sync in kinds("sync", RunConfig)]
    for choice in ("loss", "advantage"):
        made += [
            configuration(algorithm={**algorithm, choice: section}) for section in kinds(choice, Algorithm)
        ]
    critic = {"kind": "gae", "critic": {"schedule": {}}}
    made.append(configuration(algorithm={"preset": "ppo", "advantage": critic}))
    made.append(configuration(trainer={"lora": {}}))
    for tool in (FUNCTION, {"mcp": {"command": ["serve"]}}):
        session = {
            "function": FUNCTION,
            "named": {"solo": FUNCTION},
            "environment": FUNCTION,
            "tools": [tool],
        }
        made.append(configuration(rollout={"session": session}))
    for config in made:
        for path, _, _ in decided(config):
            found.setdefault(path, config)
    return found


def changed(section: Any, path: list[str]) -> Any:
    """A copy in which the value at the path is another one."""
    if not path:
        return "another"
    if isinstance(section, list):
        number = int(path[0])
        return [*section[:number], changed(section[number], path[1:]), *section[number + 1 :]]
    return section.model_copy(update={path[0]: changed(getattr(section, path[0]), path[1:])})


@cache
def attributes(module: str) -> set[str]:
    """Names of the attributes that a module reads."""
    tree = ast.parse((Path(millrace.__file__).parent / module).read_text())
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    assert set(ROWS) == sections().keys()
    assert set(ROWS) <= set(bases())


def test_no_section_is_optional_without_a_decision_of_its_own() -> None:
    """A section that appears or disappears is one change, for which its field needs a decision."""

    def undecided(model: type[BaseModel], above: str, inherited: bool) -> Iterator[str]:
        from millrace.core.config.parts.restart import restart_of

        for name, field in model.model_fields.items():
            here = inherited or restart_of(field) is not None
            below = models(field.annotation)
            may_differ = (
                len(below) > 1 or NoneType in get_args(field.annotation) or get_origin(field.annotation)
            )
            if below and may_differ and not here:
                yield f"{above}{name}"
            for section in below:
                yield from undecided(section, f"{above}{name}.", here)

    assert list(undecided(RunConfig, "", False)) == []


@pytest.mark.parametrize("path", ROWS)
def test_a_change_of_the_field_is_accepted_or_refused_by_name_with_its_reason(path: str) -> None:
    row, before = ROWS[path], bases()[path]
    now = changed(before, path.split("."))
    for allowed, check in (
        (row.resume, lambda: check_resume(before, now)),
        (row.branch, lambda: check_branch(before, now, {**PARENT, "at": 0})),
    ):
        if allowed:
            check()
            continue
        with pytest.raises(ConfigError) as refused:
            check()
        where = path.removesuffix(".name") if path.startswith("data.sources") else path
        where = where.removesuffix(".0") if path.endswith("sources.0.name") else where
        where = where.removesuffix(".0.name") if path.endswith(("tools.0.name", "named.0.name")) else where
        assert f"  {where}: was " in refused.value.reason
        assert "another" in refused.value.reason
        assert refused.value.reason.rstrip(")").rpartition(" (")[2], "the reason"
    if row.resume or row.branch:
        assert row.proof != REFUSED


@pytest.mark.parametrize("path", [path for path, row in ROWS.items() if row.proof == REBUILT])
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_actors_of_another_value_are_not_kept(path: str) -> None:
    before = bases()[path]
    now = changed(before, path.split("."))
    assert digest(before.for_actors()) != digest(now.for_actors())


@pytest.mark.parametrize(
    "path", [p for p, row in ROWS.items() if row.proof not in (REBUILT, REFUSED, TRAINED_WITH)]
)
def test_the_driver_reads_the_field_where_the_table_says(path: str) -> None:
    parts = [part for part in path.split(".")[1:] if not part.isdigit()]
    named = ["reward", *parts] if path.startswith("reward.") else parts
    assert attributes(ROWS[path].proof) & set(named), f"{ROWS[path].proof} does not read {path}"


def test_a_refused_change_names_both_values_and_the_way() -> None:
    before = configuration()
    now = configuration(trainer={"optimizer": {"lr": 1e-9}, "schedule": {"kind": "linear"}})
    with pytest.raises(ConfigError) as refused:
        check_resume(before, now)
    assert "trainer.optimizer.lr: was 1e-06, now 1e-09 (one run has one algorithm)" in str(refused.value)
    assert "trainer.schedule.kind: was 'constant', now 'linear'" in str(refused.value)
    assert "millrace branch a NEW --at ITERATION" in str(refused.value)
    check_branch(before, now, PARENT)
    with pytest.raises(
        ConfigError, match=r"(?s)model.dtype: was 'float32', now 'bfloat16'.*another run.name"
    ):
        check_resume(before, configuration(model={"path": "model", "dtype": "bfloat16"}))


def test_a_branch_cannot_add_a_model_that_the_checkpoint_lacks() -> None:
    before = configuration()
    for changes in ({"preset": "ppo"}, {"kl_coef": 0.1, "reference_update_steps": 5}):
        now = configuration(algorithm=changes)
        with pytest.raises(ConfigError, match="hold no model"):
            check_branch(before, now, PARENT)
        check_branch(before, now, {**PARENT, "at": 0})


def test_data_that_only_moved_is_the_same_configuration() -> None:
    before, moved = (
        configuration(data={"sources": [{"path": path, "reward": FUNCTION}]})
        for path in ("train.jsonl", "elsewhere.jsonl")
    )
    check_resume(before, moved)


@pytest.mark.parametrize("field", ["path", "tokenizer", "chat_template"])
def test_a_model_that_only_moved_is_the_same_where_hashes_can_say_so(field: str) -> None:
    before = configuration(model={"path": "model", field: "a"})
    moved = configuration(model={"path": "model", field: "../b"})
    check_resume(before, moved, {f"model.{field}"})
    check_branch(before, moved, PARENT, {f"model.{field}"})
    with pytest.raises(ConfigError, match=f"model.{field}: was 'a', now '../b'"):
        check_resume(before, moved)
    check_resume(before, configuration(model={"path": "model", field: str(Path.cwd() / "a")}))
    if field != "path":
        with pytest.raises(ConfigError, match=f"model.{field}: was 'a', now None"):
            check_resume(before, configuration(model={"path": "model"}), {f"model.{field}"})
