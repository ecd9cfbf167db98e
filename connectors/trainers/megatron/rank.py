"""One rank of megatron-core's trainer.

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

    from millrace.connectors.trainers.megatron.models import MegatronLearner
    from millrace.connectors.trainers.megatron.optim.offload import OptimizerOffload
    from millrace.connectors.trainers.weights.buckets import TensorGroup
    from millrace.core.families.served_files import Served


class TrainerRank(LearnerRank):
    """Holds one rank's share of the policy at a weight version."""

    learner: MegatronLearner
    offload_state: OptimizerOffload
    hf: dict[str, Any]  # config.json of model.path

    def _import(self) -> None:
        from millrace.connectors.trainers.megatron import models  # noqa: F401
        from millrace.connectors.trainers.megatron.optim import offload  # noqa: F401
        from millrace.connectors.trainers.megatron.process import distributed  # noqa: F401

    def _join(self, master: tuple[str, int], meeting: socket.socket | None) -> torch.device:
        from millrace.connectors.trainers.megatron.process import distributed

        return distributed.join(self.config, self.rank, self.world_size, master, meeting)

    def _leave(self) -> None:
        from millrace.connectors.trainers.megatron.process import distributed

        distributed.leave()

    def _build(self) -> None:
        from millrace.connectors.trainers.megatron.models import MegatronLearner
        from millrace.connectors.trainers.megatron.optim.offload import OptimizerOffload
        from millrace.core.families.config_file import read_hf_config

        self.hf = read_hf_config(self.config.model.path)
        self.learner = MegatronLearner(self.config, self.hf, self.device)
        policy, critic = self.learner.policy, self.learner.critic
        self.policy, self.optimizer, self.schedule = policy.inner, policy.optimizer, policy.schedule
        self.offload_state = OptimizerOffload([policy, critic.trainable] if critic else [policy])

    def _calls(self) -> contextlib.AbstractContextManager[Any]:
        from millrace.connectors.trainers.megatron.process.distributed import device_context

        return device_context(self.device)

    def _reload(self) -> None:
        self.offload_state.reload()

    def _release(self) -> int:
        return self.offload_state.offload()

    def _sections(self) -> list[TensorGroup]:
        from millrace.connectors.trainers.megatron.weights.sections import sections

        return sections(self.policy, self.hf)

    def _write_export(self, folder: Path, served: Served, merged: bool) -> None:
        from millrace.connectors.trainers.megatron.weights.adapter_tensors import write_adapters
        from millrace.connectors.trainers.megatron.weights.hf_folder import write_hf

        lora, source = self.config.trainer.lora, self.config.model.path
        if lora is not None and not merged:
            write_adapters(self.policy, self.hf, lora, source, folder)
        else:
            write_hf(self.policy, self.hf, source, folder, served)
