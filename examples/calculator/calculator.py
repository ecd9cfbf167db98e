"""A tool and a rollout that reads the calls itself: a tiny model writes `=2+2` and reads the answer."""

from __future__ import annotations

import ast
import operator

from millrace import Session

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def calculate(session: Session, *, turns: int = 3) -> dict[str, float]:
    """A turn that begins with = is a call; any other is the answer. Right answers earn 1, and a call that worked 0.1."""
    worked = 0
    for _ in range(turns):
        turn = await session.generate()
        text = turn.content.strip()
        if not text.startswith("="):
            break
        answer = await session.call("calculator", expression=text.removeprefix("="))
        worked += answer.lstrip("-").isdigit()
        session.observe(answer, "user")
    right = float(text == session.task.label)
    return {"reward": right + 0.1 * min(1, worked), "right": right, "calls": float(worked)}


def calculator(expression: str) -> int:
    """Compute a sum, difference or product of whole numbers.

    Args:
        expression: Such as 2+2.
    """
    return value(ast.parse(expression[:40], mode="eval").body)


def value(node: ast.expr) -> int:
    """The value of an expression of whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**6:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        result: int = OPERATIONS[type(node.op)](value(node.left), value(node.right))
        return result
    raise ValueError("no sum, difference or product of whole numbers")
