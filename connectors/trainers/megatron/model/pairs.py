"""A pair of a linear layer's adapter as this rank holds it (LoRA, arXiv:2106.09685): its parts, and their sharded state."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Module, Parameter

from millrace.core.families.adapters import Matrix

CHECKPOINTED = "adapters"  # before the names of pairs in a checkpoint


class HeldPair(NamedTuple):
    """This rank's parts of the pair of one Hugging Face matrix.

    by_rows: B is cut over tensor parallel ranks, by its dimension `axis`; else A is, by its own. halves: B is [2, out / 2, rank].
    """

    matrix: Matrix
    a: Tensor
    b: Tensor
    by_rows: bool
    axis: int
    halves: bool = False


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

    def held(self) -> Iterator[HeldPair]:
        """Its parts, without gradients."""
        yield HeldPair(self.matrix, self.A.detach(), self.B.detach(), self.by_rows, self.axis, self.halves)

    def whole_b(self) -> Tensor:
        """This rank's B [out, rank]."""
        return self.B.flatten(0, 1) if self.halves else self.B

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
