"""Configurations that older runs stored: every field of the first shape is read, moved or named as without effect."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.reading.findings import all_fields
from millrace.core.config.reading.load import validate
from millrace.core.config.reading.stored import NEW_FIELDS, VERSION, lifted
from millrace.core.errors import ConfigError

FIRST = json.loads(
    (Path(__file__).parent / "version_1.json").read_text()
)  # every field, and a stored default


def stored(**changes: Any) -> dict[str, Any]:
    """A configuration as the first version stored it; changes are of sections' fields, algorithm=, engines=, ..."""
    config: dict[str, Any] = copy.deepcopy(FIRST["config"])
    for section, fields in changes.items():
        config[section] |= fields
    return config


def today(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(lifted({"name": "a", "config": stored(**changes)})["config"])


@pytest.mark.parametrize("field", FIRST["fields"])
def test_every_field_of_version_1_has_its_place_today(field: str) -> None:
    moved = next((new + field[len(old) :] for old, new in NEW_FIELDS.items() if field.startswith(old)), field)
    assert moved in all_fields()


def test_a_stored_default_is_todays_default_under_todays_module_names() -> None:
    fresh = RunConfig.model_validate(
        {
            "run": {"name": "a", "prepare": "millrace.flows.quickstart:prepare"},
            "model": {"path": "m", "dtype": "float32"},  # which was the default
            "data": {"sources": [{"path": "x.jsonl"}]},
            "evaluation": {"sets": [{"name": "h", "path": "h.jsonl"}]},
        }
    )
    assert today() == fresh


PPO = {"preset": "ppo", "advantage": "gae", "whiten": True, "kl_placement": "reward", "kl_kind": "k1"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"clip_high": 0.28}, {"loss": {"clip_high": 0.28}}),
        ({"dual_clip": 3.0, "clip_low": 0.1}, {"loss": {"dual_clip": 3.0, "clip_low": 0.1}}),
        ({"preset": "gspo", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, {"preset": "gspo"}),
        ({"loss": "sapo", "sapo_temperatures": [1, 2]}, {"loss": {"kind": "sapo", "temperatures": [1, 2]}}),
        ({"loss": "sft", "loss_function": "a:b"}, {"loss": "sft"}),
        ({"loss_function": "core.x:f"}, {"loss": {"kind": "function", "function": "millrace.core.x:f"}}),
        ({"divide_by_std": False, "epsilon": 1e-4}, {"advantage": {"divide_by_std": False, "epsilon": 1e-4}}),
        ({"advantage": "max_rl", "preset": "max_rl"}, {"preset": "max_rl"}),
        ({"advantage_function": "a.b:f"}, {"advantage": {"kind": "function", "function": "a.b:f"}}),
        (
            {**PPO, "aggregation": "token_mean", "lam": 0.9, "critic": {"lr": 1e-3, "clip": None}},
            {"preset": "ppo", "advantage": {"lam": 0.9, "critic": {"lr": 1e-3, "clip": None}}},
        ),
        ({"shaping_function": "a.b:f"}, {"shaping": "a.b:f"}),
        ({"aggregation": "per_rollout"}, {}),
    ],
    ids=str,
)
def test_an_algorithm_of_version_1_is_the_same_algorithm(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert today(algorithm=old).algorithm == Algorithm.model_validate(new)


def test_other_sections_keep_what_acts_under_their_kind() -> None:
    addresses = ["http://a:1", "http://b:1"]
    external = today(engines={"kind": "external", "addresses": addresses, "count": 2}).engines
    assert (external.kind, external.count) == ("external", 2)
    assert today(engines={"kind": "sglang", "gpus": 2, "sglang": {"x": 1}}).engines.sglang == {"x": 1}
    assert today(sync={"kind": "disk", "directory": "/d"}).sync.directory == "/d"
    assert today(filter={"function": "core.group_filters:fully_scored"}).filter.model_dump()[
        "group_filter"
    ] == {"function": "millrace.core.group_filters:fully_scored", "options": {}}


def test_a_branchs_parent_is_lifted_too_and_a_lifted_record_stays() -> None:
    record = {
        "name": "b",
        "config": None,
        "parent": {"run": "a", "at": 1, "config": stored()},
        "attempts": [],
    }
    new = lifted(record)
    assert new["parent"]["config"] == today().model_dump(mode="json")
    assert (new["config"], new["config_version"], new["parent"]["at"]) == (None, VERSION, 1)
    assert lifted(new) == new


def test_a_run_from_before_the_field_keeps_the_seeds_of_its_name() -> None:
    for version in ({}, {"config_version": VERSION}):
        assert lifted({"name": "a", "config": None, **version})["seed_name"] == "a"
    assert (
        lifted({"name": "a", "config": None, "config_version": VERSION, "seed_name": ""})["seed_name"] == ""
    )


def test_what_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"run\.json of a.*later millrace"):
        lifted({"name": "a", "config": {}, "config_version": VERSION + 1})
    with pytest.raises(ConfigError, match=r"run\.json of a.*iterations"):
        lifted({"name": "a", "config": stored(run={"iterations": 0})})


@pytest.mark.parametrize(("old", "new"), NEW_FIELDS.items())
def test_a_file_in_the_old_shape_is_told_the_new_field(old: str, new: str) -> None:
    section, name = old.split(".")
    values = {"run": {"name": "a"}, "model": {"path": "m"}, "data": {"sources": [{"path": "x.jsonl"}]}}
    (problem,) = validate({**values, section: {name: "x"}})[1]
    assert (problem.field, problem.remedy) == (old, f"did you mean {new}?")
