"""The page for people from other frameworks: every argument of slime's, verl's and TRL's that is kept beside this file has a row, and
every field that a row names is a field."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from millrace.core.config import RunConfig
from millrace.core.config.megatron_options.transformer import ACCEPTED

HERE = Path(__file__)
PAGE = (HERE.parents[2] / "docs" / "coming-from.md").read_text()
HEADS = ("| slime |", "| verl |", "| TRL |")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(HEADS)]
ARGUMENTS = HERE.with_name("slime_arguments.txt").read_text().split()
OTHERS = {name: HERE.with_name(f"{name}_arguments.txt").read_text().split() for name in ("verl", "trl")}
FIELD = re.compile(r"`([a-z_]+(?:\[\])?(?:\.[A-Za-z_]+(?:\[\])?)+)`")
FREE = ("engines.sglang", "engines.router.options")  # fields of others, under their names


def flags(text: str) -> set[str]:
    return set(re.findall(r"`(--[a-z0-9-]+)[` ]", text))


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from sections(part)


def is_field(path: str) -> bool:
    """Whether a dotted path is a field of a run's configuration, of any kind of its sections."""
    if path.startswith("trainer.megatron."):
        return path.rpartition(".")[2] in ACCEPTED
    if path.startswith(FREE):
        return True
    found: list[type[BaseModel]] = [RunConfig]
    for name in path.replace("[]", "").split("."):
        fields = [each.model_fields[name] for each in found if name in each.model_fields]
        if not fields:
            return False
        found = [section for each in fields for section in sections(each.annotation)]
    return True


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_each_argument_of_slimes_has_a_row(argument: str) -> None:
    own = any(argument in flags(row) for row in ROWS)
    by_rule = argument.startswith("--sglang-") and "Any `--sglang-NAME` is `engines.sglang.NAME`" in PAGE
    assert own or by_rule


@pytest.mark.parametrize(("name", "argument"), [(name, each) for name in OTHERS for each in OTHERS[name]])
def test_each_argument_of_verls_and_trls_has_a_row(name: str, argument: str) -> None:
    """By its whole name, or from one of its dots on: in its column of a common table, or in a table of its own."""
    column = ("verl", "trl").index(name) + 1
    cells = [row.strip("| ").split(" | ") for row in ROWS]
    named = {
        text.partition("=")[0]
        for row in cells
        for text in re.findall(r"`([^`]+)`", row[column] if len(row) == 4 else row[0])
    }
    parts = argument.split(".")
    assert named & {".".join(parts[at:]) for at in range(len(parts))}


@pytest.mark.parametrize("name", OTHERS)
def test_a_kept_list_of_others_names_each_argument_once(name: str) -> None:
    assert len(OTHERS[name]) == len(set(OTHERS[name])) >= 60


def test_the_kept_list_names_each_argument_once() -> None:
    assert len(ARGUMENTS) == len(set(ARGUMENTS)) > 300


def test_each_field_that_a_row_names_is_a_field() -> None:
    silent = PAGE[PAGE.index("## What differs silently") :].split("\n## ", 2)[0].splitlines()
    ours = [row.strip("| ").rpartition(" | ")[2] for row in ROWS]
    ours += [row.strip("| ").split(" | ")[2] for row in silent if row.count(" | ") == 3]
    named = {path for cell in ours for path in FIELD.findall(cell)}
    known = {path for path in named if re.split(r"[.\[]", path)[0] in RunConfig.model_fields}
    assert {path for path in known if not is_field(path)} == set()
    assert len(known) > 120


@pytest.mark.parametrize(
    ("path", "exists"),
    [
        ("run.seed", True),
        ("data.sources[].path", True),
        ("algorithm.loss.clip_high", True),
        ("algorithm.advantage.critic.clip", True),
        ("evaluation.sets[].sampling.temperature", True),
        ("engines.sglang.ep_size", True),
        ("trainer.megatron.recompute_method", True),
        ("trainer.megatron.no_such_field", False),
        ("run.sed", False),
        ("rollout.sampling.temprature", False),
        ("algorithm.loss.clip", False),
    ],
)
def test_what_is_a_field(path: str, exists: bool) -> None:
    assert is_field(path) is exists
