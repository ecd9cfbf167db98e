"""Which matrices of a model adapters can be added to, by their Hugging Face names, and the files of a PEFT folder. No torch.

An adapter of a matrix W [out, in] is a pair A [rank, in] and B [out, rank]: the layer computes W x + alpha / rank · B A x
(LoRA, arXiv:2106.09685).
"""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from millrace.core.families.architecture import Architecture
from millrace.core.families.family import ModelPart
from millrace.core.families.registry import family_named

USUAL = r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|gate_up|down)_proj"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of a PEFT folder
SUPPORTED = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "layers.{layer}.mlp.linear_fc1.weight",
    "layers.{layer}.mlp.linear_fc2.weight",
)
FORMS = ("one", "pair", "halves", "heads")


class Matrix(NamedTuple):
    """A matrix of a layer."""

    name: str  # in Hugging Face's checkpoints, without .weight
    outputs: int
    inputs: int
    part: ModelPart
    layer: int

    @property
    def supported(self) -> bool:
        """Whether it can have an adapter."""
        return self.part.parameter.endswith(SUPPORTED) and self.part.form in FORMS

    @property
    def kind(self) -> str:
        """What it belongs to, in words."""
        if ".mlp.experts." in self.name or ".mlp.shared_expert" in self.name:
            return "experts"
        if ".linear_attn." in self.name:
            return "gated delta nets"
        return "latent or gated attention" if ".self_attn." in self.name else "routers"


def matrices(arch: Architecture) -> Iterator[Matrix]:
    """The matrices of all layers. Tensors that hold all experts of a layer count as one matrix."""
    for layer in range(arch.layers):
        sizes = arch.sizes(layer)
        for part in family_named(arch.family).layer:
            for text, shape in arch.shapes(part, sizes).items():
                for expert in range(sizes["experts"] if part.of_experts and not part.stacked else 1):
                    if len(shape) >= 2:
                        name = text.format(layer=layer, expert=expert).removesuffix(".weight")
                        yield Matrix(name, shape[-2], shape[-1], part, layer)


def targeted(arch: Architecture, targets: str) -> list[Matrix]:
    """The matrices whose whole name the regular expression matches."""
    pattern = re.compile(targets)
    return [matrix for matrix in matrices(arch) if pattern.fullmatch(matrix.name)]


@functools.lru_cache(
    maxsize=8
)  # it is asked at each sync, and a mixture of experts has tens of thousands of matrices
def target_modules(arch: Architecture, targets: str) -> tuple[str, ...]:
    """What PEFT's adapter_config.json calls them: last parts of names if every matrix with such a name is among them, else whole names."""
    found = {matrix.name for matrix in targeted(arch, targets)}
    ends = {name.rpartition(".")[2] for name in found}
    if {matrix.name for matrix in matrices(arch) if matrix.name.rpartition(".")[2] in ends} == found:
        return tuple(sorted(ends))
    return tuple(sorted(found))


def parameters_of(matrix: Matrix, rank: int, tensor_parallel: int = 1) -> int:
    """Numbers in a pair, on one of so many tensor parallel ranks: one of A and B is cut as the matrix is."""
    a, b = rank * matrix.inputs, rank * matrix.outputs
    if matrix.part.split == 1:
        return -(-a // tensor_parallel) + b
    return a + -(-b // tensor_parallel)


def holds_adapters(folder: Path) -> bool:
    """Whether it is a PEFT folder: adapters without the model that they belong to."""
    # False for a folder that may not be searched, which its readers name
    return os.path.isfile(folder / CONFIG) and not os.path.isfile(folder / "config.json")
