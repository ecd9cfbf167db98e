"""GLM-4.5, 4.6 and 4.7: half of a head rotates, and sigmoids choose experts beside a shared one, from some layer on.

Whether attention has biases and norms of heads is the checkpoint's to say.
"""

from millrace.core.families import decoder
from millrace.core.families.family import Family, Honoured

GLM4_MOE = Family(
    name="glm4_moe",
    title="GLM-4.5",
    model_class="Glm4MoeForCausalLM",
    keys={
        **decoder.SIZES,
        **decoder.SIGMOID_EXPERTS,
        **decoder.FURTHER_LAYERS,
        "rms_norm_eps": Honoured(float, absent=1e-5),
        "num_key_value_heads": Honoured(int),
        "head_dim": Honoured(int, absent=decoder.hidden_over_heads),
        "attention_bias": Honoured(bool, absent=False),
        "use_qk_norm": Honoured(bool, absent=False),
        "first_k_dense_replace": Honoured(int, least=0),
    },
    bound={**decoder.bound_but("attention_bias"), **decoder.SIGMOID_BOUND},
    harmless=decoder.HARMLESS | decoder.ROUTER_LOSSES,
    before=decoder.BEFORE,
    layer=(
        *decoder.NORMS,
        *decoder.ATTENTION,
        *decoder.only_with("qkv_bias", decoder.QKV_BIAS),
        *decoder.only_with("qk_norm", decoder.QK_NORM),
        *decoder.SIGMOID_LAYER,
    ),
    after=decoder.AFTER,
    rotary_part=0.5,
    ties_in_sglang=False,
)
