"""DeepSeek V3, V3.1 and R1, and Moonlight: latent attention, and experts that sigmoids choose, from some layer on.

Kimi K2 is the same model under another name.
"""

from dataclasses import replace

from millrace.core.families import decoder
from millrace.core.families.family import Family, Honoured

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    title="DeepSeek-V3",
    model_class="DeepseekV3ForCausalLM",
    keys={
        **decoder.SIZES,
        **decoder.LATENT_SIZES,
        **decoder.SIGMOID_EXPERTS,
        **decoder.FURTHER_LAYERS,
        "first_k_dense_replace": Honoured(int, least=0),
    },
    bound={**decoder.BOUND, **decoder.SIGMOID_BOUND},
    harmless=decoder.HARMLESS
    | decoder.ROUTER_LOSSES
    | {"pretraining_tp", "ep_size", "seq_aux", "aux_loss_alpha"},
    before=decoder.BEFORE,
    layer=(
        *decoder.NORMS,
        *decoder.LATENT_ATTENTION,
        *decoder.SIGMOID_LAYER,
    ),
    after=decoder.AFTER,
)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2", title="Kimi K2")
