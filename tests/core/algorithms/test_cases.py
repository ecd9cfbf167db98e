"""Published numbers: every case of cases.json, each naming its source and convention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.core.algorithms import (
    aggregate,
    group_advantages,
    importance,
    kl,
    losses,
    token_advantages,
)

CASES = json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]


def t(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def clip(i: dict[str, Any], **more: Any) -> losses.PolicyLoss:
    old = t(i["old_logprobs"]) if "old_logprobs" in i else t(i["logprobs"]) - t(i["ratios"]).log()
    function = more.pop("function", losses.clipped_policy_loss)
    low, high = i.get("clip_low", 0.2), i.get("clip_high", 0.2)
    return function(t(i["logprobs"]), old, t(i["advantages"]), clip_low=low, clip_high=high, **more)


def policy(i: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    loss = clip(i, **more).loss
    return {"per_token": loss, "token_mean": loss.mean()}


def corrected(i: dict[str, Any]) -> dict[str, Tensor]:
    log_w = importance.log_weights(
        t(i["old_logprobs"]),
        t(i["rollout_logprobs"]),
        torch.ones(3),
        torch.tensor([3]),
        level="token",
    )
    weights = importance.truncate(log_w.exp(), high=i["cap"]) if "cap" in i else log_w.exp()
    return {"weights": weights, "token_mean": (weights * clip(i).loss).mean()}


def reinforce(i: dict[str, Any]) -> dict[str, Tensor]:
    return {"token_mean": losses.reinforce_loss(t(i["logprobs"]), t(i["advantages"])).mean()}


def kinds(i: dict[str, Any]) -> dict[str, Tensor]:
    both = t(i["logprobs"]), t(i["ref_logprobs"])
    return {kind: kl.kl_estimate(*both, kind) for kind in ("k1", "k2", "k3", "low_var")}


def gae(i: dict[str, Any]) -> dict[str, Tensor]:
    n = len(i["rewards"])
    a, r = token_advantages.gae(
        t(i["rewards"]), t(i["values"]), torch.ones(n), torch.tensor([n]), gamma=i["gamma"], lam=i["lam"]
    )
    return {"advantages": a, "returns": r}


def whiten(i: dict[str, Any]) -> dict[str, Tensor]:
    mask = t(i["mask"])
    return {"valid": token_advantages.whiten(t(i["x"]), mask)[mask.bool()]}


def group(i: dict[str, Any]) -> Tensor:
    return group_advantages.group_relative(
        t(i["rewards"]), torch.tensor(i["group_ids"]), divide_by_std=i.get("divide_by_std", True)
    )


def rpp(i: dict[str, Any]) -> Tensor:
    return token_advantages.reinforce_plus_plus(
        t(i["rewards"]),
        t(i["kl"]),
        t(i["mask"]),
        torch.tensor(i["lengths"]),
        gamma=i["gamma"],
        kl_coef=i["kl_coef"],
    )


def token_mean(i: dict[str, Any]) -> Tensor:
    lengths = torch.tensor([len(row) for row in i["loss"]])
    weights = aggregate.token_mean(lengths)
    parts = [  # one sample a rank
        aggregate.reduce(t(row), torch.ones(len(row)), weights[at].expand(len(row)))
        for at, row in enumerate(i["loss"])
    ]
    return torch.stack(parts).sum()


RUN = {
    "clip-1": policy,
    "ratio-one": policy,
    "dual-1": lambda i: policy(i, dual_clip=i["dual_clip"]),
    "cispo-1": lambda i: policy(i, function=losses.cispo_loss),
    "cispo-bands": lambda i: policy(i, function=losses.cispo_loss),
    "reinforce-1": reinforce,
    "is-token": corrected,
    "tis-token": corrected,
    "kl-1": kinds,
    "gae-1": gae,
    "whiten-1": whiten,
    "group-no-std": group,
    "group-std": group,
    "group-uneven": group,
    "maxrl-1": lambda i: group_advantages.max_rl(t(i["rewards"]), torch.tensor(i["group_ids"])),
    "rpp-1": rpp,
    "agg-token": token_mean,
    "adaptive-kl": lambda i: kl.adaptive_kl(**i),
}


@pytest.mark.parametrize("case", [c for c in CASES if c["id"] != "admission"], ids=lambda c: c["id"])
def test_published_number(case: dict[str, Any]) -> None:
    got, expected = RUN[case["id"]](case["inputs"]), case["expected"]
    pairs = (
        [(got[name], expected[name]) for name in expected]
        if isinstance(expected, dict)
        else [(got, expected)]
    )
    for found, wanted in pairs:
        torch.testing.assert_close(
            torch.as_tensor(found, dtype=torch.float64),
            torch.as_tensor(wanted, dtype=torch.float64),
            rtol=1e-5,
            atol=2e-6,
            msg=lambda text: f"{case['id']} ({case['source']}; {case.get('note', '')}): {text}",
        )


def test_every_case_is_run() -> None:
    assert set(RUN) == {case["id"] for case in CASES}
