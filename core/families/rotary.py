"""The rotary embedding that a config.json asks for, in any of the spellings that transformers has written.

`rope_theta` stands outside or inside of `rope_parameters`, or of `rope_scaling`; the kind is `rope_type` or `type`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, NoReturn

from millrace.core.families.rope_scaling import KINDS, Llama3Scaling, YarnScaling

ROTARY = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")  # keys that are read here
OF_AXES = {
    "mrope_section",
    "mrope_interleaved",
}  # which dimensions turn by which axis of a picture's positions
OF_LATENTS = {"mscale", "mscale_all_dim"}  # of YaRN; SGLang reads them for latent attention alone
DEFAULT_THETA = 10000.0  # transformers' own, for every family here

Refuse = Callable[[str, Any, str], NoReturn]
"""Raises the error for a key, its value and what is wrong with it."""


def rotary(
    config: Mapping[str, Any],
    refuse: Refuse,
    part: float | None = None,
    *,
    latent: bool = False,
    default: Mapping[str, Any] = MappingProxyType({}),
    axes: bool = False,
) -> dict[str, Any]:
    """rope_theta, the base, and rope_scaling: its kind as rope_type with the fields of that kind, or None.

    `part`: the family's partial_rotary_factor if the key is missing, which is then in the result too; None: only whole heads.
    latent: whether only a part of each head, beside a latent one, rotates. `default`: what the family has without any
    parameters; its rope_theta also with others. axes: whether parameters of several axes of positions are left aside. Calls
    `refuse` for a scaling of another kind, and for an ambiguous embedding.
    """
    name, inner = _parameters(config, refuse, default)
    inner = {key: value for key, value in inner.items() if not (axes and key in OF_AXES)}
    kinds = {f"{name}.{key}": inner.pop(key) for key in ("rope_type", "type") if key in inner}
    if axes:
        kinds = {key: "default" if value == "mrope" else value for key, value in kinds.items()}
    kind = _agreed(kinds, refuse) if kinds else "default"
    if kind not in ("default", *KINDS):
        known = f"of scaled rotary embeddings only {', '.join(KINDS)} are supported"
        refuse(f"{name}.rope_type", kind, known)
    theta = _given("rope_theta", config, name, inner, refuse)
    partial = _given("partial_rotary_factor", config, name, inner, refuse)
    if part is None and partial not in (None, 1):
        refuse("partial_rotary_factor", partial, "in this family only whole heads rotate")
    scaling: dict[str, Any] = {}
    if kind in KINDS:
        scaling = _scaling(kind, name, inner, refuse, latent)
    for key, value in inner.items():
        refuse(f"{name}.{key}", value, f"a {kind} rotary embedding has no such parameter")
    theta = (
        default.get("rope_theta", DEFAULT_THETA) if theta is None else _number("rope_theta", theta, refuse)
    )
    read = {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **scaling} if scaling else None}
    if part is not None:
        read["partial_rotary_factor"] = _number("partial_rotary_factor", partial or part, refuse)
    return read


def _scaling(kind: str, name: str, inner: dict[str, Any], refuse: Refuse, latent: bool) -> dict[str, Any]:
    """Takes the fields of a kind of scaling out of a mapping."""
    scaling: dict[str, Any] = {
        field.name: _number(f"{name}.{field.name}", inner.pop(field.name, None), refuse)
        for field in fields(KINDS[kind])
        if field.name != "truncate"
        if (field.name in inner and (latent or field.name not in OF_LATENTS)) or field.default is MISSING
    }
    if len(alone := OF_LATENTS & set(scaling)) == 1:
        refuse(
            f"{name}.{min(alone)}",
            scaling[min(alone)],
            "engines differ in what it means without the other one",
        )
    if kind == "yarn" and inner.get("truncate") is not None:
        if not isinstance(inner["truncate"], bool):
            refuse(f"{name}.truncate", inner["truncate"], "true or false is wanted")
        scaling["truncate"] = inner.pop("truncate")
    made = KINDS[kind](**scaling)
    if isinstance(made, Llama3Scaling) and not made.low_freq_factor < made.high_freq_factor:
        refuse(f"{name}.high_freq_factor", made.high_freq_factor, "it must be above low_freq_factor")
    if isinstance(made, YarnScaling):
        if made.factor < 1:
            refuse(f"{name}.factor", made.factor, "it must be at least 1")
        if made.beta_slow > made.beta_fast:
            refuse(f"{name}.beta_slow", made.beta_slow, f"it must be at most beta_fast = {made.beta_fast:g}")
        # SGLang does not read it
        value, usual = inner.pop("attention_factor", None), made.table_factor
        if value is not None and value != usual:
            reason = f"only {usual} is supported, which it is without the key"
            refuse(f"{name}.attention_factor", value, reason)
    return scaling


def _number(key: str, value: Any, refuse: Refuse) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        refuse(key, value, "a number above 0 is wanted")
    return float(value)


def _parameters(
    config: Mapping[str, Any], refuse: Refuse, default: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The mapping that names the rotary embedding's parameters, and its key."""
    given: dict[str, Any] = {}
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        given["rope_parameters"] = {key: value for key, value in default.items() if key != "rope_theta"}
    for name in ("rope_parameters", "rope_scaling"):
        inner = config.get(name)
        if inner is not None and not isinstance(inner, dict):
            refuse(name, inner, "a mapping is wanted")
        if inner:
            given[name] = inner
    return next(iter(given), "rope_parameters"), dict(_agreed(given, refuse) or {})


def _given(key: str, config: Mapping[str, Any], name: str, inner: dict[str, Any], refuse: Refuse) -> Any:
    """A parameter that may be outside or inside of the mapping; None if it is missing."""
    places = {key: config[key]} if key in config else {}
    if key in inner:
        places[f"{name}.{key}"] = inner.pop(key)
    for place, value in places.items():
        if value is None:
            refuse(place, value, "it says nothing")
    return _agreed(places, refuse)


def _agreed(places: Mapping[str, Any], refuse: Refuse) -> Any:
    """The value on which all spellings agree; None without any."""
    if not places:
        return None
    first, *others = places
    for other in others:
        if places[other] != places[first]:
            refuse(other, places[other], f"{first} says {places[first]!r}")
    return places[first]
