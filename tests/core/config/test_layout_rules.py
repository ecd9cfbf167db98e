"""What of a model a layout cannot divide, and which layers each rank then holds."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.config.layout_rules import problems
from millrace.core.config.megatron_options.stages import layers_of_ranks
from millrace.core.config.run_config import RunConfig
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import resolved

LAYERS = 12
SIZES = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"


def shape(kind: str, **changes: Any) -> Architecture:
    return architecture(resolved({"model_type": kind, **SIZES, **changes}, "test"))


DENSE, MIXTURE = shape("qwen3"), shape("qwen3_moe", **EXPERTS)


def config(parallel: dict[str, Any], options: dict[str, Any], **trainer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "a"},
            "model": {"path": "m"},
            "data": {"sources": [{"path": "p"}]},
            "trainer": {"world_size": 64, "parallel": parallel, "megatron": options, **trainer},
        }
    )


DIVIDED: dict[str, tuple[dict[str, int], dict[str, Any], list[list[int]]]] = {
    "whole": ({}, {}, [[*range(12)]]),
    "even": ({"pipeline": 2}, {}, [[*range(6)], [*range(6, 12)]]),
    "a first stage": ({"pipeline": 3}, {FIRST: 2}, [[0, 1], [*range(2, 7)], [*range(7, 12)]]),
    "both ends": ({"pipeline": 3}, {FIRST: 3, LAST: 1}, [[0, 1, 2], [*range(3, 11)], [11]]),
    "virtual": ({"pipeline": 2, "virtual": 3}, {}, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
    "virtual with a first stage": (
        {"pipeline": 2, "virtual": 2},
        {FIRST: 4},
        [[0, 1, 6, 7], [2, 3, 4, 5, 8, 9, 10, 11]],
    ),
    "a layout": ({"pipeline": 2}, {LAYOUT: "Et*4|t*8,L"}, [[0, 1, 2, 3], [*range(4, 12)]]),
    "a virtual layout": (
        {"pipeline": 2, "virtual": 2},
        {LAYOUT: "Et|(tt|)*2t*7L"},
        [[0, 3, 4], [1, 2, *range(5, 12)]],
    ),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_each_rank_holds_these_layers(name: str) -> None:
    parallel, options, held = DIVIDED[name]
    assert list(problems(config(parallel, options), DENSE)) == []
    assert layers_of_ranks(config(parallel, options), LAYERS) == held


def test_embedding_and_output_layer_may_count_as_layers() -> None:
    options = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    chosen = config({"pipeline": 2, "virtual": 2}, options)
    assert list(problems(chosen, shape("qwen3", num_hidden_layers=10))) == []
    assert layers_of_ranks(chosen, 10) == [[0, 1, 5, 6, 7], [2, 3, 4, 8, 9]]


TENSOR, EXPERT = "trainer.parallel.tensor", "trainer.parallel.expert"
WRONG = [
    (DENSE, {"tensor": 4}, {}, TENSOR, "6 attention heads"),
    (shape("qwen3", num_key_value_heads=3), {"tensor": 2}, {}, TENSOR, "3 key-value heads"),
    (shape("qwen3", intermediate_size=49), {"tensor": 2}, {}, TENSOR, "49 MLP channels"),
    (MIXTURE, {"tensor": 2}, {}, "trainer.parallel.sequence", "need sequence parallelism"),
    (MIXTURE, {"tensor": 3, "sequence": True, "expert_tensor": 1}, {}, TENSOR, "key-value heads"),
    (MIXTURE, {"expert": 3}, {}, EXPERT, "8 experts"),
    (MIXTURE, {"expert_tensor": 8}, {}, "trainer.parallel.expert_tensor", "20 channels of an expert"),
    (DENSE, {"expert": 2}, {}, EXPERT, "has no experts"),
    (DENSE, {"expert_tensor": 1}, {}, "trainer.parallel.expert_tensor", "has no experts"),
    (DENSE, {"pipeline": 5}, {}, "trainer.parallel.pipeline", "12 layers"),
    (DENSE, {"pipeline": 2, "virtual": 4}, {}, "trainer.parallel.virtual", "does not divide 6, 6"),
    (DENSE, {"pipeline": 2, "virtual": 2}, {FIRST: 3}, "trainer.parallel.virtual", "does not divide 3, 9"),
    (DENSE, {"pipeline": 3}, {FIRST: 3}, f"trainer.megatron.{FIRST}", "stages of 3, 4, 4 layers"),
    (DENSE, {"pipeline": 2}, {FIRST: 6, LAYOUT: "Et*6|t*6L"}, f"trainer.megatron.{LAYOUT}", "excludes"),
    (DENSE, {"pipeline": 2}, {LAYOUT: "Et*6|t*5L"}, f"trainer.megatron.{LAYOUT}", "stages of 6, 5 layers"),
    (DENSE, {"pipeline": 2}, {LAYOUT: "Et*6|t*4|t*2L"}, f"trainer.megatron.{LAYOUT}", "it has 3 stages"),
    *(
        (
            DENSE,
            {"pipeline": 2},
            {LAYOUT: text},
            f"trainer.megatron.{LAYOUT}",
            "it does not have the embedding",
        )
        for text in (
            "E|t*12L",
            "t*6|t*6L",
            "Et*6|t*6mL",
            "Et*6|t*6",
            "(Et*6|t*6L",
            "Et*99999999999|tL",
            "tp2",
        )
    ),
]


@pytest.mark.parametrize(("model", "parallel", "options", "field", "words"), WRONG)
def test_what_does_not_divide_is_named(
    model: Architecture, parallel: dict[str, Any], options: dict[str, Any], field: str, words: str
) -> None:
    (problem,) = problems(config(parallel, options), model)
    assert problem.field == field
    assert words in problem.reason
    assert problem.remedy


def test_heads_that_fsdps_context_parallel_ranks_cannot_share_are_named() -> None:
    """Heads of keys are repeated if there are fewer than ranks."""
    for context in (2, 3, 6):
        assert list(problems(config({"context": context}, {}, kind="fsdp"), DENSE)) == []
    (problem,) = problems(config({"context": 4}, {}, kind="fsdp"), DENSE)
    assert (problem.field, problem.value) == ("trainer.parallel.context", 4)
    assert "6 attention heads" in problem.reason
    assert list(problems(config({"context": 4}, {}), DENSE)) == []


@pytest.mark.parametrize(
    ("model", "tensor"),
    [(shape("qwen3", num_attention_heads=8), 4), (shape("qwen3", num_key_value_heads=1), 2)],
)
def test_a_key_head_may_be_on_several_ranks(model: Architecture, tensor: int) -> None:
    assert list(problems(config({"tensor": tensor}, {}), model)) == []
