"""The way of tokens to experts on other ranks, and back.

Expert parallel ranks hold whole experts, tensor parallel ranks of experts a part of each. Owns which rows each rank sends, and their
order: sums over a token's experts are made on the token's rank. Knows nothing of what an expert computes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from millrace.connectors.trainers.megatron.model.expert_rows import gathered, in_rows, rows_of, spread

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


def exchanged(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    ranks: Any,
    here: Sequence[int],
    compute: Compute,
    on_rows: Callable[[Tensor], None],
) -> Tensor:
    """The experts' sum [T, H] for this rank's tokens [T, H], with weights [T, k] for experts [T, k] of all ranks.

    ranks: megatron's dispatcher, for its groups. here: numbers of this rank's experts. compute(x, weights, chosen) gives the sums
    of this rank's experts, numbered from 0. on_rows is told how many rows each expert parallel rank gets.
    """
    local, experts = len(here), len(here) * ranks.ep_size
    rows = rows_of(experts - 1 - chosen, experts)  # from the first expert, as ranks follow each other
    counts = rows.ends.diff(prepend=rows.ends.new_zeros(1))
    of_ranks = gather_from_sequence_parallel_region(counts, group=ranks.tp_ep_group)
    of_ranks = of_ranks.view(ranks.ep_size, ranks.tp_size, experts).transpose(0, 1)
    received = of_ranks[:, :, here[0] : here[0] + local]  # [tp, ep, local]
    sizes = [counts.view(ranks.ep_size, local).sum(1), received[ranks.tp_rank].sum(1), received.sum((1, 2))]
    on_host, wait = _to_host(torch.cat(sizes))  # one transfer from the device for all
    # the device orders rows while the host waits for their counts
    on_rows(of_ranks.sum((0, 1)).view(ranks.ep_size, local).sum(1))
    values, of_values = spread(x, rows), in_rows(weights, rows)[:, None]
    wait()
    sent, own, of_tensor_ranks = (size.tolist() for size in on_host.split([len(size) for size in sizes]))

    def to_experts(values: Tensor) -> Tensor:
        values = _all_to_all(ranks.ep_group, values, own, sent)
        if ranks.tp_size == 1:
            return values
        gather = gather_from_sequence_parallel_region
        whole: Tensor = gather(values, group=ranks.tp_group, output_split_sizes=of_tensor_ranks)
        return whole

    def back(values: Tensor) -> Tensor:
        if ranks.tp_size > 1:
            scatter = reduce_scatter_to_sequence_parallel_region
            summed = scatter(
                values.to(weights.dtype), group=ranks.tp_group, input_split_sizes=of_tensor_ranks
            )
            values = summed.to(values.dtype)
        return _all_to_all(ranks.ep_group, values, sent, own)

    numbers = torch.arange(local, device=x.device).repeat(ranks.tp_size * ranks.ep_size)
    chosen_here = numbers.repeat_interleave(received.flatten(), output_size=sum(of_tensor_ranks))
    of_rows = to_experts(of_values)
    out = compute(to_experts(values), of_rows, chosen_here[:, None])
    return gathered(back(out), None, rows)


def _to_host(values: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The values on the host, and a function that waits until they are there, but for nothing that the device gets to do later."""
    if not values.is_cuda:
        return values, lambda: None
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived.synchronize


def _all_to_all(group: Any, values: Tensor, received: list[int], sent: list[int]) -> Tensor:
    out: Tensor = tensor_parallel.all_to_all(group, values, received, sent)
    return out
