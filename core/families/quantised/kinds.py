"""Quantised weights that are read: a module a kind, chosen by `quant_method` of config.json's quantization_config.

A kind says which tensors of a file hold a weight, and makes the weight of them. What is not one of these is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from millrace.core.families.quantised.fp8_blocks import Fp8Blocks
from millrace.core.families.quantised.mxfp4 import Mxfp4
from millrace.core.families.quantised.packed_int4 import PackedInt4

Shape = tuple[int, ...]
Tensor = Any  # PyTorch's, which the configuration, that imports this module, does not load
DTYPE = "BF16"  # of what is made
READ = ", ".join(
    (
        "FP8 in blocks (quant_method fp8)",
        "INT4 in groups (compressed-tensors, pack-quantized)",
        "MXFP4 (mxfp4)",
    )
)
REMEDY = f"read are {READ}; else take the checkpoint that is not quantised, or write one in bfloat16 from it"


class Quantisation(Protocol):
    """How the weights of one checkpoint are quantised."""

    def weight_of(self, stored: str) -> str:
        """The weight that a stored tensor is a part of, by both names; a tensor that is no part is its own."""

    def problem(self, name: str, parts: Mapping[str, tuple[str, Shape]]) -> str | None:
        """What is wrong with the parts of a weight: their types and shapes by stored name."""

    def shape(self, name: str, parts: Mapping[str, tuple[str, Shape]]) -> Shape:
        """The shape of a weight whose parts have no problem."""

    def values(self, name: str, shape: Shape, rows: slice, read: Callable[[str, slice], Tensor]) -> Tensor:
        """These rows of a weight in bfloat16. read: rows of a part."""


KINDS: dict[str, Callable[[Mapping[str, Any]], Quantisation | None]] = {
    "fp8": Fp8Blocks.of,
    "compressed-tensors": PackedInt4.of,
    "mxfp4": Mxfp4.of,
}


def quantisation_of(config: object) -> Quantisation | None:
    """The kind that a quantization_config describes; None if it describes none that is read."""
    if not isinstance(config, Mapping):
        return None
    kind = KINDS.get(str(config.get("quant_method")))
    return kind(config) if kind else None


def is_read(config: object) -> bool:
    """Whether a value of quantization_config describes weights that are read."""
    return quantisation_of(config) is not None
