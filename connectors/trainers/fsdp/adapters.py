"""Adapters of a model under FSDP: pairs of matrices beside Hugging Face's linear layers (LoRA, arXiv:2106.09685).

A pair is a module of its layer, and so of the layer's block: FSDP cuts and gathers it with the block's weights, which are frozen.
Owns the pairs, what they add, and whole pairs for files.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from millrace.connectors.trainers.adapters import FlatPairs, first_pair, read_peft
from millrace.connectors.trainers.frozen_models import held
from millrace.connectors.trainers.ops.added_product import add_product
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.families.adapters import targeted
from millrace.core.families.architecture import Architecture


class LinearPair(Module):
    """A [rank, in] and B [out, rank] of a linear layer. matrix: the name of its weight in checkpoints, without .weight."""

    def __init__(self, matrix: str, linear: Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.matrix, self.scale = matrix, scale
        self.A, self.B = Parameter(a), Parameter(b)
        linear.adapter = self
        linear.register_forward_hook(self.add_to)

    def add_to(self, _layer: Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """A forward hook of the layer: adds scale · B A x to its output."""
        # two dimensions: of three, PyTorch chooses the product by whether a gradient is wanted, and the bits would differ
        x = inputs[0].flatten(0, -2)
        return add_product(out, F.linear(x, self.A.to(x.dtype)), self.B, self.scale)


def attach(model: Any, config: RunConfig, arch: Architecture | None) -> None:
    """Freeze a PackedModel's weights, and add the pairs of trainer.lora to its layers: before FSDP cuts it.

    Raises ConfigError if the model's family is not known, if transformers has no linear layer of a matrix, or if trainer.lora.path
    does not fit.
    """
    lora = config.trainer.lora
    assert lora is not None
    if arch is None:
        raise ConfigError(
            "adapters need a family whose matrices are known",
            where=f"model.path = {config.model.path}",
            remedy="leave out trainer.lora",
        )
    stored = None if lora.path is None else read_peft(Path(lora.path), lora, arch, "trainer.lora.path")
    model.requires_grad_(False)
    linears = {name: part for name, part in model.inner.named_modules() if isinstance(part, Linear)}
    for matrix in targeted(arch, lora.targets):
        linear = linears.get(matrix.name)
        if linear is None:
            raise ConfigError(
                f"it matches {matrix.name}, for which transformers has no linear layer",
                where=f"trainer.lora.targets = {lora.targets}",
                remedy="name other matrices, or take trainer.kind=megatron",
            )
        a, b = first_pair(matrix, lora.rank, config.run.seed) if stored is None else stored[matrix.name]
        LinearPair(matrix.name, linear, a.float(), b.float(), lora.alpha / lora.rank)


def pairs_of(model: Module) -> Iterator[LinearPair]:
    """The pairs of a model, in the order of its layers."""
    return (part for part in model.modules() if isinstance(part, LinearPair))


def gathered(model: Module, dtype: torch.dtype, sharded_over: Any) -> FlatPairs:
    """All pairs, whole and in a type, on every rank. sharded_over: the group of ranks that together have them. All ranks must call it."""
    pairs = list(pairs_of(model))
    parameters = [each for pair in pairs for each in (pair.A, pair.B)]
    whole = iter(_whole(parameters, dtype, sharded_over))
    return FlatPairs.of({pair.matrix: (next(whole), next(whole)) for pair in pairs})


def _whole(parameters: Sequence[Parameter], dtype: torch.dtype, group: Any) -> list[Tensor]:
    """Parameters that ranks have rows of, gathered at once: of n rows the first ranks have ceil(n / ranks) each, the last what is left."""
    ranks = group.size()
    sizes = [-(-len(each) // ranks) * each.shape[1] for each in parameters]
    own = held(parameters[0]).new_zeros(sum(sizes), dtype=dtype)
    for part, each in zip(own.split(sizes), parameters, strict=True):
        rows = held(each).reshape(-1)
        part[: len(rows)] = rows
    every = own.new_empty(ranks, len(own))
    dist.all_gather_into_tensor(every.view(-1), own, group=group)
    return [
        part.reshape(-1, each.shape[1])[: len(each)]
        for part, each in zip(every.split(sizes, dim=1), parameters, strict=True)
    ]
