"""Qwen2.5-VL and Qwen3-VL: the language models Qwen2 and Qwen3, or its mixture of experts, beside a tower that sees pictures.

Of a checkpoint the language model is built here, and the tensors of the tower are kept as they are. A token of a text has one
position, which all three axes of rotary positions share; `images` says what pictures add. Qwen3-VL's mixtures store the experts of
a layer together, with their inputs first, and normalise the weights of a token's experts.
"""

from dataclasses import replace

from millrace.core.families import decoder
from millrace.core.families.family import Bound, ModelPart
from millrace.core.families.qwen2 import QWEN2
from millrace.core.families.qwen3 import QWEN3, QWEN3_MOE

# keys of config.json that say how pictures are seen, or what stands for them
OF_PICTURES = frozenset(
    [
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "vision_token_id",
    ]
)


def within_language_model(parts: tuple[ModelPart, ...]) -> tuple[ModelPart, ...]:
    """The same parts, with the longer names that they have beside a tower."""
    return tuple(part.renamed("model.", "model.language_model.") for part in parts)


QWEN2_5_VL = replace(
    QWEN2,
    name="qwen2_5_vl",
    model_class="Qwen2_5_VLForConditionalGeneration",
    within="text_config",
    harmless=QWEN2.harmless | OF_PICTURES,
    rotary_axes=True,
    rotary_default={"rope_theta": 1000000.0},
    beside=("visual.",),
)
QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    model_class="Qwen3VLForConditionalGeneration",
    within="text_config",
    harmless=QWEN3.harmless | OF_PICTURES,
    rotary_axes=True,
    rotary_default={"rope_theta": 500000.0},
    before=within_language_model(QWEN3.before),
    layer=within_language_model(QWEN3.layer),
    after=within_language_model(QWEN3.after),
    beside=("model.visual.",),
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="qwen3_vl_moe",
    model_class="Qwen3VLMoeForConditionalGeneration",
    within=QWEN3_VL.within,
    keys={key: rule for key, rule in QWEN3_MOE.keys.items() if key != "norm_topk_prob"},
    # transformers' class does not have the key, SGLang's reads it
    bound={**QWEN3_MOE.bound, "norm_topk_prob": Bound((True,))},
    harmless=QWEN3_MOE.harmless | OF_PICTURES,
    rotary_axes=True,
    rotary_default=QWEN3_VL.rotary_default,
    before=QWEN3_VL.before,
    layer=within_language_model(
        (
            *decoder.NORMS,
            *decoder.ATTENTION,
            *decoder.QK_NORM,
            *decoder.DENSE,
            *decoder.EXPERTS_INPUTS_FIRST,
        )
    ),
    after=QWEN3_VL.after,
    beside=QWEN3_VL.beside,
)
