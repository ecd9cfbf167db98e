"""Environments that tests reach through adapters: a calculator by hand, one for Gymnasium's registry, one for an OpenEnv server."""

from __future__ import annotations

import ast
import operator
from typing import Any

from millrace.core.sessions.interface import Done, Observation, Task, Turn

OPERATORS: dict[type[ast.AST], Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    """Works out what the policy asks, until it answers."""

    recovery = "stateless"

    def __init__(self, *, ask: str = "calculate") -> None:
        self._ask = ask

    async def reset(self, task: Task) -> Observation | None:
        """The prompt says all; the label is the answer."""
        self._label = task.label
        return None

    async def step(self, turn: Turn) -> Observation | Done:
        """`calculate 2 + 3`, or `answer 5`."""
        word, _, rest = turn.content.strip().partition(" ")
        if word == "answer":
            return Done(float(rest.strip() == str(self._label)))
        if word != self._ask:
            return Observation(f"write {self._ask} and a sum, or answer and a number")
        try:
            return Observation(str(_value(ast.parse(rest, mode="eval").body)))
        except (SyntaxError, ValueError, KeyError):
            return Observation("this is no sum")

    async def close(self) -> None:
        """Nothing to let go of."""


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        return int(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("not a sum")
