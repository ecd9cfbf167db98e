"""A served teacher's log-probabilities for a sample, for the reward task.

A failed request fails the sample, with its reason; no number replaces an answer.
"""

import time
from typing import NamedTuple, cast

from millrace.connectors.http.posting import RemoteRewardError
from millrace.connectors.teachers.served_teacher import FIELD, ServedTeacher
from millrace.core.contracts.references import scrubbed
from millrace.core.contracts.sample import AskedAbout, Unscored
from millrace.tasks.runtime.hints import Hinted, HintError, Hints


class Taught(NamedTuple):
    """The teacher's log-probability of each response token, or the reason why there are none. Empty if it was not asked.

    The top fields have its likeliest tokens at each response token, one token's after another's, if the run compares them.
    """

    logprobs: list[float] | None = None
    reason: str | None = None
    seconds: float | None = None
    top_tokens: list[int] | None = None
    top_logprobs: list[float] | None = None
    hint: str | None = None  # the hint that was added to its prompt


async def ask_teacher(teacher: ServedTeacher | None, hints: Hints | None, row: Unscored) -> Taught:
    """Ask about a sample, unless there is no served teacher or nothing was generated."""
    if teacher is None or row["status"] in ("failed", "aborted"):
        return Taught()
    if not row["response_length"]:
        return Taught([], top_tokens=[], top_logprobs=[]) if teacher.server.top_k else Taught([])
    started = time.perf_counter()
    asked = cast(AskedAbout, row)
    try:
        tokens, hint = await hints.hinted(asked) if hints else Hinted(asked["tokens"], None)
        found = await teacher.logprobs(tokens, row["response_length"])
    except HintError as error:
        return Taught(None, str(error), time.perf_counter() - started)
    except RemoteRewardError as error:
        reason = scrubbed(f"{FIELD}: {error}", teacher.server.key)
        return Taught(None, reason, time.perf_counter() - started)
    seconds = time.perf_counter() - started
    return Taught(found.logprobs, None, seconds, found.top_tokens, found.top_logprobs, hint)
