"""Adapters that the engine serves by name, beside the weights (LoRA, arXiv:2106.09685).

Owns reading a PEFT folder, and what an adapter adds to the outputs of a layer's matrices. Rows of one batch may have different
adapters; each row's result depends on that row alone, as everywhere in the engine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from millrace.connectors.engines.embedded.sampling import RequestError
from millrace.core.families.adapters import Matrix, matrices
from millrace.core.families.architecture import Architecture

PLACES = {  # what the engine's layers call what a fused layer of the trainer is
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "o",
    "mlp.linear_fc1": "gate_up",
    "mlp.linear_fc2": "down",
}
PREFIX = "base_model.model."
Part = tuple[int, tuple[Tensor, Tensor] | None]  # outputs of a matrix, and its pair


@dataclass(frozen=True, eq=False)
class Adapter:
    """The pairs of one adapter, by layer and place; a fused place has a part for each of its matrices."""

    name: str
    scale: float
    parts: Mapping[tuple[int, str], Sequence[Part]]

    def added(self, layer: int, place: str, x: Tensor) -> Tensor | None:
        """What it adds to the outputs [M, out] of inputs [M, in]; None if it has no pair there."""
        parts = self.parts.get((layer, place))
        if parts is None:
            return None
        each = [
            x.new_zeros(len(x), outputs) if pair is None else F.linear(F.linear(x, pair[0]), pair[1])
            for outputs, pair in parts
        ]
        return torch.cat(each, dim=-1) * self.scale


def read_adapter(name: str, folder: Path, shape: Architecture, dtype: torch.dtype) -> Adapter:
    """Read a PEFT folder. Raises RequestError, and takes none of it, if a tensor of it is of no matrix that can have a pair."""
    try:
        settings: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "adapter_model.safetensors")
        rank, scale = int(settings["r"]), float(settings["lora_alpha"]) / int(settings["r"])
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, SafetensorError) as error:
        raise RequestError(f"lora_path: {folder} is no folder of adapters: {error}") from error
    places: dict[tuple[int, str], list[Part]] = {}
    for matrix in matrices(shape):
        if matrix.supported:
            place = matrix.part.parameter.partition("{layer}.")[2].removesuffix(".weight")
            pair = _pair(stored, matrix, rank, dtype)
            places.setdefault((matrix.layer, PLACES[place]), []).append((matrix.outputs, pair))
    if stored:
        raise RequestError(
            f"lora_path: tensor {min(stored)} of {folder} is of no matrix that can have an adapter"
        )
    held = {at: parts for at, parts in places.items() if any(pair is not None for _, pair in parts)}
    return Adapter(name, scale, held)


def _pair(
    stored: dict[str, Tensor], matrix: Matrix, rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Take a matrix's pair out of the stored tensors; None if it has none."""
    shapes = {"A": (rank, matrix.inputs), "B": (matrix.outputs, rank)}
    names = {side: f"{PREFIX}{matrix.name}.lora_{side}.weight" for side in shapes}
    found = [stored.pop(name, None) for name in names.values()]
    if found == [None, None]:
        return None
    for tensor, (side, shape) in zip(found, shapes.items(), strict=True):
        if tensor is None or tuple(tensor.shape) != shape:
            given = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise RequestError(f"lora_path: tensor {names[side]} is {given}, and {list(shape)} is wanted")
    a, b = found
    assert a is not None
    assert b is not None
    return a.to(dtype), b.to(dtype)


class RowAdapters:
    """The adapters of the rows of one batch."""

    def __init__(self, adapters: Sequence[Adapter | None], each: int = 1) -> None:
        """adapters: of the requests, in order; each of which has `each` rows."""
        distinct = {id(adapter): adapter for adapter in adapters if adapter is not None}
        self._masks = [
            (adapter, torch.tensor([one is adapter for one in adapters]).repeat_interleave(each)[:, None])
            for adapter in distinct.values()
        ]

    def add(self, layer: int, place: str, x: Tensor, out: Tensor) -> Tensor:
        """out [M, n] of inputs x [M, in], with what each row's adapter adds; rows past those of the requests have none."""
        for adapter, mask in self._masks:
            added = adapter.added(layer, place, x)
            if added is not None:
                padded = F.pad(mask, (0, 0, 0, len(x) - len(mask)))
                out = torch.where(padded, out + added, out)
        return out


NO_ADAPTERS = RowAdapters([])
