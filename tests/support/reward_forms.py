"""Rewards of every form, good and hostile, for tests that have worker processes call them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from millrace.core.hooks.protocols import RewardInput


class Length:
    """A class: made once in a process."""

    made = 0

    def __init__(self, *, scale: float = 1.0) -> None:
        Length.made += 1
        self.scale = scale

    def __call__(self, sample: RewardInput) -> dict[str, float]:
        return {"reward": self.scale * len(sample.response), "made": Length.made}


class AsyncLength(Length):
    """Its call is awaited."""

    async def __call__(self, sample: RewardInput) -> dict[str, float]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__call__(sample)


class FailsWhereItIsMade:
    """A class without an instance."""

    def __init__(self) -> None:
        raise ValueError("no index")


class Uncallable:
    """A class whose objects cannot be called."""


def rank(samples: Sequence[RewardInput]) -> list[float]:
    """A group reward: the place by length, 0 for the shortest."""
    lengths = sorted(len(sample.response) for sample in samples)
    return [float(lengths.index(len(sample.response))) for sample in samples]


async def rank_awaited(samples: Sequence[RewardInput]) -> list[float]:
    """The same, awaited."""
    await asyncio.sleep(0)
    return rank(samples)


def too_few(samples: Sequence[RewardInput]) -> list[float]:
    """A group reward that forgets one."""
    return rank(samples)[1:]


def one_number(samples: Sequence[RewardInput]) -> float:
    """A group reward with one answer for all."""
    return 1.0


async def slime_length(args: Any, sample: Any, **kwargs: Any) -> Any:
    """slime's signature."""
    return {"score": args.scale * len(sample.response), "acc": True, "pred": "x", "label": sample.label}


async def slime_group(args: Any, samples: list[Any], **kwargs: Any) -> list[float]:
    """slime's signature for a group."""
    return [float(sample.index) for sample in samples]


async def slime_tokens(args: Any, sample: Any, **kwargs: Any) -> float:
    """Reads what there is not."""
    return float(len(sample.tokens))


def by_response(response: str) -> float:
    """Does what the response says, as hostile code would."""
    if response == "loops":
        while True:
            pass
    if response == "memory":
        return float(len(bytearray(64 << 30)))
    if response == "forks":
        for _ in range(200):
            subprocess.Popen(["sleep", "60"])
        time.sleep(60)
    if response == "forks into sessions":
        for _ in range(200):
            subprocess.Popen(["sleep", "60"], start_new_session=True)
        time.sleep(60)
    if response == "power":
        return float(9**9**9)
    if response == "regex":
        return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
    if response == "raises":
        raise KeyError("points")
    if response == "words":
        return "1"  # type: ignore[return-value]
    if response == "hangs in C":
        ctypes.CDLL(None).sleep(60)
    if response == "exits":
        os._exit(3)
    if response == "cancelled":
        raise asyncio.CancelledError("closed")
    return float(len(response))


def hostile(sample: RewardInput) -> float:
    """A function."""
    return by_response(sample.response)


async def hostile_awaited(sample: RewardInput) -> float:
    """An async function."""
    return by_response(sample.response)


class Hostile:
    """A class."""

    def __call__(self, sample: RewardInput) -> float:
        return by_response(sample.response)


def hostile_group(samples: Sequence[RewardInput]) -> list[float]:
    """A group reward."""
    return [by_response(sample.response) for sample in samples]


async def waits(sample: RewardInput) -> float:
    """An async function that waits, as for a server."""
    if sample.response == "never":
        await asyncio.sleep(600)
    await asyncio.sleep(0.3)
    if sample.response == "late":
        raise TimeoutError("mine")
    return by_response(sample.response)


def length_in_words(sample: RewardInput) -> dict[str, float | str]:
    """A reward with a part that is a text."""
    return {"reward": len(sample.response), "words": f"{len(sample.response)} letters"}


def seen(sample: RewardInput) -> dict[str, float]:
    """Says in its parts what it sees of a prompt of messages and of a label that is an object."""
    shown = [f"{message['role']}: {message['content']}" for message in sample.prompt]
    return {"reward": 1.0, **dict.fromkeys([*shown, *(f"label: {key}" for key in sample.label)], 1.0)}


class Lengths:
    """slime's form of a reward model: loaded once, asked for a batch."""

    made = 0

    def __init__(self, model_path: str, scale: float = 1.0) -> None:
        Lengths.made += 1
        self.model_path, self.scale = model_path, scale

    def compute_reward(self, prompts: list[Any], responses: list[str]) -> Any:
        """A tensor's list, as models give it."""
        assert len(prompts) == len(responses)
        return [self.scale * len(response) for response in responses]


class LengthsOfArgs:
    """The same, made with args; its answer is awaited, and it reads labels."""

    def __init__(self, args: Any) -> None:
        self.scale = args.scale

    async def compute_reward(self, prompts: list[Any], responses: list[str], labels: list[Any]) -> Any:
        """An array."""
        import numpy

        return numpy.array([self.scale * len(a) + (b == "x") for a, b in zip(responses, labels, strict=True)])


class TooFewScores:
    """Answers with one number."""

    def compute_reward(self, prompts: list[Any], responses: list[str]) -> Any:
        """No list."""
        return 1.0


class NoReward:
    """Has no compute_reward."""


_begun: list[asyncio.Event] = []


async def all_have_begun(samples: Sequence[RewardInput], *, count: int) -> list[float]:
    """Ends once as many calls as `count` run in this process: the lengths of the responses."""
    lengths, mine = [float(len(sample.response)) for sample in samples], asyncio.Event()
    _begun.append(mine)
    if len(_begun) == count:
        for event in _begun:
            event.set()
    await mine.wait()
    return lengths
