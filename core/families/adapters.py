"""Which matrices of a model adapters can be added to, by their Hugging Face names, and the files of a PEFT folder. No torch.

An adapter of a matrix W [out, in] is a pair A [rank, in] and B [out, rank]: the layer computes W x + alpha / rank · B A x
(LoRA, arXiv:2106.09685).
"""

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence, Set
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
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
)
OF_EXPERTS = (
    "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    "mlp.experts.local_experts.{expert}.linear_fc2.weight",
)
FORMS = ("one", "pair", "halves", "heads")
GATED = ("gate_proj", "up_proj", "down_proj")


class Matrix(NamedTuple):
    """A matrix of a layer."""

    name: str  # in Hugging Face's checkpoints, without .weight
    outputs: int
    inputs: int
    part: ModelPart
    layer: int
    expert: int = 0  # its number, if it is an expert's

    @property
    def supported(self) -> bool:
        """Whether it can have an adapter."""
        if self.part.of_experts:
            # with a flag it is of a family that stores experts in two forms, neither of which PEFT reads adapters of
            apart = not self.part.stacked and not self.part.when
            return apart and self.part.parameter.endswith(OF_EXPERTS) and self.part.form in FORMS
        return self.part.parameter.endswith(SUPPORTED) and self.part.form in FORMS

    @property
    def of_experts(self) -> bool:
        """Whether it is an expert's that routers choose."""
        return self.part.of_experts

    @property
    def of_shared(self) -> bool:
        """Whether it is of the experts that every token uses."""
        return ".shared_experts.linear_" in self.part.parameter

    @property
    def in_layer(self) -> str:
        """The name without the layer's."""
        return self.name.partition(f".layers.{self.layer}.")[2]

    @property
    def kind(self) -> str:
        """What it belongs to, in words."""
        if self.part.of_experts:
            return "experts that are stored together"
        if ".shared_expert" in self.name:
            return "the gates of shared experts"
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
                        yield Matrix(name, shape[-2], shape[-1], part, layer, expert)


def targeted(arch: Architecture, targets: str) -> list[Matrix]:
    """The matrices whose whole name the regular expression matches."""
    pattern = re.compile(targets)
    return [matrix for matrix in matrices(arch) if pattern.fullmatch(matrix.name)]


# transformers 5 holds its experts in one tensor, as of other families here, and PEFT 0.21 maps the names of all but this family
UNMAPPED = "qwen2_moe"
FUSED, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"  # the tensors of all experts
FUSED_PATTERN, FUSED_RANKS = (
    r".*\.mlp\.experts\.gate_up_proj",
    2,
)  # of PEFT's patterns; ranks of a gate and an up projection


class PeftTargets(NamedTuple):
    """What PEFT's adapter_config.json calls matrices with adapters: modules, and parameters of modules."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def fused(self) -> bool:
        """Whether gate and up projections are named together."""
        return FUSED in self.parameters


@functools.lru_cache(
    maxsize=8
)  # it is asked at each sync, and a mixture of experts has tens of thousands of matrices
def peft_targets(arch: Architecture, targets: str) -> PeftTargets:
    """The names of the targeted matrices: each as short as it can be without naming another matrix too.

    In a mixture of experts, PEFT 0.21 takes each module that ends in GATED for an expert's, since transformers 5 holds experts in
    one tensor. Dense MLPs and shared experts are therefore named by their parameters, which it reads under the same names of tensors.
    """
    known, found = list(matrices(arch)), targeted(arch, targets)
    by_parameter = {
        matrix.name
        for matrix in found
        if arch.experts and not matrix.of_experts and matrix.name.endswith(GATED)
    }
    parameters = {f"{name}.weight" for name in _shortest(known, by_parameter, least=IN_LAYER)}
    experts = [matrix for matrix in found if matrix.of_experts and arch.family == UNMAPPED]
    parameters |= {DOWN if matrix.name.endswith("down_proj") else FUSED for matrix in experts}
    others = {matrix.name for matrix in found} - by_parameter - {matrix.name for matrix in experts}
    return PeftTargets(tuple(sorted(_shortest(known, others))), tuple(sorted(parameters)))


LENGTHS: tuple[Callable[[Matrix], str], ...] = (
    lambda matrix: matrix.name.rpartition(".")[2],
    lambda matrix: matrix.in_layer,
    lambda matrix: matrix.name,
)
IN_LAYER = 1


def _shortest(known: Sequence[Matrix], wanted: Set[str], least: int = 0) -> set[str]:
    """Names of the wanted matrices, from their last parts to whole ones. least: the first of LENGTHS that may be taken."""
    names, left = set[str](), set(wanted)
    for length in LENGTHS[least:]:
        others = {length(matrix) for matrix in known if matrix.name not in wanted}
        taken = {matrix.name: length(matrix) for matrix in known if matrix.name in left}
        names |= {short for short in taken.values() if short not in others}
        left = {name for name, short in taken.items() if short in others}
    return names


def parameters_of(matrix: Matrix, rank: int, tensor_parallel: int = 1) -> int:
    """Numbers in a pair, on one of so many tensor parallel ranks of the matrix: one of A and B is cut as the matrix is."""
    a, b = rank * matrix.inputs, rank * matrix.outputs
    if matrix.part.split == 1:
        return -(-a // tensor_parallel) + b
    return a + -(-b // tensor_parallel)


def holds_adapters(folder: Path) -> bool:
    """Whether it is a PEFT folder: adapters without the model that they belong to."""
    # False for a folder that may not be searched, which its readers name
    return os.path.isfile(folder / CONFIG) and not os.path.isfile(folder / "config.json")
