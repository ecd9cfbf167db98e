"""Models that SGLang would serve otherwise are refused: with windows that it does not have, an output layer that they do not have, or
delta nets in layers that it does not take for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import resolved
from millrace.flows.preflight.check_machine import check_delta_layers, check_output_layer, check_windows
from tests.core.test_model_folder import PUBLISHED, shape_of
from tests.support.wrong_configs import GOOD


def shape(window: int | None) -> Architecture:
    return architecture(resolved({**PUBLISHED["Mistral-7B-Instruct-v0.3"], "sliding_window": window}, "test"))


@pytest.mark.parametrize(
    ("kind", "window", "refused"),
    [
        ("sglang", None, False),
        ("sglang", 47, True),
        ("sglang", 48, False),  # no prompt with its answer is longer
        ("embedded", 47, False),
    ],
)
def test_a_window_that_texts_exceed_needs_an_engine_with_windows(
    kind: str, window: int | None, refused: bool
) -> None:
    engines: dict[str, Any] = {"kind": kind}
    config = RunConfig.model_validate({**GOOD, "engines": engines})
    problems = list(check_windows(config, shape(window)))
    assert [problem.field for problem in problems] == ["engines.kind"] * refused


def test_a_window_bounds_the_products_of_attention() -> None:
    full, narrow = shape(None), shape(100)
    assert narrow.flops(100) == full.flops(100)
    steps = [narrow.flops(tokens + 1) - narrow.flops(tokens) for tokens in (100, 1000)]
    assert steps[0] == steps[1] < full.flops(1001) - full.flops(1000)
    assert replace(narrow, windows=(100, *full.windows[1:])).flops(1000) > narrow.flops(1000)


@pytest.mark.parametrize(
    ("kind", "family", "tied", "refused"),
    [
        ("sglang", "qwen3_moe", True, True),
        ("sglang", "qwen3_moe", False, False),
        ("embedded", "qwen3_moe", True, False),
        ("sglang", "qwen3", True, False),
    ],
)
def test_a_mixture_without_an_output_layer_needs_an_engine_that_asks_for_none(
    kind: str, family: str, tied: bool, refused: bool
) -> None:
    engines: dict[str, Any] = {"kind": kind}
    config = RunConfig.model_validate({**GOOD, "engines": engines})
    problems = list(check_output_layer(config, shape_of(family, tied=tied)))
    assert [problem.field for problem in problems] == ["engines.kind"] * refused


@pytest.mark.parametrize(
    ("kind", "changes", "refused"),
    [
        ("sglang", {}, False),
        ("sglang", {"full_attention_interval": 4}, True),
        ("embedded", {"full_attention_interval": 4}, False),
        ("sglang", {"full_attention_interval": 4, "layer_types": None, "num_hidden_layers": 4}, False),
    ],
)
def test_layers_of_delta_net_that_sglang_takes_for_others_need_another_engine(
    kind: str, changes: dict[str, Any], refused: bool
) -> None:
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    engines: dict[str, Any] = {"kind": kind}
    config = RunConfig.model_validate({**GOOD, "engines": engines})
    problems = list(check_delta_layers(config, shape_of("qwen3_next", **{**kinds, **changes})))
    assert [problem.field for problem in problems] == ["engines.kind"] * refused
