"""Arithmetic over several turns: the policy calls a calculator, and learns to."""

from __future__ import annotations

import random
import re
from typing import Any

from millrace import RewardInput


def calc(of: str) -> int:
    """Calculate with two numbers.

    Args:
        of: A sum, a difference or a product, such as 12*34.
    """
    numbers = re.fullmatch(r"(\d+)([+*-])(\d+)", of)
    if numbers is None:
        raise ValueError("give two numbers with +, - or * between them")
    left, sign, right = int(numbers[1]), numbers[2], int(numbers[3])
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def right(sample: RewardInput) -> dict[str, float]:
    """1 for the right number, with the calls that it took as a part that counts nothing."""
    calls = sum(message["role"] == "tool" for message in sample.messages)
    return {"reward": float(sample.response.strip() == sample.label), "calls": calls}


def problem(rng: random.Random) -> dict[str, Any]:
    """A product and a sum. Half of the dialogues to warm up on are right; the others guess, or stop too early."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 99)
    product, total = str(a * b), str(a * b + c)
    both = [f"calc(of={a}*{b})", product, f"calc(of={product}+{c})", total, total]
    one, guess = [*both[:2], product], [str(rng.randint(100, 9999))]
    dialogue = rng.choices([both, one, guess], [2, 1, 1])[0]
    return {"prompt": f"{a}*{b}+{c}", "label": total, "dialogue": dialogue}
