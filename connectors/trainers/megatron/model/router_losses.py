"""Auxiliary losses of the routers of a mixture of experts, over all tokens of a step.

Owns their definition and how their gradients reach the routers. megatron computes them per microbatch, so that packing would
change them, and scales them by tokens; here each is a mean over the step, independent of packs, ranks and pipeline stages.
Knows nothing of the policy's objective.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from millrace.connectors.trainers.megatron.model.attention import PackBounds
from millrace.connectors.trainers.megatron.model.replayed_router import PackRouter
from millrace.core.config.megatron_options.transformer import MoELosses

Metrics = dict[str, tuple[Tensor, Tensor]]


class RouterLosses:
    """The losses of one model's routers in the current step; inactive outside `training`.

    For one layer with E experts, of which a token takes k, and softmax probabilities p over the T tokens of the step:

        aux_loss = E * sum_e f_e * mean_t p_te; f_e is the share of the T k choices that fell on e
        seq_aux_loss = the mean over samples of the same sum, for each sample over its tokens
        z_loss = mean_t logsumexp(logits_t)^2

    The step's gradient is the gradient of each coefficient times the sum over layers; metrics are means over layers with experts.
    """

    def __init__(self, options: MoELosses, config: TransformerConfig) -> None:
        self.options = options
        self.layers = sum(config.moe_layer_freq)  # with experts
        self.topk = config.moe_router_topk
        self.groups = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
        self.sample_groups = mpu.get_tensor_and_context_parallel_group()
        self.tensor_rank = mpu.get_tensor_model_parallel_rank()
        self.tensor_size = mpu.get_tensor_model_parallel_world_size()
        self._mode: str | None = None
        self._tokens = self._samples = 0  # counts of the whole step
        self._chosen: dict[int, Tensor] = {}  # by layer [E]: how often the step's tokens chose each expert
        self._sums: dict[str, Tensor] = {}  # this rank's parts of the metrics

    @property
    def counts_first(self) -> bool:
        """Whether a counting pass over the step must come before training, since every gradient needs f_e over all packs."""
        return self.options.kind == "aux_loss" and self.options.aux_coeff > 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """A context in which forward passes count the choices of experts. At its end the counts are summed over ranks."""
        self._mode, self._chosen = "counting", {}
        try:
            yield
        finally:
            self._mode = None
        for layer in sorted(self._chosen):
            dist.all_reduce(self._chosen[layer], group=self.groups)

    @contextlib.contextmanager
    def training(self, tokens: int, samples: int) -> Iterator[None]:
        """A context in which backward passes add the losses' gradients. tokens, samples: of the step, over all ranks."""
        self._mode, self._tokens, self._samples = "training", tokens, samples
        self._sums = {}
        try:
            yield
        finally:
            self._mode, self._chosen = None, {}

    def metrics(self) -> Metrics:
        """This rank's parts of the means over layers, without coefficients. The parts of all ranks sum to the step's metrics."""
        return {name: (value / self.layers, torch.zeros_like(value)) for name, value in self._sums.items()}

    def attach(self, logits: Tensor, layer: int, bounds: PackBounds) -> Tensor:
        """The logits [T, E] of this rank's tokens, through which the losses' gradients flow in training."""
        grads = torch.is_grad_enabled()  # recomputed layers call this twice, first without gradients
        if self._mode is None or (self._mode == "training" and not grads):
            return logits
        samples = self._sample_of_token(bounds)
        probs = logits.float().softmax(-1)
        real = (samples >= 0)[:, None]
        chosen = torch.zeros_like(probs).scatter(1, probs.topk(self.topk, dim=1).indices, 1.0) * real
        if self._mode == "counting":
            total = self._chosen.setdefault(layer, probs.new_zeros(probs.shape[1], dtype=torch.float64))
            total += chosen.sum(0)
            return logits
        loss = logits.new_zeros((), dtype=torch.float32)
        if self.options.aux_coeff > 0:
            aux = self._aux(layer, probs * real, chosen, samples, bounds.samples)
            loss = loss + self.options.aux_coeff * aux
            self._add("moe_aux_loss", aux)
        if self.options.z_coeff > 0:
            z = (logits.float().logsumexp(-1).square() * real[:, 0]).sum() / self._tokens
            loss = loss + self.options.z_coeff * z
            self._add("moe_z_loss", z)
        out: Tensor = _AddLoss.apply(logits, loss)
        return out

    def _aux(self, layer: int, probs: Tensor, chosen: Tensor, samples: Tensor, count: int) -> Tensor:
        """This rank's part of the auxiliary loss."""
        experts = probs.shape[1]
        if self.options.kind == "aux_loss":
            share = (self._chosen[layer] / (self._tokens * self.topk)).float()
            over_step: Tensor = experts * (share * probs.sum(0)).sum() / self._tokens
            return over_step
        index = samples.clamp(min=0)  # padding adds zeros to the first sample
        empty = probs.new_zeros(max(1, count), experts)
        probs_of_sample = empty.index_add(0, index, probs)
        chosen_of_sample = empty.index_add(0, index, chosen)
        if dist.get_world_size(self.sample_groups) > 1:  # a sample's tokens are on several ranks
            dist.all_reduce(chosen_of_sample, group=self.sample_groups)
        lengths = (chosen_of_sample.sum(1) / self.topk).clamp(min=1.0)  # a pack may have no samples
        each = experts * (chosen_of_sample * probs_of_sample).sum(1) / (self.topk * lengths.square())
        within_samples: Tensor = each.sum() / self._samples
        return within_samples

    def _sample_of_token(self, bounds: PackBounds) -> Tensor:
        """The number in the pack of each token's sample, -1 for padding. [T of this rank]."""
        samples = bounds.sample_of_token
        assert samples is not None
        if self.tensor_size > 1:
            # with tensor parallelism, megatron requires sequence parallelism for experts
            samples = samples.chunk(self.tensor_size)[self.tensor_rank]
        return samples

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value


class _AddLoss(torch.autograd.Function):
    """The identity on logits. Its backward pass adds the gradient of a loss, as if that were added to the step's loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


class LossRouter(PackRouter):
    """megatron's router with millrace's losses. They count what the router itself would choose, replayed or not."""

    def __init__(
        self, losses: RouterLosses, *, config: TransformerConfig, pg_collection: Any, **more: Any
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **more)
        self.losses = losses

    def routed(self, logits: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and the map of tokens to experts, both [T, E], from logits [T, 1, E]."""
        assert self.bounds is not None
        flat = self.losses.attach(logits.view(-1, logits.shape[-1]), self.layer_number, self.bounds)
        return super().routed(flat.view(logits.shape), padding_mask)
