"""What a refused comparison of engine and trainer offers is allowed: each field that its messages name, set as they say, on a resume.

A field that a message comes to name has no row, and fails.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from millrace.connectors.trainers import refusals
from millrace.core import logprob_gap
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.config.rules import problems
from millrace.flows.driver.same_run import refused_in_branch, refused_in_run

TEXT = """
run: {name: a, iterations: 4}
model: {path: m}
data: {sources: [{name: sums, path: s.jsonl}]}
engines: {kind: sglang}
"""
FIELD = re.compile(r"\b((?:sync|trainer|engines|rollout)\.[a-z_.]*[a-z])")
OFFERED = {  # a field that a message names, and the setting that it comes to
    "sync.max_logprob_gap": ["sync.max_logprob_gap=0.06"],
    "sync.max_prompt_gap": ["sync.max_prompt_gap=0.01"],
    "sync.kind": ["sync.kind=disk"],
    "engines.sglang": ["engines.sglang.disable_radix_cache=true"],
    "engines.sglang.context_length": ["engines.sglang.context_length=4096"],
}
IN_A_BRANCH = {"trainer.optimizer.lr": ["trainer.optimizer.lr=1e-7"]}
SAID = {"rollout.sampling.temperature"}  # as what the trainer divides by


def config(*overrides: str) -> RunConfig:
    return load_config(None, list(overrides), text=TEXT)


@pytest.mark.parametrize("field", OFFERED)
def test_a_run_goes_on_with_what_is_offered(field: str) -> None:
    now = config(*OFFERED[field])
    assert now != config()
    assert list(problems(now)) == list(problems(config()))
    assert refused_in_run(config(), now) == []


@pytest.mark.parametrize("field", IN_A_BRANCH)
def test_a_branch_takes_what_is_offered_for_a_branch(field: str) -> None:
    assert refused_in_branch(config(), config(*IN_A_BRANCH[field])) == []


def test_each_field_that_a_message_names_is_tried() -> None:
    trees = [ast.parse(Path(str(module.__file__)).read_text()) for module in (logprob_gap, refusals)]
    texts = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert {field for text in texts for field in FIELD.findall(text)} == {*OFFERED, *IN_A_BRANCH, *SAID}
