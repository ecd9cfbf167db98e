"""The values of a checkpoint folder's tensors, read one at a time: by the trainer, the embedded engine and conversion.

Owns that a tensor is read when it is asked for, and no other with it, and that a quantised weight is made of its parts then. `tensors.py` decides which tensors a folder must hold.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.architecture import Architecture
from millrace.core.families.config_file import WHOLE
from millrace.core.families.tensors import NAMES, QuantisedTensor, StoredTensor, kept_tensors, weight_tensors

EVERY = slice(None)
# with those of quantised weights' parts
TYPES = {name: getattr(torch, kind) for name, kind in NAMES.items()} | {
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


class FolderTensors:
    """The tensors of a Hugging Face folder, by their names there. `stored`: of the model; `kept`: those that no step changes.

    Raises ConfigError if they do not fit the model, or some are missing. `field`: the setting that named the folder. mapped: tensors
    are views of files in memory, which readers of the same files share; otherwise each is a copy, which a reader can give up.
    whole: False for a folder of which only `kept` matters.
    """

    def __init__(
        self,
        folder: str,
        arch: Architecture,
        field: str = "model.path",
        *,
        mapped: bool = True,
        whole: bool = True,
    ) -> None:
        self.stored = weight_tensors(folder, arch, field) if whole else {}
        self.kept = kept_tensors(folder, arch, field)
        self._folder = Path(folder)
        self._mapped = mapped
        self._where = f"{field} = {folder}"
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor of the folder. Raises ConfigError if its file cannot be read."""
        return self.rows(name)

    def type_of(self, name: str) -> str:
        """The type of a tensor as it is read: float32, float16 or bfloat16."""
        return NAMES[(self.stored.get(name) or self.kept[name]).dtype]

    def rows(self, name: str, rows: slice = EVERY) -> Tensor:
        """A tensor of the folder, or these rows of its first dimension. Raises ConfigError if its file cannot be read."""
        stored = self.stored.get(name) or self.kept[name]
        try:
            return self._made(name, stored, rows)
        except (OSError, EOFError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"{stored.file} cannot be read: {error}", where=self._where, remedy=remedy_of(error, WHOLE)
            ) from error

    def expert(self, name: str, number: int) -> Tensor:
        """One expert's share of a tensor that holds those of all experts, which come first in its shape."""
        return self.rows(name, slice(number, number + 1))[0]

    def _made(self, name: str, stored: StoredTensor, rows: slice) -> Tensor:
        if isinstance(stored, QuantisedTensor):
            parts = stored.parts

            def read(part: str, some: slice) -> Tensor:
                return self._made(part, parts[part], some)

            made: Tensor = stored.quantisation.values(name, stored.shape, rows, read)
            return made
        return self._view(name, stored.file)[rows] if self._mapped else self._copy(stored, rows)

    def _view(self, name: str, file: str) -> Tensor:
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, "pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor

    def _copy(self, stored: StoredTensor, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(stored.shape[0])
        row = (stored.end - stored.start) // stored.shape[0]
        buffer = bytearray(row * (stop - start))
        with (self._folder / stored.file).open("rb") as file:
            file.seek(stored.start + row * start)
            if file.readinto(buffer) < len(buffer):
                raise EOFError("it ends too early")
        return torch.frombuffer(buffer, dtype=TYPES[stored.dtype]).reshape(-1, *stored.shape[1:])
