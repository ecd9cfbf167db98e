"""A solver, and a critic that is paid for seeing whether the solver is right. Both are the same policy."""

from __future__ import annotations

from millrace import Session


async def solve_and_judge(session: Session) -> None:
    """The solver answers a sum; the critic is asked about that answer in a branch of its own, and says y or n."""
    answer = (await session.generate()).content.strip()
    right = answer == session.task.label
    critic = session.branch("critic", prompt=f"{session.task.prompt}{answer}?")
    said = (await critic.generate()).content.strip()
    seen = said == ("y" if right else "n")
    critic.reward(float(seen))
    session.reward(float(right), critic=float(seen))
