"""config.json of a checkpoint folder, read whole: a key is honoured, harmless, unknown to its family, or refused.

The result holds only the honoured keys, each under one name and with its default filled in. No torch.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.adapters import holds_adapters
from millrace.core.families.decoder import EXPERT_COUNTS, TOGETHER
from millrace.core.families.delta_net import DEFAULT_INTERVAL, linear_layers
from millrace.core.families.family import REFUSED, Family, Honoured
from millrace.core.families.registry import family_named, family_of, known_names
from millrace.core.families.rotary import ROTARY, rotary
from millrace.core.families.routing import BEST
from millrace.core.families.weight_files import tensor_names
from millrace.core.families.windows import windows
from millrace.core.plain_text import json_text

WHOLE = "take a whole checkpoint"
MERGE = "add them to its weights, and name that folder: millrace convert {folder} NEW --merge"
OTHER = "take another model, or remove the key if it changes nothing"
# transformers 5 may write the first; the family has one of the others
ALIASES = {
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "num_mtp_layers": ("num_nextn_predict_layers",),
}
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

READ_AS_NULL = (
    "is_causal",
    "original_max_position_embeddings",
)  # of these, null is not as if they were missing


def read_hf_config(folder: str, field: str = "model.path") -> dict[str, Any]:
    """The resolved config.json of a folder, as `resolved` returns it, and how the folder stores experts.

    `field`: the setting that named the folder.

    Raises ConfigError with the field, the file and the key.
    """
    where = f"{field} = {folder}"
    values = resolved(read_object(Path(folder) / "config.json", where), where)
    # no key of config.json says it
    parts = [part for part in family_named(values["model_type"]).layer if part.when == TOGETHER]
    if parts and {name.format(layer=0) for part in parts for name in part.tensors} & tensor_names(
        Path(folder)
    ):
        values[TOGETHER] = True
    return values


def read_object(path: Path, where: str, remedy: str = WHOLE) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint folder. where: the setting and the folder. Raises ConfigError if there is none."""
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if holds_adapters(path.parent):
            raise only_adapters(path.parent, where) from error
        raise ConfigError(
            f"cannot read {path}: {error}", where=where, remedy=remedy_of(error, remedy)
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no object", where=where, remedy=remedy)
    return config


def only_adapters(folder: Path, where: str) -> ConfigError:
    """The refusal of a PEFT folder where a model is wanted."""
    reason = "it is a folder of adapters, without the model that they belong to"
    return ConfigError(reason, where=where, remedy=MERGE.format(folder=shlex.quote(str(folder))))


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
    renamed = _opened(config, family, refuse)
    for alias, names in ALIASES.items():
        name = next((name for name in names if name in family.keys), None)
        if name and alias in renamed:
            value = renamed.pop(alias)
            # 1 is not true
            if json_text(renamed.setdefault(name, value)) != json_text(value):
                refuse(alias, value, f"{name} says {renamed[name]!r}")
    _check_bound(renamed, family, refuse)
    values: dict[str, Any] = {"model_type": family.name}
    for key, rule in family.keys.items():
        values[key] = _value(renamed, key, rule, values, where, refuse)
    latent = "kv_lora_rank" in family.keys
    values |= rotary(
        renamed,
        refuse,
        family.rotary_part,
        latent=latent,
        default=family.rotary_default,
        axes=family.rotary_axes,
    )
    if family.windows:
        values["windows"] = windows(renamed, family.windows, values["num_hidden_layers"], refuse)
    if family.delta_net:
        values["linear_layers"] = linear_layers(renamed, values["num_hidden_layers"], refuse)
        values["full_attention_interval"] = renamed.get("full_attention_interval", DEFAULT_INTERVAL)
    _check_sizes(values, refuse)
    return values


def undeclared_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that its family does not have, and that change nothing."""
    family = family_named(config["model_type"])
    known = {*family.declared, *ROTARY, *ALIASES, family.within}
    every = {**config, **config.get(family.within, {})} if family.within else config
    return sorted(key for key, value in every.items() if key not in known and value is not None)


def _opened(config: Mapping[str, Any], family: Family, refuse: Any) -> dict[str, Any]:
    """All keys of a config.json and of the language model in it, which must not contradict each other."""
    inner = config.get(family.within, {})
    if not isinstance(inner, dict):
        refuse(family.within, inner, "a mapping is wanted", WHOLE)
    outer = {key: value for key, value in config.items() if key != family.within}
    for key in outer.keys() & inner.keys() - {"model_type", "architectures"}:
        if outer[key] is not None and json_text(outer[key]) != json_text(inner[key]):
            refuse(f"{family.within}.{key}", inner[key], f"{key} says {outer[key]!r}")
    return {**inner, **outer}


def _check_bound(config: Mapping[str, Any], family: Family, refuse: Any) -> None:
    """Refuse the first key whose value, or whose default if it is missing, means another model."""
    known = {*family.declared, *ROTARY}
    for key, value in config.items():
        rule = family.bound.get(key)
        if rule is None:
            if key in READ_UNDECLARED - known and (value is not None or key in READ_AS_NULL):
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
    if rule.kind is list:
        if not isinstance(value, list) or (rule.allows and not rule.allows(value)):
            refuse(key, value, "no list of its kind", WHOLE)
        return value
    if isinstance(value, bool) or not isinstance(value, int if rule.kind is int else int | float):
        refuse(key, value, "a number is wanted", WHOLE)
    if not (value > 0 if rule.least is None else value >= rule.least):
        refuse(
            key, value, f"it must be {'above 0' if rule.least is None else f'at least {rule.least}'}", WHOLE
        )
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
    if "kv_lora_rank" in values:
        if heads != kv_heads:
            refuse(
                "num_key_value_heads",
                kv_heads,
                f"latent attention has as many as query heads, {heads}",
                WHOLE,
            )
        rotating, whole = values["qk_rope_head_dim"], values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        for key, meant in (("head_dim", rotating), ("qk_head_dim", whole)):
            if values[key] != meant:
                refuse(key, values[key], f"the sizes of its parts make it {meant}", WHOLE)
    if "linear_num_key_heads" in values:
        served, of = values["linear_num_value_heads"], values["linear_num_key_heads"]
        if served % of:
            refuse("linear_num_value_heads", served, f"linear_num_key_heads = {of} does not divide it", WHOLE)
    experts_key = next((key for key in EXPERT_COUNTS if key in values), None)
    if experts_key:
        _check_experts(values, values[experts_key], refuse)


def _check_experts(values: Mapping[str, Any], experts: int, refuse: Any) -> None:
    chosen, layers, kinds = (
        values["num_experts_per_tok"],
        values["num_hidden_layers"],
        values.get("mlp_layer_types"),
    )
    if chosen > experts:
        refuse("num_experts_per_tok", chosen, f"there are only {experts} experts", WHOLE)
    if chosen == 1 and values.get("norm_topk_prob", True):
        refuse("num_experts_per_tok", chosen, "with norm_topk_prob the router would have no effect", WHOLE)
    if kinds is not None and len(kinds) != layers:
        refuse("mlp_layer_types", kinds, f"there are {layers} layers", WHOLE)
    groups, used = values.get("n_group", 1), values.get("topk_group", 1)
    if experts % groups or (groups > 1 and experts // groups < BEST):
        refuse("n_group", groups, f"{experts} experts do not make as many groups of {BEST} and more", WHOLE)
    if used > groups:
        refuse("topk_group", used, f"there are only {groups} groups", WHOLE)
    if chosen > experts // groups * used:
        refuse(
            "num_experts_per_tok",
            chosen,
            f"{used} groups have only {experts // groups * used} experts",
            WHOLE,
        )
