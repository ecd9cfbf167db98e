"""Adapters that the engine serves by name, beside the weights (LoRA, arXiv:2106.09685).

Owns what an adapter adds to the outputs of a layer's matrices. Rows of one batch may have different adapters; each row's result
depends on that row alone, as everywhere in the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.connectors.engines.embedded.sampling import RequestError
from millrace.core.errors import ConfigError
from millrace.core.families.adapters import matrices
from millrace.core.families.architecture import Architecture
from millrace.core.families.peft_folder import read_config, stored_pairs

PLACES = {  # what the engine's layers call what a fused layer of the trainer is
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "o",
    "mlp.linear_fc1": "gate_up",
    "mlp.linear_fc2": "down",
    "mlp.shared_experts.linear_fc1": "shared.gate_up",
    "mlp.shared_experts.linear_fc2": "shared.down",
    "mlp.experts.local_experts.{expert}.linear_fc1": "{expert}.gate_up",
    "mlp.experts.local_experts.{expert}.linear_fc2": "{expert}.down",
}
FIELD = "lora_path"
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
    """Read a PEFT folder into memory. Raises RequestError, and takes none of it, if it is none or does not fit the model."""
    known = [matrix for matrix in matrices(shape) if matrix.supported]
    try:
        settings = read_config(folder, FIELD)
        stored = stored_pairs(folder, known, settings.rank, FIELD)
    except ConfigError as error:
        raise RequestError(str(error)) from error
    places: dict[tuple[int, str], list[Part]] = {}
    for matrix in known:
        place = matrix.part.parameter.partition("{layer}.")[2].removesuffix(".weight")
        pair = stored.get(matrix.name)
        # a copy: what is read is a view of the file, which others may change
        own = None if pair is None else (pair[0].to(dtype, copy=True), pair[1].to(dtype, copy=True))
        at = matrix.layer, PLACES[place].format(expert=matrix.expert)
        places.setdefault(at, []).append((matrix.outputs, own))
    held = {at: parts for at, parts in places.items() if any(pair is not None for _, pair in parts)}
    return Adapter(name, settings.scale, held)


class RowAdapters:
    """The adapters of the rows of one batch."""

    def __init__(self, adapters: Sequence[Adapter | None], each: int = 1) -> None:
        """adapters: of the requests, in order; each of which has `each` rows."""
        distinct = {id(adapter): adapter for adapter in adapters if adapter is not None}
        self._masks = [
            (adapter, torch.tensor([one is adapter for one in adapters]).repeat_interleave(each)[:, None])
            for adapter in distinct.values()
        ]

    def at(self, rows: Tensor, of: int) -> "RowAdapters":
        """The adapters of some rows of a batch of so many, in their order."""
        taken = RowAdapters([])
        taken._masks = [
            (adapter, F.pad(mask, (0, 0, 0, of - len(mask)))[rows]) for adapter, mask in self._masks
        ]
        return taken

    def add(self, layer: int, place: str, x: Tensor, out: Tensor) -> Tensor:
        """out [M, n] of inputs x [M, in], with what each row's adapter adds; rows past those of the requests have none."""
        for adapter, mask in self._masks:
            added = adapter.added(layer, place, x)
            if added is not None:
                padded = F.pad(mask, (0, 0, 0, len(x) - len(mask)))
                out = torch.where(padded, out + added, out)
        return out


NO_ADAPTERS = RowAdapters([])
