"""A model under FSDP that is trained: its gradients, AdamW over this rank's parts of the weights, and the schedule.

Owns the order of an optimizer step: all checks that may refuse it come before any change. Knows nothing of losses.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adam import adam

from millrace.connectors.trainers.adapters import trained
from millrace.connectors.trainers.frozen_models import held
from millrace.connectors.trainers.fsdp.host_adamw import ShardedHostAdamW
from millrace.connectors.trainers.fsdp.packed_model import PackedModel
from millrace.connectors.trainers.host_adamw import numbers_of
from millrace.connectors.trainers.memory_errors import pinned
from millrace.core.algorithms.learning_rate import learning_rate
from millrace.core.config import RunConfig
from millrace.core.config.trainer import Schedule
from millrace.core.replay import StepNumbers

MOMENTS = ("exp_avg", "exp_avg_sq")


class StepSchedule:
    """The learning rate by the number of steps that were made."""

    def __init__(self, config: RunConfig, lr: float, schedule: Schedule) -> None:
        self.num_steps = 0
        self._peak = lr
        self._schedule = schedule
        total = schedule.decay_steps or config.run.iterations * config.steps_per_iteration
        self._decay = max(total, schedule.warmup_steps + 1)

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        s = self._schedule
        return learning_rate(
            s.kind,
            self.num_steps,
            peak=self._peak,
            least=s.min_lr,
            warmup=s.warmup_steps,
            decay=self._decay,
        )

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint holds; rates follow from the configuration."""
        return {"num_steps": self.num_steps}


class TrainedFsdp:
    """A model with its optimizer."""

    def __init__(self, inner: PackedModel, config: RunConfig, lr: float, sharded_over: Any) -> None:
        """sharded_over: the group of ranks that together have all weights once."""
        self.inner = inner
        self.sharded_over = sharded_over
        self.lr = 0.0  # learning rate of the last step
        self.schedule = StepSchedule(config, lr, config.trainer.schedule)
        o = config.trainer.optimizer
        self.clip_grad = o.clip_grad
        self.parameters = [each for _, each in trained(inner)]
        # as megatron-core: no decay for norms and biases
        decayed = [each for each in self.parameters if each.ndim > 1]
        others = [each for each in self.parameters if each.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": o.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=lr,
            betas=o.betas,
            eps=o.eps,
            fused=self.parameters[0].is_cuda,
            foreach=False,
        )
        for each in self.parameters:  # there before the first step, so that every checkpoint has them
            zeros = {name: torch.zeros_like(each, requires_grad=False) for name in MOMENTS}
            self.optimizer.state[each] = {"step": self._steps_made(0), **zeros}
        self.host: ShardedHostAdamW | None = None
        if o.offload:
            self.host = ShardedHostAdamW(self.parameters, o.offload, config.trainer.threads)
            self.host.take_over(self.optimizer)
        self._norm = 0.0
        self._host: dict[
            tuple[Parameter, str], tuple[int, Tensor]
        ] = {}  # of moved moments: bytes, and their copy

    def _steps_made(self, count: int) -> Tensor:
        device = self.parameters[0].device if self.parameters[0].is_cuda else "cpu"
        return torch.tensor(float(count), dtype=torch.float32, device=device)

    def go_on_after(self, count: int) -> None:
        """Go on after so many steps, whose weights and moments have been read."""
        self.schedule.num_steps = count
        for each in self.parameters:
            self.optimizer.state[each]["step"].fill_(count)
        if self.host is not None:
            self.host.read_weights()

    def zero_grad(self) -> None:
        """Forget gradients, also after a refused step."""
        self.optimizer.zero_grad(set_to_none=True)

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes add gradients: they always do, summed over ranks pack by pack."""
        return contextlib.nullcontext()

    def _gradients(self) -> list[Tensor]:
        return self._held_gradients(self.parameters)

    @staticmethod
    def _held_gradients(parameters: Sequence[Parameter]) -> list[Tensor]:
        return [held(each.grad) for each in parameters if each.grad is not None]

    def divide_gradient(self, denominator: float) -> None:
        """Divide the gradients, which are summed over ranks, before they are measured."""
        torch._foreach_mul_(self._gradients(), 1.0 / denominator)

    def measure_gradient(self) -> None:
        """Nothing: `gradient_norm` measures."""

    def gradient_norm(self) -> float:
        """Norm of the gradient before clipping; changes nothing."""
        parts = [each for each in self._gradients() if each.numel()]
        device = self.parameters[0].device
        square = torch.zeros((), dtype=torch.float32, device=device)
        if parts:
            square = torch.stack(torch._foreach_norm(parts)).square().sum()
        if self.sharded_over.size() > 1:
            dist.all_reduce(square, group=self.sharded_over)
        self._norm = float(square.sqrt())
        return self._norm

    def step(self, made_with: StepNumbers | None = None) -> None:
        """Advance optimizer and schedule, after `gradient_norm`: step n uses the schedule's rate after n - 1 steps.

        made_with: the recorded numbers of a step that is repeated; they replace the configuration's.
        """
        with self._numbers(made_with) as clip:
            if self.host is not None:
                self.host.norm = self._norm
                self.host.step(clip)
            if clip > 0 and (scale := clip / (self._norm + 1e-6)) < 1 and (kept := self._gradients()):
                torch._foreach_mul_(kept, scale)
            self._adamw()
        self.schedule.num_steps += 1
        self.zero_grad()

    @torch.no_grad()
    def _adamw(self) -> None:
        """One step on this rank's tensors. The optimizer's own would go through DTensor, parameter by parameter: five times the step."""
        for group in self.optimizer.param_groups:
            own = [each for each in group["params"] if each.grad is not None]
            states = [self.optimizer.state[each] for each in own]
            adam(
                [held(each) for each in own],
                self._held_gradients(own),
                [held(state["exp_avg"]) for state in states],
                [held(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                foreach=False,
                fused=group["fused"],
                **numbers_of(group),
            )

    @contextlib.contextmanager
    def _numbers(self, made_with: StepNumbers | None) -> Iterator[float]:
        """A context in which the optimizer has a step's numbers; yields the largest norm of a gradient."""
        groups = self.optimizer.param_groups
        own = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in groups]
        self.lr = self.schedule.lr if made_with is None else made_with["lr"]
        for group, numbers in zip(groups, own, strict=True):
            group["lr"] = self.lr
            if made_with is not None:
                group["betas"], group["eps"] = tuple(made_with["betas"]), made_with["eps"]
                decays = group is groups[0]
                group["weight_decay"] = made_with["weight_decay"] if decays else numbers["weight_decay"]
        try:
            yield self.clip_grad if made_with is None else made_with["clip_grad"]
        finally:
            for group, numbers in zip(groups, own, strict=True):
                group.update(numbers)

    def skip(self) -> None:
        """Advance only the schedule."""
        self.lr = self.schedule.lr
        self.schedule.num_steps += 1

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of tensors that this rank saves: weights and both moments."""
        return sum((1 + len(MOMENTS)) * held(each).nbytes for each in self.parameters)

    def state(self) -> dict[str, Tensor]:
        """Trained weights and their moments by name, as this rank has them: what a checkpoint holds, and is loaded into."""
        tensors: dict[str, Tensor] = {}
        for name, each in trained(self.inner):
            tensors[f"model.{name}"] = each.detach()
            for moment in MOMENTS:
                tensors[f"optimizer.{moment}.{name}"] = self.optimizer.state[each][moment]
        return tensors

    # GPU memory

    def release(self) -> int:
        """Move the moments to the host, drop gradients and PyTorch's cache; returns the bytes freed on the GPU."""
        if not torch.cuda.is_available():
            return 0
        before = torch.cuda.mem_get_info()[0]
        self.zero_grad()
        if not self._host:
            copies = {}  # all of them before anything is moved, since the host may lack memory
            for each in self.parameters:
                for name in MOMENTS:
                    moment = held(self.optimizer.state[each][name])
                    if not moment.is_cuda:  # of a parameter that the host steps
                        continue
                    copy = pinned(moment.nbytes).view(moment.dtype).view(moment.shape)
                    copy.copy_(moment, non_blocking=True)
                    copies[each, name] = moment.untyped_storage().nbytes(), copy
            torch.cuda.synchronize()
            self._host = copies
            for each, name in self._host:
                held(self.optimizer.state[each][name]).untyped_storage().resize_(0)
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0] - before)

    def reload(self) -> None:
        """Take the moments back, if they were moved."""
        for (each, name), (size, copy) in self._host.items():
            moment = held(self.optimizer.state[each][name])
            moment.untyped_storage().resize_(size)
            moment.copy_(copy, non_blocking=True)
        if self._host:
            torch.cuda.synchronize()
        self._host = {}
