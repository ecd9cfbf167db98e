"""Token advantages of a step, and whitening over ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from millrace.core.algorithms import advantages
from millrace.core.algorithms.token_advantages import TokenAdvantages, token_advantages
from millrace.core.config.algorithm import Algorithm
from millrace.core.errors import TrainerError

LENGTHS = torch.tensor([2, 3])
MASK = torch.tensor([1, 1, 1, 0, 1])
LOGP = torch.tensor([-1.0, -2.0, -0.5, -9.0, -1.5])
REF = torch.tensor([-1.1, -1.9, -0.5, -1.0, -2.5])
REWARDS = torch.tensor([1.0, 3.0])


def estimate(config: Algorithm, **more: torch.Tensor) -> TokenAdvantages:
    given = {
        "rewards": REWARDS,
        "sample_advantages": advantages.sample_advantages(REWARDS, torch.tensor([0, 0]), config),
        "mask": MASK,
        "lengths": LENGTHS,
        "logprobs": LOGP,
    }
    return token_advantages(config, **(given | more))  # type: ignore[arg-type]


def test_group_estimators_are_broadcast() -> None:
    found = estimate(Algorithm(divide_by_std=False))
    assert found.advantages.tolist() == [-1, -1, 1, 0, 1]
    assert found.returns is None


def test_kl_is_taken_off_the_reward_of_each_token() -> None:
    config = Algorithm(
        preset="reinforce_plus_plus_baseline", kl_placement="reward", kl_kind="k1", kl_coef=0.5, whiten=False
    )
    found = estimate(config, ref_logprobs=REF).advantages
    torch.testing.assert_close(found, torch.tensor([-1.05, -0.95, 1.0, 0.0, 0.5]))
    with pytest.raises(TrainerError, match="reference"):
        estimate(config)


def test_reinforce_plus_plus_starts_from_rewards() -> None:
    config = Algorithm(preset="reinforce_plus_plus", kl_coef=0.0, whiten=False, gamma=0.5)
    assert estimate(config).advantages.tolist() == [0.5, 1, 0.75, 0, 3]


def test_ppo_has_returns_that_are_not_whitened() -> None:
    values = torch.tensor([0.5, 0.5, 1.0, 99.0, 2.0])
    config = Algorithm(preset="ppo")
    found = estimate(config, values=values)
    raw, returns = advantages.gae(torch.tensor([0.0, 1, 0, 0, 3]), values, MASK, LENGTHS, gamma=1.0, lam=1.0)
    assert found.returns is not None
    torch.testing.assert_close(found.returns, returns)
    torch.testing.assert_close(found.advantages, advantages.whiten(raw, MASK))
    with pytest.raises(TrainerError, match="critic"):
        estimate(config)


def test_distillation_adds_the_teacher_after_whitening() -> None:
    teacher = LOGP + torch.tensor([0.1, -0.2, 0.0, 5.0, 1.0])
    found = estimate(Algorithm(preset="opd", teacher="x"), teacher_logprobs=teacher).advantages
    torch.testing.assert_close(found, torch.tensor([0.1, -0.2, 0.0, 0.0, 1.0]))
    mixed = Algorithm(divide_by_std=False, whiten=True, distillation_coef=2.0, teacher="x")
    both = estimate(mixed, teacher_logprobs=teacher).advantages
    plain = estimate(Algorithm(divide_by_std=False, whiten=True)).advantages
    torch.testing.assert_close(both - plain, 2 * found)
    with pytest.raises(TrainerError, match="teacher"):
        estimate(mixed)


def _whiten_on_a_rank(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    x, mask = _whiten_input()
    bounds = [0, 4, 4, 20] if world == 3 else [0, 20]  # the second rank holds nothing
    mine = slice(bounds[rank], bounds[rank + 1])
    found = advantages.whiten(x[mine], mask[mine], dist.group.WORLD)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _whiten_input() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x, mask = torch.randn(20, generator=g) * 3 + 1, (torch.rand(20, generator=g) > 0.3).long()
    return torch.where(mask.bool(), x, torch.nan), mask


def test_whitening_over_ranks_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_whiten_on_a_rank, args=(3, port, str(tmp_path)), nprocs=3)
    parts = torch.cat([torch.load(tmp_path / f"{rank}.pt") for rank in range(3)])
    torch.testing.assert_close(parts, advantages.whiten(*_whiten_input()), rtol=1e-6, atol=1e-7)
