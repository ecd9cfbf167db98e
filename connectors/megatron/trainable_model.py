"""A model that is trained: its DDP wrapper, optimizer and schedule, and how a step is applied to them.

Owns the order of an optimizer step, so that a refused one has touched nothing; knows nothing of losses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from millrace.connectors.megatron.model.policy_model import CriticModel, PolicyModel, build_model
from millrace.connectors.megatron.optim import fused_adamw as fast_step
from millrace.connectors.megatron.optim import optimizer as optim
from millrace.connectors.megatron.weights.hf_files import load_hf
from millrace.core.config import RunConfig


def from_hf(config: RunConfig, folder: str, hf: dict[str, Any], device: Any, kind: type = PolicyModel) -> Any:
    """A model with the weights of a Hugging Face folder, in the configured type, on the device."""
    inner = build_model(config, hf, kind).to(device)
    if config.model.dtype == "bfloat16":
        inner.bfloat16()
    load_hf(inner, folder, hf)
    return inner


class Trained:
    """A model with its optimizer."""

    def __init__(self, inner: PolicyModel | CriticModel, config: RunConfig, lr: float) -> None:
        self.inner = inner
        self.model = optim.wrap(inner, config)
        self.optimizer = optim.make_optimizer(self.model, config, lr)
        self.schedule = optim.make_schedule(self.optimizer, config, lr)
        inner.config.grad_scale_func = self.optimizer.scale_loss
        self._fast = fast_step.applies(self.optimizer)
        self._norm = 0.0
        self._measured: Tensor | None = None

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Forget gradients, those of a refused step too."""
        self._measured = None
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def measure_gradient(self) -> None:
        """Have the device measure the gradient's norm, where it can do so by itself: `gradient_norm` then only reads it."""
        if self._fast:
            self.optimizer.prepare_grads()
            self._measured = fast_step.gradient_norm(self.optimizer)

    def gradient_norm(self) -> float:
        """Norm of the gradient before clipping; changes nothing."""
        if self._fast:
            if self._measured is None:
                self.measure_gradient()
            assert self._measured is not None
            self._norm = float(self._measured)
            return self._norm
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(self) -> None:
        """Advance schedule and optimizer, after `gradient_norm`: the learning rate of step n is the schedule's at n."""
        self.schedule.step(increment=1)
        if self._fast:
            fast_step.step(self.optimizer, self._norm)
            return
        done, _, _ = self.optimizer.step()
        assert done, "the optimizer skipped a step with finite gradients"

    def skip(self) -> None:
        """Advance the schedule alone."""
        self.schedule.step(increment=1)

    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """Model and optimizer by shards, of the unwrapped model: the wrapper's adds a prefix that it does not take back."""
        model = self.inner.sharded_state_dict()
        return {
            "model": model,
            "optimizer": optim.optimizer_state(self.optimizer, model, loading=loading),
        }

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Take a loaded `sharded_state`, with the schedule's beside it."""
        self.inner.load_state_dict(loaded["model"])
        optim.load_optimizer(self.optimizer, loaded["optimizer"])
        self.schedule.load_state_dict(loaded["schedule"])
