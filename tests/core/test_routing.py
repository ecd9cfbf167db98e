"""Which layers have experts, and how a router of sigmoids chooses among them: as Hugging Face's models do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from millrace.core.families.architecture import expert_layers
from millrace.core.families.routing import SigmoidRouting

# experts, groups, groups used, experts of a token
SHAPES = [(8, 1, 1, 2), (8, 1, 1, 1), (8, 4, 2, 3), (12, 3, 2, 2), (16, 8, 4, 8), (6, 3, 3, 4)]


@pytest.mark.parametrize(("experts", "groups", "used", "count"), SHAPES)
@pytest.mark.parametrize("normalised", [True, False])
def test_a_router_of_sigmoids_is_hugging_faces(
    experts: int, groups: int, used: int, count: int, normalised: bool
) -> None:
    """Also where the best two experts of a group are not count / used, as megatron has it."""
    torch.manual_seed(experts + groups)
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=10,
            n_routed_experts=experts,
            n_group=groups,
            topk_group=used,
            num_experts_per_tok=count,
            norm_topk_prob=normalised,
            routed_scaling_factor=1.7,
        )
    )
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.normal_()
    logits, weights, chosen = theirs(torch.randn(200, 10))
    routing = SigmoidRouting(groups, used, 1.7)

    ours = routing.chosen(logits, theirs.e_score_correction_bias, count)

    expected, order = chosen.sort(-1)
    assert ours.sort(-1).values.equal(expected)
    found = routing.weights(logits, ours.sort(-1).values, normalised=normalised)
    torch.testing.assert_close(found, weights.gather(-1, order))
    unbiased = routing.chosen(logits, torch.zeros(experts), count)
    assert count == experts or not unbiased.sort(-1).values.equal(expected)


LAYERS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (0, 1, 2, 3, 4)),
    ({"first_k_dense_replace": 0}, (0, 1, 2, 3, 4)),
    ({"first_k_dense_replace": 3}, (3, 4)),
    ({"decoder_sparse_step": 2, "mlp_only_layers": []}, (1, 3)),
    ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}, (1, 2, 4)),
    ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}, (1, 3, 4)),
]


@pytest.mark.parametrize(("said", "layers"), LAYERS)
def test_layers_with_experts_are_those_that_the_config_says(
    said: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert expert_layers({"num_hidden_layers": 5, **said}) == layers
