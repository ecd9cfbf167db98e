"""The weights of a torch_dist checkpoint, read one parameter at a time, whatever layout of ranks wrote it.

Our trainer, Megatron-LM and slime write this format: tensors with global shapes, cut into chunks that lie in files. Needs neither
megatron-core nor process groups, and reads files as data: no name in them is imported or called. Optimizer states are left alone.
"""

import json
import math
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from millrace.connectors.trainers.checkpoint.stored_metadata import NAME, read_metadata
from millrace.connectors.trainers.megatron.conversion.parameters import Parameter, Place, Shape, parameters
from millrace.core.errors import ConfigError, CorruptFileError, MissingFileError, remedy_of
from millrace.core.families.architecture import Architecture
from millrace.core.families.folder_tensors import EVERY

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMMON, FORMAT_FILE = "common.pt", "metadata.json"
# states beside the policy's weights
OTHER_STATE = ("optimizer", "chained_", "critic.", "reference.", "rng_state", "rerun_state_machine")
NAMESPACE = "argparse.Namespace"
COPY = "take a whole copy of the checkpoint"
OTHER_FORMAT = "write it again with --ckpt-format torch_dist (Megatron-LM's --ckpt-convert-format does it)"
THIS_MODEL = "name the Hugging Face folder of this very model: --model FOLDER"
WRONG = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    EOFError,
    pickle.UnpicklingError,
    OSError,
)


def checkpoint_folder(path: Path) -> Path:
    """The folder with the table of contents: this one, or the iteration that Megatron-LM's tracker file names.

    Raises MissingFileError if there is none, ConfigError for another format.
    """
    folder = path
    if (path / TRACKER).is_file():
        named = (path / TRACKER).read_text(encoding="utf-8").strip()
        if named != RELEASE and not named.isdecimal():
            raise CorruptFileError(
                f"names neither an iteration nor {RELEASE}", where=str(path / TRACKER), remedy=COPY
            )
        folder = path / (RELEASE if named == RELEASE else f"iter_{int(named):07d}")
    if not folder.is_dir():
        raise MissingFileError("no such folder", where=str(folder), remedy="correct the path")
    backend = _backend(folder)
    if backend != "torch_dist" or any(folder.glob("mp_rank_*")):
        form = backend if backend != "torch_dist" else "torch"
        raise ConfigError(
            f"a checkpoint of the format {form}, not torch_dist", where=str(folder), remedy=OTHER_FORMAT
        )
    if not (folder / NAME).is_file():
        raise MissingFileError(
            f"holds neither config.json nor {NAME}: no Hugging Face folder, and no whole torch_dist checkpoint",
            where=str(folder),
            remedy=f"name the folder that holds one of them, or {TRACKER}",
        )
    return folder


def _backend(folder: Path) -> str:
    path = folder / FORMAT_FILE
    if not path.is_file():
        return "torch_dist"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["sharded_backend"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CorruptFileError(
            f"cannot be read: {error}", where=str(path), remedy=remedy_of(error, COPY)
        ) from error


class TorchDistWeights:
    """The model's parameters in a torch_dist folder.

    Raises ConfigError naming the first parameter that is missing, the first tensor that belongs to none, a wrong shape, or an argument
    of Megatron-LM by which the same tensors are another model.
    """

    def __init__(self, folder: Path, arch: Architecture) -> None:
        self.folder = folder
        files = {path.name for path in folder.iterdir()}
        self._metadata: Metadata = read_metadata(folder, files, COPY)
        self._stored = {
            (index.fqn, tuple(index.offset)): place
            for index, place in self._metadata.storage_data.items()
            if index.offset is not None
        }
        self._arch = arch
        _check_arguments(common_arguments(folder), arch, folder)
        every = parameters(arch)
        self._places = {parameter.name: self._place(parameter) for parameter in every}
        self._check_all_used()

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The type that a parameter is stored in."""
        dtype: torch.dtype = self._tensor(self._places[parameter.name].keys[0]).properties.dtype
        return dtype

    def read(self, parameter: Parameter, rows: slice) -> Tensor:
        """A parameter, or these rows of it. Raises CorruptFileError naming the file that cannot be read."""
        place = self._places[parameter.name]
        if len(place.keys) > 1:
            return torch.cat([self._region(key, place.index) for key in place.keys])
        # without the rows by which a layout pads the vocabulary
        start, stop, _ = rows.indices(parameter.shape[0])
        return self._region(place.keys[0], place.index, slice(start, stop))

    def _tensor(self, key: str) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        return found

    def _place(self, parameter: Parameter) -> Place:
        tensors = self._metadata.state_dict_metadata
        for place in parameter.places():
            if all(isinstance(tensors.get(key), TensorStorageMetadata) for key in place.keys):
                self._check_shape(parameter, place)
                return place
        raise ConfigError(
            f"it has no {parameter.name}, nor the same under another name",
            where=str(self.folder),
            remedy=THIS_MODEL,
        )

    def _check_shape(self, parameter: Parameter, place: Place) -> None:
        depth = len(place.index)
        sizes = [tuple(self._tensor(key).size) for key in place.keys]
        found = (*sizes[0][:depth], sum(size[depth] for size in sizes), *sizes[0][depth + 1 :])
        wanted = (*(getattr(self._arch, axis) for axis in place.axes), *parameter.shape)
        padded = parameter.mapping.vocabulary and found[0] > wanted[0]
        if found != wanted and not (padded and found[1:] == wanted[1:]):
            raise ConfigError(
                f"{' and '.join(place.keys)} has shape {[*found]}, the model has {[*wanted]}",
                where=str(self.folder),
                remedy=THIS_MODEL,
            )

    def _check_all_used(self) -> None:
        used = {key for place in self._places.values() for key in place.keys}
        for key, stored in self._metadata.state_dict_metadata.items():
            if (
                isinstance(stored, TensorStorageMetadata)
                and key not in used
                and not key.startswith(OTHER_STATE)
            ):
                raise ConfigError(
                    f"tensor {key} belongs to no parameter of this {self._arch.family} model",
                    where=str(self.folder),
                    remedy=THIS_MODEL,
                )

    def _region(self, key: str, index: tuple[int, ...], rows: slice = EVERY) -> Tensor:
        """A stored tensor at `index`, or these rows of it."""
        stored = self._tensor(key)
        depth = len(index)
        start, stop, _ = rows.indices(stored.size[depth])
        shape = (stop - start, *stored.size[depth + 1 :])
        whole, covered = None, 0
        for chunk in stored.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            inner = tuple(at - first for at, first in zip(index, offsets, strict=False))
            first, last = max(start, offsets[depth]), min(stop, offsets[depth] + sizes[depth])
            if first >= last or not all(0 <= at < size for at, size in zip(inner, sizes, strict=False)):
                continue
            # how many of the chunk's rows are before these
            before = 0
            for at, size in zip((*inner, first - offsets[depth]), sizes, strict=False):
                before = before * size + at
            read = self._read(key, offsets, sizes, slice(before, before + last - first), depth)
            if tuple(read.shape) == shape:
                return read
            whole = torch.empty(shape, dtype=read.dtype) if whole is None else whole
            columns = zip(offsets[depth + 1 :], sizes[depth + 1 :], strict=True)
            whole[(slice(first - start, last - start), *(slice(at, at + size) for at, size in columns))] = (
                read
            )
            covered += read.numel()
        if whole is None or covered != math.prod(shape):
            raise CorruptFileError(
                f"its chunks of {key} do not make the whole tensor",
                where=str(self.folder / NAME),
                remedy=COPY,
            )
        return whole

    def _read(self, key: str, offsets: Shape, sizes: Shape, rows: slice, depth: int) -> Tensor:
        """Rows of a chunk, which are its sizes after `depth` and all before together. Reads no other bytes of it."""
        place = self._stored.get((key, offsets))
        if place is None:
            raise CorruptFileError(f"it has no place of {key}", where=str(self.folder / NAME), remedy=COPY)
        path, row = self.folder / place.relative_path, sizes[depth + 1 :]
        try:
            with path.open("rb") as file:
                view: Any = _create_file_view(file, place.offset, place.length)
                with torch.serialization.skip_data():
                    chunk = torch.load(view, map_location="cpu", weights_only=True)
                if (
                    not isinstance(chunk, Tensor)
                    or chunk.numel() != math.prod(sizes)
                    or not chunk.is_contiguous()
                ):
                    raise ValueError("it is no tensor as the table of contents names it")
                width = math.prod(row) * chunk.itemsize
                buffer = bytearray(width * (rows.stop - rows.start))
                view.seek(0)
                archive: Any = torch._C.PyTorchFileReader(view)
                start = archive.get_record_offset("data/0")
                start += chunk.storage_offset() * chunk.itemsize + rows.start * width
                file.seek(place.offset + start)
                if start + len(buffer) > place.length or file.readinto(buffer) < len(buffer):
                    raise EOFError("it ends too early")
        except WRONG as error:
            reason = str(error).partition("\n")[0]
            raise CorruptFileError(
                f"{key} cannot be read: {reason}", where=str(path), remedy=remedy_of(error, COPY)
            ) from error
        return torch.frombuffer(buffer, dtype=chunk.dtype).reshape(-1, *row)


class _Inert:
    """What stands for a class or function that a file names: it keeps nothing, and nothing is imported or called."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def common_arguments(folder: Path) -> dict[str, Any]:
    """Megatron-LM's arguments in common.pt; empty without the file, or without arguments in it.

    Read as data: PyTorch's reader takes plain values, and each name that it does not know stands for an inert object. Raises
    CorruptFileError if even so it cannot be read.
    """
    path = folder / COMMON
    if not path.is_file():
        return {}
    try:
        names = list(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        stand_ins: list[Any] = [(type(name, (_Inert,), {}), name) for name in names if name != NAMESPACE]
        with torch.serialization.safe_globals([*stand_ins, (Namespace, NAMESPACE)]):
            common = torch.load(path, map_location="cpu", weights_only=True)
    except WRONG as error:
        raise CorruptFileError(
            f"it is not read: {str(error).partition(chr(10))[0]}",
            where=str(path),
            remedy=f"remove it: {COMMON} holds no weights, and without it nothing of Megatron-LM's arguments is checked",
        ) from error
    arguments = common.get("args") if isinstance(common, dict) else None
    return dict(vars(arguments)) if isinstance(arguments, Namespace) else {}


def model_arguments(arch: Architecture) -> dict[str, Any]:
    """Megatron-LM's arguments that shapes alone do not tell, or that its own loader asks for."""
    return {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "apply_layernorm_1p": False,
    }


def _check_arguments(arguments: dict[str, Any], arch: Architecture, folder: Path) -> None:
    """Refuse a checkpoint whose arguments say that the same tensors are another model."""
    for name, wanted in model_arguments(arch).items():
        found = arguments.get(name, wanted)
        if found != wanted and not isinstance(found, _Inert):
            raise ConfigError(
                f"{COMMON} says {name} = {found!r}, and the model has {wanted!r}",
                where=str(folder),
                remedy=THIS_MODEL,
            )
