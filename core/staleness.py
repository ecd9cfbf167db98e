"""How far rollouts may run ahead of training. Pure.

Owns two decisions: how many samples may be admitted now, and whether a finished sample is still young enough to train
on. Staleness is counted in weight versions between the policy that drew a token and the trainer.
Admission is by capacity: with versions 0, 1, 2, ... each consuming one batch, at version v no more than
(max_staleness + v + 1) batches may ever have been admitted, so that what is admitted last is consumed at most
max_staleness versions later.
"""

from __future__ import annotations

from collections.abc import Sequence


def capacity(
    *, max_staleness: int, batch: int, version: int, max_concurrent: int | None, accepted: int, running: int
) -> int:
    """Samples that may be admitted now; never negative.

    min(max_concurrent - running, (max_staleness + version + 1) * batch - (accepted + running))

    batch: samples that a version consumes. version: the trainer's. max_concurrent: most samples in flight, None for
    no bound. accepted: samples finished and kept since version 0. running: samples in flight.
    Source: AReaL (arXiv:2505.24298), section 5.1.
    """
    assert max_staleness >= 0
    assert batch >= 1
    free = (max_staleness + version + 1) * batch - (accepted + running)
    if max_concurrent is not None:
        free = min(free, max_concurrent - running)
    return max(0, free)


def oldest_version(policy_versions: Sequence[tuple[int, int]]) -> int | None:
    """Version of the oldest policy in a sample's run-length list of (first token, version); None when it has none."""
    return min((version for _, version in policy_versions), default=None)


def staleness(policy_versions: Sequence[tuple[int, int]], version: int) -> int:
    """Versions between a sample's oldest token and the trainer's weights that are about to be trained."""
    oldest = oldest_version(policy_versions)
    return 0 if oldest is None else version - oldest


def admissible(policy_versions: Sequence[tuple[int, int]], version: int, max_staleness: int) -> bool:
    """The hard check at train time: whether no token is older than `max_staleness` versions."""
    return staleness(policy_versions, version) <= max_staleness
