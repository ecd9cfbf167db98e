"""A taskset for verifiers with an environment of its own: a sum, and a hint after a wrong answer.

verifiers finds it as `verifiers-sums`, since this folder is on the path of a run that begins here.
"""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Sums", "SumsEnv"]

LARGEST = 49


class SumData(vf.TaskData):
    """Its answer."""

    answer: int = 0


class SumTask(vf.Task[SumData]):
    """Scored by the last answer, and by how many there were."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right number at once, 0.5 after a hint."""
        if trace.last_reply.strip() != str(self.data.answer):
            return 0.0
        return 1.0 if trace.num_turns == 1 else 0.5

    @vf.metric
    async def tries(self, trace: vf.Trace) -> float:
        """Answers that were given."""
        return float(trace.num_turns)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Every sum of two terms."""

    def load(self) -> list[SumTask]:
        """A task for each."""
        terms = range(LARGEST + 1)
        return [SumTask(SumData(prompt=f"{a}+{b}=", answer=a + b)) for a in terms for b in terms]


class SumsConfig(vf.EnvConfig):
    """One seat."""

    solver: vf.AgentConfig = vf.AgentConfig()


class SumsEnv(vf.Env[SumsConfig]):
    """Two tries."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        """Say "no." after a wrong answer, once."""
        async with agents.solver.interaction(task) as chat:
            said = await chat.turn()
            if not said.terminated and said.last_reply.strip() != str(task.data.answer):
                await chat.turn("no.")
