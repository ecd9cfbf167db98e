"""The folder of an export: on a disk, where ranks share it until it is whole, or in any storage, where each uploads its files.

Owns that a reader never sees a half-written export. Knows nothing of how tensors are gathered.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.storage.store import split_url
from millrace.core.contracts.task_records import FileRecord
from millrace.core.families.weight_files import INDEX


@contextlib.contextmanager
def in_place(directory: str) -> Iterator[Path]:
    """A new folder that ranks write to, renamed to `directory` at the end. All ranks must enter it."""
    target = Path(directory)
    aside = target.with_name(f".aside-{target.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    yield aside
    if dist.get_rank() == 0:
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
    dist.barrier()


def uploaded(url: str, write: Callable[[Path], None]) -> list[FileRecord]:
    """What this rank writes to a folder on its node's disk, uploaded to `url`; the records of the files, relative to the folder."""
    store, name = split_url(url)
    with temporary_folder("millrace-export") as local:
        write(Path(local))
        entries = store.upload_dir(local, name)
    files = [entry.model_copy(update={"path": entry.path.removeprefix(f"{name}/")}) for entry in entries]
    return [file.record() for file in files]


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a rank's share of a model's tensors, which are on the host; rank 0 returns after the others have written theirs.

    All ranks must call it.
    """
    file = f"model-{dist.get_rank():05d}.safetensors"
    if tensors:
        save_file(dict(tensors), folder / file, metadata={"format": "pt"})
    files_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(files_of_ranks, (file, {name: tensor.nbytes for name, tensor in tensors.items()}))
    if dist.get_rank() == 0:
        _finish(folder, files_of_ranks)


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
