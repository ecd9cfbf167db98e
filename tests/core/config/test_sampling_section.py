"""Each field of a sampling: what a request has of it, and whether rollouts that train may have it."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config.rollout import Sampling
from millrace.core.config.rules import problems
from millrace.core.config.run_config import RunConfig
from tests.core.config.test_rules import BASE

Case = tuple[Any, Any, str]  # a value, as a request has it, and what becomes of the log-probability

# own: of the policy, and of what is drawn; cut: of the policy alone; reshaped: of what is drawn alone
FIELDS: dict[str, Case] = {
    "temperature": (0.7, 0.7, "own"),
    "top_p": (0.9, 0.9, "cut"),
    "top_k": (5, 5, "cut"),
    "min_p": (0.1, 0.1, "cut"),
    "max_new_tokens": (9, 9, "own"),
    "stop": (["x"], ["x"], "own"),
    "stop_token_ids": ([7], [7], "own"),
    "stop_regex": (["[0-9]x"], ["[0-9]x"], "own"),
    "ignore_eos": (True, True, "own"),
    "skip_special_tokens": (False, False, "own"),
    "min_new_tokens": (4, 4, "reshaped"),
    "frequency_penalty": (0.5, 0.5, "reshaped"),
    "presence_penalty": (0.5, 0.5, "reshaped"),
    "repetition_penalty": (1.2, 1.2, "reshaped"),
    "logit_bias": ({"7": -1}, {"7": -1.0}, "reshaped"),
    "json_schema": ({"type": "object"}, '{"type": "object"}', "reshaped"),
    "regex": ("[0-9]+", "[0-9]+", "reshaped"),
    "ebnf": ('root ::= "a"', 'root ::= "a"', "reshaped"),
}
ALWAYS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "no_stop_trim",
}


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({**BASE, "engines": {"kind": "sglang"}, **sections})


def wrong(made: RunConfig) -> list[str]:
    return [problem.field for problem in problems(made)]


def in_rollouts(sampling: dict[str, Any], **sections: Any) -> list[str]:
    return wrong(config(rollout={**BASE["rollout"], "sampling": sampling}, **sections))


def in_a_set(sampling: dict[str, Any], **sections: Any) -> list[str]:
    held_out = {"name": "held", "path": "h.parquet", "sampling": {"temperature": 0.5, **sampling}}
    return wrong(config(evaluation={"sets": [held_out]}, **sections))


def test_the_table_has_every_field() -> None:
    assert list(FIELDS) == list(Sampling.model_fields)


@pytest.mark.parametrize("name", FIELDS)
def test_a_request_has_a_field_that_is_given_and_nothing_new_without(name: str) -> None:
    value, sent, _ = FIELDS[name]
    assert Sampling.model_validate({name: value}).request[name] == sent
    assert Sampling().request.keys() == ALWAYS


@pytest.mark.parametrize("name", FIELDS)
def test_what_draws_from_another_distribution_is_for_evaluation_alone(name: str) -> None:
    value, _, kind = FIELDS[name]
    refused = [f"rollout.sampling.{name}"]
    assert in_rollouts({name: value}) == (refused if kind == "reshaped" else [])
    corrected = in_rollouts({name: value}, algorithm={"correction": {"kind": "truncate"}})
    assert corrected == ([] if kind == "own" else refused)
    assert in_a_set({name: value}) == []


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"min_new_tokens": 10, "max_new_tokens": 9}, "min_new_tokens"),
        ({"stop_regex": ["("]}, "stop_regex"),
        ({"stop_regex": ["x*"]}, "stop_regex"),
        ({"logit_bias": {-1: 2}}, "logit_bias"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"json_schema": {}, "regex": "a"}, "regex"),
    ],
)
def test_what_contradicts_itself_is_refused(sampling: dict[str, Any], field: str) -> None:
    assert in_a_set(sampling) == [f"evaluation.sets.held.sampling.{field}"]


@pytest.mark.parametrize("name", FIELDS)
def test_what_an_engine_or_its_router_lacks_is_refused(name: str) -> None:
    value, _, _ = FIELDS[name]
    refused = [f"evaluation.sets.held.sampling.{name}"]
    no_grammar = name in ("json_schema", "regex", "ebnf")
    assert in_a_set({name: value}, engines={"kind": "embedded"}) == (refused if no_grammar else [])
    without = {"kind": "sglang", "sglang": {"grammar_backend": "none"}}
    assert in_a_set({name: value}, engines=without) == (refused if no_grammar else [])
    routed = {"kind": "sglang", "router": {}}
    assert in_a_set({name: value}, engines=routed) == (
        refused if name in ("stop_regex", "logit_bias") else []
    )
    drafts = {"kind": "sglang", "sglang": {"speculative_algorithm": "NGRAM"}}
    counted = ("min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p")
    own = in_a_set({name: value}, engines=drafts, sync={"kind": "broadcast"})
    assert own == (refused if name in counted else [])


@pytest.mark.parametrize("name", FIELDS)
def test_sessions_refuse_what_turns_have_no_place_for(name: str) -> None:
    value, _, _ = FIELDS[name]
    session = {**BASE["rollout"], "session": {"function": "a:b", "max_tokens": 100}}
    refused = name in ("ignore_eos", "skip_special_tokens")
    expected = [f"evaluation.sets.held.sampling.{name}"] if refused else []
    assert in_a_set({name: value}, rollout=session) == expected
