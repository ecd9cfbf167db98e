"""GLM-4 (0414) and GLM-Z1: 9B and 32B. Neighbouring dimensions of half a head rotate, and each layer has four norms.

The gate and the up projection are stored as one tensor. Whether queries, keys and values have biases is the checkpoint's to say.
"""

from millrace.core.families import decoder
from millrace.core.families.family import Family, Honoured

GLM4 = Family(
    name="glm4",
    title="GLM-4",
    model_class="Glm4ForCausalLM",
    keys={
        **decoder.SIZES,
        "rms_norm_eps": Honoured(float, absent=1.5625e-7),
        "num_key_value_heads": Honoured(int),
        "head_dim": Honoured(int, absent=128),
        "attention_bias": Honoured(bool, absent=True),
    },
    bound=decoder.bound_but("attention_bias"),
    harmless=decoder.HARMLESS,
    before=decoder.BEFORE,
    layer=(
        *decoder.NORMS,
        *decoder.BRANCH_NORMS,
        *decoder.ATTENTION,
        *decoder.only_with("qkv_bias", decoder.QKV_BIAS),
        *decoder.DENSE_AS_ONE,
    ),
    after=decoder.AFTER,
    rotary_part=0.5,
    interleaved=True,
)
