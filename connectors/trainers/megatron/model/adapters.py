"""Adapters of a rank's model: pairs of matrices beside megatron's linear layers (LoRA, arXiv:2106.09685).

A column-parallel layer's A is whole on each tensor parallel rank and its B is cut by rows, as the layer's weight is; a
row-parallel layer's A is cut by columns and its B is whole. A fused layer has a pair for each Hugging Face matrix that it is made
of. What crosses ranks is as wide as the rank of the pairs, not as the layer.

Owns the pairs, what they add, and their sharded state. Knows nothing of files: `weights.adapter_tensors` gathers whole pairs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Module, ModuleDict, Parameter

from millrace.connectors.trainers.adapters import Pairs, first_pair
from millrace.core.config.trainer import Lora
from millrace.core.families.adapters import Matrix, matrices, targeted
from millrace.core.families.architecture import Architecture

CHECKPOINTED = "adapters"  # before the names of pairs in a checkpoint


class Pair(Module):
    """A and B of one Hugging Face matrix, this rank's parts. B [out, rank]; of a gate and an up projection in one, [2, out / 2, rank]."""

    def __init__(self, matrix: Matrix, rank: int, *, like: Tensor, sequence: bool) -> None:
        super().__init__()
        self.matrix = matrix
        tensors = mpu.get_tensor_model_parallel_world_size()
        self.by_rows = matrix.part.split == 0  # else by columns
        self.halves = matrix.part.form == "halves"
        outputs = matrix.outputs // tensors if self.by_rows else matrix.outputs
        inputs = matrix.inputs if self.by_rows else matrix.inputs // tensors
        rows = (2, outputs // 2) if self.halves else (outputs,)
        self.A = Parameter(like.new_empty(rank, inputs))
        self.B = Parameter(like.new_empty(*rows, rank))
        for name, weight in self.named_parameters():
            cut = (name == "B") == self.by_rows
            set_tensor_model_parallel_attributes(weight, cut, self.axis, 1)
            # a whole part sees a rank's own tokens alone, so that its gradient is a part of a sum
            weight.sequence_parallel = sequence and not cut  # type: ignore[attr-defined]

    @property
    def axis(self) -> int:
        """The dimension of the cut part that is cut."""
        return 1 if self.halves or not self.by_rows else 0

    def fill(self, a: Tensor, b: Tensor) -> None:
        """Take this rank's parts of whole A [rank, in] and B [out, rank]."""
        if self.halves:
            b = b.unflatten(0, (2, -1))
        at, of = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        if self.by_rows:
            b = b.chunk(of, self.axis)[at]
        else:
            a = a.chunk(of, self.axis)[at]
        with torch.no_grad():
            self.A.copy_(a)
            self.B.copy_(b)

    def widened(self, narrow: Tensor) -> Tensor:
        """narrow [..., rank] times B: [..., out] on this rank."""
        b = self.B.flatten(0, 1) if self.halves else self.B
        return F.linear(narrow, b.to(narrow.dtype))

    def sharded_state_dict(self, prefix: str) -> dict[str, Any]:
        """Both parts, named in a checkpoint by their matrix: equal under each layout of pipeline stages."""
        state = {}
        for name, weight in self.named_parameters():
            key = f"{CHECKPOINTED}.{self.matrix.name}.lora_{name}"
            cut = (name == "B") == self.by_rows
            state[f"{prefix}{name}"] = (
                make_tp_sharded_tensor_for_checkpoint(weight, key, self.axis)
                if cut
                else make_sharded_tensor_for_checkpoint(weight, key)
            )
        return state


class Adapters(Module):
    """The pairs of one stage."""

    def __init__(self, lora: Lora) -> None:
        super().__init__()
        self.scale = lora.alpha / lora.rank
        self.pairs = ModuleDict()

    def __iter__(self) -> Iterator[Pair]:
        yield from self.pairs.values()  # type: ignore[misc]

    def add(self, pair: Pair) -> None:
        """Add a pair under its matrix's name."""
        self.pairs[pair.matrix.name.replace(".", "/")] = pair

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
        parts = iter(narrow.chunk(len(self._pairs), dim=-1))
        each = [
            self._zeros(narrow, matrix) if pair is None else pair.widened(next(parts))
            for matrix, pair in self._matrices
        ]
        return out[0] + (self._fused(each) * self._scale).view_as(out[0]), *out[1:]

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

    def _zeros(self, narrow: Tensor, matrix: Matrix) -> Tensor:
        """What a matrix of a fused layer adds if it has no pair."""
        return narrow.new_zeros(
            *narrow.shape[:-1], matrix.outputs // mpu.get_tensor_model_parallel_world_size()
        )

    def _fused(self, each: list[Tensor]) -> Tensor:
        """The outputs in the order of the layer's rows."""
        if len(each) == 1:
            return each[0]
        if self._matrices[0][0].part.form == "pair":
            return torch.cat(each, dim=-1)
        groups = self._arch.kv_heads // mpu.get_tensor_model_parallel_world_size()
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in each], dim=-1).flatten(-2)


def attach(model: Any, lora: Lora, arch: Architecture, seed: int, pairs: Pairs | None = None) -> None:
    """Freeze a RankModel's weights, and add pairs to its layers; whole ones from `pairs`, by default those before the first step."""
    model.requires_grad_(False)
    wanted = {matrix.name for matrix in targeted(arch, lora.targets)}
    layers: dict[tuple[int, str], list[Matrix]] = {}
    for matrix in matrices(arch):
        if matrix.supported:
            layers.setdefault((matrix.layer, matrix.part.parameter), []).append(matrix)
    for stage in model.stages:
        stage.adapters = Adapters(lora)
        own = {layer.layer_number - 1: layer for layer in stage.decoder.layers}
        for (number, parameter), parts in layers.items():
            if number not in own or not any(matrix.name in wanted for matrix in parts):
                continue
            linear = own[number].get_submodule(parameter.partition("{layer}.")[2].removesuffix(".weight"))
            made: list[tuple[Matrix, Pair | None]] = []
            for matrix in parts:
                pair = None
                if matrix.name in wanted:
                    pair = Pair(
                        matrix, lora.rank, like=linear.weight, sequence=stage.config.sequence_parallel
                    )
                    pair.fill(*(pairs[matrix.name] if pairs else first_pair(matrix, lora.rank, seed)))
                    stage.adapters.add(pair)
                made.append((matrix, pair))
            Delta(linear, made, stage.adapters.scale, arch)
        if stage.pre_process:
            stage.embedding.register_forward_hook(_with_gradient)


def _with_gradient(_embedding: Any, _inputs: Any, out: Tensor) -> Tensor:
    """A layer that is computed again passes no gradient on unless its input has one."""
    return out.requires_grad_() if torch.is_grad_enabled() else out
