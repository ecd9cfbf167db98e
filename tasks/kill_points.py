"""Stop points for kill tests: the driver waits at a named place of an iteration, so that it can be killed exactly there.

Off unless the environment sets it. MILLRACE_KILL_POINT=<index of the iteration>/<task>/<before|in|committed|after> names the
place, MILLRACE_KILL_POINT_FILE a file. The first time the driver reaches the place it creates the file, and continues when the
file is removed. `in` is after a task has written its first output and before it commits, `committed` after the checkpoint task
has written complete.json, `cut` after rollout has ended the requests of groups that are deferred. The task `cut` is the commit
of cut.json. The task `finish`, of the iteration after the last, marks the run complete: `in` is between its trackers and
run.json. Of eager_passes, `before` is before a chunk is passed, and `in` after one was.
"""

import asyncio
import os
from pathlib import Path
from typing import Literal

POLL_S = 0.005
_reached: set[str] = set()


async def kill_point(
    iteration: int, task: str, when: Literal["before", "in", "cut", "committed", "after"]
) -> None:
    """Wait here if the environment names this place."""
    place = f"{iteration}/{task}/{when}"
    if os.environ.get("MILLRACE_KILL_POINT") != place or place in _reached:
        return
    _reached.add(place)
    file = Path(os.environ["MILLRACE_KILL_POINT_FILE"])
    file.write_text(str(os.getpid()))
    while file.exists():  # noqa: ASYNC110 - another process removes it
        await asyncio.sleep(POLL_S)
