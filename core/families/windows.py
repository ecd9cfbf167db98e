"""The windows of attention that a config.json asks for: how many keys a token attends to, and in which layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_FIRST = 28  # transformers' max_window_layers

Refuse = Callable[[str, Any, str], NoReturn]
"""Raises the error for a key, its value and what is wrong with it."""


@dataclass(frozen=True)
class Windows:
    """How a family asks for windows.

    `keys`: the keys of config.json for them. `default`: sliding_window if the key is missing. `layers`: whether a
    layer has a window, by its number and max_window_layers, if there are no layer_types. `null`: whether sliding_window may be
    null. `in_sglang`: whether SGLang's model of the family has windows too.
    """

    keys: tuple[str, ...]
    default: int
    layers: Callable[[int, int], bool]
    null: bool = True
    in_sglang: bool = False


EVERY_LAYER = Windows(("sliding_window",), 4096, lambda layer, first: True)
LAST_LAYERS = Windows(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    4096,
    lambda layer, first: layer >= first,
)


def windows(config: Mapping[str, Any], how: Windows, layers: int, refuse: Refuse) -> list[int]:
    """By layer, to how many keys a token attends, itself among them; 0: to all before it."""
    width: Any = config.get("sliding_window", how.default)
    used = "use_sliding_window" not in how.keys or _flag(config, refuse)
    fits = how.null if width is None else _whole(width) and (width > 0 or not used)
    if not fits:
        refuse("sliding_window", width, "a number of keys, at least 1, is wanted")
    width = width if used else None
    types = config.get("layer_types") if "layer_types" in how.keys else None
    first = config.get("max_window_layers", DEFAULT_FIRST)
    if "max_window_layers" in how.keys and not _whole(first):
        refuse("max_window_layers", first, "a number of layers is wanted")
    if types is None:
        slides: Sequence[bool] = [width is not None and how.layers(layer, first) for layer in range(layers)]
    else:
        if not isinstance(types, list) or len(types) != layers or not {FULL, SLIDING}.issuperset(types):
            refuse("layer_types", types, f"{FULL} or {SLIDING} is wanted for each of {layers} layers")
        slides = [one == SLIDING for one in types]
        if width is None and any(slides):
            refuse("layer_types", types, f"there is no window for {SLIDING}")
    return [width if slide else 0 for slide in slides]


def _flag(config: Mapping[str, Any], refuse: Refuse) -> bool:
    used = config.get("use_sliding_window", False)
    if not isinstance(used, bool):
        refuse("use_sliding_window", used, "true or false is wanted")
    return used


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
