"""A rollout that hands over half a character, a NUL and a sequence that moves a cursor, in each place where user code may."""

from __future__ import annotations

from millrace.core.hooks.protocols import RewardInput
from millrace.core.sessions.interface import Session

ODD = "half \ud83d, byte \udcff, nul \0, escape \x1b[2J"
SHOWN = "half \\ud83d, byte \\udcff"


async def hands_over(session: Session) -> float | dict[str, float]:
    """A turn, and what `where` of the row says."""
    where = session.task.metadata["where"]
    await session.generate()
    if where == "arguments":
        await session.call("echo", text=ODD)
    elif where == "answer":
        await session.call("odd_answer")
    elif where == "fields":
        await session.call("odd_fields")
    elif where == "failure of a tool":
        await session.call("odd_failure")
    elif where == "message":
        await session.generate(ODD)
    elif where == "role of a message":
        await session.generate([{"role": "user", "name": ODD, "content": "x"}])
    elif where == "reason":
        raise ValueError(ODD)
    elif where == "name of an error":
        raise type(ODD.split(",", maxsplit=1)[0], (Exception,), {})
    elif where == "branch":
        await session.branch(name=ODD).generate("x")
    elif where == "part":
        return {"reward": 1.0, ODD: 2.0}
    return 1.0


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What.
    """
    return text


def odd_answer() -> str:
    """Answer oddly."""
    return ODD


def odd_fields() -> dict[str, str]:
    """Answer oddly, with an object."""
    return {ODD: ODD}


def odd_failure() -> str:
    """Fail oddly."""
    raise RuntimeError(ODD)


def scored(sample: RewardInput) -> dict[str, float]:
    """Fails on one answer, and names a part of the others oddly."""
    if sample.label == "2":
        raise ValueError(f"no number: {ODD}")
    print(ODD)
    return {"reward": 1.0, ODD: 2.0}
