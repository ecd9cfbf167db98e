"""Which parameters train: all of a model's, or adapters beside it; and adapters as a folder in PEFT's form.

Owns the first values of adapters, and what a trainer writes to a PEFT folder and takes of one. Knows no trainer: how a pair is cut
over ranks is the trainer's. Knows no form of files: `core.families.peft_folder` does.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from millrace.core.config.trainer import Lora
from millrace.core.errors import ConfigError
from millrace.core.families.adapters import CONFIG, WEIGHTS, Matrix, peft_targets, targeted
from millrace.core.families.architecture import Architecture
from millrace.core.families.peft_folder import fused_patterns, read_config, stored_pairs, tensor_names
from millrace.core.families.tensors import STORED
from millrace.core.families.weight_files import file_start
from millrace.core.plain_text import json_text

SEED_BYTES = 7
WRITERS, CHUNK = 4, 2**24  # to shared memory, one thread writes slower than it could be read
Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""A [rank, in] and B [out, rank] of each matrix, by its name."""


def trained(model: Module) -> Iterator[tuple[str, Parameter]]:
    """Names and parameters that steps change, checkpoints hold, and a reference needs a copy of."""
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)


def first_pair(matrix: Matrix, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """The values before the first step, fp32: A uniform within 1 / sqrt(in), as PEFT draws it, and B zero, so that nothing is added.

    They follow from the matrix's name and the run's seed, and so are the same in each layout.
    """
    digest = hashlib.sha256(f"{seed}/{matrix.name}".encode()).digest()
    draws = torch.Generator().manual_seed(int.from_bytes(digest[:SEED_BYTES], "big"))
    bound = 1 / math.sqrt(matrix.inputs)
    a = torch.rand(rank, matrix.inputs, generator=draws) * 2 * bound - bound
    return a, torch.zeros(matrix.outputs, rank)


@dataclass(frozen=True, eq=False)
class FlatPairs:
    """Pairs one after the other in one buffer, so that they are copied and written as one. tensors: name and shape of each, in order."""

    tensors: Sequence[tuple[str, tuple[int, ...]]]
    values: Tensor

    @classmethod
    def of(cls, pairs: Pairs) -> Self:
        """Copy pairs of one type into a buffer, on their device."""
        named = {
            stored: tensor
            for name, pair in pairs.items()
            for stored, tensor in zip(tensor_names(name), pair, strict=True)
        }
        ordered = sorted(named.items())
        values = torch.cat([tensor.reshape(-1) for _, tensor in ordered])
        return cls([(name, tuple(tensor.shape)) for name, tensor in ordered], values)

    def on_host(self) -> Self:
        """The same in the host's memory, which a GPU copies to at once if it is pinned."""
        if self.values.device.type == "cpu":
            return self
        host = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
        return replace(self, values=host.copy_(self.values))


def write_peft(folder: Path, pairs: FlatPairs, lora: Lora, arch: Architecture, base: str) -> None:
    """Write a PEFT folder of pairs on the host. base: the folder or name of the model that the adapters belong to."""
    _write_tensors(folder / WEIGHTS, pairs)
    names = peft_targets(arch, lora.targets)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": names.modules,
        "modules_to_save": None,
        "inference_mode": True,
    }
    if names.parameters:
        settings["target_parameters"] = names.parameters
    if names.fused:
        settings |= fused_patterns(lora.rank, lora.alpha)
    (folder / CONFIG).write_text(json_text(settings, indent=2) + "\n", encoding="utf-8")


def _write_tensors(file: Path, pairs: FlatPairs) -> None:
    """Write a safetensors file: its header, and the values in large pieces, several at once."""
    size, stored = pairs.values.itemsize, STORED[str(pairs.values.dtype).removeprefix("torch.")]
    sized = [(name, stored, shape, size * math.prod(shape)) for name, shape in pairs.tensors]
    assert sum(each for *_, each in sized) == pairs.values.nbytes, "the shapes are those of the values"
    first, values = file_start(sized), pairs.values.view(torch.uint8).numpy().data
    with file.open("wb", buffering=0) as stream, ThreadPoolExecutor(WRITERS) as pool:
        stream.write(first)

        def write(at: int) -> None:
            left = values[at : at + CHUNK]
            while left:
                written = os.pwrite(stream.fileno(), left, len(first) + at)
                at, left = at + written, left[written:]

        for _ in pool.map(write, range(0, len(values), CHUNK)):
            pass


def read_peft(folder: Path, lora: Lora, arch: Architecture, field: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs that a run with these settings starts from. Raises ConfigError if the folder has others, or not all of them."""
    settings = read_config(folder, field)
    for name, value, stored, theirs in (
        ("rank", lora.rank, "r", settings.rank),
        ("alpha", lora.alpha, "lora_alpha", settings.alpha),
    ):
        if theirs != value:
            raise ConfigError(
                f"the adapters of {field} have {stored} = {theirs:g}",
                where=f"trainer.lora.{name} = {value:g}",
                remedy=f"set it to {theirs:g}",
            )
    wanted = targeted(arch, lora.targets)
    pairs = stored_pairs(folder, wanted, lora.rank, field)
    missing = next((matrix.name for matrix in wanted if matrix.name not in pairs), None)
    if missing is not None:
        raise ConfigError(
            f"the adapters of {field} have none of {missing}",
            where="trainer.lora.targets",
            remedy="match the matrices that have adapters there",
        )
    return pairs


def merged(weight: Tensor, pair: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """weight + scale · B A, added in fp32 or a wider type, then rounded to the weight's."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (part.to(wide) for part in pair)
    return torch.addmm(weight.to(wide), b, a, alpha=scale).to(weight.dtype)
