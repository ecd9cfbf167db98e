"""Reasons to refuse a step before it is applied: no tokens, a loss that is not finite, or engine and trainer that disagree.

Imports no torch: the rank's class, which the driver names, needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from millrace.core.errors import RefusedStepError, TrainerError
from millrace.core.logprob_gap import Cause

if TYPE_CHECKING:
    from millrace.connectors.trainers.packing import BatchRow


def check_rows(rows: Sequence[BatchRow], version: int, batch_url: str, max_age: int | None) -> None:
    """Raise TrainerError if a step has no rows, RefusedStepError if it has no token of at most this age."""
    if not rows:
        raise TrainerError(
            f"{batch_url}: no sample names step {version}; the batch belongs to another iteration"
        )
    if not any(row.trains(max_age) for row in rows):
        bound = "" if max_age is None else f" of age {max_age} (algorithm.correction.max_token_age) or less"
        raise RefusedStepError(
            f"step {version}: none of its {len(rows)} samples has a token to train on{bound}; nothing was applied"
        )


def check_loss(loss: float, version: int) -> None:
    """Raise RefusedStepError if the loss is not finite."""
    if not math.isfinite(loss):
        raise RefusedStepError(
            f"step {version}: the loss is {loss}; nothing was applied. Look at the batch's log-probabilities"
        )


def refuse_gap(
    dtype: str,
    version: int,
    samples_of: int,
    mean: float,
    largest: float,
    limit: float,
    floor: float | None,
    cause: Cause,
) -> NoReturn:
    """Raise RefusedStepError: engine and trainer differ by more than `limit` on the samples of one of the iteration's steps.

    dtype: of the model. floor: the difference from rounding alone, from which the limit is computed; None if sync.max_logprob_gap
    is a number.
    """
    where = "" if samples_of == version else f" on the samples of step {samples_of}"
    allowed = (
        f"sync.max_logprob_gap is {limit:g}"
        if floor is None
        else f"the limit is {limit:.3g}, since rounding to {dtype} makes {floor:.3g} (sync.max_logprob_gap=auto)"
    )
    number = f"{float(f'{1.5 * mean:.1g}'):g}" if math.isfinite(mean) else "a number"
    raise RefusedStepError(
        f"step {version}: engine and trainer disagree{where}: mean log-probability difference {mean:.3g} (largest "
        f"{largest:.3g}), {allowed}; nothing was applied. It looks like {cause.kind}: {cause.seen}",
        remedy=f"{cause.remedy}. These samples are stored: the same start refuses them again. Once the cause is mended, have them "
        f"generated anew; if nothing is wrong, raise sync.max_logprob_gap to {number}",
    )
