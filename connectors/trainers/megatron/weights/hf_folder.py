"""Hugging Face checkpoint folders: read into this rank's shards, and written from them.

`core.families` reads tensors, and decides which ones a folder must hold.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from millrace.connectors.trainers.megatron.model.policy_model import RankModel, padded_vocab
from millrace.connectors.trainers.megatron.weights.hf_tensors import (
    hf_tensors,
    mapped_parameters,
    tensor_parallel_place,
    writes,
)
from millrace.connectors.trainers.weights.export_folder import write_tensors
from millrace.core.families.architecture import architecture
from millrace.core.families.folder_tensors import FolderTensors
from millrace.core.families.served_files import ALONE, Served, name_dtype, write_side_files
from millrace.core.families.tensors import kept_tensors, stacked_names


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


def write_hf(model: RankModel, hf: dict[str, Any], source: str, folder: Path, served: Served = ALONE) -> None:
    """Write this rank's part of a Hugging Face folder; rank 0 returns after the others have written theirs. All ranks must call it.

    served: the run's settings for engines.
    Tensors have the type of the trainer's parameters, like the buckets for engines; config.json names it. Tensors that steps
    never change are copied as the source has them.
    """
    arch = architecture(hf)
    kept, stacked = kept_tensors(source, arch), stacked_names(arch)
    tensors = {
        name: tensor.to("cpu", copy=True).contiguous()
        for name, tensor in hf_tensors(model, hf)
        if writes(".mlp.experts." in name, stacked=name in stacked) and name not in kept
    }
    if kept and dist.get_rank() == 0:
        checkpoint = FolderTensors(source, arch)
        tensors |= {name: checkpoint[name] for name in kept}
    write_tensors(folder, tensors)
    if dist.get_rank() == 0:
        write_side_files(folder, source, served)
        name_dtype(folder / "config.json", str(model.config.params_dtype).removeprefix("torch."))
