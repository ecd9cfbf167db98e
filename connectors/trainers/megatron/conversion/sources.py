"""The two forms of a checkpoint that conversion reads, as one: parameters by parameter, as Hugging Face tensors.

Owns which folder is of which form, and where the model's description is: its config.json and tokenizer.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from millrace.connectors.storage.files import in_threads, recorded
from millrace.connectors.storage.sampled_hash import sampled_hash
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.adapters import merged
from millrace.connectors.trainers.megatron.conversion.parameters import (
    FURTHER,
    Parameter,
    further,
    parameters,
)
from millrace.connectors.trainers.megatron.conversion.stored_weights import (
    TorchDistWeights,
    checkpoint_folder,
)
from millrace.core.errors import ConfigError
from millrace.core.families.adapters import WEIGHTS, holds_adapters, matrices
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.decoder import TOGETHER
from millrace.core.families.folder_tensors import FolderTensors
from millrace.core.families.peft_folder import read_config, stored_pairs
from millrace.core.families.registry import family_named
from millrace.core.families.tensors import may_hold_more, tensor_shapes

Form = Literal["hf", "torch_dist"]
DESCRIBED = "hugging_face"  # folder of config.json and tokenizer beside weights in torch_dist
MARKER = "complete.json"  # of our trainer's checkpoints: the hash of each file


class CheckpointSource(Protocol):
    """A checkpoint that is read. `model`: the folder of its config.json and tokenizer."""

    form: Form
    folder: Path
    model: Path
    arch: Architecture
    every: list[Parameter]

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The type of a parameter's tensors."""

    def tensors(self, parameter: Parameter, rows: slice) -> list[Tensor]:
        """The Hugging Face tensors that make a parameter, or these rows of them, which `Parameter.pieces` gives."""

    def state(self) -> str:
        """A hash that differs if other weights are there."""


class HuggingFaceSource:
    """A Hugging Face folder."""

    form: Form = "hf"

    def __init__(self, folder: Path) -> None:
        self.folder = self.model = folder
        self.arch = architecture(read_hf_config(str(folder), "source"))
        self._tensors = FolderTensors(str(folder), self.arch, "source", mapped=False)
        parts = family_named(self.arch.family).layer if self.arch.experts_together else ()
        self._together = {part.parameter: next(iter(part.tensors)) for part in parts if part.when == TOGETHER}
        self.every = [*parameters(self.arch), *_further(self._tensors, self.arch)]

    def part_experts(self) -> None:
        """Give the experts of a layer one by one, also if the folder stores them together: torch_dist keeps them apart."""
        self.arch = replace(self.arch, experts_together=False)
        self.every = [*parameters(self.arch), *_further(self._tensors, self.arch)]

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The type of a parameter's tensors."""
        dtypes = {self._tensors.type_of(name) for name in self._stored(parameter)}
        if len(dtypes) > 1:
            raise ConfigError(
                f"{' and '.join(parameter.shapes)} are of types {', '.join(sorted(dtypes))}, and make one parameter",
                where=f"source = {self.folder}",
                remedy="say which type all weights shall have: --dtype bfloat16",
            )
        dtype: torch.dtype = getattr(torch, dtypes.pop())
        return dtype

    def tensors(self, parameter: Parameter, rows: slice) -> list[Tensor]:
        """The Hugging Face tensors that make a parameter, or these rows of them."""
        stored = self._stored(parameter)
        if stored == list(parameter.shapes):
            return [self._tensors.rows(name, rows) for name in stored]
        share = self._tensors.expert(stored[0], parameter.expert)
        return [tensor[rows] for tensor in share.chunk(len(parameter.shapes))]

    def _stored(self, parameter: Parameter) -> list[str]:
        """Names of the stored tensors that hold a parameter: its own, or the one of all experts of its layer."""
        together = self._together.get(parameter.part.parameter)
        return [together.format(layer=parameter.layer)] if together else list(parameter.shapes)

    def state(self) -> str:
        """A hash of the folder's configuration, and of the sizes and times of its weight files."""
        return _state(self.folder, sorted(path.name for path in self.folder.glob("*.safetensors")))


class MergedSource(HuggingFaceSource):
    """A Hugging Face folder with what the adapters of a PEFT folder add to its weights."""

    def __init__(self, adapters: Path, model: Path | None, dtype: torch.dtype | None) -> None:
        """model: the folder of the weights; by default as adapter_config.json names it. dtype: of the weights that are added to."""
        settings = read_config(adapters, "source")
        base = model or Path(settings.base)
        if not (base / "config.json").is_file():
            raise ConfigError(
                f"{base} holds no config.json, and the adapters belong to a model",
                where=f"source = {adapters}",
                remedy="name the folder of the model that they were trained beside: --model FOLDER",
            )
        super().__init__(base)
        self.folder, self._dtype = adapters, dtype
        self._scale = settings.scale
        self._pairs = stored_pairs(adapters, matrices(self.arch), settings.rank, "source")

    def tensors(self, parameter: Parameter, rows: slice) -> list[Tensor]:
        """The Hugging Face tensors that make a parameter, or these rows of them."""
        found = []
        for name, tensor in zip(parameter.shapes, super().tensors(parameter, rows), strict=True):
            pair = self._pairs.get(name.removesuffix(".weight"))
            if pair is None:
                found.append(tensor)
                continue
            # a trainer adds to weights of its own type, which are rounded or widened before
            weight = tensor if self._dtype is None else tensor.to(self._dtype)
            found.append(merged(weight, (pair[0], pair[1][rows]), self._scale))
        return found

    def state(self) -> str:
        """A hash of what it is made of: the model's weights and the adapters."""
        of_base = _state(self.model, sorted(path.name for path in self.model.glob("*.safetensors")))
        return hashlib.sha256(f"{of_base}\n{sampled_hash(self.folder / WEIGHTS)}".encode()).hexdigest()


class TorchDistSource:
    """A torch_dist folder, or the folder of a tracker file above it. Files that our trainer wrote are checked by their hashes."""

    form: Form = "torch_dist"

    def __init__(self, path: Path, model: Path | None) -> None:
        self.folder = checkpoint_folder(path)
        described = path / DESCRIBED
        if model is None and not described.is_dir():
            raise ConfigError(
                "a torch_dist checkpoint has no config.json and no tokenizer",
                where=f"source = {path}",
                remedy="name the Hugging Face folder that the model came from: --model FOLDER",
            )
        self.model = model or described
        self.arch = replace(architecture(read_hf_config(str(self.model), "model")), experts_together=False)
        if (self.folder / MARKER).is_file():
            store = Store(str(self.folder))
            marker = store.read_sealed(MARKER)
            if "trainer" in marker:
                raise ConfigError(
                    f"it was saved with trainer.kind={marker['trainer']}",
                    where=f"source = {path}",
                    remedy="name an export of the run: its checkpoints hold the trainer's own form",
                )
            if "base" in marker:
                raise ConfigError(
                    "it holds adapters alone, without the weights beside them",
                    where=f"source = {path}",
                    remedy="merge an export of the run: millrace convert EXPORT FOLDER --merge",
                )
            files = recorded(marker["files"], store.url_of(MARKER))
            in_threads(store.verify, files)
        self._weights = TorchDistWeights(self.folder, self.arch)
        # megatron's model has none of the layers that predict further tokens
        has_more = may_hold_more(self.arch) and any(self.model.glob("*.safetensors"))
        self._more = (
            FolderTensors(str(self.model), self.arch, "model", mapped=False, whole=False)
            if has_more
            else None
        )
        self.every = [*parameters(self.arch), *(_further(self._more, self.arch) if self._more else [])]

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The type of a parameter's tensors."""
        if self._more and parameter.name.startswith(FURTHER):
            return getattr(torch, self._more.type_of(*parameter.shapes))  # type: ignore[no-any-return]
        return self._weights.dtype(parameter)

    def tensors(self, parameter: Parameter, rows: slice) -> list[Tensor]:
        """The Hugging Face tensors that make a parameter, or these rows of them."""
        if self._more and parameter.name.startswith(FURTHER):
            return [self._more.rows(name, rows) for name in parameter.shapes]
        return parameter.mapping.whole([self._weights.read(parameter, rows)], self.arch)

    def state(self) -> str:
        """A hash of the model's configuration, and of the sizes and times of the weight files."""
        files = sorted(path.name for path in self.folder.iterdir() if path.suffix == ".distcp")
        return _state(self.folder, [".metadata", *files], self.model)


def _further(tensors: FolderTensors, arch: Architecture) -> list[Parameter]:
    """The tensors of a folder that are of no parameter."""
    known = tensor_shapes(arch)
    return further({name: stored.shape for name, stored in tensors.kept.items() if name not in known})


def open_source(
    path: Path, model: Path | None = None, *, merge: bool = False, dtype: torch.dtype | None = None
) -> HuggingFaceSource | TorchDistSource:
    """The checkpoint at a path. model: the Hugging Face folder that describes a torch_dist checkpoint, or whose adapters are merged.

    merge: the path is a folder of adapters, which are added to weights of this dtype, by default as they are stored.

    Raises ConfigError or StorageError, naming the file and the remedy, before any weight is read.
    """
    if merge:
        return MergedSource(path, model, dtype)
    if holds_adapters(path):
        raise ConfigError(
            "it is a folder of adapters",
            where=f"source = {path}",
            remedy="add them to the weights that they belong to: --merge",
        )
    if (path / "config.json").is_file():
        return HuggingFaceSource(path)
    return TorchDistSource(path, model)


def _state(folder: Path, files: list[str], model: Path | None = None) -> str:
    digest = hashlib.sha256(((model or folder) / "config.json").read_bytes())
    for name in files:
        status = (folder / name).stat()
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
