"""The policy writes a program of a few characters, sees how it fails its tests, and repairs it.

A program is an expression over x. The row's prompt shows one value that it has, and its label holds the expression that is
looked for, which says what the other tests expect. The tests run in a sandbox.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

from millrace import Done, Observation, SandboxLimits, Task, Turn, run_python

INPUTS = (1, 2, 5, 10)  # what the tests call the program with
LIMITS = SandboxLimits(timeout_s=10, memory_mb=128)
TESTS = "for x in map(int, input().split()):\n    print({program})\n"
FAILURE = 60  # characters of an error that the policy is shown


class CodeRepair:
    """One program: the reward is the share of tests that its last version passes, times `keep` for each repair."""

    recovery = "snapshot"

    def __init__(self, tries: int = 3, keep: float = 0.8) -> None:
        self.tries, self.keep = tries, keep
        self.tried = 0

    async def reset(self, task: Task) -> None:
        """The prompt says all; what the tests expect is no secret of the sandbox."""
        outputs, _ = await asyncio.to_thread(outputs_of, str(task.label))
        self.expected = outputs

    async def step(self, turn: Turn) -> Observation | Done:
        """Run the tests; show the first that fails, until there are no tries left."""
        outputs, error = await asyncio.to_thread(outputs_of, turn.content.strip())
        self.tried += 1
        passed = [found == wanted for found, wanted in zip(outputs, self.expected, strict=False)]
        share = sum(passed) / len(INPUTS)
        if share == 1.0 or self.tried == self.tries:
            repairs = self.tried - 1
            return Done(share * self.keep**repairs, {"passed": share, "repairs": float(repairs)})
        if error:
            return Observation(error, role="user")
        at = passed.index(False)
        return Observation(f"f({INPUTS[at]})={self.expected[at]} not {outputs[at]}", role="user")

    def snapshot(self) -> str:
        """The tries so far."""
        return str(self.tried)

    def restore(self, state: str) -> None:
        """Go on from them."""
        self.tried = int(state)

    async def close(self) -> None:
        """Nothing is held."""


@lru_cache(maxsize=65536)  # many rollouts write the same program
def outputs_of(program: str) -> tuple[list[str], str]:
    """What a program prints for each input, and what went wrong."""
    outcome = run_python(TESTS.format(program=program), " ".join(map(str, INPUTS)), LIMITS)
    if outcome.succeeded:
        return outcome.stdout.splitlines(), ""
    error = (outcome.stderr.strip().splitlines() or [outcome.ended])[-1]
    return [], error[:FAILURE]
