"""FSDP over copies of the weights (HSDP): the sums of one rank, equal copies, and checkpoints that the first copy writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.connectors.fsdp.test_fsdp_trainer import fsdp, gradients
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "two copies, each whole": ("qwen3", 2, {"replicate": 2}),
    "two copies over two ranks": ("qwen3", 4, {"replicate": 2}),
    "two copies, context of two": ("gemma3", 4, {"replicate": 2, "context": 2}),
    "experts": ("qwen3_moe", 4, {"replicate": 2}),
}


def weights(rank: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().full_tensor() for name, each in rank.learner.policy.inner.named_parameters()}


def bytes_saved(rank: Any) -> int:
    saved: int = rank.learner.checkpoint_bytes
    return saved


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "two copies, context of two"))
def test_loss_and_gradients_are_those_of_one_rank(
    workers: Workers, model: Callable[..., Path], batch: str, layout: str
) -> None:
    kind, world, parallel = LAYOUTS[layout]
    found, steps = [], []
    for ranks, cut in ((1, {}), (world, parallel)):
        with workers.group(fsdp(model(kind), ranks, parallel=cut, algorithm={"kl_coef": 0.1})) as group:
            found.append(group.run(gradients, batch.format(1)))
            steps.append([group.train([step], batch.format(step))[0] for step in (1, 2, 3)])
            copies = group.run(weights)
    (alone,), others = found
    for own, copy in zip(others, copies, strict=True):
        for name, gradient in alone.items():
            assert (own[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
        for name, weight in copies[0].items():
            assert torch.equal(copy[name], weight), "copies stay equal"
    for one, several in zip(*steps, strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=2e-6)
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("second", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_first_copy_writes_a_checkpoint_that_other_numbers_of_ranks_and_copies_load(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, second: int
) -> None:
    url = str(tmp_path / "saved")
    changes: dict[str, Any] = {"algorithm": {"kl_coef": 0.1, "reference_update_steps": 2}}
    with workers.group(fsdp(model(), 4, parallel={"replicate": 2}, **changes)) as group:
        group.train([1], batch.format(1))
        group.call("save", url)
        saved = group.run(bytes_saved)
        expected = group.train([2], batch.format(2))[0]
    sizes = {path.name: path.stat().st_size for path in sorted(Path(url).glob("*.distcp"))}
    assert [size > 0 for size in sizes.values()] == [True, True, False, False]
    assert [size > 0 for size in saved] == [True, True, False, False]
    with workers.group(fsdp(model(), second, **changes)) as group:
        assert set(group.call("load", url)) == {1}
        found = group.train([2], batch.format(2))[0]
    # sums over other numbers of ranks, as between layouts
    for name, (share, least) in {
        "loss": (1e-5, 2e-6), "grad_norm": (1e-4, 0.0), "kl": (1e-4, 1e-7), "lr": (0.0, 0.0),
    }.items():  # fmt: skip
        assert found[name] == pytest.approx(expected[name], rel=share, abs=least), name
