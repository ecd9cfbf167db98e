"""A taskset for verifiers with an environment of several turns: guess a number, with hints."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Numbers", "NumbersEnv"]


class NumberData(vf.TaskData):
    """What is looked for."""

    number: int = 0


class NumberTask(vf.Task[NumberData]):
    """Right or not."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """One for the number."""
        return float(trace.last_reply.strip() == str(self.data.number))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """How many there were."""
        return float(trace.num_turns)


class Numbers(vf.Taskset[NumberTask, vf.TasksetConfig]):
    """Numbers below ten."""

    def load(self) -> list[NumberTask]:
        """One task a number."""
        system = "Say a number and nothing else."
        return [
            NumberTask(NumberData(prompt="Guess below ten.", system_prompt=system, number=number))
            for number in range(10)
        ]


class NumbersConfig(vf.EnvConfig):
    """One player."""

    player: vf.AgentConfig = vf.AgentConfig()


class NumbersEnv(vf.Env[NumbersConfig]):
    """Five guesses, with a hint after each."""

    async def run(self, task: NumberTask, agents: vf.Agents) -> None:
        """Play."""
        async with agents.player.interaction(task) as chat:
            said = await chat.turn()
            for _ in range(4):
                if said.terminated or said.last_reply == str(task.data.number):
                    break
                low = int(said.last_reply) < task.data.number
                said = await chat.turn("too low" if low else "too high")
