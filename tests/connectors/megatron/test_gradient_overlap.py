"""Gradients that are reduced bucket by bucket, while the backward pass runs, are those that are reduced after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers, configuration, samples, write_batch

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", {}, {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}, {}),
    "replicated optimizer": ("qwen3", {}, {"optimizer": {"distributed": False}}),
    "context": ("qwen3", {}, {"parallel": {"context": 2}}),
    "experts": ("qwen3_moe", {}, {}),
    "experts apart": ("qwen3_moe", {}, {"parallel": {"expert": 2}}),
    "recomputed": ("qwen3", {}, {"recompute": "full"}),
}


def in_small_buckets(rank: Any) -> int:
    """Build the rank's model anew with buckets of few parameters; how many there are."""
    from millrace.connectors.trainers.megatron.optim import optimizer

    whole = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = partial(whole, bucket_size=2000)  # type: ignore[misc, assignment]
    try:
        with rank._working("setup"):
            rank._build()
            rank.version, rank.last = 0, None
    finally:
        optimizer.DistributedDataParallelConfig = whole  # type: ignore[misc]
    return len(rank.learner.policy.models[0].bucket_groups)


def add_output_gradient_in_place(rank: Any) -> None:
    """Have the output layer's gradient go by autograd, as on a GPU."""
    from millrace.connectors.trainers.ops import logprobs

    plain = logprobs._TokenLogprobs

    class InPlace(plain):  # type: ignore[misc, valid-type]
        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            parameter = ctx.saved_tensors[1]
            hidden, weight, *rest = plain.backward(ctx, *grads)
            parameter.main_grad.add_(weight)
            logprobs.mark_gradient_added(parameter)
            return hidden, None, *rest

    logprobs._TokenLogprobs = InPlace  # type: ignore[misc]
    rank.plain = plain


def add_it_by_autograd(rank: Any) -> None:
    from millrace.connectors.trainers.ops import logprobs

    logprobs._TokenLogprobs = rank.plain  # type: ignore[misc]


def reduce_afterwards(rank: Any) -> None:
    rank.learner.policy.models[0].ddp_config.overlap_grad_reduce = False


def watch(rank: Any) -> None:
    """Note how many buckets are under way when the backward pass has ended."""
    model = rank.learner.policy.models[0]
    finish = model.finish_grad_sync

    def noting(**arguments: Any) -> None:
        groups = model.bucket_groups + model.expert_parallel_bucket_groups
        rank.under_way = [group.grad_reduce_handle is not None for group in groups]
        finish(**arguments)

    model.finish_grad_sync = noting


def weights(rank: Any) -> tuple[dict[str, list[float]], list[bool]]:
    return {name: p.flatten().tolist() for name, p in rank.policy.named_parameters()}, rank.under_way


def steps(group: Any, urls: list[str], *before: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    assert all(count > 2 for count in group.run(in_small_buckets))
    for function in (watch, *before):
        group.run(function)
    figures = [group.step(step, url)[0] for step, url in enumerate(urls, 1)]
    return [(one["loss"], one["grad_norm"]) for one in figures], group.run(weights)


@pytest.mark.parametrize("name", slow_but(MODELS, "dense", "experts"))
def test_weights_are_bit_equal_with_and_without_overlap(
    name: str, workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    few = write_batch(tmp_path, samples(3, count=1))  # a rank without samples takes part
    urls = [batch.format(1), batch.format(2), few, batch.format(4)]
    kind, shape, changes = MODELS[name]
    with workers.group(configuration(model(kind, **shape), 2, **changes)) as group:
        after, held_after = steps(group, urls, reduce_afterwards)
        during, held = steps(group, urls)
        assert during == after
        for (mine, under_way), (other, none) in zip(held, held_after, strict=True):
            assert mine == other
            assert all(under_way)
            assert not any(none)


@pytest.mark.parametrize("tied", slow_but([False, True], False))
def test_a_gradient_that_goes_by_autograd_is_reduced_too(
    tied: bool, workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    urls = [batch.format(step) for step in (1, 2)]
    with workers.group(configuration(model(tie_word_embeddings=tied), 2)) as group:
        through, held_through = steps(group, urls)
        by, held_by = steps(group, urls, add_output_gradient_in_place)
        assert by == through
        assert held_by == held_through
        group.run(add_it_by_autograd)


def test_a_checkpoint_of_many_buckets_and_one_of_a_single_bucket_go_on_alike(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    with workers.group(configuration(model(), 2)) as whole:
        whole.train([1], batch.format(1))
        whole.call("save", f"{tmp_path}/whole")
        expected = whole.train([2], batch.format(2))[0]
    with workers.group(configuration(model(), 2)) as group:
        group.run(in_small_buckets)
        group.call("load", f"{tmp_path}/whole")
        found = [group.train([2], batch.format(2))[0]]
        group.call("load", f"{tmp_path}/whole")
        group.call("save", f"{tmp_path}/small")
    with workers.group(configuration(model(), 2)) as whole:
        whole.call("load", f"{tmp_path}/small")
        found += [whole.train([2], batch.format(2))[0]]
    for one in found:
        assert [one["loss"], one["grad_norm"]] == pytest.approx(
            [expected["loss"], expected["grad_norm"]], rel=1e-6
        )
