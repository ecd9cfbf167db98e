"""GLM-4.7-Flash: DeepSeek-V3's layers, with a list of which of them are dense."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.core.families import decoder
from millrace.core.families.deepseek_v3 import DEEPSEEK_V3
from millrace.core.families.family import Bound, Honoured


def _first_dense(sizes: Mapping[str, Any]) -> list[str]:
    return ["dense", *["sparse"] * (sizes["num_hidden_layers"] - 1)]


def _kinds(value: list[Any]) -> bool:
    return all(kind in ("dense", "sparse") for kind in value)


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    model_class="Glm4MoeLiteForCausalLM",
    keys={
        **decoder.SIZES,
        **decoder.LATENT_SIZES,
        "num_key_value_heads": Honoured(int, absent=decoder.same_as_heads),
        **decoder.SIGMOID_EXPERTS,
        **decoder.FURTHER_LAYERS,
        "rms_norm_eps": Honoured(float, absent=1e-5),
        "mlp_layer_types": Honoured(list, absent=_first_dense, null=_first_dense, allows=_kinds),
    },
    # of checkpoints without that list, which SGLang reads
    bound={**decoder.BOUND, **decoder.SIGMOID_BOUND, "first_k_dense_replace": Bound((1,))},
    ties_in_sglang=False,
)
