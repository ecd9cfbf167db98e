"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's attention, experts, and beside them one that every token uses, behind a gate of its own."""

from __future__ import annotations

from millrace.core.families import decoder
from millrace.core.families.family import Bound, Family, Honoured

QWEN2_MOE = Family(
    name="qwen2_moe",
    title="Qwen2-MoE",
    model_class="Qwen2MoeForCausalLM",
    keys={
        **decoder.SIZES,
        "num_key_value_heads": Honoured(int),
        "head_dim": Honoured(int, absent=decoder.hidden_over_heads),
        "num_experts": Honoured(int),
        "num_experts_per_tok": Honoured(int),
        "moe_intermediate_size": Honoured(int),
        "shared_expert_intermediate_size": Honoured(int),
        "norm_topk_prob": Honoured(bool, absent=False),
    },
    bound={
        **decoder.BOUND,
        "mlp_only_layers": Bound(([], None)),
        "decoder_sparse_step": Bound((1,)),
        "qkv_bias": Bound((True,)),
    },
    harmless=decoder.HARMLESS | decoder.NO_WINDOW | {"output_router_logits", "router_aux_loss_coef"},
    before=decoder.BEFORE,
    layer=(
        *decoder.NORMS,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.EXPERTS,
        *decoder.gated("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
        *decoder.SHARED_GATE,
    ),
    after=decoder.AFTER,
)
