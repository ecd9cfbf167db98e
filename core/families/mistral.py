"""Mistral: Llama's decoder under keys of its own, with a window of attention in every layer unless the checkpoint has none."""

from millrace.core.families import decoder
from millrace.core.families.family import Family, Honoured
from millrace.core.families.windows import EVERY_LAYER

MISTRAL = Family(
    name="mistral",
    title="Mistral",
    model_class="MistralForCausalLM",
    keys={
        **decoder.SIZES,
        "num_key_value_heads": Honoured(int, absent=8, null=decoder.same_as_heads),
        "head_dim": Honoured(int, absent=decoder.hidden_over_heads, null=decoder.hidden_over_heads),
    },
    bound=decoder.BOUND,
    harmless=decoder.HARMLESS,
    before=decoder.BEFORE,
    layer=(*decoder.NORMS, *decoder.ATTENTION, *decoder.DENSE),
    after=decoder.AFTER,
    windows=EVERY_LAYER,
)
