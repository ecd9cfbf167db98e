"""Adapters of the experts that routers choose: for each expert of this rank a pair of each of its matrices, side by side in a tensor.

Expert parallel ranks have the pairs of their own experts. Over the tensor parallel ranks of experts one of A and B is cut as the
expert's matrix is, and the other is whole: its gradient is a sum over these ranks, which is made here and not by megatron.

Owns the pairs, their sharded state, and what they add to experts that are computed one after the other; `grouped_adapters` computes
all experts at once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.nn import Module, Parameter

from millrace.connectors.trainers.megatron.model.pairs import CHECKPOINTED, HeldPair
from millrace.core.families.adapters import Matrix


class ExpertPairs(Module):
    """The pairs of one parameter of the experts of a layer: of gate and up projections, or of down projections.

    A [experts, matrices, rank, in] and B [experts, matrices, out, rank] of this rank, from its first expert.
    """

    def __init__(self, parts: Sequence[Matrix], rank: int, weight: Any) -> None:
        """parts: the matrices of all experts of all ranks, one kind after the other. weight: the parameter of one of this rank's."""
        super().__init__()
        one, kinds = parts[0], len(parts[0].part.tensors)
        every = len(parts) // kinds
        experts = every // mpu.get_expert_model_parallel_world_size()
        first = experts * mpu.get_expert_model_parallel_rank()
        self.matrices = [parts[expert::every] for expert in range(first, first + experts)]
        self.by_rows = one.part.split == 0  # B is cut, else A
        cut = mpu.get_expert_tensor_parallel_world_size()
        outputs, inputs = (
            (one.outputs // cut, one.inputs) if self.by_rows else (one.outputs, one.inputs // cut)
        )
        self.A = Parameter(weight.new_empty(experts, kinds, rank, inputs))
        self.B = Parameter(weight.new_empty(experts, kinds, outputs, rank))
        for name, each in self.named_parameters():
            # no rank has another's pairs, but of a whole part the tensor parallel ranks have copies, of which one counts in norms
            set_tensor_model_parallel_attributes(each, True, self.axis, 1)
            each.sequence_parallel = False  # type: ignore[attr-defined]
            each.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
            if not self.is_cut(name) and mpu.get_expert_tensor_parallel_rank():
                each.shared = True  # type: ignore[attr-defined]

    @property
    def axis(self) -> int:
        """The dimension of the cut part that is cut."""
        return 2 if self.by_rows else 3

    @property
    def name(self) -> str:
        """What they are called in checkpoints, the same on each rank."""
        kinds = self.matrices[0]
        above = kinds[0].name.partition(".experts.")[0]
        return f"{above}.experts.{'+'.join(kind.name.rpartition('.')[2] for kind in kinds)}"

    def is_cut(self, name: str) -> bool:
        """Whether A or B is cut over tensor parallel ranks."""
        return (name == "B") == self.by_rows

    def fill(self, values: Callable[[Matrix], tuple[Tensor, Tensor]]) -> None:
        """Take this rank's parts of whole A [rank, in] and B [out, rank] of each matrix."""
        at, of = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
        with torch.no_grad():
            for expert, kinds in enumerate(self.matrices):
                for kind, matrix in enumerate(kinds):
                    a, b = values(matrix)
                    self.A[expert, kind].copy_(a if self.by_rows else a.chunk(of, 1)[at])
                    self.B[expert, kind].copy_(b.chunk(of)[at] if self.by_rows else b)

    def held(self) -> Iterator[HeldPair]:
        """The parts of each pair, without gradients."""
        for kinds, a, b in zip(self.matrices, self.A.detach(), self.B.detach(), strict=True):
            for kind, matrix in enumerate(kinds):
                yield HeldPair(matrix, a[kind], b[kind], self.by_rows, 0 if self.by_rows else 1)

    def add_to(self, linears: Sequence[Any], scale: float) -> None:
        """Add what they give to the outputs of the linear layers of this rank's experts, when these are called."""
        for expert, linear in enumerate(linears):
            linear.register_forward_hook(partial(self._added, expert, scale))

    def _added(
        self, expert: int, scale: float, _linear: Any, inputs: tuple[Any, ...], out: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any]:
        a, b = self.A[expert], self.B[expert]
        group = mpu.get_expert_tensor_parallel_group()
        if self.by_rows:
            a = copy_to_tensor_model_parallel_region(a, group=group)
        else:
            b = copy_to_tensor_model_parallel_region(b, group=group)
        narrow = F.linear(inputs[0], a.flatten(0, 1)).chunk(len(b), dim=-1)
        added = [F.linear(part, each) for part, each in zip(narrow, b, strict=True)]
        return out[0] + torch.cat(added, dim=-1) * scale, *out[1:]

    def sharded_state_dict(self, prefix: str) -> dict[str, Any]:
        """Both parts, as parts of what all experts of the layer have."""
        experts = (0, mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size())
        at, of = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
        state = {}
        for name, weight in self.named_parameters():
            cut = self.is_cut(name)
            state[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{CHECKPOINTED}.{self.name}.lora_{name}",
                weight,
                experts,
                *([(self.axis, at, of)] if cut else []),
                replica_id=(0, 0 if cut else at, mpu.get_expert_data_parallel_rank()),
            )
        return state


class PairsOfExperts(NamedTuple):
    """The pairs of a layer's experts: of gate and up projections, and of down projections; and the factor of what they add."""

    first: ExpertPairs | None
    second: ExpertPairs | None
    scale: float
