"""The folder in which runs of pairs are made: data of every form that a feature asks for, other models, and the user's module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.pairs.features import OWN

MODULE = '''
"""A user's functions, one for each hook that a feature names."""

import resource
from pathlib import Path

from millrace import Done, Observation


def scored(reward, **parts):
    """A reward with the megabytes that its process may have; 0 without a limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return {"reward": reward, "memory_mb": 0.0 if most == resource.RLIM_INFINITY else float(most >> 20), **parts}


def length(sample):
    """Differs between samples of a prompt, and is never 11 or 12."""
    return scored((sample.response_length % 5) / 4)


def ranks(samples):
    """Of a group at once: the shortest first."""
    order = sorted(range(len(samples)), key=lambda at: samples[at].response_length)
    return [scored(float(order.index(at)), rank=float(order.index(at))) for at in range(len(samples))]


def eleven(sample):
    return scored(11.0 + sample.response_length % 3)


def twelve(sample):
    return scored(-12.0 - sample.response_length % 3)


async def dialogue(session):
    """Two turns with a call between them; the section reward scores it."""
    turn = await session.generate(max_new_tokens=8)
    session.observe(await session.call("note", key="k"), "user")
    await session.generate(max_new_tokens=8)


async def solo(session):
    """One turn, with a part of its own."""
    turn = await session.generate(max_new_tokens=8)
    return {"reward": 7.0 + len(turn.output_ids) % 3, "solo": 1.0}


def note(key: str) -> str:
    """Write something down.

    Args:
        key: What.
    """
    return "noted"


class Guess:
    """Says how far off an answer's length is."""

    recovery = "stateless"

    async def reset(self, task):
        return Observation("go", "user")

    async def step(self, turn):
        if turn.prompt_tokens > 24:
            return Done(1.0 / (1 + len(turn.output_ids)), {"guessed": 1.0})
        return Observation("off", "user")

    async def close(self):
        pass


def newest(groups):
    return list(reversed(groups))


def signs(rewards, group_ids):
    """No estimator of millrace's gives these."""
    return (rewards - rewards.mean()).sign() * 0.375


def hint(sample):
    return " hint"


def halved(rewards, response_lengths, truncated):
    return rewards * 0.5 + response_lengths * 0.001


def loss(batch):
    count = batch.mask.sum()
    return -batch.advantages * batch.logprobs, {"of_the_users": (count, count)}


def drops_some(samples):
    """By the prompt's text alone, so that the same group gets the same answer."""
    return "even" if sum(map(ord, str(samples[0].input.prompt))) % 4 == 0 else None


class Growing:
    def __init__(self, level):
        self.level = level

    def __len__(self):
        return 20

    def __getitem__(self, number):
        return {"prompt": f"{self.level}+{number}=", "label": str(self.level + number)}


def growing(level):
    return Growing(level)


def prepare(config):
    Path("prepared").touch()
'''


def write(folder: Path) -> None:
    """Everything that the features' settings name, beside the model of a workplace."""
    from millrace.connectors.huggingface.tiny import build_tiny_model

    build_tiny_model(folder / "other", seed=1)
    (folder / f"{OWN}.py").write_text(MODULE)
    sums = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(6)]
    tool = {
        "type": "function",
        "function": {"name": "note", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    tables: dict[str, Iterable[Mapping[str, Any]]] = {
        "sums": sums,
        "second": [{"prompt": f"{a}-{a}=", "label": "0", "tools": [tool]} for a in range(30)],
        "solo": [{"prompt": f"{a}*1=", "label": str(a), "metadata": {"rollout": "solo"}} for a in range(30)],
        "graded": [
            {"prompt": f"{a}*2=", "label": str(2 * a), "metadata": {"reward": "exact"}} for a in range(30)
        ],
        "few": [{"prompt": f"{a}/1=", "label": str(a)} for a in range(4)],
        "short": [{"prompt": f"{a}*3=", "label": "3", "sampling": {"max_new_tokens": 5}} for a in range(30)],
        "held_out": [
            {"prompt": f"{a}+0=", "label": str(a), "metadata": {"kind": "ab"[a % 2]}} for a in range(4)
        ],
        "dialogues": [
            {
                "prompt": [
                    {"role": "user", "content": f"{a}+1"},
                    {"role": "assistant", "content": str(a + 1)},
                ]
            }
            for a in range(30)
        ],
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
