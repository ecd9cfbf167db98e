"""Features that do nothing beside a mode that has no place for them, and why. They need no run together."""

from __future__ import annotations


def _each(why: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


ENGINES = "lora_by_name two_engines router broadcast prompt_gap weights_by_url external"
SAMPLING = "flush stops top_p oversample admission"
SCORING = "zero_variance group_filter group_reward named_rewards remote_limits levels pools"
LEARNING = (
    "critic returns teacher kl kl_in_reward reference entropy gspo own_loss whiten icepop sequence_masks sampler_ratio constant "
    "max_token_age"
)
STEPS = (
    "steps passes stages_of_the_model recompute plain_optimizer host_optimizer background_checkpoint exports bfloat16 lora "
    "fsdp copies_of_weights context"
)
IDLE: dict[str, dict[str, str]] = {
    "sft": {
        **_each("supervised training generates nothing", f"{SAMPLING} {ENGINES}"),
        **_each("supervised rows have no rewards", SCORING),
        **_each(
            "supervised rows have no advantages",
            "critic returns own_advantage teacher served_teacher teacher_top_k hint entropy whiten overlong shaping sampler_ratio "
            "constant",
        ),
    },
    "rollouts_only": {
        **_each("no trainer starts", f"{LEARNING} {STEPS} lora_by_name"),
        **_each("no weights are sent", "broadcast weights_by_url"),
    },
    "rollouts_from": {
        **_each("no engine starts", f"oversample admission {ENGINES}"),
        **_each("a run that deferred groups is refused as a source, by name", "finish max_token_age"),
    },
    "broadcast": _each("weights pass the folder by, which a replay uses", "weights_by_url"),
    "own_loss": _each("a loss of the user's own weighs what it likes", "icepop sequence_masks"),
}
"""By mode: what does nothing in it, and why."""


def idle(one: str, beside: str) -> str:
    """Why a feature does nothing beside another; empty where it acts."""
    why = IDLE.get(beside, {}).get(one)
    return f"{one} beside {beside}: {why}" if why else ""
