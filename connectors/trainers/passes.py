"""Forward and backward passes of packs through one model of this rank, together with all other ranks; losses of held-out samples.

Owns what every trainer does around a pass: which values are kept, response tokens of context parallel ranks put together, and the
sums of metrics over packs and ranks. How a pack goes through a model is the trainer's. Knows nothing of objectives, sets, files or versions.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from millrace.connectors.trainers.ops.logprobs import TokenLogprobs
from millrace.connectors.trainers.packing import BatchRow, Pack, make_packs
from millrace.connectors.trainers.place import RankPlace
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.connectors.trainers.step_speed import ForwardClock
from millrace.core.config import RunConfig
from millrace.core.families.architecture import Architecture

Metrics = dict[str, tuple[Tensor, Tensor]]  # weighted sum and weight, by name
MetricSums = dict[str, tuple[float, float]]  # the same as numbers, summed over packs
Output = TypeVar("Output")  # a head's output for the hidden states of a pack


class Passes(ABC):
    """Passes through one model of this rank."""

    replays = False  # whether routers take the experts of the packs' rows

    def __init__(self, config: RunConfig, place: RankPlace, device: Any) -> None:
        self.config = config
        self.place = place
        self.device = device
        self.clock = ForwardClock(device)  # of passes without gradients

    @abstractmethod
    def _run(
        self, packs: Sequence[Pack], loss: Callable[[Pack, Tensor], Tensor], *, forward_only: bool
    ) -> None:
        """Compute each pack's hidden states [T, 1, H], its loss, and unless `forward_only` its gradients, which add up."""

    @abstractmethod
    def _train(self, mode: bool) -> None:
        """Set the model to training, or to evaluation."""

    @contextlib.contextmanager
    def own_routing(self) -> Iterator[None]:
        """A context in which routers choose the experts themselves."""
        before, self.replays = self.replays, False
        try:
            yield
        finally:
            self.replays = before

    def gather_context_parallel(self, pack: Pack, local: Tensor) -> Tensor:
        """Values of all context parallel ranks in the pack's order, [N] or [N, k]; gradients flow to this rank's values."""
        if self.place.context_group is None:
            return local  # already complete and in order
        out = local.new_zeros(pack.count, *local.shape[1:]).index_put((pack.slots,), local)
        others = out.detach().clone()
        dist.all_reduce(others, group=self.place.context_group)
        return out + (others - out.detach())

    def forward(self, packs: Sequence[Pack], head: Callable[[Pack, Tensor], Tensor]) -> Tensor | None:
        """The head's values of all response tokens, end to end, without gradients; None before the last stage."""
        values: list[Tensor] = []

        def collect(pack: Pack, hidden: Tensor) -> Tensor:
            values.append(head(pack, hidden).detach())
            return hidden.new_zeros(())

        self._train(False)
        with torch.no_grad(), self.clock.counting(sum(pack.tokens for pack in packs)):
            self._run(packs, collect, forward_only=True)
        self._train(True)
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
        numbers = iter(range(len(packs)))
        metrics_of_packs: list[Metrics] = []

        def pack_loss(pack: Pack, hidden: Tensor) -> Tensor:
            total, metrics = loss(next(numbers), head(pack, hidden))
            if not forward_only and not total.requires_grad:
                # as of a pack without samples: all ranks sum gradients
                total = total + hidden.sum() * 0
            if self.place.reports:
                metrics_of_packs.append({name: (x.detach(), y.detach()) for name, (x, y) in metrics.items()})
            return total

        with torch.set_grad_enabled(not forward_only):
            self._run(packs, pack_loss, forward_only=forward_only)
        if on_launched is not None:
            on_launched()
        for metrics in metrics_of_packs:  # at the end, since reading a number waits for the device
            add_sums(sums, to_numbers(metrics))


class LogprobPasses(Passes):
    """Passes through a model with an output layer over the vocabulary, and log-probabilities taken from it."""

    temperature: float

    def logprobs(self, packs: Sequence[Pack]) -> Tensor | None:
        """Log-probabilities of the packs' response tokens, end to end; None before the last pipeline stage."""
        return self.forward(
            packs, lambda pack, hidden: self.token_logprobs(pack, hidden, entropy=False).targets
        )

    def text_logprobs(self, packs: Sequence[Pack]) -> Tensor | None:
        """`logprobs` of tokens that nobody sampled: those of the whole vocabulary, also if answers have only a part of it."""
        return self.logprobs(packs)

    @abstractmethod
    def wider_logprobs(self, packs: Sequence[Pack]) -> Tensor | None:
        """The same, computed in the next wider type than the weights'."""

    @abstractmethod
    def token_logprobs(
        self,
        pack: Pack,
        hidden: Tensor,
        *,
        entropy: bool,
        entropy_gradient: bool = True,
        others: bool = False,
    ) -> TokenLogprobs:
        """Log-probabilities [N] of a pack's response tokens, and entropies, from its hidden states.

        others: also return log-probabilities [N, k] of the pack's other tokens.
        """

    def gathered(self, pack: Pack, found: TokenLogprobs) -> TokenLogprobs:
        """The values of all context parallel ranks, on each of them."""
        return TokenLogprobs(
            self.gather_context_parallel(pack, found.targets),
            None if found.entropies is None else self.gather_context_parallel(pack, found.entropies),
            None if found.others is None else self.gather_context_parallel(pack, found.others),
        )

    @abstractmethod
    def router_losses(
        self, packs: Sequence[Pack], tokens: int, samples: int, sums: MetricSums
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes include the routers' losses, if the model has any; adds their metrics to `sums`.

        tokens, samples: of the whole step.
        """

    @abstractmethod
    def expert_metrics(self) -> Metrics:
        """How full experts are, how long their ranks wait, and how many replayed ones the routers would have chosen; empty without experts."""


class ValuePasses(Passes):
    """Passes through a model with a scalar head."""

    def values(self, packs: Sequence[Pack]) -> Tensor | None:
        """Values of the packs' response tokens, end to end; None before the last pipeline stage."""
        return self.forward(packs, self.token_values)

    @abstractmethod
    def token_values(self, pack: Pack, hidden: Tensor) -> Tensor:
        """Values [N] of a pack's response tokens, from its hidden states."""


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
    passes: LogprobPasses,
    samples: Sequence[HeldOutSample],
    config: RunConfig,
    architecture: Architecture | None,
    device: Any,
    place: RankPlace,
) -> list[float]:
    """For each sample, the sum of -log p over its tokens with a loss, in nats. All ranks call it with all samples, and get all sums."""
    rows = [_row(number, sample) for number, sample in enumerate(samples)]
    packs = make_packs(rows, config, architecture, device, place, with_teacher=False)
    logprobs = passes.text_logprobs(packs)
    found: dict[int, float] = {}
    if logprobs is not None and place.reports:
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
        images=sample.images,
    )
