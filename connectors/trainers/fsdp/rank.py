"""One rank of the trainer that uses PyTorch's FSDP2 on Hugging Face's models.

Heavy imports happen in `prepare`, so that the driver can name the class without loading torch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.connectors.trainers.learner_rank import LearnerRank

if TYPE_CHECKING:
    import socket

    import torch

    from millrace.connectors.trainers.fsdp.models import FsdpLearner
    from millrace.connectors.trainers.weights.buckets import TensorGroup
    from millrace.core.families.served_files import Served


class FsdpRank(LearnerRank):
    """Holds one rank's share of the policy at a weight version."""

    learner: FsdpLearner

    def _import(self) -> None:
        from transformers.utils import logging

        from millrace.connectors.trainers.fsdp import models  # noqa: F401

        logging.disable_progress_bar()

    def _join(self, master: tuple[str, int], meeting: socket.socket | None) -> torch.device:
        from millrace.connectors.trainers import process

        return process.join(self.config, self.rank, self.world_size, master, meeting)

    def _leave(self) -> None:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        from millrace.connectors.trainers import process

        process.leave()
        # PyTorch keeps what it found for a mesh, and takes an equal mesh of the next ranks for it, whose groups have other names
        _clear_sharding_prop_cache()

    def _build(self) -> None:
        from millrace.connectors.trainers.fsdp.models import FsdpLearner
        from millrace.core.families.unknown import shape_of

        self.learner = FsdpLearner(self.config, shape_of(self.config.model.path), self.device)

    def _calls(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def _reload(self) -> None:
        self.learner.policy.reload()

    def _release(self) -> int:
        return self.learner.policy.release()

    def _sections(self) -> list[TensorGroup]:
        from millrace.connectors.trainers.fsdp.hf_weights import sections

        return sections(self.learner.policy.inner, self._dtype, self.learner.architecture)

    def _write_export(self, folder: Path, served: Served, merged: bool) -> None:
        import torch.distributed as dist

        from millrace.connectors.trainers.adapters import write_peft
        from millrace.connectors.trainers.fsdp.adapters import gathered
        from millrace.connectors.trainers.fsdp.hf_weights import hf_tensors
        from millrace.connectors.trainers.weights.export_folder import write_tensors
        from millrace.core.families.folder_tensors import FolderTensors
        from millrace.core.families.served_files import name_dtype, write_side_files

        model, source = self.learner.policy.inner, self.config.model.path
        lora, shape = self.config.trainer.lora, self.learner.architecture
        if lora is not None and not merged:
            pairs = gathered(model, self._dtype, self.learner.policy.sharded_over)
            if dist.get_rank() == 0:
                assert shape is not None, "adapters belong to a known family"
                write_peft(folder, pairs.on_host(), lora, shape, source)
            return
        tensors: dict[str, torch.Tensor] = {}
        for unit in hf_tensors(model, self._dtype, shape):  # all ranks gather, rank 0 keeps
            if dist.get_rank() == 0:
                tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in unit.items()}
        if dist.get_rank() == 0 and shape is not None:  # what no step changes, such as a tower
            kept = FolderTensors(source, shape, whole=False)
            tensors |= {name: kept[name] for name in kept.kept if name not in tensors}
        write_tensors(folder, tensors)
        if dist.get_rank() == 0:
            write_side_files(folder, source, served)
            name_dtype(folder / "config.json", self.config.dtype)

    @property
    def _dtype(self) -> torch.dtype:
        """The type of weights for others."""
        from millrace.connectors.trainers.compute_type import compute_type

        return compute_type(self.config)
