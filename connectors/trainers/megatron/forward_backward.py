"""Forward and backward passes of packs through one model of this rank, together with all other ranks; losses of held-out samples.

Owns megatron's schedule, the assembly of response tokens over context parallel ranks and the sums of metrics over ranks.
Knows nothing of objectives, sets, files or versions.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel as tp
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor
from torch.nn import functional as F

from millrace.connectors.trainers.megatron import patches
from millrace.connectors.trainers.megatron.model.attention import PackBounds
from millrace.connectors.trainers.megatron.model.fused import take_rows
from millrace.connectors.trainers.megatron.model.logprobs import TokenLogprobs, token_logprobs
from millrace.connectors.trainers.megatron.model.policy_model import RankModel
from millrace.connectors.trainers.megatron.model.wider import computing_wider
from millrace.connectors.trainers.megatron.packing import BatchRow, Pack, make_packs
from millrace.connectors.trainers.megatron.process.distributed import model_context
from millrace.connectors.trainers.megatron.step_speed import ForwardClock
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.config import RunConfig
from millrace.core.families.architecture import Architecture
from millrace.core.waits import beat

Metrics = dict[str, tuple[Tensor, Tensor]]  # weighted sum and weight, by name
MetricSums = dict[str, tuple[float, float]]  # the same as numbers, summed over packs
Output = TypeVar("Output")  # a head's output for the hidden states of a pack


class ForwardBackward:
    """One model of this rank. megatron calls `models`, one a stage; `inner` holds the parameters."""

    def __init__(self, config: RunConfig, models: list[Any], inner: RankModel, device: Any) -> None:
        self.config = config
        self.models = models
        self.inner = inner
        self.device = device
        self.replays = False  # whether routers take the experts of the packs' rows
        self.clock = ForwardClock(device)  # of passes without gradients

    @contextlib.contextmanager
    def own_routing(self) -> Iterator[None]:
        """A context in which routers choose the experts themselves."""
        before, self.replays = self.replays, False
        try:
            yield
        finally:
            self.replays = before

    def forward(self, packs: Sequence[Pack], head: Callable[[Pack, Tensor], Tensor]) -> Tensor | None:
        """The head's values of all response tokens, end to end, without gradients; None before the last stage."""
        values: list[Tensor] = []

        def collect(pack: Pack, hidden: Tensor) -> Tensor:
            values.append(head(pack, hidden).detach())
            return hidden.new_zeros(())

        for model in self.models:
            model.eval()
        with torch.no_grad(), self.clock.counting(sum(pack.tokens for pack in packs)):
            self._run(packs, collect, forward_only=True)
        for model in self.models:
            model.train()
        return torch.cat(values) if values else None

    def forward_backward(
        self,
        packs: Sequence[Pack],
        head: Callable[[Pack, Tensor], Output],
        loss: Callable[[int, Output], tuple[Tensor, Metrics]],
        sums: MetricSums,
        *,
        forward_only: bool,
        on_launched: Callable[[], None] | None = None,
    ) -> None:
        """Leave the gradients of the sum of all packs' losses in the model's buffers, and add the metrics to `sums`.

        `head` maps a pack's hidden states to its output, `loss` the pack's number and output to its loss. Only one of the ranks with
        the same samples adds the metrics. `forward_only` computes no gradients. `on_launched` is called when all work of the device
        is launched, before the host waits for it.
        """
        counts_metrics = mpu.get_context_parallel_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0
        numbers = iter(range(len(packs)))
        metrics_of_packs: list[Metrics] = []

        def pack_loss(pack: Pack, hidden: Tensor) -> Tensor:
            total, metrics = loss(next(numbers), head(pack, hidden))
            if counts_metrics:
                metrics_of_packs.append({name: (x.detach(), y.detach()) for name, (x, y) in metrics.items()})
            return total

        with torch.set_grad_enabled(not forward_only):
            self._run(packs, pack_loss, forward_only=forward_only)
        if on_launched is not None:
            on_launched()
        for metrics in metrics_of_packs:  # at the end, since reading a number waits for the device
            add_sums(sums, to_numbers(metrics))

    def gather_context_parallel(self, pack: Pack, local: Tensor) -> Tensor:
        """Values of all context parallel ranks in the pack's order, [N] or [N, k]; gradients flow to this rank's values."""
        if self.config.trainer.parallel.context == 1:
            return local  # already complete and in order
        out = local.new_zeros(pack.count, *local.shape[1:]).index_put((pack.slots,), local)
        others = out.detach().clone()
        dist.all_reduce(others, group=mpu.get_context_parallel_group())
        return out + (others - out.detach())

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
                if not total.requires_grad:
                    total = total + hidden.sum() * 0
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
            return pack.params
        return replace(pack.params, routed=pack.routed.to(self.device, non_blocking=True))

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


class LogprobForwardBackward(ForwardBackward):
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

    def logprobs(self, packs: Sequence[Pack]) -> Tensor | None:
        """Log-probabilities of the packs' response tokens, end to end; None before the last pipeline stage."""
        return self.forward(
            packs, lambda pack, hidden: self.token_logprobs(pack, hidden, entropy=False).targets
        )

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
        return TokenLogprobs(
            self.gather_context_parallel(pack, found.targets),
            None if found.entropies is None else self.gather_context_parallel(pack, found.entropies),
            None if found.others is None else self.gather_context_parallel(pack, found.others),
        )


class ValueForwardBackward(ForwardBackward):
    """A model with a scalar head, and its values."""

    def values(self, packs: Sequence[Pack]) -> Tensor | None:
        """Values of the packs' response tokens, end to end; None before the last pipeline stage."""
        return self.forward(packs, self.token_values)

    def token_values(self, pack: Pack, hidden: Tensor) -> Tensor:
        """Values [N] of the whole pack's response tokens, on every context parallel rank."""
        if self.config.trainer.parallel.sequence:
            hidden = tp.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        head = self.inner.last.value_head
        states = take_rows(hidden.squeeze(1), pack.places).to(head.weight.dtype)
        return self.gather_context_parallel(pack, F.linear(states, head.weight, head.bias)[:, 0].float())


def maximum(values: Tensor) -> tuple[Tensor, Tensor]:
    """A maximum as a metric, marked for `add_sums` by the weight NaN."""
    largest = values.max() if values.numel() else values.new_zeros(())
    return largest, torch.full_like(largest, math.nan)


def to_numbers(metrics: Metrics) -> MetricSums:
    """Metrics as numbers, in one transfer from the device."""
    if not metrics:
        return {}
    flat = torch.stack([x.detach().double() for pair in metrics.values() for x in pair]).tolist()
    return dict(zip(metrics, zip(flat[::2], flat[1::2], strict=True), strict=True))


def add_sums(total: MetricSums, more: MetricSums) -> None:
    """Add `more` to `total` by name. A weight of NaN marks a maximum, a weight of 0 a plain sum."""
    for name, (value, weight) in more.items():
        before = total.get(name)
        if before is None:
            total[name] = (value, weight)
        elif math.isnan(weight):
            total[name] = (max(before[0], value), weight)
        else:
            total[name] = (before[0] + value, before[1] + weight)


def means_of(sums: MetricSums) -> dict[str, float]:
    """Weighted sums divided by their weights, by name; maxima and plain sums are unchanged."""
    return {
        name: value if math.isnan(weight) or not weight else value / weight
        for name, (value, weight) in sums.items()
    }


def sum_over_ranks(sums: MetricSums) -> MetricSums:
    """Sums over all ranks, added in rank order."""
    if dist.get_world_size() == 1:
        return dict(sums)
    sums_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums_of_ranks, sums)
    total: MetricSums = {}
    for rank_sums in sums_of_ranks:
        add_sums(total, rank_sums)
    return total


def sample_losses(
    passes: LogprobForwardBackward,
    samples: Sequence[HeldOutSample],
    config: RunConfig,
    architecture: Architecture,
    device: Any,
) -> list[float]:
    """For each sample, the sum of -log p over its tokens with a loss, in nats. All ranks call it with all samples, and get all sums."""
    rows = [_row(number, sample) for number, sample in enumerate(samples)]
    packs = make_packs(rows, config, architecture, device, with_teacher=False)
    logprobs = passes.logprobs(packs)
    found: dict[int, float] = {}
    # ranks of one tensor or context parallel group have equal values, so one of them reports
    reports = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    if logprobs is not None and reports:
        members = [number for pack in packs for number in pack.members]
        parts = logprobs.double().cpu().split([rows[number].response_length for number in members])
        for number, part in zip(members, parts, strict=True):
            has_loss = torch.from_numpy(rows[number].loss_mask).bool()
            found[number] = -float(part[has_loss].sum())
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    losses = {number: loss for part in of_ranks for number, loss in part.items()}
    return [losses[number] for number in range(len(rows))]


def _row(number: int, sample: HeldOutSample) -> BatchRow:
    length = len(sample.mask)
    return BatchRow(
        sample_id=str(number),
        tokens=np.asarray(sample.tokens, dtype=np.int64),
        response_length=length,
        loss_mask=np.asarray(sample.mask, dtype=np.int64),
        rollout_logprobs=np.zeros(length, dtype=np.float32),
        advantage=None,
        reward=float("nan"),
        shaped_reward=None,
        truncated=False,
        train_step=0,
    )
