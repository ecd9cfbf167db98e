"""A model's weights under FSDP as Hugging Face tensors: gathered unit by unit, under the names and in the form of a checkpoint.

All ranks must iterate together, and every rank gets every tensor. Knows nothing of files, nor of the tensors' receivers.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from millrace.connectors.trainers.adapters import merged
from millrace.connectors.trainers.frozen_models import held
from millrace.connectors.trainers.fsdp.adapters import LinearPair
from millrace.connectors.trainers.fsdp.packed_model import TOWER, PackedModel, parts_of_units
from millrace.connectors.trainers.weights.buckets import JOINED, TensorGroup, Unit
from millrace.core.families.architecture import Architecture
from millrace.core.families.tensors import tensor_shapes


def hf_tensors(
    model: PackedModel, dtype: torch.dtype, shape: Architecture | None
) -> Iterator[dict[str, Tensor]]:
    """The tensors of each unit in turn, parameters in a type; each once, tied ones under the embedding's name.

    What adapters add is added to the weights. shape: of the model, if its family is known.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = tensor_shapes(shape) if shape is not None else {}
    names = {id(tensor): name for name, tensor in reversed([*_kept(model)])}
    units = [*parts_of_units(model)]
    for _, parts in [units[-1], *units[:-1]]:  # the root first, since a single file begins with the embedding
        whole: dict[str, Tensor] = {}
        for part in parts:
            if isinstance(part, LinearPair):
                weight = f"{part.matrix}.weight"
                a, b = (_full(each.detach().to(dtype)) for each in (part.A, part.B))
                whole[weight] = merged(whole[weight], (a, b), part.scale)
                continue
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                name = names.get(id(tensor))
                if name is not None and name not in whole:
                    # cast before it is gathered: as exact, and fewer bytes. Buffers, such as routers' biases, keep their type
                    own = tensor.detach()
                    whole[name] = _full(own.to(dtype) if isinstance(tensor, Parameter) else own)
        stored: dict[str, Tensor] = revert_weight_conversion(model.inner, whole)
        yield {name: _as_stored(tensor, name, shapes) for name, tensor in stored.items()}


def _as_stored(tensor: Tensor, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    # transformers reads Qwen3-VL's experts with their inputs first, as published, and gives them back with their outputs first
    turned = tensor.shape != shapes.get(name, tensor.shape)
    return (tensor.transpose(-1, -2) if turned else tensor).contiguous()


def _kept(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that a checkpoint has, by name."""
    yield from model.inner.named_parameters()
    stored = model.inner.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.inner.named_buffers() if name in stored)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tower_tensors(model: PackedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the tower that sees a run's pictures, none without one: no step changes them, and every rank holds them whole."""
    from transformers.core_model_loading import revert_weight_conversion

    if model.sight is None:
        return {}
    held = {f"{TOWER}.{name}": each.to(dtype) for name, each in model.sight.tower.state_dict().items()}
    stored: dict[str, Tensor] = revert_weight_conversion(model.inner, held)
    return stored


def sections(model: PackedModel, dtype: torch.dtype, shape: Architecture | None) -> list[TensorGroup]:
    """One section: every rank gathers every tensor, and has the tower's: an engine that gave its memory away has lost both."""

    def units() -> Iterator[Unit]:
        for tensors in chain(hf_tensors(model, dtype, shape), [tower_tensors(model, dtype)]):
            joined = [name for name in tensors if name.endswith(JOINED)]
            if len(joined) == len(JOINED):  # of one block, as are all tensors here
                yield [(name, tensors.pop(name)) for name in joined]
            yield from ([(name, tensor)] for name, tensor in tensors.items())

    return [TensorGroup(dist.get_rank(), tuple(range(dist.get_world_size())), units, broadcast=False)]


def copy_weights(model: PackedModel, source: Any) -> None:
    """Set a cut model's weights to those of a model of the same kind, which is whole on rank 0. All ranks must call it."""
    theirs = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            own = held(parameter)
            whole = theirs[name].detach().to(device=own.device, dtype=own.dtype)
            own.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local())
