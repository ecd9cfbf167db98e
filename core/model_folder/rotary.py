"""The rotary embedding that a config.json asks for, in any of the spellings that transformers has written.

`rope_theta` stands outside or inside of `rope_parameters`, or of `rope_scaling`; the kind is `rope_type` or `type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

DEFAULT_THETA = 10000.0  # transformers' own, for every family here

Refuse = Callable[[str, Any, str], NoReturn]
"""Raises the error for a key, its value and what is wrong with it."""


def rotary_theta(config: Mapping[str, Any], refuse: Refuse) -> float:
    """Base of the rotary embedding. Calls `refuse` for a scaled, a partial and an ambiguous one."""
    name, inner = _parameters(config, refuse)
    kinds = {f"{name}.{key}": inner.pop(key) for key in ("rope_type", "type") if key in inner}
    kind = _agreed(kinds, refuse) if kinds else "default"
    if kind != "default":
        refuse(f"{name}.rope_type", kind, "scaled rotary embeddings are not supported")
    theta = _given("rope_theta", config, name, inner, refuse)
    partial = _given("partial_rotary_factor", config, name, inner, refuse)
    if partial not in (None, 1):
        refuse("partial_rotary_factor", partial, "partial rotary embeddings are not supported")
    for key, value in inner.items():
        refuse(f"{name}.{key}", value, "the default rotary embedding has no such parameter")
    if theta is None:
        return DEFAULT_THETA
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        refuse("rope_theta", theta, "a number above 0 is wanted")
    return float(theta)


def _parameters(config: Mapping[str, Any], refuse: Refuse) -> tuple[str, dict[str, Any]]:
    """The mapping that names the rotary embedding's parameters, and the key it stands under."""
    given: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        inner = config.get(name)
        if inner is not None and not isinstance(inner, dict):
            refuse(name, inner, "a mapping is wanted")
        if inner:
            given[name] = inner
    return next(iter(given), "rope_parameters"), dict(_agreed(given, refuse) or {})


def _given(key: str, config: Mapping[str, Any], name: str, inner: dict[str, Any], refuse: Refuse) -> Any:
    """A parameter that may stand outside or inside of the mapping; None where it stands nowhere."""
    places = {key: config[key]} if key in config else {}
    if key in inner:
        places[f"{name}.{key}"] = inner.pop(key)
    for place, value in places.items():
        if value is None:
            refuse(place, value, "it says nothing")
    return _agreed(places, refuse)


def _agreed(places: Mapping[str, Any], refuse: Refuse) -> Any:
    """The value that one or several spellings give; None where there is none."""
    if not places:
        return None
    first, *others = places
    for other in others:
        if places[other] != places[first]:
            refuse(other, places[other], f"{first} says {places[first]!r}")
    return places[first]
