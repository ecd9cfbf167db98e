"""Configurations that nobody means: every one is refused by a named error, and what the error advises makes it load."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from millrace.core.config import RunConfig
from millrace.core.config.parts.section import models
from millrace.core.config.reading.findings import all_fields
from millrace.core.config.reading.load import load_config, validate
from millrace.core.config.reading.overrides import apply
from millrace.core.config.reading.yaml_text import MAX_DEPTH
from millrace.core.errors import ConfigError
from tests.support.permissions import modes_hold

GOOD = "run: {name: a}\nmodel: {path: m}\ndata: {sources: [{name: s, path: s.jsonl}]}\n"
DEEP = 10_000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
ODD_NUMBERS = [".inf", "-.inf", ".nan", "1e400", "1" + "0" * 400]


def _numbers(annotation: Any) -> set[type]:
    """The number types of a field, below unions and lists too; not those of a mapping, which has places of its own."""
    if annotation in (int, float):
        return {annotation}
    if isinstance(annotation, type) or get_origin(annotation) is dict:
        return set()
    return {kind for part in get_args(annotation) for kind in _numbers(part)}


NUMBERS = sorted(path for path, field in all_fields().items() if _numbers(field.annotation))


def _sections(model: type[BaseModel] = RunConfig) -> set[type[BaseModel]]:
    below = {section for field in model.model_fields.values() for section in models(field.annotation)}
    return {model}.union(*(_sections(section) for section in below))


def test_there_are_numbers_to_try() -> None:
    assert {"trainer.optimizer.lr", "rollout.prompts", "data.sources[].weight"} <= set(NUMBERS)
    assert len(NUMBERS) > 60


@pytest.mark.parametrize("number", ODD_NUMBERS)
def test_no_number_of_a_configuration_may_be_infinite_or_none_at_all(number: str) -> None:
    for path in NUMBERS:
        values = yaml.safe_load(GOOD)
        place = path.replace("[]", ".0")
        apply(values, f"{place}={number}")
        config, problems = validate(values)
        assert config is None
        (problem,) = [problem for problem in problems if problem.field == place]
        assert problem.reason in ("not a finite number", "too large")
        assert len(str(problem)) < 200


def test_a_number_in_a_mapping_is_looked_at_too() -> None:
    with pytest.raises(ConfigError, match=r"data\.stages\.0\.weights\.x.*not a finite number"):
        load_config(None, text=GOOD, overrides=["data.stages=[{weights: {x: .inf}}]"])


def test_no_section_takes_a_number_that_is_not_finite_from_elsewhere() -> None:
    for section in _sections():
        for name, field in section.model_fields.items():
            if float not in _numbers(field.annotation) or str(field.annotation).startswith("dict"):
                continue
            for value in (math.inf, -math.inf, math.nan):
                with pytest.raises(ValidationError) as raised:
                    section.model_validate({name: value})
                assert name in {error["loc"][0] for error in raised.value.errors()}, (section, name)


@pytest.mark.parametrize("value", [".inf", "[1, .nan]", "{deep: {deeper: [.inf]}}", '"\\0"', '"\\ud800"'])
def test_options_of_a_users_function_are_looked_into(value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, text=f"{GOOD}reward: {{options: {{x: {value}}}}}")
    assert "reward.options.x" in str(raised.value)
    load_config(None, text=f"{GOOD}reward: {{options: {{x: 1}}}}")


TEXTS = {
    "deep list": ("a: " + "[" * DEEP + "]" * DEEP, "deep"),
    "deep mapping": ("{a: " * DEEP + "1" + "}" * DEEP, "deep"),
    "deep block": ("\n".join(" " * depth + "a:" for depth in range(1000)), "deep"),
    "never closed": ("[" * DEEP, "deep"),
    "alias bomb": (BOMB, "aliases"),
    "alias of itself": ("run: &r {name: a, x: *r}", "recursive"),
    "list": ("- 1\n- 2", "not list"),
    "scalar": ("hello", "not str"),
    "number": ("17", "not int"),
    "NUL": (f"{GOOD}\0", "remove that character"),
    "two documents": (f"{GOOD}---\n{GOOD}", "another document"),
    "a day that is none": ("run: {name: 2020-13-45}", "month must be"),
    "a number that is none": ("run: {iterations: 0b_}", "no such number"),
    "a number without end": ("run: {iterations: " + "9" * 5000 + "}", "no such number"),
    "a tag": ("run: !!python/object:os.system x", "tag"),
    "a list as a key": ("? [a]\n: 1", "unhashable"),
    "a merge of a number": ("run: {<<: 3}", "merging"),
    "a base with NUL": ('base: "a\\0b"', "give the path of one YAML file"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_means_nothing_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    text, reason = TEXTS[name]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(str(file))
    assert reason in str(raised.value)
    assert raised.value.where.startswith(str(file))
    assert raised.value.remedy
    assert len(str(raised.value)) < 500 + len(str(file))
    file.write_text(GOOD)
    assert load_config(str(file)).run.name == "a"


def test_nesting_up_to_the_bound_is_read() -> None:
    depth = MAX_DEPTH - 3
    text = f"{GOOD}reward: {{options: {{x: {'[' * depth}{']' * depth}}}}}"
    assert load_config(None, text=text).reward.options["x"]


@pytest.mark.parametrize(
    "override",
    [f"reward.options.x={'[' * DEEP}{']' * DEEP}", f"reward.options.{'a.' * DEEP}a=1", "run.seed=2020-13-45"],
)
def test_an_override_that_means_nothing_is_refused(override: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [override], text=GOOD)
    assert "override" in str(raised.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff}")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    closed = tmp_path / "closed.yaml"
    closed.write_text(GOOD)
    closed.chmod(0)
    remedies = {
        "folder.yaml": "a folder is there: name a file",
        "latin.yaml": "name a YAML file",
        "loop.yaml": "name a YAML file",
        "absent.yaml": "name a YAML file",
        "closed.yaml": f"give this user (uid {os.geteuid()}) the right to it, or name another",
    }
    for name, remedy in remedies.items():
        with modes_hold(), pytest.raises(ConfigError) as raised:
            load_config(str(tmp_path / name))
        assert "cannot be read" in raised.value.reason
        assert raised.value.remedy == remedy


NAMES = sorted(
    path
    for path, field in all_fields().items()
    if path.split(".")[-1].removesuffix("[]") in ("name", "rollouts_from")
)
NO_NAMES = (".", "..", "...", "", "a/b", "../a", "a\\b", "a\n", "a\x1b[2J", "a b")


@pytest.mark.parametrize("path", NAMES)
def test_a_name_is_no_folder_above_and_no_path(path: str) -> None:
    """Files and folders are named after it: a held-out set named `..` wrote its rows beside the run."""
    (pattern,) = (kept.pattern for kept in all_fields()[path].metadata if hasattr(kept, "pattern"))
    assert re.fullmatch(pattern, "a")
    assert [name for name in NO_NAMES if name and re.fullmatch(pattern, name)] == []


def test_there_are_names() -> None:
    assert len(NAMES) >= 5
    sets = {"sets": [{"name": "..", "path": "h.jsonl"}]}
    (problem,) = validate({**yaml.safe_load(GOOD), "evaluation": sets})[1]
    assert "not dots alone" in problem.remedy
