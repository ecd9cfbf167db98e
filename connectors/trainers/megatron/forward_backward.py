"""Forward and backward passes of packs through one model of this rank, together with all other ranks.

Owns megatron's schedule. Knows nothing of objectives, sets, files or versions.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel as tp
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor
from torch.nn import functional as F

from millrace.connectors.trainers import patches
from millrace.connectors.trainers.megatron.model.attention import PackBounds
from millrace.connectors.trainers.megatron.model.expert_loads import load_metrics
from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.connectors.trainers.megatron.model.wider import computing_wider
from millrace.connectors.trainers.megatron.process.distributed import model_context, rank_place
from millrace.connectors.trainers.ops.fused import take_rows
from millrace.connectors.trainers.ops.logprobs import TokenLogprobs, token_logprobs
from millrace.connectors.trainers.packing import Pack
from millrace.connectors.trainers.passes import (
    LogprobPasses,
    Metrics,
    MetricSums,
    Passes,
    ValuePasses,
    add_sums,
    to_numbers,
)
from millrace.core.config import RunConfig
from millrace.core.waits import beat


class ForwardBackward(Passes):
    """One model of this rank. megatron calls `models`, one a stage; `inner` holds the parameters."""

    def __init__(self, config: RunConfig, models: list[Any], inner: RankModel, device: Any) -> None:
        super().__init__(config, rank_place(), device)
        self.models = models
        self.inner = inner

    def _train(self, mode: bool) -> None:
        for model in self.models:
            model.train(mode)

    def _run(
        self, packs: Sequence[Pack], loss: Callable[[Pack, Tensor], Tensor], *, forward_only: bool
    ) -> None:
        first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        counts = iter([int(first)] + [0] * (len(packs) - 1))
        # megatron's bf16 models convert their outputs to fp32, but only a sum over tensor parallel ranks needs that
        keep_bf16 = self.inner.config.bf16 and self.config.trainer.parallel.tensor == 1
        extra = {"fp32_output": False} if keep_bf16 else {}

        def forward_step(iterator: Iterator[Pack], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            beat()
            pack = next(iterator)
            with model_context(self.device):
                hidden = model(
                    input_ids=pack.input_ids,
                    position_ids=pack.position_ids,
                    attention_mask=None,
                    packed_seq_params=self._bounds(pack),
                    **extra,
                )
            return hidden, partial(loss_step, pack)

        def loss_step(pack: Pack, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            beat()
            with model_context(self.device):
                total = loss(pack, hidden)
                # megatron divides gradients by the sum of these counts over all packs: exactly one pack counts 1
                return total, torch.full((), next(counts), dtype=torch.int, device=self.device), {}

        with patches.shapes_known(*self._shapes(packs)):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(packs) for _ in self.models] if len(self.models) > 1 else iter(packs),
                model=self.models,
                num_microbatches=len(packs),
                seq_length=max(pack.input_ids.shape[1] for pack in packs),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _bounds(self, pack: Pack) -> PackBounds:
        """The pack's bounds, with the experts to replay."""
        if not self.replays or pack.routed is None:
            return PackBounds.of(pack)
        return PackBounds.of(pack, pack.routed.to(self.device, non_blocking=True))

    def _shapes(self, packs: Sequence[Pack]) -> tuple[Iterator[list[int]], Iterator[list[int]]]:
        """Shapes of what this rank's stages receive from other ranks, in order: of hidden states and of their gradients."""
        c = self.inner.config
        parts = c.tensor_model_parallel_size if c.sequence_parallel else 1
        shapes = [[pack.input_ids.shape[1] // parts, 1, c.hidden_size] for pack in packs]
        passes = get_schedule_table(len(packs), len(self.models), c.microbatch_group_size_per_vp_stage)
        # the model begins in the first rank's first stage; backward passes go through the stages from the last to the first
        begins, ends = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        return (
            iter([shapes[pack] for pack, stage in passes if not (begins and stage == 0)]),
            iter([shapes[pack] for pack, stage in passes if not (ends and stage == 0)]),
        )


class LogprobForwardBackward(ForwardBackward, LogprobPasses):
    """A model with an output layer over the vocabulary, and log-probabilities taken from it."""

    def __init__(
        self,
        config: RunConfig,
        models: list[Any],
        inner: RankModel,
        device: Any,
        *,
        vocab: int,
        temperature: float,
    ) -> None:
        super().__init__(config, models, inner, device)
        self.vocab = vocab
        self.temperature = temperature
        self._wide: torch.dtype | None = None

    def wider_logprobs(self, packs: Sequence[Pack]) -> Tensor | None:
        """The same as `logprobs`, computed in the next wider type than the weights'. See `wider`."""
        with computing_wider(self.inner) as self._wide:
            try:
                return self.logprobs(packs)
            finally:
                self._wide = None

    def token_logprobs(
        self,
        pack: Pack,
        hidden: Tensor,
        *,
        entropy: bool,
        entropy_gradient: bool = True,
        others: bool = False,
    ) -> TokenLogprobs:
        """Log-probabilities [N] of the whole pack's response tokens, and entropies, on every context parallel rank.

        others: also return log-probabilities [N, k] of the pack's other tokens.
        """
        if self.config.trainer.parallel.sequence:
            hidden = tp.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = tp.copy_to_tensor_model_parallel_region(hidden)
        inner = self.inner.last
        weight = (
            inner.shared_embedding_or_output_weight()
            if inner.share_embeddings_and_output_weights
            else inner.output_layer.weight
        )
        if self._wide is not None:
            weight = weight.detach().to(self._wide)
        found = token_logprobs(
            take_rows(hidden.squeeze(1), pack.places).to(weight.dtype),
            weight,
            pack.targets,
            vocab=self.vocab,
            group=mpu.get_tensor_model_parallel_group(),
            temperature=self.temperature,
            chunk=self.config.trainer.logprob_chunk_tokens,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            others=pack.others if others else None,
        )
        return self.gathered(pack, found)

    @contextlib.contextmanager
    def router_losses(
        self, packs: Sequence[Pack], tokens: int, samples: int, sums: MetricSums
    ) -> Iterator[None]:
        """A context in which backward passes include the routers' losses, if the model has any; adds their metrics to `sums`.

        tokens, samples: of the whole step.
        """
        losses = self.inner.router_losses
        if losses is None:
            yield
            return
        if losses.counts_first:
            with losses.counting():
                self.forward(packs, lambda _, hidden: hidden.new_zeros(0))
        with losses.training(tokens, samples):
            yield
        add_sums(sums, to_numbers(losses.metrics()))

    def expert_metrics(self) -> Metrics:
        """How full experts are, how long their ranks wait, and the share of replayed ones that the routers would have chosen.

        Each rank has other tokens or layers, so that all ranks report.
        """
        metrics = load_metrics(self.inner.expert_loads)
        counts = [count for each in self.inner.agreements if (count := each.take()) is not None]
        if not counts:
            return metrics
        same, every = (torch.stack(parts).sum() for parts in zip(*counts, strict=True))
        return metrics | {"routing_agreement": (same, every)}


class ValueForwardBackward(ForwardBackward, ValuePasses):
    """A model with a scalar head, and its values."""

    def token_values(self, pack: Pack, hidden: Tensor) -> Tensor:
        """Values [N] of the whole pack's response tokens, on every context parallel rank."""
        if self.config.trainer.parallel.sequence:
            hidden = tp.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        head = self.inner.last.value_head
        states = take_rows(hidden.squeeze(1), pack.places).to(head.weight.dtype)
        return self.gather_context_parallel(pack, F.linear(states, head.weight, head.bias)[:, 0].float())
