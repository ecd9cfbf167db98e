"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from millrace.core.families import decoder
from millrace.core.families.family import Family, Honoured
from millrace.core.families.windows import LAST_LAYERS

QWEN2 = Family(
    name="qwen2",
    title="Qwen2",
    model_class="Qwen2ForCausalLM",
    keys={
        **decoder.SIZES,
        "num_key_value_heads": Honoured(int, null=decoder.same_as_heads),
        "head_dim": Honoured(int, absent=decoder.hidden_over_heads),
    },
    bound=decoder.bound_but(*LAST_LAYERS.keys),
    harmless=decoder.HARMLESS,
    before=decoder.BEFORE,
    layer=(*decoder.NORMS, *decoder.ATTENTION, *decoder.QKV_BIAS, *decoder.DENSE),
    after=decoder.AFTER,
    windows=LAST_LAYERS,
)
