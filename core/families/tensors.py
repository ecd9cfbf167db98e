"""The tensors of a checkpoint folder: which ones a model has, and which ones its weight files hold.

Every tensor of the files belongs to the model, and every tensor of the model is in them once, with its shape and in a type
that can be read. Looks at the headers of safetensors files, not at the values. No torch.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.contracts.source_path import inside
from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.architecture import Architecture
from millrace.core.families.config_file import WHOLE
from millrace.core.families.decoder import HEAD, UNQUANTISED
from millrace.core.families.family import ModelPart
from millrace.core.families.quantised.kinds import DTYPE as MADE_IN
from millrace.core.families.quantised.kinds import Quantisation, quantisation_of
from millrace.core.families.registry import every_family, family_named
from millrace.core.families.weight_files import INDEX, ONLY_FILE

BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of the readable types
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STORED = {name: stored for stored, name in NAMES.items()}
LEFT_OVER = re.compile(
    r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq"
)  # computed from rope_theta
LARGEST_HEADER = 100 * 2**20
CHUNK = 2**24

FAMILY = "take a whole checkpoint of the family and sizes that config.json names"
LONE = f"leave {ONLY_FILE} alone in the folder, or files that an index names"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file, as the file's header has it. `start`, `end`: its bytes in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A weight that is made of several tensors of weight files; `dtype` is the type that it is made in."""

    parts: Mapping[str, StoredTensor]
    quantisation: Quantisation


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model, by its Hugging Face name."""
    family = family_named(arch.family)

    def stored(
        parts: Iterable[ModelPart], sizes: Mapping[str, int], layer: int = 0
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in parts:
            for expert in range(sizes["experts"] if part.of_experts and not part.stacked else 1):
                for name, shape in arch.shapes(part, sizes).items():
                    yield name.format(layer=layer, expert=expert), shape

    shapes = dict(stored(family.before, arch.sizes()))
    for layer in range(arch.layers):
        shapes |= dict(stored(family.layer, arch.sizes(layer), layer))
    shapes |= dict(stored(family.after, arch.sizes()))
    if arch.tied:
        del shapes[HEAD]
    return shapes


def stored_names(arch: Architecture, parameter: str, *, layer: int = 0, expert: int = 0) -> list[str]:
    """Hugging Face names of the tensors that make a parameter. parameter: the end of megatron's name, as in a family's part.

    Empty if the layer has no such parameter.
    """
    family = family_named(arch.family)
    parts = [(part, arch.sizes(layer)) for part in family.layer]
    parts += [(part, arch.sizes()) for part in (*family.before, *family.after)]
    return [
        name.format(layer=layer, expert=expert)
        for part, sizes in parts
        if part.parameter.endswith(f".{parameter}")
        for name in arch.shapes(part, sizes)
    ]


def weight_tensors(folder: str, arch: Architecture, field: str = "model.path") -> dict[str, StoredTensor]:
    """The place of each tensor of the model. `field`: the setting that named the folder.

    Raises ConfigError naming the first tensor that is missing, stored twice, of another shape or of a type that is not
    read, or that no parameter of the model takes; a stored output layer of a tied model must equal the embedding.
    """
    where = f"{field} = {folder}"
    stored = _model_tensors(Path(folder), where)
    shapes, embedding = tensor_shapes(arch), family_named(arch.family).embedding
    further = _of_further_layers(arch)
    for name, tensor in stored.items():
        known = shapes.get(name, shapes[embedding] if name == HEAD else None)
        if tensor.dtype not in BYTES and not LEFT_OVER.fullmatch(name):
            reason = f"tensor {name} in {tensor.file} is of type {tensor.dtype}, not of {', '.join(BYTES)}"
            raise ConfigError(reason, where=where, remedy=UNQUANTISED)
        if known is None and not LEFT_OVER.fullmatch(name) and not further.match(name):
            reason = f"tensor {name} in {tensor.file} belongs to no parameter of this {arch.family} model"
            raise ConfigError(reason, where=where, remedy=FAMILY)
        if known is not None and tensor.shape != known:
            reason = (
                f"tensor {name} in {tensor.file} has shape {list(tensor.shape)}, the model has {list(known)}"
            )
            raise ConfigError(reason, where=where, remedy=FAMILY)
    # without it a layer of the model itself, left out by a wrong number of layers, would pass for one after the last
    marks = {
        f"{found.group()}eh_proj.weight" for found in map(further.match, stored) if found and found.group(1)
    }
    for name in (*shapes, *sorted(marks)):
        if name not in stored:
            raise ConfigError(f"tensor {name} is missing", where=where, remedy=FAMILY)
    if arch.tied and HEAD in stored and not _equal(Path(folder), stored[HEAD], stored[embedding]):
        raise ConfigError(
            f"tie_word_embeddings is true, and {HEAD} in {stored[HEAD].file} is not {embedding}",
            where=where,
            remedy="set tie_word_embeddings to what the model was trained with",
        )
    return {name: stored[name] for name in shapes}


def stacked_names(arch: Architecture) -> list[str]:
    """Names of the tensors that hold all experts of a layer."""
    parts = [part for part in family_named(arch.family).layer if part.stacked and arch.has(part)]
    return [
        name.format(layer=layer) for layer in arch.expert_layers for part in parts for name in part.tensors
    ]


def kept_tensors(folder: str, arch: Architecture, field: str = "model.path") -> dict[str, StoredTensor]:
    """Tensors of a folder that no step changes: the routers' biases, and all that the model here does not have."""
    fixed = [part for part in family_named(arch.family).layer if not part.trained]
    if not fixed and not may_hold_more(arch):
        return {}
    names = {
        name.format(layer=layer) for part in fixed for layer in arch.expert_layers for name in part.tensors
    }
    further = _of_further_layers(arch)
    stored = _model_tensors(Path(folder), f"{field} = {folder}")
    return {name: tensor for name, tensor in stored.items() if name in names or further.match(name)}


def may_hold_more(arch: Architecture) -> bool:
    """Whether a folder may hold tensors that the model here does not have, and keeps."""
    return arch.further_layers > 0 or bool(family_named(arch.family).beside)


def _of_further_layers(arch: Architecture) -> re.Pattern[str]:
    """How names of tensors start that the model here does not have, also in layers after the last."""
    numbers = range(arch.layers, arch.layers + arch.further_layers)
    layers = rf"model\.layers\.({'|'.join(map(str, numbers)) or 'none'})\."
    return re.compile("|".join([layers, *map(re.escape, family_named(arch.family).beside)]))


def stored_type(folder: str) -> str | None:
    """The type of a folder's stored weights, taken from the embedding; None if no weights can be read."""
    try:
        stored = _stored_tensors(Path(folder), folder)
    except ConfigError:
        # `weight_tensors` gives the reason
        return None
    names = (family.embedding for family in every_family())
    embedding = next((stored[name] for name in names if name in stored), None)
    return NAMES.get(embedding.dtype) if embedding else None


def _model_tensors(folder: Path, where: str) -> dict[str, StoredTensor]:
    """Every tensor of the folder's model: from its weight files, of which some may make one quantised weight."""
    stored, quantisation = _stored_tensors(folder, where), _quantisation(folder)
    if quantisation is None:
        return stored
    by_weight: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        by_weight.setdefault(quantisation.weight_of(name), {})[name] = tensor
    made: dict[str, StoredTensor] = {}
    for name, parts in by_weight.items():
        if parts.keys() == {name} and parts[name].dtype in BYTES:
            made[name] = parts[name]
            continue
        headers = {part: (tensor.dtype, tensor.shape) for part, tensor in parts.items()}
        if problem := quantisation.problem(name, headers):
            raise ConfigError(problem, where=where, remedy=WHOLE)
        file, shape = next(iter(parts.values())).file, quantisation.shape(name, headers)
        made[name] = QuantisedTensor(file, MADE_IN, shape, 0, 0, parts, quantisation)
    if not any(isinstance(tensor, QuantisedTensor) for tensor in made.values()):
        reason = "config.json: quantization_config says how weights are quantised, and none of them is"
        raise ConfigError(reason, where=where, remedy=f"remove the key, or {WHOLE}")
    return made


def is_quantised(folder: str) -> bool:
    """Whether a folder's weights are stored quantised, in a way that is read."""
    return _quantisation(Path(folder)) is not None


def _quantisation(folder: Path) -> Quantisation | None:
    """How the folder's weights are quantised. `read_hf_config` refuses what is not read."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return quantisation_of(config.get("quantization_config"))


def _stored_tensors(folder: Path, where: str) -> dict[str, StoredTensor]:
    """Every tensor of the folder's weight files, sorted by name."""
    listed = _weight_map(folder, where)
    names = sorted(set(listed.values())) if listed else [ONLY_FILE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(f"its weights lack {some}", where=where, remedy="copy the whole checkpoint")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in names:
            reason = f"{path.name} lies beside the weights and is not part of them"
            raise ConfigError(reason, where=where, remedy=LONE)
    stored: dict[str, StoredTensor] = {}
    for file in names:
        for name, tensor in _header(folder / file, where).items():
            if name in stored:
                reason = f"tensor {name} is in {stored[name].file} and in {file}"
                raise ConfigError(reason, where=where, remedy=LONE)
            if listed and listed.get(name) != file:
                reason = f"tensor {name} is in {file}, which {INDEX} does not say"
                raise ConfigError(reason, where=where, remedy=WHOLE)
            stored[name] = tensor
    for name, file in listed.items():
        if name not in stored:
            raise ConfigError(f"tensor {name} is not in {file}", where=where, remedy=WHOLE)
    return dict(sorted(stored.items()))


def _weight_map(folder: Path, where: str) -> dict[str, str]:
    """The file of each tensor as the index has it; empty without an index."""
    if not (folder / INDEX).is_file():
        return {}
    try:
        listed: Any = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if not listed or not all(isinstance(file, str) for file in listed.values()):
            raise ValueError("weight_map is empty, or names no files")
        for file in sorted(set(listed.values())):
            inside(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"its {INDEX} cannot be read: {error}", where=where, remedy=remedy_of(error, WHOLE)
        ) from error
    return dict(listed)


def _header(path: Path, where: str) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LARGEST_HEADER:
                raise ValueError("no header of safetensors")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        first = 8 + length
        found = {
            name: StoredTensor(
                path.name,
                entry["dtype"],
                tuple(entry["shape"]),
                *(first + at for at in entry["data_offsets"]),
            )
            for name, entry in entries.items()
        }
        size, held = max((tensor.end for tensor in found.values()), default=first), path.stat().st_size
        if held != size:
            raise ValueError(f"it has {held} bytes, its header names {size}")
        for name, tensor in found.items():
            width = BYTES.get(tensor.dtype)
            if width and tensor.end - tensor.start != width * math.prod(tensor.shape):
                raise ValueError(f"the bytes of {name} do not fit its shape")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        reason = f"{path.name} is no whole safetensors file: {error}"
        raise ConfigError(reason, where=where, remedy=remedy_of(error, WHOLE)) from error
    return found


def _equal(folder: Path, one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same type and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or isinstance(one, QuantisedTensor):
        return False
    with (folder / one.file).open("rb") as left, (folder / other.file).open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        remaining = one.end - one.start
        while remaining:
            size = min(CHUNK, remaining)
            if left.read(size) != right.read(size):
                return False
            remaining -= size
    return True
