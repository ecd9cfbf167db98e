"""A generation of your own in ten lines: a wrong answer gets a second try."""

from __future__ import annotations

from millrace import Session


async def second_try(session: Session, *, worth: float = 0.5) -> float:
    """1 for the right answer, `worth` for one that is right at the second try."""
    for reward in (1.0, worth):
        turn = await session.generate("no." if session.turns else None)
        if turn.content.strip() == session.task.label:
            return reward
    return 0.0
