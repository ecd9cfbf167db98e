"""The values of a checkpoint folder's tensors, read one at a time: by the trainer, the embedded engine and conversion.

Owns that a tensor is read when it is asked for, and no other with it. `tensors.py` decides which tensors a folder must hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.architecture import Architecture
from millrace.core.families.config_file import WHOLE
from millrace.core.families.tensors import kept_tensors, weight_tensors


class FolderTensors:
    """The tensors of a Hugging Face folder, by their names there. `stored`: of the model; `kept`: those that no step changes.

    Raises ConfigError if they do not fit the model, or some are missing. `field`: the setting that named the folder.
    """

    def __init__(self, folder: str, arch: Architecture, field: str = "model.path") -> None:
        self.stored = weight_tensors(folder, arch, field)
        self.kept = kept_tensors(folder, arch, field)
        self._folder = Path(folder)
        self._where = f"{field} = {folder}"
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor of the folder. Raises ConfigError if its file cannot be read."""
        file = (self.stored.get(name) or self.kept[name]).file
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._folder / file, "pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} cannot be read: {error}", where=self._where, remedy=remedy_of(error, WHOLE)
            ) from error
        return tensor
