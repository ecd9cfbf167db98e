"""Hugging Face checkpoint folders: read into this rank's shards, and written from them.

Owns that shards are read lazily, and that a reader never sees a half-written export.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from millrace.connectors.megatron.model.policy_model import PolicyModel, padded_vocab
from millrace.connectors.megatron.weights.hf_tensors import (
    hf_tensors,
    mapped_parameters,
    tensor_parallel_place,
    writes,
)
from millrace.connectors.storage.store import split_url
from millrace.core.architecture import architecture
from millrace.core.errors import ConfigError

SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "tokenizer*")
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a Hugging Face folder, read one at a time."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.exists():
            self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self.files = {}
            for path in sorted(self.folder.glob("*.safetensors")):
                with safe_open(path, "pt") as file:
                    self.files |= dict.fromkeys(file.keys(), path.name)
        if not self.files:
            raise ConfigError(
                "no safetensors",
                where=f"model.path = {folder}",
                remedy="convert the checkpoint to safetensors",
            )
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.files:
            raise ConfigError(
                f"tensor {name} is missing",
                where=f"model.path = {self.folder}",
                remedy="take a whole checkpoint of the family that config.json names",
            )
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


def load_hf(model: PolicyModel, folder: str, hf: dict[str, Any]) -> None:
    """Copy a Hugging Face checkpoint into this rank's parameters. Raises ConfigError naming a missing tensor."""
    checkpoint, arch = Checkpoint(folder), architecture(hf)
    vocab_rows = padded_vocab(arch.vocab, mpu.get_tensor_model_parallel_world_size())
    with torch.no_grad():
        for parameter, mapping in mapped_parameters(model, hf):
            rank, size = tensor_parallel_place(mapping)
            tensors = [checkpoint[name] for name in mapping.names]
            parameter.copy_(mapping.local(tensors, arch, rank, size, vocab_rows))


def export_hf(model: PolicyModel, hf: dict[str, Any], source: str, directory: str) -> dict[str, Any]:
    """Write a Hugging Face folder: safetensors of every stage, index, config and tokenizer. Renamed into place at the end.

    All ranks must call it, and all that write must see the same directory. Returns the bytes written by this rank.
    """
    target = Path(directory)
    aside = target.with_name(f".aside-{target.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    written = _write(model, hf, source, aside)
    if dist.get_rank() == 0:
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
    dist.barrier()
    return written


def upload_hf(model: PolicyModel, hf: dict[str, Any], source: str, url: str) -> dict[str, Any]:
    """Write the same to a folder of any storage: every rank uploads its files, each whole, from its node's disk.

    All ranks must call it; the folder is complete when all have returned. Returns the bytes written by this rank.
    """
    store, name = split_url(url)
    with tempfile.TemporaryDirectory(prefix="millrace-export-") as local:
        written = _write(model, hf, source, Path(local))
        store.upload_dir(local, name)
    return written


def _write(model: PolicyModel, hf: dict[str, Any], source: str, folder: Path) -> dict[str, Any]:
    """Write this rank's part of a Hugging Face folder; rank 0 returns after the others have written theirs."""
    dtype = getattr(torch, hf.get("dtype") or hf.get("torch_dtype") or "float32")
    tensors = {
        name: tensor.to("cpu", dtype).clone().contiguous()
        for name, tensor in hf_tensors(model, hf)
        if writes(".mlp.experts." in name)
    }
    file = f"model-{dist.get_rank():05d}.safetensors"
    if tensors:
        save_file(tensors, folder / file, metadata={"format": "pt"})
    files_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files_of_ranks, (file, {name: tensor.nbytes for name, tensor in tensors.items()}))
    if dist.get_rank() == 0:
        _finish(folder, source, files_of_ranks)
    return {"bytes": sum(tensor.nbytes for tensor in tensors.values())}


def _finish(folder: Path, source: str, files_of_ranks: list[Any]) -> None:
    """Rank 0's part: rename the only file, or write the index of them all; copy config and tokenizer.

    An only file is rank 0's own, since that rank holds the embedding.
    """
    file_of_tensor = {name: file for file, sizes in files_of_ranks for name in sizes}
    total = sum(size for _, sizes in files_of_ranks for size in sizes.values())
    files = sorted(set(file_of_tensor.values()))
    if len(files) == 1:
        (folder / files[0]).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of_tensor.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    for pattern in SIDE_FILES:
        for path in Path(source).glob(pattern):
            if path.name != INDEX and not (folder / path.name).exists():
                shutil.copy(path, folder / path.name)
