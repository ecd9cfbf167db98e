"""Llama: the plain decoder."""

from millrace.core.families import decoder
from millrace.core.families.family import Family, Honoured

LLAMA = Family(
    name="llama",
    title="Llama",
    model_class="LlamaForCausalLM",
    keys={
        **decoder.SIZES,
        "num_key_value_heads": Honoured(int, absent=decoder.same_as_heads, null=decoder.same_as_heads),
        "head_dim": Honoured(int, absent=decoder.hidden_over_heads, null=decoder.hidden_over_heads),
    },
    bound=decoder.BOUND,
    harmless=decoder.HARMLESS | {"pretraining_tp"},
    before=decoder.BEFORE,
    layer=(*decoder.NORMS, *decoder.ATTENTION, *decoder.DENSE),
    after=decoder.AFTER,
)
