"""config.json of a checkpoint folder, read whole: a key is honoured, harmless, unknown to its family, or refused.

The result holds only the honoured keys, each under one name and with its default filled in. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.family import REFUSED, Family, Honoured
from millrace.core.families.registry import family_named, family_of, known_names
from millrace.core.families.rotary import ROTARY, rotary
from millrace.core.plain_text import json_text

WHOLE = "take a whole checkpoint"
OTHER = "take another model, or remove the key if it changes nothing"
ALIASES = {"num_local_experts": "num_experts"}  # transformers 5 writes the first
# by transformers' attention, masks, caches and rotary embeddings, or by an engine's model
READ_UNDECLARED = frozenset(
    [
        "sliding_window",
        "attention_chunk_size",
        "layer_types",
        "mlp_layer_types",
        "per_layer_config",
        "num_kv_shared_layers",
        "is_causal",
        "original_max_position_embeddings",
        "rope_is_neox_style",
        "dual_chunk_attention_config",
        "bias",
        "use_qk_norm",
        "qk_norm",
        "attn_temperature_tuning",
        "logits_mup_width_multiplier",
        "unpadded_vocab_size",
    ]
)


def read_hf_config(folder: str, field: str = "model.path") -> dict[str, Any]:
    """The resolved config.json of a folder, as `resolved` returns it. `field`: the setting that named the folder.

    Raises ConfigError with the field, the file and the key.
    """
    path, where = Path(folder) / "config.json", f"{field} = {folder}"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", where=where, remedy=remedy_of(error, WHOLE)
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no object", where=where, remedy=WHOLE)
    return resolved(config, where)


def resolved(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The honoured keys of a config.json, under one name each, with defaults; rope_theta and rope_scaling among them.

    Raises ConfigError for a family that is not supported, and naming the first key that is missing, or asks for another model
    than the built one.
    """

    def refuse(key: str, value: Any, reason: str, remedy: str = OTHER) -> NoReturn:
        shown = json_text(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ConfigError(f"config.json: {key} = {shown}: {reason}", where=where, remedy=remedy)

    model_type = config.get("model_type")
    family = family_of(model_type)
    if family is None:
        raise ConfigError(
            f"model_type {model_type!r} is not supported",
            where=where,
            remedy=f"supported: {', '.join(known_names())}",
        )
    renamed = dict(config)
    for alias, name in ALIASES.items():
        if name in family.keys and alias in renamed:
            value = renamed.pop(alias)
            if renamed.setdefault(name, value) != value:
                refuse(alias, value, f"{name} says {renamed[name]!r}")
    _check_bound(renamed, family, refuse)
    values: dict[str, Any] = {"model_type": family.name}
    for key, rule in family.keys.items():
        values[key] = _value(renamed, key, rule, values, where, refuse)
    values |= rotary(renamed, refuse, family.rotary_part)
    _check_sizes(values, refuse)
    return values


def undeclared_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that its family does not have, and that change nothing."""
    family = family_named(config["model_type"])
    known = {*family.keys, *family.bound, *family.harmless, *ROTARY, *ALIASES}
    return sorted(key for key, value in config.items() if key not in known and value is not None)


def _check_bound(config: Mapping[str, Any], family: Family, refuse: Any) -> None:
    """Refuse the first key whose value, or whose default if it is missing, means another model."""
    known = {*family.keys, *family.harmless, *ROTARY}
    for key, value in config.items():
        rule = family.bound.get(key)
        if rule is None:
            if key in READ_UNDECLARED - known and value is not None:
                refuse(key, value, f"an engine may read it, but the {family.name} model here does not")
        elif not rule.takes(value):
            refuse(key, value, "not supported", rule.remedy)
    for key, rule in family.bound.items():
        if key not in config and rule.default is not REFUSED and not rule.takes(rule.default):
            refuse(key, rule.default, "not supported, and it is the default of a missing key", rule.remedy)


def _value(
    config: Mapping[str, Any], key: str, rule: Honoured, sizes: Mapping[str, Any], where: str, refuse: Any
) -> Any:
    """An honoured key's value, or its default."""
    if config.get(key) is None:
        default = rule.null if key in config else rule.absent
        value = default(sizes) if callable(default) else default
        if value is REFUSED:
            raise ConfigError(f"config.json has no {key}", where=where, remedy=WHOLE)
        return value
    value = config[key]
    if rule.kind is bool:
        if not isinstance(value, bool):
            refuse(key, value, "true or false is wanted", WHOLE)
        return value
    if isinstance(value, bool) or not isinstance(value, int if rule.kind is int else int | float):
        refuse(key, value, "a number is wanted", WHOLE)
    if not value > 0:
        refuse(key, value, "it must be above 0", WHOLE)
    return rule.kind(value)


def _check_sizes(values: Mapping[str, Any], refuse: Any) -> None:
    """Refuse sizes that contradict each other."""
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"it does not divide num_attention_heads = {heads}", WHOLE)
    if values["head_dim"] % 2:
        refuse("head_dim", values["head_dim"], "rotary embeddings need an even one", WHOLE)
    turning = values["head_dim"] * (part := values.get("partial_rotary_factor", 1.0))
    if part > 1 or turning < 2 or int(turning) % 2:
        refuse("partial_rotary_factor", part, "an even number of a head's dimensions must rotate", WHOLE)
    chosen, experts = values.get("num_experts_per_tok", 0), values.get("num_experts", 0)
    if chosen > experts:
        refuse("num_experts_per_tok", chosen, f"there are only {experts} experts", WHOLE)
    if chosen == 1 and values["norm_topk_prob"]:
        refuse("num_experts_per_tok", chosen, "with norm_topk_prob the router would have no effect", WHOLE)
