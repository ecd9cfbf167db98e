"""The parameters of a whole model, and the places where a torch_dist checkpoint may hold each of them.

megatron-core stacks equal layers and experts in one tensor, or numbers them in the name; with Transformer Engine a norm belongs to
the linear layer after it. Owns these forms. Knows nothing of files.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from millrace.connectors.trainers.megatron.weights import hf_mapping
from millrace.core.families.architecture import Architecture
from millrace.core.families.decoder import HEAD
from millrace.core.families.family import ModelPart
from millrace.core.families.registry import family_named

Shape = tuple[int, ...]
PIECE = 16 * 2**20  # bytes; an embedding may be larger than all layers of a stage
# a norm alone, and as a part of the layer that takes its output; our trainer stores the second form
NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".input_layernorm.", ".self_attention.in_proj.layer_norm_"),
    (".q_layernorm.", ".linear_q_up_proj.layer_norm_"),
    (".kv_layernorm.", ".linear_kv_up_proj.layer_norm_"),
)
BY_LAYER = NORMS[:2]
FURTHER = "further."  # before the names of tensors that belong to no parameter of megatron's model
LAYER, EXPERT = ".layers.{layer}.", ".experts.local_experts.{expert}."
HALVES = ("_w", "_v")  # of a gated part that is stored as two tensors: gate, up


@dataclass(frozen=True)
class Place:
    """Where a parameter may be: under these names, which follow each other along its first dimension, at `index` of each.

    axes: what the index counts, by the names of sizes of an Architecture.
    """

    keys: tuple[str, ...]
    index: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """One parameter of a whole model. `shapes`: of the Hugging Face tensors that make it, by name."""

    part: ModelPart
    layer: int
    expert: int
    shapes: Mapping[str, Shape]

    @cached_property
    def mapping(self) -> hf_mapping.Mapping:
        """How the tensors make it."""
        return hf_mapping.Mapping(self.part, tuple(self.shapes))

    @property
    def shape(self) -> Shape:
        """The parameter's shape: its tensors one after the other."""
        shapes = list(self.shapes.values())
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def pieces(self, itemsize: int) -> Iterator[slice]:
        """Rows that together make the parameter, at most PIECE bytes if it is made of one tensor; otherwise all."""
        rows = self.shape[0]
        whole = self.part.form != "one"
        step = rows if whole else max(1, PIECE * rows // max(1, self.numbers * itemsize))
        yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    @property
    def name(self) -> str:
        """megatron's name, with the numbers of layer and expert in the whole model."""
        return self.part.parameter.format(layer=self.layer, expert=self.expert)

    def own_place(self, arch: Architecture) -> Place:
        """Where our trainer stores it: megatron-core numbers layers of which some may have experts, and stacks all others."""
        name = self.part.parameter
        for alone, joined in BY_LAYER:
            name = name.replace(alone, joined)
        apart = len(self.part.pieces) or 1
        whole = [place for place in self._forms(name) if len(place.keys) == apart]
        return whole[len(whole) // 2] if (arch.experts or arch.delta) and LAYER in name else whole[0]

    def own_rows(self, arch: Architecture) -> list[int]:
        """How many of its rows each name of `own_place` holds."""
        if not self.part.pieces:
            return [self.shape[0]]
        sizes = arch.sizes(self.layer)
        return [sizes[size] for size in self.part.pieces.values()]

    def places(self) -> Iterator[Place]:
        """All places, none of which two parameters share."""
        name = self.part.parameter
        yield from self._forms(name)
        for alone, joined in NORMS:
            if alone in name:
                yield from self._forms(name.replace(alone, joined))

    def _forms(self, name: str) -> Iterator[Place]:
        """Stacked before numbered, by layers and then by experts; whole and in halves."""
        none = (("", (), ()),)
        layers = ((".layers.", (self.layer,), ("layers",)), (f".layers.{self.layer}.", (), ()))
        experts = (
            (".experts.experts.", (self.expert,), ("experts",)),
            (f".experts.experts.{self.expert}.", (), ()),
        )
        for (in_layers, layer, layer_axis), (in_experts, expert, expert_axis) in product(
            layers if LAYER in name else none, experts if EXPERT in name else none
        ):
            key = name.replace(LAYER, in_layers).replace(EXPERT, in_experts)
            index, axes = (*layer, *expert), (*layer_axis, *expert_axis)
            keys = tuple(f"{key}.{piece}" for piece in self.part.pieces) or (key,)
            yield Place(keys, index, axes)
            if self.part.form in ("pair", "halves"):
                yield Place(tuple(f"{key}{half}" for half in HALVES), index, axes)


def parameters(arch: Architecture) -> list[Parameter]:
    """Every parameter of a model, layer by layer."""
    family = family_named(arch.family)

    def present(part: ModelPart, layer: int | None = None) -> Iterator[Parameter]:
        sizes = arch.sizes(layer)
        shapes = arch.shapes(part, sizes)
        for expert in range(sizes["experts"] if part.of_experts and not part.stacked else 1):
            number = layer or 0
            named = {name.format(layer=number, expert=expert): shape for name, shape in shapes.items()}
            if named and not (arch.tied and HEAD in named):
                yield Parameter(part, number, expert, named)

    layers = [(part, layer) for layer in range(arch.layers) for part in family.layer]
    outer: list[list[tuple[ModelPart, None]]] = [
        [(part, None) for part in parts] for parts in (family.before, family.after)
    ]
    return [
        parameter for part, layer in [*outer[0], *layers, *outer[1]] for parameter in present(part, layer)
    ]


def further(shapes: Mapping[str, Shape]) -> list[Parameter]:
    """A parameter of its own for each of these tensors, which belong to no parameter of megatron's model."""
    return [
        Parameter(ModelPart(f"{FURTHER}{name}", {name: ()}, trained=False), 0, 0, {name: shape})
        for name, shape in shapes.items()
    ]
