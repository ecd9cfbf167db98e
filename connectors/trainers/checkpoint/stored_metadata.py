"""Reads checkpoints as data: names in stored files are looked up in a list, and no other name is imported or called.

PyTorch stores a checkpoint's table of contents as a pickle, and unpickles objects among the tensors. Owns the list, and the
allowed content of a table of contents. Knows nothing of models.
"""

import io
import pathlib
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import _get_layout

from millrace.core.errors import CorruptFileError

NAME = ".metadata"
LOAD_ANOTHER = "load another, or train from the start"
CLASSES = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
)
KNOWN: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__qualname__): each for each in CLASSES},
    # the path of the folder that it was written to; nothing reads it
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
    ("torch.serialization", "_get_layout"): _get_layout,
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype | torch.layout)
    },
}
WRONG = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows only the parts of a table of contents."""

    def find_class(self, module: str, name: str, /) -> Any:
        """The listed object of this name. Raises UnpicklingError for any other name, and never imports."""
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")
        return KNOWN[module, name]


def read_metadata(folder: Path, files: Collection[str], remedy: str = LOAD_ANOTHER) -> Metadata:
    """A checkpoint's table of contents. files: names of its files. remedy: of the errors.

    Raises CorruptFileError if it names anything that is not part of a checkpoint, or a file that is not in `files`.
    """
    path = folder / NAME
    try:
        read = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except WRONG as error:
        raise _refused(path, str(error), remedy) from error
    if not isinstance(read, Metadata) or not isinstance(read.storage_data, dict):
        raise _refused(path, "it is not a table of contents", remedy)
    for place in read.storage_data.values():
        name = place.relative_path if isinstance(place, filesystem._StorageInfo) else place
        if name not in files:
            raise _refused(path, f"it names {name!r}, which is not a file of the checkpoint", remedy)
    return read


def as_data(stored: io.BytesIO) -> io.BytesIO:
    """An object of a checkpoint, stored again, made only of tensors, plain values and types that megatron-core declared safe.

    Raises UnpicklingError if it holds anything else.
    """
    again = io.BytesIO()
    torch.save(torch.load(stored, map_location="cpu", weights_only=True), again)
    again.seek(0)
    return again


def _refused(path: Path, reason: str, remedy: str) -> CorruptFileError:
    return CorruptFileError(f"it is not read: {reason}", where=str(path), remedy=remedy)
