"""Conversion of a checkpoint between Hugging Face's form and torch_dist, a file at a time, and the comparison of the two.

Owns which files of the target are whole: `.conversion` there names each finished one with its hash, so that a conversion that
was killed goes on. Needs no GPU, no process group and no megatron-core; holds about one parameter in memory.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from millrace.connectors.host.local_files import NO_LOCKS, make_folder
from millrace.connectors.storage.files import FileEntry, in_threads, write_blocks
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.megatron.conversion.parameters import FURTHER, Parameter
from millrace.connectors.trainers.megatron.conversion.sources import (
    CheckpointSource,
    Form,
    HuggingFaceSource,
    open_source,
)
from millrace.connectors.trainers.megatron.conversion.targets import (
    FURTHER_FILE,
    HuggingFaceTarget,
    Target,
    TorchDistTarget,
    WeightFile,
)
from millrace.core.config.plan import size_text
from millrace.core.errors import ConfigError, CorruptFileError, StorageError
from millrace.core.families.tensors import NAMES, stacked_names

log = logging.getLogger(__name__)

DTYPES = {name: getattr(torch, name) for name in NAMES.values()}
RECORD = ".conversion"
EMPTY = "name a folder that does not exist"
AGAIN = "remove the target and convert again"
SPARE = 1.02  # headers and tables of contents


@dataclass(frozen=True)
class Order:
    """What is converted. model: the Hugging Face folder that describes a torch_dist source, or whose adapters the source holds.

    merge: add the source's adapters to the model's weights. to: the form; by default the other one. dtype: of all weights; by default as they are stored. file_bytes: of a weight file, about.
    """

    source: Path
    target: Path
    model: Path | None = None
    to: Form | None = None
    dtype: torch.dtype | None = None
    file_bytes: int = 4 * 2**30
    merge: bool = False


class Converted(NamedTuple):
    """What is in the target. kept: how many of its weight files an earlier call had written."""

    form: Form
    tensors: int
    size: int  # bytes of tensors
    files: int
    kept: int

    @property
    def line(self) -> str:
        """The outcome in words."""
        there = f"; {self.kept} of the files were there already" if self.kept else ""
        return f"{self.tensors} tensors, {size_text(self.size)}, {self.form} in {self.files} files{there}"


class Conversion:
    """An order whose source was opened and checked.

    Raises ConfigError or StorageError, naming the file and the remedy, before anything is written.
    """

    def __init__(self, order: Order) -> None:
        source, target = order.source.resolve(), order.target.resolve()
        if source == target or source in target.parents or target in source.parents:
            raise ConfigError(
                "one lies in the other", where=f"{order.source} and {order.target}", remedy=EMPTY
            )
        self.source: CheckpointSource = open_source(
            order.source, order.model, merge=order.merge, dtype=order.dtype
        )
        form = order.to or ("hf" if self.source.form == "torch_dist" else "torch_dist")
        if form == "torch_dist" and isinstance(self.source, HuggingFaceSource):
            self.source.part_experts()
        self.every = self.source.every
        # what steps do not change keeps its type
        self.dtypes = {
            each.name: order.dtype if order.dtype and each.part.trained else self.source.dtype(each)
            for each in self.every
        }
        if stacked_names(self.source.arch) and "torch_dist" in (form, self.source.form):
            raise ConfigError(
                f"tensors of {self.source.arch.family} hold all experts of a layer, which torch_dist keeps apart",
                where=f"source = {order.source}",
                remedy="convert between folders of Hugging Face: --to hf",
            )
        self.target: Target = (
            HuggingFaceTarget(self.dtypes)
            if form == "hf"
            else TorchDistTarget(self.dtypes, self.source.arch, self.every)
        )
        self.folder = target
        self._files = self._planned(order.file_bytes)
        self._plan = {
            "source": str(source),
            "state": self.source.state(),
            "form": form,
            "dtype": str(order.dtype),
            "file_bytes": order.file_bytes,
        }

    def convert(self) -> Converted:
        """Write each file that is not there yet. Raises StorageError if the target holds anything else, or its disk is too small."""
        store = Store(str(self.folder))
        with self._alone():
            record = self._record(store)
            whole = dict(record["files"]) if record["complete"] else self._whole(store, record["files"])
            kept = len(whole)
            self._check_room([path for path in self._files if path not in whole])
            for path in [path for path in self._files if path not in whole]:
                whole[path] = self._write(store, path)
                store.write_sealed(RECORD, {**record, "files": whole})
                log.info("%s: %s of %s files", store.url_of(path), len(whole), len(self._files))
            if not record["complete"]:
                files = [WeightFile(path, some, whole[path]["lengths"]) for path, some in self._files.items()]
                self.target.finish(self.folder, files, self.source.model)
                store.write_sealed(RECORD, {**record, "files": whole, "complete": True})
        return Converted(
            self.target.form, self.tensors, sum(map(self._size, self.every)), len(self._files), kept
        )

    @property
    def tensors(self) -> int:
        """How many Hugging Face tensors the model has."""
        return sum(len(parameter.shapes) for parameter in self.every)

    def verify(self) -> None:
        """Read source and target, and compare every tensor bit for bit.

        Raises CorruptFileError naming the first tensor that differs, ConfigError or StorageError if the target cannot be read.
        """
        there = open_source(self.folder)
        if there.arch != self.source.arch or [one.name for one in there.every] != [
            one.name for one in self.every
        ]:
            reason = "it is another model than the source's"
            raise CorruptFileError(reason, where=str(there.model), remedy=AGAIN)
        for parameter, rows in self._pieces(self.every):
            if there.dtype(parameter) != self.dtypes[parameter.name]:
                raise self._differs(parameter.name)
            pairs = zip(self._read(parameter, rows), there.tensors(parameter, rows), strict=True)
            for name, (wanted, found) in zip(parameter.shapes, pairs, strict=True):
                if not torch.equal(_bits(wanted), _bits(found)):
                    raise self._differs(name)

    def _differs(self, name: str) -> CorruptFileError:
        return CorruptFileError(f"{name} is not the source's", where=str(self.folder), remedy=AGAIN)

    def _planned(self, file_bytes: int) -> dict[str, list[Parameter]]:
        """The parameters of each weight file."""
        groups: list[list[Parameter]] = [[]]
        size = 0
        for parameter in self.every:
            if parameter.name.startswith(FURTHER) and self.target.form == "torch_dist":
                continue
            if groups[-1] and size + self._size(parameter) > file_bytes:
                groups.append([])
                size = 0
            groups[-1].append(parameter)
            size += self._size(parameter)
        files = {self.target.file(number, len(groups)): some for number, some in enumerate(groups)}
        if self.target.form == "torch_dist":
            more = [parameter for parameter in self.every if parameter.name.startswith(FURTHER)]
            files |= {FURTHER_FILE: more} if more else {}
        return files

    def _size(self, parameter: Parameter) -> int:
        return parameter.numbers * self.dtypes[parameter.name].itemsize

    def _pieces(self, some: Sequence[Parameter]) -> Iterator[tuple[Parameter, slice]]:
        for parameter in some:
            for rows in parameter.pieces(self.dtypes[parameter.name].itemsize):
                yield parameter, rows

    def _read(self, parameter: Parameter, rows: slice) -> list[Tensor]:
        return [tensor.to(self.dtypes[parameter.name]) for tensor in self.source.tensors(parameter, rows)]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Make the folder, and hold its lock: of two conversions into it one is refused."""
        if self.folder.exists() and not self.folder.is_dir():
            raise StorageError("a file is there", where=str(self.folder), remedy=EMPTY)
        make_folder(self.folder)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            _lock(handle, self.folder)
            yield
        finally:
            os.close(handle)

    def _record(self, store: Store) -> dict[str, Any]:
        """The record of the target, or a new one. Raises StorageError if the folder holds anything but this conversion."""
        if not any(self.folder.iterdir()):
            record: dict[str, Any] = {"plan": self._plan, "files": {}, "complete": False}
            store.write_sealed(RECORD, record)
            return record
        if not store.exists(RECORD):
            raise StorageError("it is not empty", where=store.url, remedy=EMPTY)
        record = store.read_sealed(RECORD)
        for name, wanted in self._plan.items():
            if record["plan"].get(name) != wanted:
                raise StorageError(
                    f"it holds another conversion: {name} {record['plan'].get(name)}, not {wanted}",
                    where=store.url,
                    remedy="remove it, or name a folder that does not exist",
                )
        store.sweep(0)
        return record

    def _whole(self, store: Store, files: dict[str, Any]) -> dict[str, Any]:
        """The recorded files that still have their hashes; the others are written again."""

        def unchanged(file: tuple[str, Any]) -> bool:
            path, written = file
            try:
                store.verify(FileEntry(path=path, sha256=written["sha256"], size=written["size"]))
            except StorageError as error:
                log.warning("it is written again: %s", error)
                return False
            return True

        listed = list(files.items())
        return {
            path: written
            for (path, written), keep in zip(listed, in_threads(unchanged, listed), strict=True)
            if keep
        }

    def _check_room(self, paths: Sequence[str]) -> None:
        needed = SPARE * sum(self._size(parameter) for path in paths for parameter in self._files[path])
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise StorageError(
                f"{size_text(needed)} are to be written, and its disk has {size_text(free)} free",
                where=str(self.folder),
                remedy="free space, or name a folder on another disk",
            )

    def _write(self, store: Store, path: str) -> dict[str, Any]:
        """Write a weight file; returns its line in the record."""
        lengths: list[int] = []

        def blocks() -> Iterator[Any]:
            lengths.clear()
            for block in self.target.blocks(self._files[path], self._read):
                lengths.append(len(block))
                yield block

        entry = write_blocks(store, path, blocks)
        return {"sha256": entry.sha256, "size": entry.size, "lengths": lengths}


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        reason = "another conversion writes to it"
        raise StorageError(reason, where=str(folder), remedy="wait for it, or end it") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
