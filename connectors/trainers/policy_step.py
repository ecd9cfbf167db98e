"""The policy's part of an optimizer step: the objective over this rank's packs, and its gradients.

Owns passing a rank's batch to the objective. Knows nothing of versions, files, actors or other models.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from millrace.connectors.trainers.ops.logprobs import TokenLogprobs
from millrace.connectors.trainers.passes import (
    LogprobPasses,
    Metrics,
    MetricSums,
    add_sums,
    maximum,
    to_numbers,
)
from millrace.connectors.trainers.rank_batch import RankBatch
from millrace.core.algorithms.ages import age_metrics, ratio_metrics
from millrace.core.algorithms.aggregate import clean
from millrace.core.algorithms.objective import Objective
from millrace.core.contracts.token_batch import TokenBatch


def policy_step(
    passes: LogprobPasses,
    objective: Objective,
    batch: RankBatch,
    sums: MetricSums,
    *,
    forward_only: bool,
    on_launched: Callable[[], None],
) -> None:
    """Leave the gradients of the step's loss in the model's buffers, unless `forward_only`; add all metrics to `sums`."""
    spans, lengths = batch.spans(), batch.pack_lengths()

    def loss(number: int, output: TokenLogprobs) -> tuple[Tensor, Metrics]:
        tokens = _token_batch(batch, spans[number], lengths[number], objective, output)
        batch.passed[number] = tokens.logprobs.detach()
        total, metrics = objective(tokens)
        metrics["loss"] = (total.detach(), torch.zeros_like(total))
        sampled = batch.sampled_logprobs
        ours = tokens.logprobs.detach() if sampled is None else sampled[spans[number]]
        ages = batch.ages[spans[number]]
        metrics.update(logprob_gap(ours, tokens.rollout_logprobs, batch.compared[spans[number]]))
        if not objective.supervised:
            metrics.update(age_metrics(ages, tokens.mask))
            metrics["staleness_max"] = maximum(ages * tokens.mask)
        if batch.oldest:
            metrics.update(ratio_metrics(ours, tokens.rollout_logprobs, tokens.mask, ages, batch.oldest))
        if "teacher" in batch.per_token and not objective.teacher_top_k:
            metrics["teacher_kl"] = _teacher_kl(tokens, batch.per_token["teacher"][spans[number]])
        return total, metrics

    losses: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not forward_only:
        losses = passes.router_losses(batch.packs, batch.tokens, batch.samples, sums)
    with losses:
        passes.forward_backward(
            batch.packs,
            partial(
                passes.token_logprobs,
                entropy=True,
                entropy_gradient=objective.needs_entropy,
                others=objective.teacher_top_k > 0,
            ),
            loss,
            sums,
            forward_only=forward_only,
            on_launched=None if forward_only else on_launched,
        )
    add_sums(sums, to_numbers(passes.expert_metrics()))


def _token_batch(
    batch: RankBatch,
    span: slice,
    lengths: Tensor,
    objective: Objective,
    output: TokenLogprobs,
) -> TokenBatch:
    """The objective's input for one pack, whose tokens are `span` of the batch."""
    rollout, ref = batch.rollout_logprobs[span], batch.per_token.get("ref")
    if "old" in batch.per_token:
        old = batch.per_token["old"][span]
    else:
        old = rollout if objective.ratio_to_rollout else output.targets.detach()
    top = batch.per_token.get("teacher_top")
    return TokenBatch(
        logprobs=output.targets,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=batch.per_token["advantages"][span],
        mask=batch.mask[span],
        lengths=lengths,
        weights=batch.weights[span],
        ref_logprobs=None if ref is None else ref[span],
        entropy=output.entropies,
        top_logprobs=output.others,
        teacher_top_logprobs=None if top is None else top[span],
        ages=batch.ages[span] if batch.oldest else None,
    )


def _teacher_kl(tokens: TokenBatch, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL of the sampling policy from the teacher, estimated on the sampled tokens."""
    mask = tokens.mask.bool()
    return clean(tokens.old_logprobs - teacher, mask).sum(), mask.sum().float()


def logprob_gap(sampled: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Difference between the trainer's log-probabilities, under the sampling weights, and the engine's; all [N]."""
    gap = clean((sampled.float() - rollout).abs(), mask)
    return {"logprob_gap_mean": (gap.sum(), mask.sum().float()), "logprob_gap_max": maximum(gap)}
