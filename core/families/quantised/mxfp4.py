"""MXFP4, as gpt-oss stores its experts: blocks of 32 numbers of 4 bits that share a scale (OCP Microscaling Formats, v1.0).

A matrix X [E, in, out] is stored by rows of its transpose: X_blocks [E, out, in / 32, 16], a byte of which has two numbers, the
lower bits first, and X_scales [E, out, in / 32], powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Shape = tuple[int, ...]
Tensor = Any  # PyTorch's, which the configuration, that imports this module, does not load
BLOCKS, SCALES = PARTS = ("_blocks", "_scales")
BYTES = 16  # of a block
BIAS = 127  # of a scale's exponent
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
KNOWN = {
    "quant_method",
    "modules_to_not_convert",
}  # these are stored unquantised, and read as they are stored


class Mxfp4:
    """Experts in MXFP4."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Mxfp4 | None:
        """Read from a quantization_config; None if it says anything that is not known here."""
        return cls() if KNOWN.issuperset(config) else None

    def weight_of(self, stored: str) -> str:
        """The weight that a stored tensor is a part of."""
        return next((stored.removesuffix(end) for end in PARTS if stored.endswith(end)), stored)

    def problem(self, name: str, parts: Mapping[str, tuple[str, Shape]]) -> str | None:
        """What is wrong with a weight's blocks and scales."""
        for part in parts.keys() ^ {f"{name}{end}" for end in PARTS}:
            return f"tensor {part} is missing" if part not in parts else f"tensor {part} is stored twice"
        (dtype, shape), (scale_dtype, scale_shape) = (parts[f"{name}{end}"] for end in PARTS)
        if dtype != "U8" or scale_dtype != "U8":
            return f"tensor {name} has blocks of type {dtype} and scales of {scale_dtype}, not of U8"
        if len(shape) != 4 or shape[-1] != BYTES or scale_shape != shape[:-1]:
            return f"tensor {name}{SCALES} has shape {[*scale_shape]}, which is not of the blocks {[*shape]}"
        return None

    def shape(self, name: str, parts: Mapping[str, tuple[str, Shape]]) -> Shape:
        """The shape of a weight."""
        experts, out, blocks, width = parts[f"{name}{BLOCKS}"][1]
        return experts, 2 * width * blocks, out

    def values(self, name: str, shape: Shape, rows: slice, read: Callable[[str, slice], Tensor]) -> Tensor:
        """These experts' weights in bfloat16, which holds each number exactly."""
        blocks, scales = (read(f"{name}{end}", rows) for end in PARTS)
        exponents = scales.int() - BIAS
        table = exponents.new_tensor([*VALUES, *(-value for value in VALUES)], dtype=exponents.float().dtype)
        low, high = (table[codes.long()] for codes in (blocks & 15, blocks >> 4))
        numbers = low.new_empty(*low.shape, 2)
        numbers[..., 0], numbers[..., 1] = low, high
        scaled = numbers.flatten(-2).ldexp(exponents.unsqueeze(-1))
        return scaled.flatten(-2).transpose(-1, -2).bfloat16()
