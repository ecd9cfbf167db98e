"""Rewards of slime's hub under slime's names, computed by millrace's rewards: for imports from slime.rollout.rm_hub."""

import asyncio
import importlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.core.hooks.protocols import RewardInput
from millrace.core.hooks.slime.names import load_function
from millrace.core.hooks.slime.sample import Sample, post
from millrace.core.rewards.hub.dapo import ANSWER, READ, READ_STRICTLY
from millrace.core.rewards.math import last_boxed


def _graded(
    reward: str, response: str, label: Any, metadata: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """The result of a reward of millrace's for a response. reward: module:function under millrace.core.rewards."""
    module, _, name = reward.partition(":")
    function = getattr(importlib.import_module(f"millrace.core.rewards.{module}"), name)
    return function(RewardInput("", response, label, metadata or {}), **options)


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """DAPO's score, 1 or -1, as slime's mapping; `pred` is the answer that was compared."""
    scored = _graded("hub.dapo:dapo", solution_str, ground_truth, strict_box=strict_box_verify)
    if strict_box_verify:
        pred = last_boxed(solution_str[-READ_STRICTLY:])
    else:
        answers = ANSWER.findall(solution_str[-READ:])
        pred = answers[-1].strip() if answers else "[INVALID]"
    return {"score": scored.reward, "acc": bool(scored.parts["acc"]), "pred": pred}


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the last box of a response is the label."""
    return (
        bool(solution_str)
        and _number(_graded("math:math", solution_str, ground_truth, boxed_only=True)) == 1.0
    )


def deepscaler(response: str, label: Any) -> float:
    """1 if the last box after the reasoning is the label, else 0."""
    return _number(_graded("hub.deepscaler:deepscaler", response, label))


def f1_score(prediction: str, ground_truth: Any) -> tuple[float, float, float]:
    """F1, precision and recall of a response's words."""
    scored = _graded("hub.f1:f1", prediction, ground_truth)
    return scored.reward, scored.parts["precision"], scored.parts["recall"]


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1 if a response settles on the right letter, else 0."""
    return _number(_graded("hub.gpqa:gpqa", response, label, metadata))


def extract_answer(passage: str) -> str | None:
    """The content of the last box."""
    return last_boxed(passage)


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """The answer of the server at args.rm_url for a sample."""
    return await post(
        args.rm_url, {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    )


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of a sample, by its path or its type, from the sample or else from the function's options."""
    path = sample.custom_rm_path or getattr(args, "custom_rm_path", None)
    if path:
        return await _awaited(load_function(path)(args, sample, **kwargs))
    kind = sample.metadata.get("rm_type") or getattr(args, "rm_type", None) or ""
    response = sample.response
    if kind.startswith("boxed_"):
        kind, response = kind.removeprefix("boxed_"), extract_answer(response) or ""
    if kind == "remote_rm":
        return await remote_rm(args, sample)
    rewards: dict[str, Callable[[], Any]] = {
        "dapo": lambda: compute_score(response, sample.label),
        "deepscaler": lambda: deepscaler(response, sample.label),
        "f1": lambda: f1_score(response, sample.label)[0],
        "gpqa": lambda: compute_gpqa_reward(response, sample.label, sample.metadata),
        "ifbench": lambda: _number(_graded("hub.ifbench:ifbench", response, sample.label, sample.metadata)),
        "math": lambda: int(grade_answer_verl(response, sample.label)),
        "random": lambda: random.randint(0, 1),
    }
    if kind not in rewards:
        raise ValueError(
            f"rm_type = {kind!r} is not one of {', '.join([*rewards, 'remote_rm'])}: give rm_type or custom_rm_path in the "
            "function's options"
        )
    return rewards[kind]()


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Any:
    """The rewards of samples: one call of args.custom_rm_path, or each by its type."""
    path = getattr(args, "custom_rm_path", None)
    if path:
        return await _awaited(load_function(path)(args, samples, **kwargs))
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _number(score: Any) -> float:
    return float(getattr(score, "reward", score))
