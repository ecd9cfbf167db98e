"""Qwen3-Next: gated delta net in three of four layers, gated attention in the others, and experts beside a shared one with a gate.

Layers that predict further tokens have names of their own, and no key of config.json.
"""

from millrace.core.families import decoder
from millrace.core.families.family import Family, Honoured

QWEN3_NEXT = Family(
    name="qwen3_next",
    title="Qwen3-Next",
    model_class="Qwen3NextForCausalLM",
    keys={
        **decoder.SIZES,
        **decoder.EXPERT_SIZES,
        **decoder.DELTA_SIZES,
        "head_dim": Honoured(int, absent=256),
        "norm_topk_prob": Honoured(bool, absent=True),
        "shared_expert_intermediate_size": Honoured(int),
    },
    bound=decoder.bound_but("layer_types"),
    harmless=decoder.HARMLESS | decoder.NO_WINDOW | decoder.ROUTER_LOSSES,
    before=decoder.BEFORE,
    layer=(
        *decoder.NORMS,
        *decoder.GATED_ATTENTION,
        *decoder.QK_NORM,
        *decoder.DELTA_NET_BY_KEY_HEAD,
        *decoder.DENSE,
        *decoder.EXPERTS,
        *decoder.gated("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
        *decoder.SHARED_GATE,
    ),
    after=decoder.AFTER,
    rotary_part=0.25,
    delta_net=True,
    centred=True,
    beside=("mtp.",),
    ties_in_sglang=False,
)
