"""INT4 in groups, as compressed-tensors packs it and Kimi K2 Thinking has it: eight numbers in an int32, and a factor a group.

    weight[i, j] = (nibble j % 8 of X.weight_packed[i, j // 8], the lowest first, minus 8) * X.weight_scale[i, j // group]

X.weight_shape holds the weight's two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
Tensor = Any  # PyTorch's, which the configuration, that imports this module, does not load
PACKED, SCALE, SIZES = PARTS = ("_packed", "_scale", "_shape")
IN_A_WORD, OFFSET = 8, 8
SIZES_FORMS = (("I64", (2,)), ("I32", (2,)))
KNOWN: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "format": ("pack-quantized",),
    "quantization_status": ("compressed", None),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
    "global_compression_ratio": (None,),
}
# what is ignored is stored unquantised, and read as it is stored
NOTES = ("ignore", "version", "config_groups")
WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),
    "symmetric": (True,),
    "dynamic": (False, None),
    "actorder": (None,),
    "block_structure": (None,),
}
WEIGHT_NOTES = ("group_size", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
GROUP: dict[str, tuple[Any, ...]] = {
    "input_activations": (None,),
    "output_activations": (None,),
    "format": ("pack-quantized", None),
}
GROUP_NOTES = ("targets", "weights")


def _known(values: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]], notes: tuple[str, ...]) -> bool:
    return all(key in notes or value in known.get(key, ()) for key, value in values.items())


@dataclass(frozen=True)
class PackedInt4:
    """INT4 with groups of so many neighbouring columns."""

    group: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> PackedInt4 | None:
        """Read from a quantization_config; None if it says anything that is not known here."""
        groups = config.get("config_groups")
        if not _known(config, KNOWN, NOTES) or not isinstance(groups, Mapping) or len(groups) != 1:
            return None
        (only,) = groups.values()
        weights = only.get("weights") if isinstance(only, Mapping) else None
        if not isinstance(weights, Mapping) or not _known(only, GROUP, GROUP_NOTES):
            return None
        size = weights.get("group_size")
        if not isinstance(size, int) or size <= 0 or size % IN_A_WORD:
            return None
        wanted = all(weights.get(key) in values for key, values in WEIGHTS.items())
        return cls(size) if wanted and _known(weights, WEIGHTS, WEIGHT_NOTES) else None

    def weight_of(self, stored: str) -> str:
        """The weight that a stored tensor is a part of."""
        ends = (end for end in PARTS if stored.endswith(f".weight{end}"))
        return stored.removesuffix(next(ends, ""))

    def problem(self, name: str, parts: Mapping[str, tuple[str, Shape]]) -> str | None:
        """What is wrong with the words, factors and sizes of a weight."""
        for end in PARTS:
            if f"{name}{end}" not in parts:
                return f"tensor {name}{end} is missing"
        if name in parts:
            return f"tensor {name} is there beside {name}{PACKED}"
        (dtype, packed), (scale_dtype, scales), sizes = (parts[f"{name}{end}"] for end in PARTS)
        if dtype != "I32" or scale_dtype not in ("BF16", "F16", "F32") or sizes not in SIZES_FORMS:
            return f"tensor {name}{PACKED} is of type {dtype}, its factors of {scale_dtype} and its sizes {sizes[0]}"
        if len(packed) != 2 or scales != (packed[0], packed[1] * IN_A_WORD // self.group):
            return (
                f"tensor {name}{SCALE} has shape {[*scales]}, which is not of the groups of {[*packed]} words"
            )
        return None

    def shape(self, name: str, parts: Mapping[str, tuple[str, Shape]]) -> Shape:
        """The shape of a weight. Whole groups make whole words, so that none has padding."""
        rows, words = parts[f"{name}{PACKED}"][1]
        return (rows, words * IN_A_WORD)

    def values(self, name: str, shape: Shape, rows: slice, read: Callable[[str, slice], Tensor]) -> Tensor:
        """These rows of a weight in bfloat16, rounded once."""
        if tuple(read(f"{name}{SIZES}", slice(None)).tolist()) != shape:
            raise ValueError(f"{name}{SIZES} does not hold {[*shape]}")
        packed = read(f"{name}{PACKED}", rows)
        nibbles = (packed[:, :, None] >> packed.new_tensor(range(0, 32, 4))) & 15
        numbers = (nibbles.reshape(len(packed), -1) - OFFSET).float()
        numbers *= read(f"{name}{SCALE}", rows).float().repeat_interleave(self.group, 1)
        return numbers.bfloat16()
