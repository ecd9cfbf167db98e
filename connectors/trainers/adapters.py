"""Which parameters train: all of a model's, or adapters beside it; and adapters as a folder in PEFT's form.

Owns the first values of adapters and the files of a PEFT folder. Knows no trainer: how a pair is cut over ranks is the trainer's.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module, Parameter

from millrace.core.config.trainer import Lora
from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.adapters import Matrix, target_modules, targeted
from millrace.core.families.architecture import Architecture
from millrace.core.plain_text import json_text

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
WHOLE = "name a folder that PEFT or an export has written, with adapters of the same matrices and rank"
SEED_BYTES = 7
PREFIX = "base_model.model."  # of the names in a PEFT folder
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


def write_peft(folder: Path, pairs: Pairs, lora: Lora, arch: Architecture, base: str) -> None:
    """Write a PEFT folder. base: the folder or name of the model that the adapters belong to."""
    tensors = {
        f"{PREFIX}{name}.lora_{side}.weight": tensor.contiguous()
        for name, pair in pairs.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": target_modules(arch, lora.targets),
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json_text(settings, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path, field: str) -> dict[str, Any]:
    """adapter_config.json of a PEFT folder. field: the setting that named the folder, for messages.

    Raises ConfigError if it is not there, or describes more than pairs with one rank and one factor.
    """
    where = f"{field} = {folder}"
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = f"{CONFIG} cannot be read: {error}"
        raise ConfigError(reason, where=where, remedy=remedy_of(error, WHOLE)) from error
    usual = {
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "target_parameters": None,
    }
    for name, value in usual.items():
        if settings.get(name, value) not in (value, None):
            reason = f"{CONFIG}: {name} = {settings[name]!r} is not supported"
            raise ConfigError(reason, where=where, remedy=WHOLE)
    if settings.get("peft_type") != "LORA" or not {"r", "lora_alpha"} <= settings.keys():
        raise ConfigError(f"{CONFIG} describes no LoRA adapters", where=where, remedy=WHOLE)
    return settings


def stored_pairs(
    folder: Path, matrices: Iterable[Matrix], rank: int, field: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs of a PEFT folder by the names of their matrices, all of which are among these.

    Raises ConfigError naming the first tensor without its other half, of another shape, or of no matrix.
    """
    where = f"{field} = {folder}"
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        reason = f"{WEIGHTS} cannot be read: {error}"
        raise ConfigError(reason, where=where, remedy=remedy_of(error, WHOLE)) from error
    pairs = {}
    for matrix in matrices:
        shapes = {"A": (rank, matrix.inputs), "B": (matrix.outputs, rank)}
        names = {side: f"{PREFIX}{matrix.name}.lora_{side}.weight" for side in shapes}
        pair = [stored.pop(name) for name in names.values() if name in stored]
        if not pair:
            continue
        if len(pair) == 1:
            raise ConfigError(f"{matrix.name} has one of A and B in {WEIGHTS}", where=where, remedy=WHOLE)
        for tensor, (side, shape) in zip(pair, shapes.items(), strict=True):
            if tuple(tensor.shape) != shape:
                reason = f"tensor {names[side]} has shape {list(tensor.shape)}, and {list(shape)} is wanted"
                raise ConfigError(reason, where=where, remedy=WHOLE)
        pairs[matrix.name] = pair[0], pair[1]
    if stored:
        reason = f"tensor {min(stored)} in {WEIGHTS} is of no matrix that has an adapter here"
        raise ConfigError(reason, where=where, remedy=WHOLE)
    return pairs


def read_peft(folder: Path, lora: Lora, arch: Architecture, field: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs that a run with these settings starts from. Raises ConfigError if the folder has others, or not all of them."""
    settings = read_config(folder, field)
    for name, value, theirs in (("rank", lora.rank, "r"), ("alpha", lora.alpha, "lora_alpha")):
        if settings[theirs] != value:
            raise ConfigError(
                f"the adapters of {field} have {theirs} = {settings[theirs]}",
                where=f"trainer.lora.{name} = {value:g}",
                remedy=f"set it to {settings[theirs]}",
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
