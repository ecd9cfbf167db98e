"""Adapters of a rank's model: pairs of matrices beside megatron's linear layers (LoRA, arXiv:2106.09685).

A column-parallel layer's A is whole on each tensor parallel rank and its B is cut by rows, as the layer's weight is; a
row-parallel layer's A is cut by columns and its B is whole. A fused layer has a pair for each Hugging Face matrix that it is made
of. What crosses ranks is as wide as the rank of the pairs, not as the layer.

Owns the pairs, what they add, and their sharded state. Knows nothing of files: `weights.adapter_tensors` gathers whole pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import Module, ModuleDict

from millrace.connectors.trainers.adapters import Pairs, first_pair
from millrace.connectors.trainers.megatron.model.expert_adapters import ExpertPairs, PairsOfExperts
from millrace.connectors.trainers.megatron.model.pairs import HeldPair, Pair
from millrace.connectors.trainers.ops.added_product import add_product
from millrace.core.config.trainer import Lora
from millrace.core.families.adapters import Matrix, matrices, targeted
from millrace.core.families.architecture import Architecture


class Adapters(Module):
    """The pairs of one stage."""

    def __init__(self, lora: Lora) -> None:
        super().__init__()
        self.scale = lora.alpha / lora.rank
        self.pairs = ModuleDict()

    def __iter__(self) -> Iterator[HeldPair]:
        for pair in self.pairs.values():
            yield from pair.held()  # type: ignore[operator]

    def add(self, name: str, pair: Pair | ExpertPairs) -> None:
        """Add a pair, or the pairs of experts, under a name."""
        self.pairs[name.replace(".", "/")] = pair

    def sharded_state_dict(self, prefix: str) -> dict[str, Any]:
        """The state of all pairs."""
        state: dict[str, Any] = {}
        for name, pair in self.pairs.items():
            state |= pair.sharded_state_dict(f"{prefix}pairs.{name}.")  # type: ignore[operator]
        return state


class Delta:
    """A forward hook of a linear layer: adds what its pairs give to the layer's output."""

    def __init__(
        self, layer: Any, pairs: Sequence[tuple[Matrix, Pair | None]], scale: float, arch: Architecture
    ) -> None:
        """pairs: of the matrices that make the layer's weight, in order; None: a matrix without an adapter."""
        self._matrices, self._scale, self._arch = pairs, scale, arch
        self._pairs = [pair for _, pair in pairs if pair is not None]
        self._sequence = bool(layer.config.sequence_parallel)
        self._by_rows = self._pairs[0].by_rows
        layer.register_forward_hook(self)

    def __call__(self, _layer: Any, inputs: tuple[Any, ...], out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        # two dimensions: of three, PyTorch chooses the product by whether a gradient is wanted, and the bits would differ
        x = inputs[0].flatten(0, -2)
        stacked = torch.cat([pair.A for pair in self._pairs]) if len(self._pairs) > 1 else self._pairs[0].A
        narrow = self._exchanged(F.linear(x, stacked.to(x.dtype)))
        # what megatron's sum over ranks returns is a view of its input, which autograd lets nobody write to
        own = out[0] if self._by_rows else out[0].clone()
        return add_product(own, narrow, self._rows(), self._scale), *out[1:]

    def _exchanged(self, narrow: Tensor) -> Tensor:
        """x A over the tensor parallel ranks: of all tokens before a cut B, summed before a whole one."""
        group = mpu.get_tensor_model_parallel_group()
        if group.size() == 1:
            return narrow
        if self._by_rows:
            over = (
                gather_from_sequence_parallel_region
                if self._sequence
                else copy_to_tensor_model_parallel_region
            )
        else:
            over = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence
                else reduce_from_tensor_model_parallel_region
            )
        exchanged: Tensor = over(narrow, group=group)
        return exchanged

    def _rows(self) -> Tensor:
        """The B of all pairs in the order of the layer's rows [out, all ranks]: each in its own columns, and zeros elsewhere.

        One product then adds to the layer's output, which is the largest tensor here and is read and written once. The zeros cost
        products that are as narrow as the pairs.
        """
        tensors = mpu.get_tensor_model_parallel_world_size()
        columns = sum(pair.A.shape[0] for pair in self._pairs)
        blocks, at = [], 0
        for matrix, pair in self._matrices:
            if pair is None:
                blocks.append(self._pairs[0].B.new_zeros(matrix.outputs // tensors, columns))
                continue
            b = pair.whole_b()
            blocks.append(F.pad(b, (at, columns - at - b.shape[1])))
            at += b.shape[1]
        if len(blocks) == 1 or self._matrices[0][0].part.form == "pair":
            return torch.cat(blocks)
        groups = self._arch.kv_heads // tensors
        return torch.cat([block.unflatten(0, (groups, -1)) for block in blocks], dim=1).flatten(0, 1)


def attach(model: Any, lora: Lora, arch: Architecture, seed: int, pairs: Pairs | None = None) -> None:
    """Freeze a RankModel's weights, and add pairs to its layers; whole ones from `pairs`, by default those before the first step."""
    model.requires_grad_(False)
    wanted = {matrix.name for matrix in targeted(arch, lora.targets)}
    layers: dict[int, dict[str, list[Matrix]]] = {}
    for matrix in matrices(arch):
        if matrix.supported:
            layers.setdefault(matrix.layer, {}).setdefault(matrix.part.parameter, []).append(matrix)

    def values(matrix: Matrix) -> tuple[Tensor, Tensor]:
        return pairs[matrix.name] if pairs else first_pair(matrix, lora.rank, seed)

    for stage in model.stages:
        stage.adapters = Adapters(lora)
        for layer in stage.decoder.layers:
            for parameter, parts in layers.get(layer.layer_number - 1, {}).items():
                targets = [matrix.name in wanted for matrix in parts]
                if not any(targets):
                    continue
                if parts[0].of_experts:
                    assert all(targets), "the rules see to that"
                    _attach_to_experts(stage, layer.mlp.experts, parts, values, lora.rank)
                    continue
                linear = layer.get_submodule(parameter.partition("{layer}.")[2].removesuffix(".weight"))
                _attach_to_linear(stage, linear, parts, targets, values, lora.rank, arch)
        if stage.pre_process:
            stage.embedding.register_forward_hook(_with_gradient)


Values = Callable[[Matrix], tuple[Tensor, Tensor]]


def _attach_to_linear(
    stage: Any,
    linear: Any,
    parts: Sequence[Matrix],
    targets: Sequence[bool],
    values: Values,
    rank: int,
    arch: Architecture,
) -> None:
    """Add pairs to a linear layer. parts: the matrices that make its weight; targets: which of them get one."""
    made: list[tuple[Matrix, Pair | None]] = []
    for matrix, wanted in zip(parts, targets, strict=True):
        pair = None
        if wanted:
            pair = Pair(matrix, rank, like=linear.weight, sequence=stage.config.sequence_parallel)
            pair.fill(*values(matrix))
            stage.adapters.add(matrix.name, pair)
        made.append((matrix, pair))
    Delta(linear, made, stage.adapters.scale, arch)


def _attach_to_experts(
    stage: Any, experts: SequentialMLP, parts: Sequence[Matrix], values: Values, rank: int
) -> None:
    """Add pairs to one parameter of the experts of a layer. parts: the matrices of all experts of all ranks."""
    name = parts[0].part.parameter.rpartition("{expert}.")[2].removesuffix(".weight")
    linears = [expert.get_submodule(name) for expert in experts.local_experts]
    pairs = ExpertPairs(parts, rank, linears[0].weight)
    pairs.fill(values)
    pairs.add_to(linears, stage.adapters.scale)
    stage.adapters.add(pairs.name, pairs)
    held = getattr(experts, "adapters", PairsOfExperts(None, None, stage.adapters.scale))
    experts.adapters = held._replace(first=pairs) if pairs.by_rows else held._replace(second=pairs)


def _with_gradient(_embedding: Any, _inputs: Any, out: Tensor) -> Tensor:
    """A layer that is computed again passes no gradient on unless its input has one."""
    return out.requires_grad_() if torch.is_grad_enabled() else out
