"""A reward for programs: the response's last fenced code block, or all of it, is run against the row's tests, in the sandbox.

Owns which programs run and how their exits are scored. What a row may hold is in millrace.core.rewards.code.cases.

An answer cannot pass by ending its process early, printing a mark of success, or returning an object that equals everything.
The process that runs the answer never holds the expected values: outputs are compared here, and asserts run in another process.
That process has the answer's results as plain values, and writes its verdict to a separate channel. A process that crashes or
exits with an error gives no result and no verdict, even if it wrote one. An answer's process does not see the arguments of
later cases either, except with asserts: one process makes all of their calls.

Does not protect against an answer that memorised the tests during training, against wrong or too few tests, or against what
the sandbox itself lets through (millrace.connectors.user_code.sandbox).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, get_args

from millrace.connectors.user_code.sandbox import SandboxLimits, SandboxOutcome, check_fence, run_python
from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.code.answer import decoded, last_code_block, long_integers, same_output, same_value
from millrace.core.rewards.code.cases import Asserts, Call, Case, Tests, tests_of
from millrace.core.rewards.code.programs import ANSWER, ASSERTS

Ended = Literal["passed", "wrong", "raised", "timed_out", "out_of_memory", "too_much_output"]
CODE = "{code}"  # the placeholder in a template
OUTCOMES: tuple[Ended, ...] = get_args(Ended)


def code(
    sample: RewardInput,
    *,
    score: Literal["all", "share"] = "all",
    fenced: bool = True,
    template: str = CODE,
    timeout_s: float = 5.0,
    total_s: float = 20.0,
    memory_mb: int = 256,
    output_bytes: int = 1 << 16,
    max_tests: int | None = None,
    unfenced: bool = False,
) -> RewardResult:
    """1 if the code passes all tests of the row, else 0; with score="share" the share of tests that it passes.

    fenced: the code is the last closed CommonMark block; if False, it is the whole response, stripped.
    template: the program, with {code} for the answer's code, such as imports before it or a function around it.
    timeout_s, memory_mb, output_bytes: limits of one program. total_s: limit of all together; the remaining tests then
    count as timed out. max_tests: use only this many of the row's tests, from the first.
    unfenced: run programs even if the kernel lacks a layer of the sandbox's fence.
    Parts: `tests`, `no_code` (1 if the response has no code), and the number of tests by outcome. With score="all" the
    first test that fails is the last one run.
    Errors: DataError if the row's tests cannot be used; ConfigError for the options, or if the host has no fence;
    MillraceError if no sandbox can be started.
    """
    if score not in ("all", "share"):
        raise ConfigError(
            f"score = {score} is not a choice", where="options of code", remedy="give all or share"
        )
    if CODE not in template:
        raise ConfigError(
            f"it has no place for the code: {template!r}",
            where="options.template of code",
            remedy=f"write {CODE} where the code stands",
        )
    if not unfenced:
        check_fence(
            "the sandbox of the reward code",
            "or set its option unfenced: true, and trust the policy with your files",
        )
    with long_integers():
        return _scored(
            sample,
            score,
            fenced,
            template,
            max_tests,
            _Sandbox(SandboxLimits(timeout_s, memory_mb, output_bytes), total_s),
        )


def _scored(
    sample: RewardInput, score: str, fenced: bool, template: str, max_tests: int | None, sandbox: _Sandbox
) -> RewardResult:
    tests = tests_of(sample.metadata)
    count = len(tests.sources) if isinstance(tests, Asserts) else len(tests)
    count = min(count, max_tests or count)
    program = last_code_block(sample.response) if fenced else sample.response.strip() or None
    if program is None:
        return _result(Counter(), count, score, no_code=True)
    program = template.replace(CODE, program)
    ended: Counter[Ended] = Counter()
    for outcome in _outcomes(sandbox, program, tests, count):
        ended[outcome] += 1
        if outcome != "passed" and score == "all":
            break
    return _result(ended, count, score)


def _result(ended: Counter[Ended], count: int, score: str, *, no_code: bool = False) -> RewardResult:
    passed = ended["passed"] / count
    parts = {"tests": float(count), "no_code": float(no_code)} | {
        name: float(ended[name]) for name in OUTCOMES
    }
    return RewardResult(passed if score == "share" else float(passed == 1), parts)


class _Sandbox:
    """Runs programs until the time for all of them is over."""

    def __init__(self, limits: SandboxLimits, total_s: float) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + total_s

    def run(self, program: str, given: str, channel: bool = False) -> SandboxOutcome | None:
        """Run one program and return its outcome; None if there is no time left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return None
        limits = self._limits
        return run_python(
            program,
            given,
            SandboxLimits(min(left, limits.timeout_s), limits.memory_mb, limits.output_bytes),
            channel=channel,
        )

    def call(self, program: str, calls: list[list[Any]]) -> tuple[list[str | None], Ended]:
        """Make each call, [name, arguments, keyword arguments], of the answer; return the encoded results and how the process ended.

        All results are None if the process failed: what it wrote before that does not count.
        """
        outcome = self.run(ANSWER, json.dumps({"code": program, "calls": calls}), channel=True)
        fault = _fault(outcome)
        if fault or outcome is None:
            return [None] * len(calls), fault or "timed_out"
        lines = (line.partition(" ") for line in outcome.channel.split("\n"))
        said = {number: text for number, _, text in lines}
        return [said.get(str(at)) for at in range(len(calls))], "wrong"


def _outcomes(sandbox: _Sandbox, program: str, tests: Tests, count: int) -> Iterator[Ended]:
    if isinstance(tests, Asserts):
        yield from _asserts(sandbox, program, Asserts(tests.sources[:count], tests.names))
        return
    for test in tests[:count]:
        yield _case(sandbox, program, test) if isinstance(test, Case) else _call(sandbox, program, test)


def _case(sandbox: _Sandbox, program: str, case: Case) -> Ended:
    outcome = sandbox.run(program, case.given)
    fault = _fault(outcome)
    if fault or outcome is None:
        return fault or "timed_out"
    return "passed" if same_output(outcome.stdout, case.expected) else "wrong"


def _call(sandbox: _Sandbox, program: str, call: Call) -> Ended:
    arguments = ["l", *map(_encoded, call.arguments)]
    (said,), ended = sandbox.call(program, [[call.name, arguments, ["d"]]])
    if said is None:
        return ended
    try:
        answer = json.loads(said)
        if "value" not in answer:
            return "raised"
        value = decoded(answer["value"])
    # the answer may have written to the channel itself
    except (ValueError, TypeError, RecursionError):
        return "wrong"
    return "passed" if any(same_value(value, expected) for expected in call.expected) else "wrong"


def _asserts(sandbox: _Sandbox, program: str, tests: Asserts) -> Iterator[Ended]:
    """Run the asserts with the results so far, have the answer make the missing calls, and repeat.

    The first run has no results, so a failure in it is the row's fault.
    """
    results: dict[str, str] = {}
    while True:
        given = {"sources": tests.sources, "names": tests.names, "results": results}
        outcome = sandbox.run(ASSERTS, json.dumps(given), channel=True)
        fault = _fault(outcome)
        # the channel is empty if the row's own code ended the process
        if fault or outcome is None or not outcome.channel:
            if not results and outcome is not None:
                raise _unusable(f"they ended with {outcome.ended}: {outcome.stderr[-200:]}")
            yield from [fault or "wrong"] * len(tests.sources)
            return
        found = json.loads(outcome.channel)
        if found["unsendable"]:
            raise _unusable(f"they pass a {found['unsendable'][0]}, which cannot be sent to another process")
        wrong = next((verdict for verdict in found["verdicts"] if verdict.startswith("unusable")), None)
        if wrong:
            raise _unusable(wrong)
        if not found["asked"]:
            if not results:
                raise _unusable("they call no function of the answer")
            yield from ["passed" if verdict == "passed" else "wrong" for verdict in found["verdicts"]]
            return
        said, ended = sandbox.call(program, list(found["asked"].values()))
        for key, answer in zip(found["asked"], said, strict=True):
            if answer is None:
                yield from [ended] * len(tests.sources)
                return
            results[key] = answer


def _fault(outcome: SandboxOutcome | None) -> Ended | None:
    """What went wrong with a program; None if it ended by itself, with exit code 0."""
    if outcome is None:
        return "timed_out"
    if outcome.ended in ("timed_out", "out_of_memory", "too_much_output"):
        return outcome.ended
    return None if outcome.succeeded else "raised"


def _unusable(reason: str) -> DataError:
    return DataError(reason, where="tests of the row", remedy="correct the row, or leave it out")


def _encoded(value: Any) -> Any:
    """Mark each container of a JSON value, in the form that programs.decode reads."""
    if isinstance(value, list):
        return ["l", *map(_encoded, value)]
    if isinstance(value, dict):
        return ["d", *([key, _encoded(item)] for key, item in value.items())]
    return value
