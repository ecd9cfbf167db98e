"""The policy writes a program of a few characters, sees how it fails its tests, and repairs it.

A program is an expression over x. The prompt shows one value of the wanted one, "f(3)=6", which many programs have.
Tests run in a sandbox; what they expect is never in there.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

from millrace import SandboxLimits, Session, run_python

INPUTS = (1, 2, 5, 10)  # what the tests call a program with
TESTS = "for x in map(int, input().split()):\n    print({program})\n"
LIMITS = SandboxLimits(timeout_s=10, memory_mb=128)
FAILURE = 60  # characters of an error that the policy is shown


async def code_repair(session: Session, *, tries: int = 3, keep: float = 0.8) -> dict[str, float]:
    """The share of tests that the last program passes, times `keep` for each repair."""
    expected, _ = await asyncio.to_thread(outputs_of, session.task.label)
    failure, repairs = None, -1
    while True:
        turn = await session.generate(failure)
        repairs += 1
        outputs, error = await asyncio.to_thread(outputs_of, turn.content.strip())
        passed = [output == wanted for output, wanted in zip(outputs, expected, strict=False)]
        share = sum(passed) / len(INPUTS)
        if share == 1.0 or repairs + 1 == tries:
            return {"reward": share * keep**repairs, "passed": share, "repairs": repairs}
        failure = error or first_failure(outputs, expected)


@lru_cache(maxsize=65536)  # many rollouts write the same program
def outputs_of(program: str) -> tuple[list[str], str]:
    """What a program gives for each input, and what went wrong."""
    outcome = run_python(TESTS.format(program=program), " ".join(map(str, INPUTS)), LIMITS)
    outputs = outcome.stdout.splitlines()
    if outcome.succeeded and len(outputs) == len(INPUTS):
        return outputs, ""
    error = outcome.stderr.strip().splitlines() or [f"Error: {outcome.ended}, {len(outputs)} lines"]
    return [], error[-1][:FAILURE]


def first_failure(outputs: list[str], expected: list[str]) -> str:
    """The first test that fails, as the policy is shown it."""
    at = [output == wanted for output, wanted in zip(outputs, expected, strict=True)].index(False)
    return f"f({INPUTS[at]})={expected[at]} not {outputs[at][:FAILURE]}"
