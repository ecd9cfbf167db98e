"""Qwen3.5's mixtures of experts, and Qwen3.6's, which are the same: Qwen3-Next's layers, with the projections of delta nets stored one by one.

Every layer has experts. Published checkpoints store those of a layer together; those in FP8, and those that transformers writes,
store them one by one. Published checkpoints also see pictures, as Qwen3.5's dense ones do.
"""

from dataclasses import replace

from millrace.core.families import decoder
from millrace.core.families.family import Bound, Honoured
from millrace.core.families.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from millrace.core.families.qwen_vl import within_language_model

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    name="qwen3_5_moe_text",
    title="Qwen3.5-MoE",
    model_class="Qwen3_5MoeForCausalLM",
    keys={
        **{key: rule for key, rule in QWEN3_5_TEXT.keys.items() if key != "intermediate_size"},
        "num_experts": Honoured(int),
        "num_experts_per_tok": Honoured(int),
        "moe_intermediate_size": Honoured(int),
        "shared_expert_intermediate_size": Honoured(int),
    },
    bound={
        **QWEN3_5_TEXT.bound,
        # transformers' class has neither key, SGLang's reads them
        "norm_topk_prob": Bound((True,)),
        "decoder_sparse_step": Bound((1,)),
    },
    harmless=QWEN3_5_TEXT.harmless | decoder.ROUTER_LOSSES,
    layer=(
        *decoder.NORMS,
        *decoder.GATED_ATTENTION,
        *decoder.QK_NORM,
        *decoder.DELTA_NET,
        *decoder.EXPERTS_IN_EITHER_FORM,
        *decoder.gated("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
        *decoder.SHARED_GATE,
    ),
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    name="qwen3_5_moe",
    model_class="Qwen3_5MoeForConditionalGeneration",
    within=QWEN3_5.within,
    harmless=QWEN3_5.harmless | decoder.ROUTER_LOSSES,
    before=QWEN3_5.before,
    layer=within_language_model(QWEN3_5_MOE_TEXT.layer),
    after=QWEN3_5.after,
    beside=QWEN3_5.beside,
)
