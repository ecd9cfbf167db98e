"""gpt-oss 20B and 120B: biases everywhere, a sink beside the keys of each head, a window in every second layer.

The experts of a layer are stored together, with the columns of gate and up in turns; published checkpoints store them as MXFP4.
"""

from millrace.core.families import decoder
from millrace.core.families.family import Bound, Family, Honoured
from millrace.core.families.windows import Windows

GPT_OSS = Family(
    name="gpt_oss",
    title="gpt-oss",
    model_class="GptOssForCausalLM",
    keys={
        **decoder.SIZES,
        "rms_norm_eps": Honoured(float, absent=1e-5),
        "num_key_value_heads": Honoured(int, absent=8, null=decoder.same_as_heads),
        "head_dim": Honoured(int, absent=64, null=decoder.hidden_over_heads),
        "num_local_experts": Honoured(int),
        "num_experts_per_tok": Honoured(int),
        "swiglu_limit": Honoured(float, absent=7.0),
    },
    bound={
        **decoder.bound_but("layer_types", "use_sliding_window"),
        "attention_bias": Bound((True,)),
        "swiglu_alpha": Bound((decoder.GATE_SLOPE,)),
    },
    harmless=decoder.HARMLESS | decoder.ROUTER_LOSSES,
    before=decoder.BEFORE,
    layer=(
        *decoder.NORMS,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.OUTPUT_BIAS,
        *decoder.SINKS,
        *decoder.BIASED_EXPERTS,
    ),
    after=decoder.AFTER,
    rotary_default={
        "rope_theta": 150000.0,
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    windows=Windows(
        ("sliding_window", "layer_types"),
        128,
        lambda layer, first: layer % 2 == 0,
        null=False,
        in_sglang=True,
    ),
    ties_in_sglang=False,
)
