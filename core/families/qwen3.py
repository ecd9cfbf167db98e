"""Qwen3, dense and as a mixture of experts: queries and keys are normalised, head by head."""

from millrace.core.families import decoder
from millrace.core.families.family import Family, Honoured
from millrace.core.families.windows import LAST_LAYERS

QWEN3 = Family(
    name="qwen3",
    title="Qwen3",
    model_class="Qwen3ForCausalLM",
    keys={
        **decoder.SIZES,
        "num_key_value_heads": Honoured(int, null=decoder.same_as_heads),
        "head_dim": Honoured(int),
    },
    bound=decoder.bound_but(*LAST_LAYERS.keys),
    harmless=decoder.HARMLESS,
    before=decoder.BEFORE,
    layer=(*decoder.NORMS, *decoder.ATTENTION, *decoder.QK_NORM, *decoder.DENSE),
    after=decoder.AFTER,
    windows=LAST_LAYERS,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    title="Qwen3-MoE",
    model_class="Qwen3MoeForCausalLM",
    keys={
        **decoder.SIZES,
        **decoder.EXPERT_SIZES,
    },
    bound=decoder.BOUND,
    harmless=decoder.HARMLESS | decoder.NO_WINDOW | decoder.ROUTER_LOSSES,
    before=decoder.BEFORE,
    layer=(*decoder.NORMS, *decoder.ATTENTION, *decoder.QK_NORM, *decoder.DENSE, *decoder.EXPERTS),
    after=decoder.AFTER,
    ties_in_sglang=False,
)
