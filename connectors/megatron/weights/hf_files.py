"""Weights between a Hugging Face checkpoint folder and this rank's shards. Both ways by the table of families.

Owns reading shards lazily and writing an export that no reader ever sees half-written.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from millrace.connectors.megatron.model.policy_model import PolicyModel, model_shape, padded_vocab
from millrace.connectors.megatron.weights.hf_mapping import Mapped, Shape, lookup
from millrace.connectors.storage.store import split_url
from millrace.core.architecture import expert_count
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
            raise ConfigError(f"model.path = {folder}: no safetensors; convert the checkpoint to safetensors")
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.files:
            raise ConfigError(
                f"model.path = {self.folder}: tensor {name} is missing; the checkpoint is not of this family"
            )
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


def mapped_parameters(model: PolicyModel, hf: dict[str, Any]) -> Iterator[tuple[torch.nn.Parameter, Mapped]]:
    """This rank's parameters with the Hugging Face tensors they belong to, in a fixed order."""
    offset = _layer_offset(model)
    experts = expert_count(hf) // mpu.get_expert_model_parallel_world_size()
    expert_offset = experts * mpu.get_expert_model_parallel_rank()
    tied = bool(hf.get("tie_word_embeddings", False))
    for name, parameter in model.named_parameters():
        if name.startswith("value_head."):
            continue  # the critic's own
        yield parameter, lookup(name, layer_offset=offset, expert_offset=expert_offset, tied=tied)


def load_hf(model: PolicyModel, folder: str, hf: dict[str, Any]) -> None:
    """Copy a Hugging Face checkpoint into this rank's parameters. Raises ConfigError naming a missing tensor."""
    checkpoint, shape = Checkpoint(folder), model_shape(hf)
    rows = padded_vocab(shape.vocab, mpu.get_tensor_model_parallel_world_size())
    with torch.no_grad():
        for parameter, mapped in mapped_parameters(model, hf):
            rank, size = _tensor_place(mapped)
            tensors = [checkpoint[name] for name in mapped.names]
            parameter.copy_(mapped.local(tensors, shape, rank, size, rows))


def hf_names(model: PolicyModel, hf: dict[str, Any], experts: bool | None = None) -> Iterator[str]:
    """Names of the Hugging Face tensors of this rank's stage, in order. `experts`: theirs alone, or the others' alone."""
    for _, mapped in _whole(model, hf, experts):
        yield from mapped.names


def hf_tensors(
    model: PolicyModel, hf: dict[str, Any], experts: bool | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole Hugging Face tensors of this rank's stage, one at a time; all tensor parallel ranks must iterate together."""
    shape: Shape = model_shape(hf)
    for parameter, mapped in _whole(model, hf, experts):
        _, size = _tensor_place(mapped)
        shards = [parameter.detach()]
        if size > 1 and mapped.rule.split is not None:
            group = (
                mpu.get_expert_tensor_parallel_group()
                if mapped.expert
                else mpu.get_tensor_model_parallel_group()
            )
            shards = [torch.empty_like(shards[0]) for _ in range(size)]
            dist.all_gather(shards, parameter.detach().contiguous(), group=group)
        yield from zip(mapped.names, mapped.whole(shards, shape), strict=True)


def _whole(
    model: PolicyModel, hf: dict[str, Any], experts: bool | None
) -> Iterator[tuple[torch.nn.Parameter, Mapped]]:
    """This rank's parameters, each Hugging Face tensor once."""
    seen: set[str] = set()
    for parameter, mapped in mapped_parameters(model, hf):
        if mapped.names[0] in seen or _shared_copy(model, parameter):
            continue
        seen.update(mapped.names)
        if experts is None or mapped.expert == experts:
            yield parameter, mapped


def export_hf(model: PolicyModel, hf: dict[str, Any], source: str, directory: str) -> dict[str, Any]:
    """Write a Hugging Face folder: safetensors of every stage, index, config and tokenizer; renamed into place last.

    All ranks must call it. Every writing rank must see the same directory. Returns bytes written by this rank.
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
    """Write the same to a folder of any storage, each file whole: every rank its own, by way of its node's disk.

    All ranks must call it; the folder is complete when all have returned. Returns bytes written by this rank.
    """
    store, name = split_url(url)
    with tempfile.TemporaryDirectory(prefix="millrace-export-") as own:
        written = _write(model, hf, source, Path(own))
        store.upload_dir(own, name)
    return written


def _write(model: PolicyModel, hf: dict[str, Any], source: str, folder: Path) -> dict[str, Any]:
    """Write this rank's part of a Hugging Face folder; rank 0 returns after the others have written theirs."""
    dtypes = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    dtype = getattr(torch, dtypes)
    mine = {
        name: tensor.to("cpu", dtype).clone().contiguous()
        for name, tensor in hf_tensors(model, hf)
        if writes(".mlp.experts." in name)
    }
    file = f"model-{dist.get_rank():05d}.safetensors"
    if mine:
        save_file(mine, folder / file, metadata={"format": "pt"})
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (file, {name: tensor.nbytes for name, tensor in mine.items()}))
    if dist.get_rank() == 0:
        _finish(folder, source, everywhere)
    return {"bytes": sum(tensor.nbytes for tensor in mine.values())}


def _finish(folder: Path, source: str, everywhere: list[Any]) -> None:
    """Rank 0's: name the only file (its own, since it holds the embedding) or list them all; config and tokenizer."""
    written = {name: file for file, sizes in everywhere for name in sizes}
    total = sum(size for _, sizes in everywhere for size in sizes.values())
    holders = sorted(set(written.values()))
    if len(holders) == 1:
        (folder / holders[0]).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(written.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    for pattern in SIDE_FILES:
        for path in Path(source).glob(pattern):
            if path.name != INDEX and not (folder / path.name).exists():
                shutil.copy(path, folder / path.name)


def writes(experts: bool) -> bool:
    """Whether this rank writes its experts' tensors, or its others: one replica does."""
    if experts:
        return bool(mpu.get_expert_data_parallel_rank() == 0 and mpu.get_expert_tensor_parallel_rank() == 0)
    return bool(
        mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _shared_copy(model: PolicyModel, parameter: Tensor) -> bool:
    """Whether a parameter is the last stage's copy of the first stage's embedding."""
    return bool(
        model.share_embeddings_and_output_weights
        and not model.pre_process
        and model.post_process
        and parameter is model.output_layer.weight
    )


def _tensor_place(mapped: Mapped) -> tuple[int, int]:
    if mapped.expert:
        return mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
    return mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()


def _layer_offset(model: PolicyModel) -> int:
    layers = model.decoder.layers
    return layers[0].layer_number - 1 if len(layers) else 0
