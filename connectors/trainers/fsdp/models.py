"""The models of a learner under FSDP, and their state in checkpoints of torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    load,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from millrace.connectors.trainers.checkpoint.base_weights import base_marked, check_base
from millrace.connectors.trainers.checkpoint.files_of_ranks import read_files, write_files
from millrace.connectors.trainers.frozen_models import OF_A_FOLDER, Reference, Teacher, held
from millrace.connectors.trainers.fsdp.adapters import attach
from millrace.connectors.trainers.fsdp.hf_weights import copy_weights
from millrace.connectors.trainers.fsdp.packed_model import PackedModel, read_model, shard
from millrace.connectors.trainers.fsdp.passes import FsdpPasses
from millrace.connectors.trainers.fsdp.trained import TrainedFsdp
from millrace.connectors.trainers.learner import Learner
from millrace.connectors.trainers.place import RankPlace
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError, TrainerError
from millrace.core.families.architecture import Architecture

KIND = "fsdp"  # of the trainer, in complete.json


def rank_place(config: RunConfig, device: torch.device) -> RankPlace:
    """This rank's place: context parallel ranks have neighbouring numbers, so that they are of one host. Every rank must call it."""
    world, rank, context = dist.get_world_size(), dist.get_rank(), config.trainer.parallel.context
    if context == 1:
        return RankPlace(data_rank=rank, data_size=world, data_group=dist.group.WORLD)
    mesh = init_device_mesh(device.type, (world // context, context), mesh_dim_names=("data", "context"))
    return RankPlace(
        data_rank=rank // context,
        data_size=world // context,
        data_group=mesh.get_group("data"),
        context_rank=rank % context,
        context_group=mesh.get_group("context"),
        reports=rank % context == 0,
    )


def weights_mesh(config: RunConfig, device: torch.device) -> tuple[DeviceMesh, Any]:
    """The mesh over which weights are cut, and the group of ranks that together have all of them once. Every rank must call it.

    With trainer.parallel.replicate the mesh has a dimension more, over which weights are equal. Ranks with neighbouring numbers share
    the weights, so that blocks are gathered within a host.
    """
    world, copies = dist.get_world_size(), config.trainer.parallel.replicate
    if copies == 1:
        return init_device_mesh(device.type, (world,)), dist.group.WORLD
    mesh = init_device_mesh(device.type, (copies, world // copies), mesh_dim_names=("replicate", "shard"))
    return mesh, mesh.get_group("shard")


class FsdpLearner(Learner):
    """All models of this rank."""

    policy: TrainedFsdp

    def __init__(self, config: RunConfig, shape: Architecture | None, device: torch.device) -> None:
        place = rank_place(config, device)
        super().__init__(config, shape, device, place)
        self._mesh, shards = weights_mesh(config, device)
        whole = read_model(config, config.model.path, device)
        if config.trainer.lora is not None:
            attach(whole, config, shape)
        model = shard(whole, config, self._mesh, device)
        model.context = place.context_group
        if config.trains_images:
            model.look(config, device)
        self.passes = FsdpPasses(config, model, place, device, self.temperature)
        self.reference = self._reference(model) if self.objective.needs_ref else None
        self.policy = TrainedFsdp(model, config, config.trainer.optimizer.lr, shards)
        self.critic = None
        self.teacher = self._teacher() if self.algorithm.teacher_held else None

        self._share_clock()

    def _reference(self, model: PackedModel) -> Reference:
        """The configured reference. Raises ConfigError if the folder's model is not the policy's."""
        folder = self.algorithm.reference
        if folder is None:
            return Reference(model, adapted=self.config.trainer.lora is not None)
        field = "algorithm.reference"
        other = read_model(self.config, folder, self.device, field)
        sizes = [
            {name: tuple(each.shape) for name, each in part.named_parameters()} for part in (other, model)
        ]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                "its architecture is not that of model.path",
                where=f"{field} = {folder}",
                remedy="name a folder of the same architecture and sizes, such as an export of a run from the same model",
            )
        with Reference(model).as_policy():  # afterwards the policy has its own weights again
            copy_weights(model, other)
            return Reference(model, OF_A_FOLDER)

    def _teacher(self) -> Teacher:
        folder = self.algorithm.teacher
        assert folder is not None
        whole = read_model(self.config, folder, self.device, "algorithm.teacher")
        model = shard(whole, self.config, self._mesh, self.device, trains=False)
        model.context = self.place.context_group
        passes = FsdpPasses(self.config, model, self.place, self.device, self.temperature)
        return Teacher(passes, model.vocab)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of tensors that this rank saves. Of ranks with equal weights the first saves them."""
        if dist.get_rank() >= dist.get_world_size() // self.config.trainer.parallel.replicate:
            return 0
        reference = sum(held(each).nbytes for each in self.policy.parameters)
        return self.policy.checkpoint_bytes + (reference if "reference" in self.checkpoint_parts else 0)

    def marked(self) -> dict[str, Any]:
        """The trainer, all state that is no tensor, and with adapters the hashes of the weights beside them."""
        return {
            "trainer": KIND,
            "layout": {"world_size": dist.get_world_size()},
            "schedule": self.policy.schedule.state_dict(),
            "algorithm": self.algorithm_state(),
            **base_marked(self.config),
        }

    def check_marked(self, marker: dict[str, Any], url: str) -> None:
        """Raise TrainerError, on every rank, if a checkpoint is of another trainer, or has adapters beside other weights."""
        if marker.get("trainer") != KIND:
            raise TrainerError(
                "was saved by megatron-core's trainer",
                where=url,
                remedy="load it with trainer.kind=megatron, or start a run from one of its exports",
            )
        check_base(self.config, marker, url)

    def write(self, folder: Path, version: int, writer: FileSystemWriter | None = None) -> None:
        """Write this rank's parts of weights and moments."""
        # of equal parts the lowest rank writes its own
        planner = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
        )
        write_files(self._tensors(), folder, planner, writer)

    def read(self, folder: Path, files: set[str], marker: dict[str, Any], url: str) -> int:
        """Load the state that `write` wrote, perhaps with other ranks; returns its version."""
        tensors = self._tensors()

        def into_tensors() -> None:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(tensors, storage_reader=FileSystemReader(folder), planner=planner)

        read_files(folder, files, into_tensors)
        self.drop_iteration()
        self.policy.zero_grad()
        self.policy.go_on_after(int(marker["schedule"]["num_steps"]))
        torch.set_rng_state(tensors["rng"])
        algorithm = marker["algorithm"]
        self.kl_controller.restore(algorithm["kl_controller"])
        if "reference" in self.checkpoint_parts:
            assert self.reference is not None
            prefix = "reference."
            stored = {
                name.removeprefix(prefix): held(value)
                for name, value in tensors.items()
                if name.startswith(prefix)
            }
            self.reference.load_weights(stored, algorithm["reference_version"])
        return int(marker["version"])

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, by name; loading writes into them."""
        tensors = {**self.policy.state(), "rng": torch.get_rng_state()}
        if "reference" in self.checkpoint_parts:
            assert self.reference is not None
            parameters = dict(self.policy.inner.named_parameters())
            for name, value in self.reference.weights.items():
                each = parameters[name]
                tensors[f"reference.{name}"] = _like(value.to(held(each).device), each)
        return tensors


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's values, cut over ranks as a parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    whole: DTensor = DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole
