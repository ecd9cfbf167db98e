"""A folder of adapters in PEFT's form: adapter_config.json and adapter_model.safetensors, as the trainer, conversion and the embedded engine read it.

Owns the names in it, and that a folder is read whole or refused: what its settings may say, and which tensors it may hold. Others
may name the folder, so nothing of it is opened that is no regular file, and no tensor is read before all names and shapes are known to fit.
"""

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.adapters import CONFIG, DOWN, FUSED, FUSED_PATTERN, FUSED_RANKS, WEIGHTS, Matrix

PREFIX = "base_model.model."  # of the names of tensors
WHOLE = "name a folder that PEFT or an export has written, with adapters of the same matrices and rank"
LARGEST_CONFIG = 2**23  # bytes; each expert may have a name
LARGEST = 2**31  # rank and alpha
TYPES = ("F64", "F32", "F16", "BF16")
PLAIN = {  # settings under which an adapter is a pair with one rank and one factor
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
}


class AdapterSettings(NamedTuple):
    """What adapter_config.json says. base: folder or name of the model that the adapters belong to; empty if it names none."""

    rank: int
    alpha: float
    base: str

    @property
    def scale(self) -> float:
        """The factor of what a pair adds."""
        return self.alpha / self.rank


def tensor_names(matrix: str) -> tuple[str, str]:
    """The names of A and B of a matrix."""
    return f"{PREFIX}{matrix}.lora_A.weight", f"{PREFIX}{matrix}.lora_B.weight"


def read_config(folder: Path, field: str) -> AdapterSettings:
    """adapter_config.json of a PEFT folder. field: the setting that named the folder, for messages.

    Raises ConfigError if it is not there, or describes more than pairs with one rank and one factor.
    """
    where = f"{field} = {folder}"
    try:
        with _regular(folder / CONFIG, LARGEST_CONFIG).open(encoding="utf-8") as file:
            settings: Any = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{CONFIG} cannot be read: {error}"
        raise ConfigError(reason, where=where, remedy=remedy_of(error, WHOLE)) from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise ConfigError(f"{CONFIG} describes no LoRA adapters", where=where, remedy=WHOLE)
    plain = {**PLAIN, **_allowed_patterns(settings)}
    for name, value in plain.items():
        if settings.get(name, value) not in (value, None):
            reason = f"{CONFIG}: {name} = {settings[name]!r} is not supported"
            raise ConfigError(reason, where=where, remedy=WHOLE)
    parameters = settings.get("target_parameters")
    if parameters and not all(_has_pairs(name) for name in _listed(parameters)):
        reason = f"{CONFIG}: target_parameters = {parameters!r} is not supported"
        raise ConfigError(reason, where=where, remedy=WHOLE)
    rank: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= LARGEST:
        raise ConfigError(f"{CONFIG}: r = {rank!r} is no rank", where=where, remedy=WHOLE)
    if type(alpha) not in (int, float) or not 0 < alpha <= LARGEST:
        raise ConfigError(f"{CONFIG}: lora_alpha = {alpha!r} is no factor", where=where, remedy=WHOLE)
    base = settings.get("base_model_name_or_path")
    return AdapterSettings(rank, alpha, base if isinstance(base, str) else "")


def stored_pairs(
    folder: Path, matrices: Iterable[Matrix], rank: int, field: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs of a PEFT folder, A [rank, in] and B [out, rank] by the names of their matrices, all of which are among these.

    Raises ConfigError naming the first tensor without its other half, of another shape or type, or of no matrix.
    """
    where = f"{field} = {folder}"
    try:
        with safe_open(_regular(folder / WEIGHTS), "pt") as file:
            left = set(file.keys())
            pairs = {}
            for matrix in matrices:
                names = tensor_names(matrix.name)
                if left.isdisjoint(names):
                    continue
                for name, shape in zip(names, ((rank, matrix.inputs), (matrix.outputs, rank)), strict=True):
                    problem = f"is missing, and {list(shape)} is wanted"
                    if name in left:
                        stored = file.get_slice(name)
                        problem = _problem(stored.get_shape(), stored.get_dtype(), shape)
                    if problem:
                        raise ConfigError(f"tensor {name} in {WEIGHTS} {problem}", where=where, remedy=WHOLE)
                left -= set(names)
                pairs[matrix.name] = names
            if left:
                reason = f"tensor {min(left)} in {WEIGHTS} is of no matrix that has an adapter here"
                raise ConfigError(reason, where=where, remedy=WHOLE)
            return {matrix: (file.get_tensor(a), file.get_tensor(b)) for matrix, (a, b) in pairs.items()}
    except (OSError, ValueError, SafetensorError) as error:
        reason = f"{WEIGHTS} cannot be read: {error}"
        raise ConfigError(reason, where=where, remedy=remedy_of(error, WHOLE)) from error


def fused_patterns(rank: int, alpha: float) -> dict[str, Any]:
    """What PEFT needs beside FUSED: the pairs of gate and up projections of an expert are one pair of twice the rank."""
    return {
        "rank_pattern": {FUSED_PATTERN: FUSED_RANKS * rank},
        "alpha_pattern": {FUSED_PATTERN: FUSED_RANKS * alpha},
    }


def _allowed_patterns(settings: dict[str, Any]) -> dict[str, Any]:
    """The patterns that a folder with FUSED among its parameters may have; with them each matrix still has one rank and one factor."""
    rank: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha")
    fused = FUSED in _listed(settings.get("target_parameters"))
    return fused_patterns(rank, alpha) if fused and type(rank) is int and type(alpha) in (int, float) else {}


def _has_pairs(parameter: object) -> bool:
    """Whether a parameter's adapters have the names of a module's: a linear layer's have, and here also what holds all experts."""
    return isinstance(parameter, str) and (parameter.endswith("_proj.weight") or parameter in (FUSED, DOWN))


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _problem(shape: list[int], dtype: str, wanted: tuple[int, int]) -> str:
    if tuple(shape) != wanted:
        return f"has shape {shape}, and {list(wanted)} is wanted"
    return "" if dtype in TYPES else f"is of type {dtype}, and one of {', '.join(TYPES)} is wanted"


def _regular(path: Path, largest: int | None = None) -> Path:
    """The path. Raises ValueError if no regular file is there, whose reading could wait or never end, or a larger one."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if largest is not None and found.st_size > largest:
        raise ValueError(f"it has {found.st_size} bytes, and {largest} are allowed")
    return path
