"""One optimizer step, or a forward pass, over a global batch: packs, losses, gradients and their checks.

Owns how samples meet the model; knows nothing of versions, files or actors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel as tp
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from connectors.megatron.logprobs import token_logprobs
from connectors.megatron.model import PolicyModel
from connectors.megatron.packs import Pack, Row, make_pack
from connectors.megatron.world import model_context
from core.algorithms.objective import Objective, TokenBatch
from core.batching import plan_packs
from core.config import RunConfig

Sums = dict[str, tuple[float, float]]


class Stepper:
    """Runs packs through the model of this rank, together with all other ranks."""

    def __init__(self, config: RunConfig, model: Any, policy: PolicyModel, vocab: int, device: Any) -> None:
        self.config = config
        self.model = model
        self.policy = policy
        self.vocab = vocab
        self.device = device
        self.objective = Objective(config.algorithm)
        self.longest = config.rollout.sampling.max_new_tokens
        self.temperature = 1.0 if self.objective.supervised else config.rollout.sampling.temperature

    def packs(self, rows: Sequence[Row]) -> list[Pack]:
        """This rank's packs of a global batch; every rank gets as many."""
        parallel = self.config.trainer.parallel
        align = (2 * parallel.context if parallel.context > 1 else 1) * (
            parallel.tensor if parallel.sequence else 1
        )
        lengths = [-(-len(row.tokens) // align) * align for row in rows]
        ranks = mpu.get_data_parallel_world_size()
        limit = self.config.trainer.max_pack_tokens * parallel.context
        planned = plan_packs(lengths, ranks=ranks, max_tokens=limit)[mpu.get_data_parallel_rank()]
        return [
            make_pack(
                [rows[i] for i in members],
                cp_size=parallel.context,
                cp_rank=mpu.get_context_parallel_rank(),
                align=align,
                device=self.device,
            )
            for members in planned
        ]

    def logprobs(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Log-probabilities of response tokens by sample id, without gradients, known to every rank."""
        packs = self.packs(rows)
        found: dict[str, Tensor] = {}

        def collect(pack: Pack, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            values, _ = self._token_logprobs(pack, hidden, entropy=False)
            lengths = [row.response_length for row in pack.rows]
            found.update(
                {
                    row.sample_id: part.detach().cpu()
                    for row, part in zip(pack.rows, values.split(lengths), strict=True)
                }
            )
            return hidden.sum() * 0, torch.zeros((), dtype=torch.int, device=self.device), {}

        self.model.eval()
        with torch.no_grad():
            self._run(packs, collect, forward_only=True)
        self.model.train()
        return _gathered(found)

    def forward_backward(
        self,
        rows: Sequence[Row],
        old: dict[str, Tensor] | None,
        ref: dict[str, Tensor] | None,
    ) -> tuple[Sums, list[int]]:
        """Gradients of the step's loss in the model's buffers; sums of every metric over all ranks; tokens a pack."""
        counts = torch.tensor([int(row.loss_mask.sum()) for row in rows], dtype=torch.float64)
        per_sample = self.objective.sample_weights(counts, self.longest)
        weight = {row.sample_id: float(w) for row, w in zip(rows, per_sample.tolist(), strict=True)}
        packs = self.packs(rows)
        sums: Sums = {}
        first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        done: list[int] = []

        def loss(pack: Pack, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            values, entropy = self._token_logprobs(pack, hidden, entropy=self.objective.needs_entropy)
            batch = self._token_batch(pack, values, entropy, weight, old, ref)
            total, metrics = self.objective(batch)
            metrics["loss"] = (total.detach(), torch.zeros_like(total))
            metrics.update(_gap(batch))
            if mpu.get_context_parallel_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0:
                _add(sums, {name: (float(value), float(amount)) for name, (value, amount) in metrics.items()})
            # megatron divides gradients by the sum of these counts over all packs: exactly one pack counts 1
            count = 1 if first and not done else 0
            done.append(1)
            return total + hidden.sum() * 0, torch.tensor(count, dtype=torch.int, device=self.device), {}

        self._run(packs, loss, forward_only=False)
        merged = _merged(sums)
        return merged, [pack.tokens for pack in packs]

    def _token_logprobs(self, pack: Pack, hidden: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N] of the whole pack's response tokens, on every context parallel rank."""
        if self.config.trainer.parallel.sequence:
            hidden = tp.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = tp.copy_to_tensor_model_parallel_region(hidden)
        weight = (
            self.policy.shared_embedding_or_output_weight()
            if self.policy.share_embeddings_and_output_weights
            else self.policy.output_layer.weight
        )
        values, entropies = token_logprobs(
            hidden[:, 0][pack.places].to(weight.dtype),  # megatron hands bf16 models' outputs over in fp32
            weight,
            pack.targets,
            vocab=self.vocab,
            group=mpu.get_tensor_model_parallel_group(),
            temperature=self.temperature,
            chunk=self.config.trainer.logprob_chunk_tokens,
            entropy=entropy,
        )
        return self._whole(pack, values), None if entropies is None else self._whole(pack, entropies)

    def _whole(self, pack: Pack, local: Tensor) -> Tensor:
        """Values of all context parallel ranks put in the pack's order; gradients flow to this rank's own."""
        out = local.new_zeros(pack.count).index_put((pack.slots,), local)
        if self.config.trainer.parallel.context > 1:
            others = out.detach().clone()
            dist.all_reduce(others, group=mpu.get_context_parallel_group())
            out = out + (others - out.detach())
        return out

    def _token_batch(
        self,
        pack: Pack,
        values: Tensor,
        entropy: Tensor | None,
        weight: dict[str, float],
        old: dict[str, Tensor] | None,
        ref: dict[str, Tensor] | None,
    ) -> TokenBatch:
        rows, device = pack.rows, self.device

        def stacked(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts).to(device) if parts else values.new_zeros(0)

        sampled = stacked([torch.from_numpy(row.rollout_logprobs.copy()) for row in rows])
        if old is not None:
            before = stacked([old[row.sample_id] for row in rows])
        else:
            before = sampled if self.objective.ratio_to_rollout else values.detach()
        lengths = torch.tensor([row.response_length for row in rows], dtype=torch.long)
        each = torch.repeat_interleave(torch.arange(len(rows)), lengths)
        return TokenBatch(
            logprobs=values,
            old_logprobs=before,
            rollout_logprobs=sampled,
            advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float32)[each].to(device),
            mask=stacked([torch.from_numpy(row.loss_mask.astype(np.float32)) for row in rows]),
            lengths=lengths.to(device),
            weights=torch.tensor([weight[row.sample_id] for row in rows], dtype=torch.float32)[each].to(
                device
            ),
            ref_logprobs=stacked([ref[row.sample_id] for row in rows]) if ref is not None else None,
            entropy=entropy,
        )

    def _run(
        self,
        packs: list[Pack],
        loss: Callable[[Pack, Tensor], tuple[Tensor, Tensor, dict[str, Any]]],
        *,
        forward_only: bool,
    ) -> None:
        def forward(iterator: Iterator[Pack], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            pack = next(iterator)
            with model_context(self.device):
                hidden = model(
                    input_ids=pack.input_ids,
                    position_ids=pack.position_ids,
                    attention_mask=None,
                    packed_seq_params=pack.params,
                )
            return hidden, partial(evaluated, pack)

        def evaluated(pack: Pack, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            with model_context(self.device):
                return loss(pack, hidden)

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(packs),
            model=[self.model],
            num_microbatches=len(packs),
            seq_length=max(pack.input_ids.shape[1] for pack in packs),
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _gap(batch: TokenBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """How far the engines' log-probabilities are from the trainer's."""
    mask = batch.mask.float()
    gap = (batch.logprobs.detach().float() - batch.rollout_logprobs).abs() * mask
    largest = gap.max() if len(gap) else gap.new_zeros(())
    return {
        "logprob_gap_mean": (gap.sum(), mask.sum()),
        "logprob_gap_max": (largest, torch.full_like(largest, math.nan)),
    }


def _add(held: Sums, more: Sums) -> None:
    """Sum by name; a weight of NaN marks a maximum, a weight of 0 a plain sum."""
    for name, (value, amount) in more.items():
        before = held.get(name)
        if before is None:
            held[name] = (value, amount)
        elif math.isnan(amount):
            held[name] = (max(before[0], value), amount)
        else:
            held[name] = (before[0] + value, before[1] + amount)


def _merged(sums: Sums) -> Sums:
    """Sums over all ranks, in rank order."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sums)
    merged: Sums = {}
    for part in everywhere:
        _add(merged, part)
    return merged


def _gathered(found: dict[str, Tensor]) -> dict[str, Tensor]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return {name: value for part in everywhere for name, value in part.items()}
