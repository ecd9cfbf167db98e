"""How packs go through a model of this rank, together with all other ranks: forward, backward and gathering.

Owns megatron's schedule, the assembly of response tokens over context parallel ranks and the sums of metrics over ranks;
knows nothing of objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel as tp
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from millrace.connectors.megatron.model.fused import rows
from millrace.connectors.megatron.model.logprobs import token_logprobs
from millrace.connectors.megatron.model.policy_model import PolicyModel
from millrace.connectors.megatron.packing import Pack
from millrace.connectors.megatron.process.distributed import model_context
from millrace.core.config import RunConfig

Sums = dict[str, tuple[float, float]]
Metrics = dict[str, tuple[Tensor, Tensor]]
Head = Callable[[Pack, Tensor], Tensor]
Loss = Callable[[int, Pack, Tensor], tuple[Tensor, Metrics]]


class Runner:
    """One model of this rank: `model` is what megatron calls, `inner` holds the parameters."""

    def __init__(self, config: RunConfig, model: Any, inner: PolicyModel, device: Any) -> None:
        self.config = config
        self.model = model
        self.inner = inner
        self.device = device

    def collect(self, packs: Sequence[Pack], head: Head) -> Tensor | None:
        """What `head` says of every response token of the packs, end to end, without gradients; None before the last stage."""
        found: list[Tensor] = []

        def note(pack: Pack, hidden: Tensor) -> Tensor:
            found.append(head(pack, hidden).detach())
            return hidden.new_zeros(())

        self.model.eval()
        with torch.no_grad():
            self._run(packs, note, forward_only=True)
        self.model.train()
        return torch.cat(found) if found else None

    def forward_backward(
        self,
        packs: Sequence[Pack],
        loss: Loss,
        sums: Sums,
        *,
        forward_only: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Gradients of the sum of `loss` (of each pack, with its number) in the model's buffers; metrics added to `sums`.

        Metrics are added on one rank of those that hold the same samples. `forward_only` leaves the gradients out.
        `meanwhile` is called when all work is with the device, before its end is waited for.
        """
        counted = mpu.get_context_parallel_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0
        number = iter(range(len(packs)))
        noted: list[Metrics] = []

        def note(pack: Pack, hidden: Tensor) -> Tensor:
            total, metrics = loss(next(number), pack, hidden)
            if counted:
                noted.append({name: (x.detach(), y.detach()) for name, (x, y) in metrics.items()})
            return total

        with torch.set_grad_enabled(not forward_only):
            self._run(packs, note, forward_only=forward_only)
        if meanwhile is not None:
            meanwhile()
        for metrics in noted:  # only now: reading a number waits for the device
            add(sums, read(metrics))

    def whole(self, pack: Pack, local: Tensor) -> Tensor:
        """Values of all context parallel ranks put in the pack's order [N]; gradients flow to this rank's own."""
        if self.config.trainer.parallel.context == 1:
            return local  # all of them, in order
        out = local.new_zeros(pack.count).index_put((pack.slots,), local)
        others = out.detach().clone()
        dist.all_reduce(others, group=mpu.get_context_parallel_group())
        return out + (others - out.detach())

    def _run(
        self, packs: Sequence[Pack], loss: Callable[[Pack, Tensor], Tensor], *, forward_only: bool
    ) -> None:
        first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        counts = iter([int(first)] + [0] * (len(packs) - 1))
        # bf16 models hand their outputs over in fp32, which only a sum over tensor parallel ranks needs
        plain = self.inner.config.bf16 and self.config.trainer.parallel.tensor == 1
        extra = {"fp32_output": False} if plain else {}

        def forward(iterator: Iterator[Pack], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            pack = next(iterator)
            with model_context(self.device):
                hidden = model(
                    input_ids=pack.input_ids,
                    position_ids=pack.position_ids,
                    attention_mask=None,
                    packed_seq_params=pack.params,
                    **extra,
                )
            return hidden, partial(evaluated, pack)

        def evaluated(pack: Pack, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            with model_context(self.device):
                total = loss(pack, hidden)
                if not total.requires_grad:
                    total = total + hidden.sum() * 0
                # megatron divides gradients by the sum of these counts over all packs: exactly one pack counts 1
                return total, torch.full((), next(counts), dtype=torch.int, device=self.device), {}

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(packs),
            model=[self.model],
            num_microbatches=len(packs),
            seq_length=max(pack.input_ids.shape[1] for pack in packs),
            micro_batch_size=1,
            forward_only=forward_only,
        )


class LanguageRunner(Runner):
    """A model with an output layer over the vocabulary."""

    def __init__(
        self,
        config: RunConfig,
        model: Any,
        inner: PolicyModel,
        device: Any,
        *,
        vocab: int,
        temperature: float,
    ) -> None:
        super().__init__(config, model, inner, device)
        self.vocab = vocab
        self.temperature = temperature

    def logprobs(self, packs: Sequence[Pack]) -> Tensor | None:
        """Log-probabilities of the packs' response tokens, end to end; None before the last pipeline stage."""
        return self.collect(packs, lambda pack, hidden: self.token_logprobs(pack, hidden, entropy=False)[0])

    def token_logprobs(self, pack: Pack, hidden: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N] of the whole pack's response tokens, on every context parallel rank."""
        if self.config.trainer.parallel.sequence:
            hidden = tp.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = tp.copy_to_tensor_model_parallel_region(hidden)
        inner = self.inner
        weight = (
            inner.shared_embedding_or_output_weight()
            if inner.share_embeddings_and_output_weights
            else inner.output_layer.weight
        )
        values, entropies = token_logprobs(
            rows(hidden.squeeze(1), pack.places).to(weight.dtype),
            weight,
            pack.targets,
            vocab=self.vocab,
            group=mpu.get_tensor_model_parallel_group(),
            temperature=self.temperature,
            chunk=self.config.trainer.logprob_chunk_tokens,
            entropy=entropy,
        )
        return self.whole(pack, values), None if entropies is None else self.whole(pack, entropies)


def read(metrics: Metrics) -> Sums:
    """Metrics as numbers, in one transfer from the device."""
    if not metrics:
        return {}
    flat = torch.stack([x.detach().double() for pair in metrics.values() for x in pair]).tolist()
    return dict(zip(metrics, zip(flat[::2], flat[1::2], strict=True), strict=True))


def add(held: Sums, more: Sums) -> None:
    """Sum by name; a weight of NaN marks a maximum, a weight of 0 a plain sum."""
    for name, (value, amount) in more.items():
        before = held.get(name)
        if before is None:
            held[name] = (value, amount)
        elif math.isnan(amount):
            held[name] = (max(before[0], value), amount)
        else:
            held[name] = (before[0] + value, before[1] + amount)


def merged(sums: Sums) -> Sums:
    """Sums over all ranks, in rank order."""
    if dist.get_world_size() == 1:
        return dict(sums)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sums)
    total: Sums = {}
    for part in everywhere:
        add(total, part)
    return total
