"""Mistral: Llama's decoder under keys of its own. A window is refused: attention here is full."""

from __future__ import annotations

from millrace.core.families import decoder
from millrace.core.families.family import Bound, Family, Honoured

WHOLE_WINDOW = "take a checkpoint without a sliding window, such as Mistral-7B-v0.3"

MISTRAL = Family(
    name="mistral",
    title="Mistral",
    model_class="MistralForCausalLM",
    keys={
        **decoder.SIZES,
        "num_key_value_heads": Honoured(int, absent=8, null=decoder.same_as_heads),
        "head_dim": Honoured(int, absent=decoder.hidden_over_heads, null=decoder.hidden_over_heads),
    },
    bound={
        **decoder.BOUND,
        "sliding_window": Bound((None,), remedy=WHOLE_WINDOW, default=4096),
    },
    harmless=decoder.HARMLESS,
    before=decoder.BEFORE,
    layer=(*decoder.NORMS, *decoder.ATTENTION, *decoder.DENSE),
    after=decoder.AFTER,
)
