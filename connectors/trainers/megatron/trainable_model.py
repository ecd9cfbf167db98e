"""A model that is trained: its DDP wrapper, optimizer and schedule, and the application of a step.

Owns the order of an optimizer step: all checks that may refuse it come before any change. Knows nothing of losses.
"""

import contextlib
from pathlib import Path
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from millrace.connectors.trainers.adapters import read_peft, trained
from millrace.connectors.trainers.megatron.model.adapters import attach
from millrace.connectors.trainers.megatron.model.grouped_experts import pack_weights
from millrace.connectors.trainers.megatron.model.policy_model import PolicyModel, RankModel, build_model
from millrace.connectors.trainers.megatron.optim import fused_adamw
from millrace.connectors.trainers.megatron.optim.host_adamw import HostAdamW
from millrace.connectors.trainers.megatron.optim.optimizer import (
    accumulating,
    make_optimizer,
    make_schedule,
    wrap,
)
from millrace.connectors.trainers.megatron.optim.parameter_state import (
    bytes_of_optimizer,
    load_optimizer,
    optimizer_state,
)
from millrace.connectors.trainers.megatron.optim.step_numbers import step_numbers
from millrace.connectors.trainers.megatron.weights.hf_folder import load_hf
from millrace.core.config import RunConfig
from millrace.core.config.trainer import Schedule
from millrace.core.families.architecture import architecture
from millrace.core.replay import StepNumbers


def model_from_hf(
    config: RunConfig,
    folder: str,
    hf: dict[str, Any],
    device: Any,
    kind: type = PolicyModel,
    field: str = "model.path",
) -> RankModel:
    """A model with the weights of a Hugging Face folder, in the configured dtype, on the device.

    Raises ConfigError, with the `field` that named the folder, if the weights do not fit the model.
    """
    inner = build_model(config, hf, kind).to(device)
    if config.dtype == "bfloat16":
        inner.bfloat16()
    load_hf(inner, folder, hf, field)
    for part in inner.modules():
        if isinstance(part, SequentialMLP):
            pack_weights(part)
    return inner


def policy_from_hf(config: RunConfig, hf: dict[str, Any], device: Any) -> RankModel:
    """The policy before its first step, with adapters if trainer.lora asks for them.

    Raises ConfigError if model.path or trainer.lora.path does not fit.
    """
    inner = model_from_hf(config, config.model.path, hf, device)
    lora = config.trainer.lora
    if lora is None:
        return inner
    arch = architecture(hf)
    pairs = None if lora.path is None else read_peft(Path(lora.path), lora, arch, "trainer.lora.path")
    attach(inner, lora, arch, config.run.seed, pairs)
    return inner


def bytes_of_weights(inner: RankModel) -> int:
    """Bytes of a model's weights that this rank saves. The first data parallel rank with a weight saves it; of adapters, only they are."""
    first = {
        True: mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
        False: mpu.get_expert_data_parallel_rank() == 0,
    }
    saved = (each for _, each in trained(inner)) if inner.adapted else inner.parameters()
    return sum(each.nbytes for each in saved if first[getattr(each, "allreduce", True)])


class TrainableModel:
    """A model with its optimizer."""

    def __init__(
        self, inner: RankModel, config: RunConfig, lr: float, schedule: Schedule | None = None
    ) -> None:
        """schedule: by default trainer.schedule."""
        self.inner = inner
        self.models = wrap(inner, config)  # one a stage
        schedule = schedule or config.trainer.schedule
        self.optimizer = make_optimizer(self.models, config, lr, schedule)
        self.schedule = make_schedule(self.optimizer, config, lr, schedule)
        inner.config.grad_scale_func = self.optimizer.scale_loss
        self._fused = fused_adamw.applies(self.optimizer)
        o = config.trainer.optimizer
        self.host = HostAdamW(self.optimizer, o.offload, config.trainer.threads) if o.offload else None
        self.lr = 0.0  # learning rate of the last step
        self._norm = 0.0
        self._device_norm: Tensor | None = None  # set by measure_gradient, read by gradient_norm

    def zero_grad(self) -> None:
        """Set gradients to zero, also after a refused step."""
        self._device_norm = None
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes add to this rank's gradients; the step's last passes reduce them over ranks."""
        return accumulating(self.models)

    def divide_gradient(self, denominator: float) -> None:
        """Divide the gradients, which are summed over ranks, before they are measured."""
        for model in self.models:
            model.scale_gradients(1.0 / denominator)

    def measure_gradient(self) -> None:
        """Launch the gradient norm on the device, if the fused optimizer applies; `gradient_norm` then only reads it."""
        if self._fused:
            self.optimizer.prepare_grads()
            self._device_norm = fused_adamw.gradient_norm(self.optimizer)

    def gradient_norm(self) -> float:
        """Norm of the gradient before clipping; changes nothing."""
        if self._fused:
            if self._device_norm is None:
                self.measure_gradient()
            assert self._device_norm is not None
            self._norm = float(self._device_norm)
            return self._norm
        self.optimizer.prepare_grads()
        self._norm = float(self.optimizer.get_grad_norm())
        return self._norm

    def step(self, made_with: StepNumbers | None = None) -> None:
        """Advance optimizer and schedule, after `gradient_norm`: step n uses the schedule's rate after n - 1 steps.

        made_with: the recorded numbers of a step that is repeated; they replace the configuration's.
        """
        with step_numbers(self.optimizer, made_with):
            self.lr = float(self.optimizer.param_groups[0]["lr"])
            if self.host is not None:
                self.host.norm = self._norm
            if self._fused:
                fused_adamw.step(self.optimizer, self._norm)
            else:
                done, _, _ = self.optimizer.step()
                assert done, "the optimizer skipped a step with finite gradients"
        self.schedule.step(increment=1)

    def skip(self) -> None:
        """Advance only the schedule."""
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.schedule.step(increment=1)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of tensors that this rank saves: main parameters and moments that it owns, and weights that no lower rank has."""
        return bytes_of_optimizer(self.optimizer) + bytes_of_weights(self.inner)

    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Sharded state dict of model and optimizer.

        Uses the unwrapped stages, since megatron's wrapper adds a prefix on saving and does not remove it on loading.
        """
        model = self.inner.sharded_state_dict()
        return {
            "model": model,
            "optimizer": optimizer_state(self.optimizer, model, loading=loading),
        }

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Load a `sharded_state`, and the number of steps from the schedule's stored state.

        Learning rate, betas, epsilon, weight decay and schedule stay the configuration's.
        """
        self.inner.load_state_dict(loaded["model"], strict=not self.inner.adapted)
        load_optimizer(self.optimizer, loaded["optimizer"])
        self.schedule.step(increment=int(loaded["schedule"]["num_steps"]) - self.schedule.num_steps)
