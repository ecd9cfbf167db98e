"""The two forms of a checkpoint that conversion writes: files of parameters one after the other, then the files that name them.

A file is written as it is read, a parameter at a time. Owns the content of files; knows nothing of what is written already.
"""

import io
import math
import pickle
import re
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from millrace.connectors.host.local_files import move
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.checkpoint.stored_metadata import NAME
from millrace.connectors.trainers.megatron.conversion.parameters import (
    FURTHER,
    Parameter,
)
from millrace.connectors.trainers.megatron.conversion.sources import DESCRIBED, Form
from millrace.connectors.trainers.megatron.conversion.stored_weights import (
    COMMON,
    FORMAT_FILE,
    RELEASE,
    TRACKER,
    model_arguments,
)
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import Architecture
from millrace.core.families.served_files import ALONE, name_dtype, write_side_files
from millrace.core.families.tensors import STORED
from millrace.core.families.weight_files import INDEX, ONLY_FILE, file_start
from millrace.core.plain_text import json_text

TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
FURTHER_FILE = f"{DESCRIBED}/{ONLY_FILE}"  # tensors that megatron's model does not have
STATES = "__0_states.distcp"
STATEFUL = re.compile(r"\.layers\..*\.(linear_\w+|in_proj|out_proj)\.weight$")
Read = Callable[[Parameter, slice], list[Tensor]]  # a parameter's tensors, or these rows of them


@dataclass(frozen=True)
class WeightFile:
    """A weight file: its parameters, and the lengths of the blocks that it was written in."""

    path: str
    parameters: Sequence[Parameter]
    lengths: Sequence[int]


class Target(Protocol):
    """A form that is written."""

    form: Form

    def file(self, number: int, of: int) -> str:
        """The path of a weight file, of so many."""

    def blocks(self, parameters: Sequence[Parameter], read: Read) -> Iterator[Any]:
        """The bytes of a file with these parameters."""

    def finish(self, folder: Path, files: Sequence[WeightFile], model: Path) -> None:
        """Write the files that name the weight files, and those beside them from the model's folder."""


class HuggingFaceTarget:
    """safetensors files with an index, or one file, beside config.json, tokenizer and the model's code."""

    form: Form = "hf"

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        self._dtypes = dtypes

    def file(self, number: int, of: int) -> str:
        """The path of a weight file, of so many."""
        return ONLY_FILE if of == 1 else f"model-{number + 1:05d}-of-{of:05d}.safetensors"

    def blocks(self, parameters: Sequence[Parameter], read: Read) -> Iterator[Any]:
        """The bytes of a safetensors file."""
        types = ((parameter, self._dtypes[parameter.name]) for parameter in parameters)
        yield file_start(
            (name, STORED[_name(dtype)], shape, dtype.itemsize * math.prod(shape))
            for parameter, dtype in types
            for name, shape in parameter.shapes.items()
        )
        for parameter in parameters:
            for rows in parameter.pieces(self._dtypes[parameter.name].itemsize):
                yield from map(_bytes_of, read(parameter, rows))

    def finish(self, folder: Path, files: Sequence[WeightFile], model: Path) -> None:
        """Write the index, and copy the files beside the weights. config.json then names the type that the weights have."""
        if len(files) > 1:
            total = sum(
                parameter.numbers * self._dtypes[parameter.name].itemsize
                for file in files
                for parameter in file.parameters
            )
            names = {
                name: file.path
                for file in files
                for parameter in file.parameters
                for name in parameter.shapes
            }
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            Store(str(folder)).write(INDEX, (json_text(index, indent=2) + "\n").encode())
        _describe(folder, model, next(iter(self._dtypes.values())))


class TorchDistTarget:
    """torch_dist as our trainer writes it, in the folders of Megatron-LM: `release`, and a file that names it.

    Each parameter is one chunk, so that every layout of ranks can load it.
    """

    form: Form = "torch_dist"

    def __init__(
        self, dtypes: Mapping[str, torch.dtype], arch: Architecture, every: Sequence[Parameter]
    ) -> None:
        """Raises ConfigError if a tensor, which all layers share, would have several types."""
        self._dtypes, self._arch = dtypes, arch
        of_key: dict[str, set[str]] = {}
        for parameter in every:
            for key in parameter.own_place(arch).keys:
                of_key.setdefault(key, set()).add(_name(dtypes[parameter.name]))
        for key, types in of_key.items():
            if len(types) > 1:
                raise ConfigError(
                    f"{key} would be of types {', '.join(sorted(types))}",
                    where="source",
                    remedy="say which type all weights shall have: --dtype bfloat16",
                )

    def file(self, number: int, of: int) -> str:
        """The path of a weight file."""
        return f"{RELEASE}/__0_{number}.distcp"

    def blocks(self, parameters: Sequence[Parameter], read: Read) -> Iterator[Any]:
        """The bytes of a file: chunks as PyTorch saves them, one after the other."""
        if parameters[0].name.startswith(FURTHER):
            yield from HuggingFaceTarget(self._dtypes).blocks(parameters, read)
            return
        for parameter in parameters:
            place = parameter.own_place(self._arch)
            for rows in parameter.pieces(self._dtypes[parameter.name].itemsize):
                whole = parameter.mapping.local(
                    read(parameter, rows), self._arch, 0, 1, rows.stop - rows.start
                )
                apart = parameter.own_rows(self._arch) if len(place.keys) > 1 else len(whole)
                for piece in whole.split(apart):
                    chunk = piece.reshape(*(1 for _ in place.index), *piece.shape)
                    # a view would be saved with all of its storage
                    alone = chunk.untyped_storage().nbytes() == chunk.nbytes
                    yield _saved(chunk.contiguous() if alone else chunk.clone())

    def finish(self, folder: Path, files: Sequence[WeightFile], model: Path) -> None:
        """Write the table of contents, the common file and, last, the file that names the folder."""
        metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta())
        metadata.version = CURRENT_DCP_VERSION
        files = [file for file in files if file.path != FURTHER_FILE]
        for file in files:
            lengths, start = iter(file.lengths), 0
            for parameter in file.parameters:
                for rows in parameter.pieces(self._dtypes[parameter.name].itemsize):
                    for number in range(len(parameter.own_place(self._arch).keys)):
                        length = next(lengths)
                        stored = _StorageInfo(Path(file.path).name, start, length)
                        self._add(metadata, parameter, number, rows, stored)
                        start += length
        store = Store(str(folder)).child(RELEASE)
        states = list(self._empty_states([parameter for file in files for parameter in file.parameters]))
        nothing = bytes(_saved([None]))
        for number, name in enumerate(states):
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            place = _StorageInfo(STATES, number * len(nothing), len(nothing))
            metadata.storage_data[MetadataIndex(name)] = place
        store.write(STATES, nothing * len(states))
        layout = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        arguments = Namespace(**model_arguments(self._arch), **layout)
        store.write(COMMON, bytes(_saved({"args": arguments, "iteration": 0, "checkpoint_version": 3.0})))
        store.write_json(FORMAT_FILE, TORCH_DIST)
        store.write(NAME, pickle.dumps(metadata))
        _describe(folder / DESCRIBED, model, next(iter(self._dtypes.values())))
        Store(str(folder)).write(TRACKER, f"{RELEASE}\n".encode())

    def _add(
        self, metadata: Metadata, parameter: Parameter, number: int, rows: slice, stored: _StorageInfo
    ) -> None:
        """Add a chunk. number: of its key among the place's, of which several hold all rows together."""
        place, own = parameter.own_place(self._arch), parameter.own_rows(self._arch)[number]
        key, rows = place.keys[number], rows if len(place.keys) == 1 else slice(0, own)
        offsets = torch.Size((*place.index, rows.start, *(0 for _ in parameter.shape[1:])))
        sizes = torch.Size((*(1 for _ in place.index), rows.stop - rows.start, *parameter.shape[1:]))
        if key not in metadata.state_dict_metadata:
            whole = (*(getattr(self._arch, axis) for axis in place.axes), own, *parameter.shape[1:])
            properties = TensorProperties(self._dtypes[parameter.name])
            metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(whole), [])
        tensor: Any = metadata.state_dict_metadata[key]
        tensor.chunks.append(ChunkStorageMetadata(offsets, sizes))
        metadata.storage_data[MetadataIndex(key, offsets, len(tensor.chunks) - 1)] = stored

    def _empty_states(self, every: Sequence[Parameter]) -> Iterator[str]:
        """Names of the states that megatron-core's linear layers ask for on loading, which are None without Transformer Engine."""
        for parameter in every:
            if not STATEFUL.search(parameter.part.parameter):
                continue
            place = parameter.own_place(self._arch)
            at = ".".join(map(str, place.index)) or "0"
            of = ".".join(str(getattr(self._arch, axis)) for axis in place.axes) or "1"
            yield f"{place.keys[0].partition('.weight')[0]}._extra_state/shard_{at}_{of}"


def _describe(folder: Path, model: Path, dtype: torch.dtype) -> None:
    """Put config.json, tokenizer and code of the model's folder there, each file whole."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".describing-", dir=folder) as aside:
        write_side_files(Path(aside), str(model), ALONE)
        name_dtype(Path(aside) / "config.json", _name(dtype))
        for path in Path(aside).iterdir():
            move(path, folder / path.name)


def _bytes_of(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.contiguous().view(torch.uint8).numpy()
    return memoryview(numbers).cast("B")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _saved(value: Any) -> memoryview:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()
