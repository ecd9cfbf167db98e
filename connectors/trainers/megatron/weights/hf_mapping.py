"""Maps megatron parameters to Hugging Face tensors, in both directions, from the parts of a family's description.

Owns how tensors are fused, and split over tensor parallel ranks. Knows nothing of files or process groups.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from millrace.core.families.architecture import Architecture
from millrace.core.families.decoder import HEAD
from millrace.core.families.family import ModelPart
from millrace.core.families.registry import family_named

PAIRS = ("pair", "halves", "turns")  # forms of a gate and an up projection


@dataclass(frozen=True)
class Mapping:
    """The Hugging Face tensors of which one parameter of this rank is a shard."""

    part: ModelPart
    names: tuple[str, ...]
    number: int = 0  # of the expert, if it is an expert's

    @property
    def expert(self) -> bool:
        """Whether it is a parameter of an expert."""
        return self.part.of_experts

    @property
    def vocabulary(self) -> bool:
        """Whether the first dimension is the vocabulary."""
        return next(iter(self.part.tensors.values()))[0] == "vocab"

    def local(
        self, tensors: Sequence[Tensor], arch: Architecture, rank: int, size: int, padded_vocab: int
    ) -> Tensor:
        """This rank's shard, from whole Hugging Face tensors; from the expert's shares of stacked ones."""
        split = self.part.split
        if self.part.stacked:
            tensors = [self.part.of_expert(tensor) for tensor in tensors]
        if split is not None and size > 1 and self.part.form in PAIRS:
            # cut separately, so that a rank holds [its gate; its up]
            halves = tensors if self.part.form == "pair" else tensors[0].chunk(2)
            return torch.cat([tensor.chunk(size, split)[rank] for tensor in halves])
        whole = _fused(self.part, tensors, arch)
        if self.vocabulary:
            whole = _pad(whole, padded_vocab)
        if split is None or size == 1:
            return whole
        return torch.cat([piece.chunk(size, split)[rank] for piece in whole.split(self._pieces(whole, arch))])

    def whole(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        """Whole Hugging Face tensors, from the shards of all tensor parallel ranks in order. With one shard, views if possible.

        Of stacked tensors the expert's shares.
        """
        split = self.part.split
        if split is None or len(shards) == 1:
            full = shards[0]
        elif self.part.form in PAIRS:
            cut = [shard.chunk(2) for shard in shards]
            pair = [torch.cat([half[i] for half in cut], split) for i in range(2)]
            if self.part.form == "pair":
                return pair
            full = torch.cat(pair)
        else:
            pieces = [size // len(shards) for size in self._pieces(shards[0], arch, len(shards))]
            by_piece = zip(*(shard.split(pieces) for shard in shards), strict=True)
            full = torch.cat([torch.cat(each, split) for each in by_piece])
        if self.vocabulary:
            full = full[: arch.vocab]
        if self.part.stacked:
            return [self.part.to_stack(full)]
        return _unfused(self.part, full, arch)

    def _pieces(self, parameter: Tensor, arch: Architecture, shards: int = 1) -> list[int]:
        """Rows of the whole parameter's pieces that are cut each by itself. parameter: it, or one of so many shards."""
        if not self.part.pieces:
            return [shards * parameter.shape[0]]
        assert arch.delta is not None
        sizes = arch.delta.sizes(arch.delta.layers[0])
        return [sizes[size] for size in self.part.pieces.values()]


def lookup(name: str, arch: Architecture, *, layer_offset: int, expert_offset: int) -> Mapping:
    """The mapping of a megatron parameter. Numbers in the name count from the rank's first layer and expert."""
    for pattern, part in _patterns(arch.family):
        match = pattern.fullmatch(name)
        if not match or not arch.has(part):
            continue
        first = {"layer": layer_offset, "expert": expert_offset}
        numbers = {key: int(text) + first[key] for key, text in match.groupdict().items()}
        names = tuple(text.format(**numbers) for text in part.tensors)
        if arch.tied and names == (HEAD,):
            names = (family_named(arch.family).embedding,)
        return Mapping(part, names, numbers.get("expert", 0))
    raise AssertionError(f"no part of family {arch.family} is megatron's parameter {name}")


@cache
def _patterns(family: str) -> list[tuple[re.Pattern[str], ModelPart]]:
    """What the parameters of each part are called."""

    def pattern(parameter: str) -> str:
        return re.sub(r"\\\{(layer|expert)\\\}", r"(?P<\1>\\d+)", re.escape(parameter))

    return [(re.compile(pattern(part.parameter)), part) for part in family_named(family).parts]


def _fused(part: ModelPart, tensors: Sequence[Tensor], arch: Architecture) -> Tensor:
    if part.form in ("one", "halves", "turns"):
        return tensors[0]
    if part.form in ("pair", "joined"):
        return torch.cat(list(tensors))
    if part.form == "key_heads":
        assert arch.delta is not None
        return torch.cat(list(tensors))[arch.delta.rows_by_key_head()]
    # by group: its query heads and their gates if they have any, then its key head, then its value head
    q, k, v = (t.reshape(arch.kv_heads, -1, arch.head_dim, *t.shape[1:]) for t in tensors)
    if part.form == "gated_heads":
        q = torch.cat([q[:, ::2], q[:, 1::2]], dim=1)
    return torch.cat([q, k, v], dim=1).reshape(-1, *tensors[0].shape[1:])


def _unfused(part: ModelPart, tensor: Tensor, arch: Architecture) -> list[Tensor]:
    if part.form in ("one", "halves", "turns"):
        return [tensor]
    if part.form == "pair":
        return list(tensor.chunk(2))
    if part.form in ("key_heads", "joined"):
        assert arch.delta is not None
        if part.form == "key_heads":
            tensor = tensor[torch.tensor(arch.delta.rows_by_key_head(), device=tensor.device).argsort()]
        sizes = arch.delta.sizes(arch.delta.layers[0])
        return list(tensor.split([sizes[shape[0]] for shape in part.tensors.values()]))
    per_group, rest = arch.heads // arch.kv_heads, tensor.shape[1:]
    if part.form == "gated_heads":
        grouped = tensor.reshape(arch.kv_heads, 2 * per_group + 2, arch.head_dim, *rest)
        q, gate, k, v = grouped.split([per_group, per_group, 1, 1], dim=1)
        return [piece.reshape(-1, *rest) for piece in (torch.stack([q, gate], dim=2), k, v)]
    grouped = tensor.reshape(arch.kv_heads, per_group + 2, arch.head_dim, *rest)
    return [piece.reshape(-1, *rest) for piece in grouped.split([per_group, 1, 1], dim=1)]


def _pad(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return tensor if not missing else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
