"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention, experts, and beside them one that every token uses, behind a gate of its own."""

from millrace.core.families import decoder
from millrace.core.families.family import Bound, Family, Honoured

QWEN2_MOE = Family(
    name="qwen2_moe",
    title="Qwen2-MoE",
    model_class="Qwen2MoeForCausalLM",
    keys={
        **decoder.SIZES,
        **decoder.EXPERT_SIZES,
        "shared_expert_intermediate_size": Honoured(int),
    },
    bound={
        **decoder.BOUND,
        "qkv_bias": Bound((True,)),
    },
    harmless=decoder.HARMLESS | decoder.NO_WINDOW | decoder.ROUTER_LOSSES,
    before=decoder.BEFORE,
    layer=(
        *decoder.NORMS,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.DENSE,
        *decoder.EXPERTS,
        *decoder.gated("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
        *decoder.SHARED_GATE,
    ),
    after=decoder.AFTER,
    ties_in_sglang=False,
)
