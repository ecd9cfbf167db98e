"""Qwen3.5, dense: Qwen3-Next's attention and gated delta net, whose projections are stored one by one.

Published checkpoints also see pictures. Of these only the language model is built, as for texts alone: its tensors have a longer
name, and the others are kept as they are. A token of a text has one position, which all three axes of rotary positions share.
"""

from dataclasses import replace

from millrace.core.families import decoder
from millrace.core.families.family import Bound, Family, Honoured
from millrace.core.families.qwen_vl import OF_PICTURES, within_language_model

QWEN3_5_TEXT = Family(
    name="qwen3_5_text",
    title="Qwen3.5",
    model_class="Qwen3_5ForCausalLM",
    keys={
        **decoder.SIZES,
        **decoder.DELTA_SIZES,
        "num_key_value_heads": Honoured(int),
        "head_dim": Honoured(int, absent=256),
    },
    bound={
        **decoder.bound_but("layer_types"),
        "attn_output_gate": Bound((True,)),
        "output_gate_type": Bound(("swish",)),  # of the delta net
        "mlp_only_layers": Bound(([], None)),
    },
    harmless=decoder.HARMLESS | {"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"},
    before=decoder.BEFORE,
    layer=(
        *decoder.NORMS,
        *decoder.GATED_ATTENTION,
        *decoder.QK_NORM,
        *decoder.DELTA_NET,
        *decoder.DENSE,
    ),
    after=decoder.AFTER,
    rotary_part=0.25,
    rotary_axes=True,
    delta_net=True,
    centred=True,
    beside=("mtp.",),
)

QWEN3_5 = replace(
    QWEN3_5_TEXT,
    name="qwen3_5",
    model_class="Qwen3_5ForConditionalGeneration",
    within="text_config",
    harmless=QWEN3_5_TEXT.harmless | OF_PICTURES | {"language_model_only"},
    before=within_language_model(QWEN3_5_TEXT.before),
    layer=within_language_model(QWEN3_5_TEXT.layer),
    after=within_language_model(QWEN3_5_TEXT.after),
    beside=("mtp.", "model.visual."),
)
