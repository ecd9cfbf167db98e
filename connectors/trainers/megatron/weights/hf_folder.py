"""Hugging Face checkpoint folders: read into this rank's shards, and written from them.

Owns that a reader never sees a half-written export. `core.families` reads tensors, and decides which ones a folder must hold.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file

from millrace.connectors.trainers.megatron.model.policy_model import RankModel, padded_vocab
from millrace.connectors.trainers.megatron.weights.export_folder import in_place, uploaded
from millrace.connectors.trainers.megatron.weights.hf_tensors import (
    hf_tensors,
    mapped_parameters,
    tensor_parallel_place,
    writes,
)
from millrace.core.contracts.task_records import FileRecord
from millrace.core.families.architecture import architecture
from millrace.core.families.folder_tensors import FolderTensors
from millrace.core.families.served_files import ALONE, Served, name_dtype, write_side_files
from millrace.core.families.tensors import INDEX, kept_tensors, stacked_names


def load_hf(model: RankModel, folder: str, hf: dict[str, Any], field: str = "model.path") -> None:
    """Copy a Hugging Face checkpoint into this rank's parameters.

    Raises ConfigError naming the first tensor of the folder that does not fit the model.
    """
    arch = architecture(hf)
    checkpoint = FolderTensors(folder, arch, field)
    vocab_rows = padded_vocab(arch.vocab, mpu.get_tensor_model_parallel_world_size())
    with torch.no_grad():
        for parameter, mapping in mapped_parameters(model, hf):
            rank, size = tensor_parallel_place(mapping)
            stacked, number = mapping.part.stacked, mapping.number
            tensors = [
                checkpoint.expert(name, number) if stacked else checkpoint[name] for name in mapping.names
            ]
            shard = mapping.local(tensors, arch, rank, size, vocab_rows)
            assert shard.shape == parameter.shape, f"{mapping.names[0]}: {shard.shape} for {parameter.shape}"
            parameter.copy_(shard)


def export_hf(
    model: RankModel, hf: dict[str, Any], source: str, directory: str, served: Served = ALONE
) -> None:
    """Write a Hugging Face folder: safetensors of every stage, index, config and tokenizer. It is renamed into place at the end.

    served: the run's settings for engines.
    All ranks must call it, and all writing ranks must see the same directory.
    """
    with in_place(directory) as aside:
        _write(model, hf, source, aside, served)


def upload_hf(
    model: RankModel, hf: dict[str, Any], source: str, url: str, served: Served = ALONE
) -> list[FileRecord]:
    """Write the same to a folder in any storage: every rank uploads its files, each whole or not at all, from its node's disk.

    All ranks must call it; the folder is complete when all have returned. Returns the records of this rank's files, relative to
    the folder.
    """
    return uploaded(url, lambda folder: _write(model, hf, source, folder, served))


def _write(model: RankModel, hf: dict[str, Any], source: str, folder: Path, served: Served) -> None:
    """Write this rank's part of a Hugging Face folder; rank 0 returns after the others have written theirs.

    Tensors have the type of the trainer's parameters, like the buckets for engines; config.json names it. Tensors that steps
    never change are copied as the source has them.
    """
    arch = architecture(hf)
    kept, stacked = kept_tensors(source, arch), stacked_names(arch)
    tensors = {
        name: tensor.to("cpu").clone().contiguous()
        for name, tensor in hf_tensors(model, hf)
        if writes(".mlp.experts." in name, stacked=name in stacked) and name not in kept
    }
    if kept and dist.get_rank() == 0:
        checkpoint = FolderTensors(source, arch)
        tensors |= {name: checkpoint[name] for name in kept}
    file = f"model-{dist.get_rank():05d}.safetensors"
    if tensors:
        save_file(tensors, folder / file, metadata={"format": "pt"})
    files_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files_of_ranks, (file, {name: tensor.nbytes for name, tensor in tensors.items()}))
    if dist.get_rank() == 0:
        _finish(folder, files_of_ranks)
        write_side_files(folder, source, served)
        name_dtype(folder / "config.json", str(model.config.params_dtype).removeprefix("torch."))


def _finish(folder: Path, files_of_ranks: list[Any]) -> None:
    """Rank 0's part: rename the file if there is just one, otherwise write the index of all files.

    A single file was written by rank 0, since that rank holds the embedding.
    """
    file_of_tensor = {name: file for file, sizes in files_of_ranks for name in sizes}
    total = sum(size for _, sizes in files_of_ranks for size in sizes.values())
    files = sorted(set(file_of_tensor.values()))
    if len(files) == 1:
        (folder / files[0]).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of_tensor.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
