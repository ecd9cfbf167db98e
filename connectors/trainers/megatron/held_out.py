"""Loss of held-out samples: a forward pass without gradients, in the trainer's packs and layout.

Owns how the parts of all ranks are combined. Knows nothing of sets, files or versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from millrace.connectors.trainers.megatron.forward_backward import LogprobForwardBackward
from millrace.connectors.trainers.megatron.packing import BatchRow, make_packs
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.config import RunConfig
from millrace.core.families.architecture import Architecture


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
