"""Credit: shaping and advantages of samples as they ever were, to the bit; advantages of tokens; whitening over ranks."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from millrace.core.algorithms import token_advantages as advantages
from millrace.core.algorithms.credit import (
    SampleCredit,
    ScoredSamples,
    TokenCredit,
    sample_credit,
    stored_or_shaped,
    token_credit,
)
from millrace.core.config.algorithm import Algorithm
from millrace.core.errors import ConfigError, TrainerError

STORED = json.loads(
    (Path(__file__).parent / "credit_cases.json").read_text()
)  # numbers of the first torch version


def batch(rewards: list[float] | None = None) -> ScoredSamples:
    values = STORED["rewards"] if rewards is None else rewards
    return ScoredSamples(
        [math.nan if value is None else value for value in values],
        STORED["groups"],
        STORED["lengths"],
        STORED["truncated"],
    )


def same(numbers: list[float] | None, wanted: list[float | None] | None) -> bool:
    """Equal to the last bit, NaN where nothing is wanted."""
    if numbers is None or wanted is None:
        return numbers is wanted
    return [None if math.isnan(x) else x for x in numbers] == wanted


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda case: case["name"])
def test_sample_credit_is_bit_equal_to_the_stored_numbers(case: dict[str, Any]) -> None:
    found = sample_credit(batch(), Algorithm(**case["algorithm"]), STORED["budget"])
    assert same(found.shaped_rewards, case["shaped"])
    assert same(found.advantages, case["advantages"])


def test_neither_a_driver_nor_naming_a_filters_credit_imports_torch() -> None:
    """A driver names the trainer's class and the engines' kinds; it would start five seconds later."""
    code = "import sys, millrace.flows.train, millrace.flows.sft, millrace.core.algorithms.credit; print({'torch', 'megatron', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def half_if_truncated(
    rewards: torch.Tensor, response_lengths: torch.Tensor, truncated: torch.Tensor
) -> torch.Tensor:
    return torch.where(truncated, rewards / 2, rewards)


def centred(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    return rewards - rewards[group_ids == 0].mean()


def one_number(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    return rewards.mean()


def test_functions_of_the_user_get_tensors_after_the_built_in_shaping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "my_credit", sys.modules[__name__])
    samples = ScoredSamples([1.0, 1.0, 0.0], [0, 0, 0], [80, 90, 100], [True, False, False])
    config = Algorithm(
        overlong={},
        shaping="my_credit:half_if_truncated",
        advantage={"kind": "function", "function": "my_credit:centred"},
    )
    assert sample_credit(samples, config, 100) == SampleCredit([0.5, 0.5, -1.0], [0.5, 0.5, -1.0])
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage\.function = my_credit:one_number.*one number per sample"
    ):
        sample_credit(
            samples, Algorithm(advantage={"kind": "function", "function": "my_credit:one_number"}), 100
        )


def test_a_batch_stored_without_shaped_rewards_is_shaped_again() -> None:
    config = Algorithm(overlong={"buffer_tokens": 37, "factor": 0.7})
    budget = STORED["budget"]
    wanted = next(case["shaped"] for case in STORED["cases"] if case["name"] == "grpo, overlong")
    count = len(wanted)
    assert same(stored_or_shaped([None] * count, batch(), config, budget), wanted)
    assert stored_or_shaped([7.0] * count, batch(), config, budget) == [7.0] * count


LENGTHS = torch.tensor([2, 3])
MASK = torch.tensor([1, 1, 1, 0, 1])
LOGP = torch.tensor([-1.0, -2.0, -0.5, -9.0, -1.5])
REF = torch.tensor([-1.1, -1.9, -0.5, -1.0, -2.5])
REWARDS = torch.tensor([1.0, 3.0])


def estimate(config: Algorithm, **more: torch.Tensor) -> TokenCredit:
    samples = ScoredSamples(REWARDS.tolist(), [0, 0], [1, 1], [False, False])
    per_sample = sample_credit(samples, config, 100).advantages
    given = {
        "rewards": REWARDS,
        "sample_advantages": None if per_sample is None else torch.tensor(per_sample),
        "mask": MASK,
        "lengths": LENGTHS,
        "logprobs": LOGP,
    }
    return token_credit(config, **(given | more))  # type: ignore[arg-type]


def test_group_estimators_are_broadcast() -> None:
    found = estimate(Algorithm(advantage={"divide_by_std": False}))
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
    config = Algorithm(preset="reinforce_plus_plus", kl_coef=0.0, whiten=False, advantage={"gamma": 0.5})
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
    mixed = Algorithm(advantage={"divide_by_std": False}, whiten=True, distillation_coef=2.0, teacher="x")
    both = estimate(mixed, teacher_logprobs=teacher).advantages
    plain = estimate(Algorithm(advantage={"divide_by_std": False}, whiten=True)).advantages
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


@pytest.mark.slow
def test_whitening_over_ranks_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_whiten_on_a_rank, args=(3, port, str(tmp_path)), nprocs=3)
    parts = torch.cat([torch.load(tmp_path / f"{rank}.pt") for rank in range(3)])
    torch.testing.assert_close(parts, advantages.whiten(*_whiten_input()), rtol=1e-6, atol=1e-7)


WRONG = (math.nan, math.inf, -math.inf)


def spoils_the_second(rewards: torch.Tensor, *_: torch.Tensor, value: float) -> torch.Tensor:
    return rewards.index_fill(0, torch.tensor([1]), value)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("field", ["shaping", "advantage"])
def test_a_function_that_returns_no_finite_number_for_a_scored_sample_is_named(
    monkeypatch: pytest.MonkeyPatch, field: str, value: float
) -> None:
    monkeypatch.setitem(sys.modules, "my_credit", sys.modules[__name__])
    function = {"function": "my_credit:spoils_the_second", "options": {"value": value}}
    config = Algorithm.model_validate(
        {field: {"kind": "function", **function} if field == "advantage" else function}
    )
    samples = ScoredSamples([1.0, 0.0, 0.5], [0, 0, 0], [8, 9, 10], [False] * 3)
    with pytest.raises(
        ConfigError,
        match=rf"algorithm\.{field}\.function = my_credit:spoils_the_second: it returned {value}.*sample 1 of 3",
    ):
        sample_credit(samples, config, 100)


def test_a_sample_that_was_not_scored_may_have_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_credit", sys.modules[__name__])
    samples = ScoredSamples([1.0, math.nan, 0.5], [0, 0, 0], [8, 9, 10], [False] * 3)
    function = {"function": "my_credit:spoils_the_second", "options": {"value": math.nan}}
    config = Algorithm.model_validate({"advantage": {"kind": "function", **function}})
    assert sample_credit(samples, config, 100).advantages == [1.0, 0.0, 0.5]


def test_branches_of_a_name_share_the_mean_of_their_rewards_and_count_once() -> None:
    # two rollouts of one prompt: the first has two branches, and each a critic, which is compared with critics alone
    rewards, groups, units = [1.0, 0.0, 0.25, 1.0, 0.75], [0, 0, 1, 0, 1], [0, 0, 1, 2, 3]
    algorithm = Algorithm.model_validate({"preset": "grpo"})
    samples = ScoredSamples(rewards, groups, [3] * 5, [False] * 5, units)
    credit = sample_credit(samples, algorithm, 16)
    plain = sample_credit(
        ScoredSamples([0.5, 0.25, 1.0, 0.75], [0, 1, 0, 1], [3] * 4, [False] * 4), algorithm, 16
    )
    assert credit.shaped_rewards == rewards
    assert plain.advantages is not None
    assert credit.advantages == [plain.advantages[unit] for unit in units]
