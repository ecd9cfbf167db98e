"""The models of a learner by megatron-core, and their state in checkpoints."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint import FileSystemWriter

from millrace.connectors.trainers.checkpoint.base_weights import base_marked, check_base
from millrace.connectors.trainers.critic import RankCritic
from millrace.connectors.trainers.frozen_models import OF_A_FOLDER, Reference, Teacher
from millrace.connectors.trainers.learner import Learner
from millrace.connectors.trainers.megatron import torch_dist
from millrace.connectors.trainers.megatron.forward_backward import (
    LogprobForwardBackward,
    ValueForwardBackward,
)
from millrace.connectors.trainers.megatron.model.policy_model import CriticModel, RankModel
from millrace.connectors.trainers.megatron.optim.optimizer import called
from millrace.connectors.trainers.megatron.process.distributed import rank_place
from millrace.connectors.trainers.megatron.trainable_model import (
    TrainableModel,
    bytes_of_weights,
    model_from_hf,
    policy_from_hf,
)
from millrace.connectors.trainers.megatron.weights.hf_folder import load_hf
from millrace.core.config import RunConfig
from millrace.core.config.megatron_options import rules as megatron_options
from millrace.core.errors import ConfigError, TrainerError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config

CRITIC = "algorithm.advantage.critic.path"


class MegatronLearner(Learner):
    """All models of this rank, as megatron-core has them."""

    policy: TrainableModel

    def __init__(self, config: RunConfig, hf: dict[str, Any], device: Any) -> None:
        shape = architecture(hf)
        super().__init__(config, shape, device, rank_place())
        megatron_options.check(config, shape)
        inner = policy_from_hf(config, hf, device)
        # before the optimizer copies the weights
        self.reference = reference_of(config, inner, hf) if self.objective.needs_ref else None
        self.policy = TrainableModel(inner, config, config.trainer.optimizer.lr)
        self.passes = LogprobForwardBackward(
            config, self.policy.models, inner, device, vocab=hf["vocab_size"], temperature=self.temperature
        )
        self.passes.replays = config.rollout.routing_replay
        self.critic = critic_of(config, hf, device) if self.algorithm.critic is not None else None
        self.teacher = teacher_of(config, self.temperature, device) if self.algorithm.teacher_held else None

        self._share_clock()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of tensors that this rank saves."""
        models = [self.policy, *([self.critic.trainable] if self.critic is not None else [])]
        reference = bytes_of_weights(self.policy.inner) if "reference" in self.checkpoint_parts else 0
        return sum(model.checkpoint_bytes for model in models) + reference

    def marked(self) -> dict[str, Any]:
        """The layout, and with adapters the hashes of the weights beside them."""
        trainer = self.config.trainer
        return {
            "layout": {"world_size": dist.get_world_size(), **trainer.parallel.model_dump()},
            "distributed_optimizer": trainer.optimizer.distributed,
            **base_marked(self.config),
        }

    def check_marked(self, marker: dict[str, Any], url: str) -> None:
        """Raise TrainerError, on every rank, if a checkpoint is of another trainer, has another kind of optimizer, or adapters
        beside other weights."""
        if "trainer" in marker:
            raise TrainerError(
                f"was saved by another trainer, {marker['trainer']}",
                where=url,
                remedy=f"load it with trainer.kind={marker['trainer']}, or start a run from one of its exports",
            )
        if marker["distributed_optimizer"] != self.config.trainer.optimizer.distributed:
            raise TrainerError(
                f"was saved with trainer.optimizer.distributed={str(marker['distributed_optimizer']).lower()}",
                where=url,
                remedy="set it so to load the checkpoint",
            )
        check_base(self.config, marker, url)

    def write(self, folder: Path, version: int, writer: FileSystemWriter | None = None) -> None:
        """Write this rank's shards of all models, and the state that is the same on every rank."""
        common = {"schedule": self.policy.schedule.state_dict(), "algorithm": self.algorithm_state()}
        state = {**self._sharded_state(loading=False), **common, "rng": _rng(), "version": version}
        torch_dist.write(state, folder, writer)

    def read(self, folder: Path, files: set[str], marker: dict[str, Any], url: str) -> int:
        """Load the state that `write` wrote, perhaps under another layout; returns its version."""
        state = torch_dist.read(self._sharded_state(loading=True), folder, files, url)
        self._load_state(state)
        torch.set_rng_state(state["rng"]["cpu"])
        if torch.cuda.is_available() and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"])
        return int(state["version"])

    def _sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Sharded state dict of all models."""
        state = self.policy.sharded_state(loading=loading)
        if "critic" in self.checkpoint_parts:
            assert self.critic is not None
            assert isinstance(self.critic.trainable, TrainableModel)
            state["critic"] = self.critic.trainable.sharded_state(loading=loading)
            add_prefix_for_sharding(state["critic"], "critic.")
        if "reference" in self.checkpoint_parts:
            assert self.reference is not None
            state["reference"] = _sharded_reference(self.policy.inner, self.reference)
        return state

    def _load_state(self, loaded: dict[str, Any]) -> None:
        """Load the sharded and the common state."""
        self.drop_iteration()
        self.policy.load_state(loaded)
        algorithm = loaded.get("algorithm", {})
        self.kl_controller.restore(algorithm.get("kl_controller", {}))
        if "critic" in self.checkpoint_parts:
            assert self.critic is not None
            assert isinstance(self.critic.trainable, TrainableModel)
            self.critic.trainable.load_state({**loaded["critic"], "schedule": algorithm["critic_schedule"]})
        if "reference" in self.checkpoint_parts:
            assert self.reference is not None
            self.reference.load_weights(loaded["reference"], algorithm["reference_version"])


def reference_of(config: RunConfig, policy: RankModel, hf: dict[str, Any]) -> Reference:
    """The configured reference. Loads it through the policy's model, which afterwards holds the weights of model.path again.

    Raises ConfigError if the folder's model is not the policy's, or its weights do not fit.
    """
    field, folder = "algorithm.reference", config.algorithm.reference
    if folder is None:
        return Reference(policy, adapted=policy.adapted)
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


def critic_of(config: RunConfig, hf: dict[str, Any], device: Any) -> RankCritic:
    """The configured critic: the policy's folder, or its own, with a scalar head."""
    critic = config.algorithm.critic
    assert critic is not None
    if critic.path is None:
        inner = model_from_hf(config, config.model.path, hf, device, CriticModel)
    else:
        own = read_hf_config(critic.path, CRITIC)
        inner = model_from_hf(config, critic.path, own, device, CriticModel, CRITIC)
    trainable = TrainableModel(inner, config, critic.lr, critic.schedule)
    return RankCritic(critic, trainable, ValueForwardBackward(config, trainable.models, inner, device))


def teacher_of(config: RunConfig, temperature: float, device: Any) -> Teacher:
    """The configured teacher, in the policy's parallel layout."""
    folder = config.algorithm.teacher
    assert folder is not None
    hf = read_hf_config(folder, "algorithm.teacher")
    inner = model_from_hf(config, folder, hf, device, field="algorithm.teacher")
    inner.requires_grad_(False)
    vocab = hf["vocab_size"]
    passes = LogprobForwardBackward(
        config, called(inner), inner, device, vocab=vocab, temperature=temperature
    )
    return Teacher(passes, vocab)


def _sharded_reference(policy: RankModel, reference: Reference) -> dict[str, Any]:
    """The policy's sharded state dict, with the reference's weights."""
    state = policy.sharded_state_dict()
    for name, item in state.items():
        if isinstance(item, ShardedBase) and name in reference.weights:
            item.data = reference.weights[name]
    add_prefix_for_sharding(state, "reference.")
    return state


def _rng() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
