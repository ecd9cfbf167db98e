"""What refuses a step before anything is applied: no tokens, a loss that is not finite, an engine that disagrees with the trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millrace.core.errors import RefusedStepError, TrainerError

if TYPE_CHECKING:
    from millrace.connectors.megatron.packing import Row


def check_rows(rows: Sequence[Row], version: int, batch_url: str, max_age: int | None) -> None:
    """Raise TrainerError for a step without rows, RefusedStepError for one without a token of at most this age."""
    if not rows:
        raise TrainerError(
            f"{batch_url}: no sample names step {version}; the batch belongs to another iteration"
        )
    if not any(row.trains(max_age) for row in rows):
        bound = "" if max_age is None else f" of age {max_age} (algorithm.correction.max_token_age) or less"
        raise RefusedStepError(
            f"step {version}: none of its {len(rows)} samples has a token to train on{bound}; nothing was applied"
        )


def check_metrics(metrics: dict[str, float], version: int, max_logprob_gap: float | None) -> None:
    """Raise RefusedStepError for a loss that is not finite, or a mean log-probability difference above the limit."""
    if not math.isfinite(metrics["loss"]):
        raise RefusedStepError(
            f"step {version}: the loss is {metrics['loss']}; nothing was applied. Look at the batch's log-probabilities"
        )
    if max_logprob_gap is not None:
        mean, largest = metrics["logprob_gap_mean"], metrics["logprob_gap_max"]
        check_gap(mean, largest, max_logprob_gap, version, version)


def check_gap(mean: float, largest: float, limit: float, version: int, samples_of: int) -> None:
    """Raise RefusedStepError for a difference above the limit, on the samples of a step of the iteration."""
    if not mean <= limit:
        where = "" if samples_of == version else f" on the samples of step {samples_of}"
        raise RefusedStepError(
            f"step {version}: engine and trainer disagree{where}: mean log-probability difference {mean:.3g} (largest "
            f"{largest:.3g}), sync.max_logprob_gap is {limit:g}; nothing was applied. Check that the "
            "engines hold the synced weights (sync.verify=true compares them) and sample at the same temperature and "
            "dtype. Where the dtype alone makes the difference, raise sync.max_logprob_gap"
        )
