"""FP8 in blocks, as DeepSeek and Qwen publish it: a weight in float8_e4m3fn, and a factor for each block of it.

    weight[i, j] = X.weight[i, j] * X.weight_scale_inv[i // rows, j // columns]

The last blocks may be cut off by the weight's edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
Tensor = Any  # PyTorch's, which the configuration, that imports this module, does not load
SCALE = "_scale_inv"
KNOWN = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),  # of engines' activations
    "scale_fmt": ("ue8m0", None),  # the factors are powers of 2, and stored as numbers all the same
}
# what these list is stored unquantised, and read as it is stored
PLAIN = ("modules_to_not_convert", "ignored_layers")


@dataclass(frozen=True)
class Fp8Blocks:
    """FP8 with blocks of this size."""

    rows: int
    columns: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fp8Blocks | None:
        """Read from a quantization_config; None if it says anything that is not known here."""
        block = config.get("weight_block_size")
        known = all(
            key in PLAIN or key == "weight_block_size" or value in KNOWN.get(key, ())
            for key, value in config.items()
        )
        sizes = (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and size > 0 for size in block)
        )
        return cls(*block) if known and sizes and isinstance(block, list) else None

    def weight_of(self, stored: str) -> str:
        """The weight that a stored tensor is a part of."""
        return stored.removesuffix(SCALE) if stored.endswith(f".weight{SCALE}") else stored

    def problem(self, name: str, parts: Mapping[str, tuple[str, Shape]]) -> str | None:
        """What is wrong with a weight and its factors."""
        for part in (name, f"{name}{SCALE}"):
            if part not in parts:
                return f"tensor {part} is missing"
        (dtype, shape), (scale_dtype, scale_shape) = parts[name], parts[f"{name}{SCALE}"]
        if dtype != "F8_E4M3" or scale_dtype not in ("F32", "BF16"):
            return f"tensor {name} is of type {dtype} and its factors are of {scale_dtype}, not F8_E4M3 and F32 or BF16"
        if len(shape) != 2 or scale_shape != (-(-shape[0] // self.rows), -(-shape[1] // self.columns)):
            return (
                f"tensor {name}{SCALE} has shape {[*scale_shape]}, which is not of the blocks of {[*shape]}"
            )
        return None

    def shape(self, name: str, parts: Mapping[str, tuple[str, Shape]]) -> Shape:
        """The shape of a weight."""
        return parts[name][1]

    def values(self, name: str, shape: Shape, rows: slice, read: Callable[[str, slice], Tensor]) -> Tensor:
        """These rows of a weight in bfloat16, rounded once."""
        start, stop, _ = rows.indices(shape[0])
        first = start // self.rows
        scales = read(f"{name}{SCALE}", slice(first, -(-stop // self.rows))).float()
        by_row = scales.repeat_interleave(self.rows, 0)[start - first * self.rows :][: stop - start]
        weight = read(name, slice(start, stop)).float()
        weight *= by_row.repeat_interleave(self.columns, 1)[:, : shape[1]]
        return weight.bfloat16()
