"""The policy's part of an optimizer step: the objective over this rank's packs, and its gradients.

Owns how a share of samples meets the objective; knows nothing of versions, files, actors or other models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.connectors.megatron.forward_backward import LanguageRunner, Metrics, Sums
from millrace.connectors.megatron.packing import Pack
from millrace.connectors.megatron.rank_batch import Share, largest
from millrace.core.algorithms.objective import Objective, TokenBatch
from millrace.core.algorithms.packed import clean


def policy_step(
    runner: LanguageRunner,
    objective: Objective,
    share: Share,
    sums: Sums,
    *,
    forward_only: bool,
    meanwhile: Callable[[], None],
) -> None:
    """Gradients of the step's loss in the model's buffers, unless `forward_only`; every metric added to `sums`."""
    spans, lengths = share.spans(), share.pack_lengths()

    def loss(number: int, pack: Pack, hidden: Tensor) -> tuple[Tensor, Metrics]:
        values, entropy = runner.token_logprobs(pack, hidden, entropy=objective.needs_entropy)
        batch = _token_batch(share, spans[number], lengths[number], objective, values, entropy)
        total, metrics = objective(batch)
        metrics["loss"] = (total.detach(), torch.zeros_like(total))
        metrics.update(_gap(batch))
        if "teacher" in share.figures:
            metrics["teacher_kl"] = _teacher_kl(batch, share.figures["teacher"][spans[number]])
        return total, metrics

    runner.forward_backward(
        share.packs, loss, sums, forward_only=forward_only, meanwhile=None if forward_only else meanwhile
    )


def _token_batch(
    share: Share, span: slice, lengths: Tensor, objective: Objective, values: Tensor, entropy: Tensor | None
) -> TokenBatch:
    sampled, ref = share.rollout_logprobs[span], share.figures.get("ref")
    if "old" in share.figures:
        before = share.figures["old"][span]
    else:
        before = sampled if objective.ratio_to_rollout else values.detach()
    return TokenBatch(
        logprobs=values,
        old_logprobs=before,
        rollout_logprobs=sampled,
        advantages=share.figures["advantages"][span],
        mask=share.mask[span],
        lengths=lengths,
        weights=share.weights[span],
        ref_logprobs=None if ref is None else ref[span],
        entropy=entropy,
    )


def _teacher_kl(batch: TokenBatch, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL of the sampling policy from the teacher, by its plain estimate on the sampled tokens."""
    mask = batch.mask.bool()
    return clean(batch.old_logprobs - teacher, mask).sum(), mask.sum().float()


def _gap(batch: TokenBatch) -> Metrics:
    """How far the engines' log-probabilities are from the trainer's."""
    mask = batch.mask.float()
    gap = (batch.logprobs.detach().float() - batch.rollout_logprobs).abs() * mask
    return {"logprob_gap_mean": (gap.sum(), mask.sum()), "logprob_gap_max": largest(gap)}
