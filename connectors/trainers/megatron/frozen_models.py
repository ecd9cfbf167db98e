"""Models that are not trained: the reference (the policy at an earlier version) and a teacher.

Owns the place of their weights. Knows nothing of the use of their log-probabilities.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from millrace.connectors.trainers.adapters import trained
from millrace.connectors.trainers.megatron.forward_backward import LogprobForwardBackward
from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.connectors.trainers.megatron.optim.optimizer import called
from millrace.connectors.trainers.megatron.packing import BatchRow
from millrace.connectors.trainers.megatron.rank_batch import RankBatch
from millrace.connectors.trainers.megatron.trainable_model import model_from_hf
from millrace.connectors.trainers.megatron.weights.hf_folder import load_hf
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError, TrainerError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config

OF_A_FOLDER = -1  # the version of a reference from another folder


def reference_of(config: RunConfig, policy: RankModel, hf: dict[str, Any]) -> Reference:
    """The configured reference. Loads it through the policy's model, which afterwards holds the weights of model.path again.

    Raises ConfigError if the folder's model is not the policy's, or its weights do not fit.
    """
    field, folder = "algorithm.reference", config.algorithm.reference
    if folder is None:
        return Reference(policy)
    if architecture(read_hf_config(folder, field)) != architecture(hf):
        raise ConfigError(
            "its architecture is not that of model.path",
            where=f"{field} = {folder}",
            remedy="name a folder of the same architecture and sizes, such as an export of a run from the same model",
        )
    load_hf(policy, folder, hf, field)
    reference = Reference(policy, OF_A_FOLDER)
    load_hf(policy, config.model.path, hf)
    return reference


class Reference:
    """Parameters of the policy's architecture in host memory, swapped into the policy's model for a forward pass.

    With adapters only they are copied: the weights beside them are the policy's own.
    """

    def __init__(self, policy: RankModel, version: int = 0) -> None:
        """Copy the current weights of the policy's model. version: OF_A_FOLDER if they are not the run's."""
        self._policy = policy
        self.version = version  # the weight version of the copy
        self._weights: dict[str, Tensor] = {}
        self.copy_policy(version)

    def copy_policy(self, version: int) -> None:
        """Copy the policy's current weights, which have this version."""
        changed = trained(self._policy) if self._policy.adapted else self._policy.named_parameters()
        self._weights = {name: value.detach().to("cpu", copy=True) for name, value in changed}
        self.version = version

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[None]:
        """A context in which the policy's model has the reference's weights."""
        parameters = dict(self._policy.named_parameters())
        policy_weights = {name: parameters[name].detach().clone() for name in self._weights}
        with torch.no_grad():
            for name, value in self._weights.items():
                parameters[name].copy_(value)
            try:
                yield
            finally:
                for name, value in policy_weights.items():
                    parameters[name].copy_(value)

    def sharded_state(self) -> dict[str, Any]:
        """The policy's sharded state dict, with the reference's weights."""
        state = self._policy.sharded_state_dict()
        for name, item in state.items():
            if isinstance(item, ShardedBase) and name in self._weights:
                item.data = self._weights[name]
        add_prefix_for_sharding(state, "reference.")
        return state

    def load_state(self, loaded: dict[str, Any], version: int) -> None:
        """Load a `sharded_state` that was saved for a reference with this version."""
        for name, value in self._weights.items():
            if name in loaded:
                value.copy_(loaded[name])
        self.version = version


class Teacher:
    """A second model, in the policy's parallel layout, whose log-probabilities are distilled."""

    def __init__(self, config: RunConfig, temperature: float, device: Any) -> None:
        folder = config.algorithm.teacher
        assert folder is not None
        hf = read_hf_config(folder, "algorithm.teacher")
        inner = model_from_hf(config, folder, hf, device, field="algorithm.teacher")
        inner.requires_grad_(False)
        self._vocab = hf["vocab_size"]
        self.passes = LogprobForwardBackward(
            config, called(inner), inner, device, vocab=self._vocab, temperature=temperature
        )

    def check_tokens(self, rows: Sequence[BatchRow]) -> None:
        """Raise TrainerError if a token is not in the vocabulary. `rows`: all samples, so that all ranks raise or none does."""
        highest = max((int(row.tokens.max()) for row in rows), default=0)
        if highest >= self._vocab:
            raise TrainerError(
                f"a sample has token {highest}, the teacher's vocabulary {self._vocab} tokens",
                where="algorithm.teacher",
                remedy="take a teacher with the model's own tokenizer",
            )

    def logprobs(self, batch: RankBatch) -> Tensor | None:
        """Log-probabilities of the batch's response tokens; None before the last pipeline stage."""
        return self.passes.logprobs(batch.packs)
