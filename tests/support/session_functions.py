"""Rollout functions, environments and tools that tests run in worker processes: good ones, and every kind of bad one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from pathlib import Path
from typing import Any

from millrace.core.sessions.interface import Done, Observation, Session, SessionError, Task, Turn

# rollout functions


async def one_turn(session: Session) -> float:
    """One answer; its reward is its length."""
    return float(len((await session.generate()).text))


async def three_turns(session: Session, *, add: str = "again") -> float:
    """Three answers, with a message of the user between them."""
    for _ in range(3):
        await session.generate(add if session.turns else None)
    return float(len(session.turns))


async def for_ever(session: Session) -> None:
    """Turns until a limit ends it."""
    while True:
        await session.generate("more" if session.turns else None)


async def branches_for_ever(session: Session) -> None:
    """A branch whose prompt is longer than the rollout's, and turns there until a limit ends it."""
    await session.generate()
    other = session.branch("other", prompt=f"say more than was said: {'more ' * 8}")
    while True:
        await other.generate("more" if other.turns else None)


async def raises(session: Session) -> None:
    """Fails after a turn."""
    await session.generate()
    raise ValueError("no idea")


async def exits(session: Session) -> None:
    """Ends its process after a turn."""
    await session.generate()
    os._exit(3)


async def writes_to_the_driver(session: Session) -> None:
    """Writes a line to each socket of its process, and keeps it busy."""
    await session.generate()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b'[1, 2, "Start", {}]\n')
    while True:
        pass


async def names_a_branch_by_a_number(session: Session) -> None:
    """Asks for a turn of a branch whose name is no text."""
    await session.branch(3).generate()  # type: ignore[arg-type]


async def spins(session: Session) -> None:
    """Never gives the loop back."""
    await session.generate()
    while True:
        pass


async def sleeps(session: Session) -> None:
    """Waits for ever, politely."""
    await session.generate()
    await asyncio.sleep(3600)


async def hangs_in_c(session: Session) -> None:
    """Holds the interpreter in C."""
    await session.generate()
    ctypes.PyDLL(None).sleep(3600)


async def hoards(session: Session) -> None:
    """Asks for more memory than it may have."""
    await session.generate()
    bytearray(64 << 30)


async def multiplies(session: Session) -> None:
    """Starts itself again and again."""
    await session.generate()
    while True:
        os.fork()


async def gives_text(session: Session) -> Any:
    """Returns what is no reward."""
    await session.generate()
    return "good"


async def calls(session: Session, *, tool: str, **arguments: Any) -> float:
    """A turn, a call, and another turn that sees the answer."""
    await session.generate()
    answer = await session.call(tool, **arguments)
    session.observe(answer)
    await session.generate()
    return float(len(answer))


async def calls_in_order(session: Session) -> None:
    """A turn, and the calls that the row lists."""
    await session.generate()
    for tool, arguments in session.task.metadata["calls"]:
        session.observe(await session.call(tool, **arguments))
    await session.generate()


async def calls_side_by_side(session: Session, *, path: str) -> float:
    """Three calls at once, of which the first ends last, between two turns."""
    await session.generate()
    waits = (session.call("count_later", path=path, seconds=0.2 - 0.1 * n) for n in range(3))
    answers = await asyncio.gather(*waits)
    session.observe(" ".join(answers))
    await session.generate()
    return float(len(answers))


async def two_turns_at_once(session: Session) -> None:
    """What a branch does not do."""
    await asyncio.gather(session.generate(), session.generate())


async def never_generates(session: Session) -> float:
    """Gives a reward for nothing."""
    session.observe("something", "user")
    return 1.0


async def refused_then_goes_on(session: Session) -> float:
    """A message that cannot follow token ids yet, and then others in their place."""
    session.observe([5, 6])
    refusal = ""
    try:
        await session.generate("hello")
    except SessionError as error:
        refusal = str(error)
    assert "a message cannot follow token ids before the first turn" in refusal
    await session.generate("hello")
    session.observe([5, 6])
    await session.generate("and")
    return 1.0


async def asks_wrongly(session: Session) -> float:
    """Lengths and stops that mean nothing, or mean something else than they say."""
    for wrong in (0, -1):
        refusal = ""
        try:
            await session.generate(max_new_tokens=wrong)
        except ValueError as error:
            refusal = str(error)
        assert refusal == f"max_new_tokens is {wrong}: a turn has a token at least"
    await session.generate(stop="ab")
    await session.generate("more", stop=["ab", "c"])
    return 1.0


async def branches(session: Session) -> None:
    """A solver and a critic that reads what it said."""
    turn = await session.generate()
    critic = session.branch("critic", prompt=f"judge: {turn.text}")
    await critic.generate()
    critic.reward(0.25, kind=1.0, words="Fine.", answer="yes")
    session.reward(1.0)


# tools


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait for a while."""
    await asyncio.sleep(seconds)
    return "waited"


def count(path: str) -> str:
    """Note that it was called."""
    with Path(path).open("a") as file:
        file.write("x")
    return "noted"


async def count_later(path: str, seconds: float) -> str:
    """Note that it was called, after a while."""
    await asyncio.sleep(seconds)
    return count(path)


def spin() -> str:
    """Never end."""
    while True:
        time.sleep(0)


def spin_in_c() -> str:
    """Hold the interpreter in C."""
    ctypes.PyDLL(None).sleep(3600)
    return ""


def crash() -> str:
    """End the process."""
    os._exit(1)


def hoard() -> str:
    """Ask for too much memory."""
    return str(len(bytearray(64 << 30)))


def fail() -> str:
    """Raise."""
    raise KeyError("missing")


def give_bytes() -> Any:
    """Give what is no text."""
    return {"odd": b"\xff", 1: float("nan")}


# environments


class Countdown:
    """Ends after `steps` turns. Notes each call of its functions in a file, if it has one."""

    recovery = "restart"

    def __init__(self, steps: int = 3, notes: str = "") -> None:
        self.left, self._notes = steps, notes

    async def reset(self, task: Task) -> Observation | None:
        """Show how many steps are left."""
        self._note("r")
        return None

    async def step(self, turn: Turn) -> Observation | Done:
        """Count down."""
        self._note("s")
        self.left -= 1
        return Observation(f"{self.left} left") if self.left else Done(1.0, {"turns": 1.0})

    async def close(self) -> None:
        """Nothing to let go of."""

    def _note(self, what: str) -> None:
        if self._notes:
            with Path(self._notes).open("a") as file:
                file.write(what)


class SavedCountdown(Countdown):
    """The same, which can be taken up again."""

    recovery = "snapshot"

    def snapshot(self) -> str:
        """How many are left."""
        return str(self.left)

    def restore(self, state: str) -> None:
        """Go on from there."""
        self.left = int(state)


class Echo(Countdown):
    """Shows the length of the turn; ends when told by its number of turns alone."""

    recovery = "stateless"

    async def step(self, turn: Turn) -> Observation | Done:
        """What follows from the turn."""
        self._note("s")
        return (
            Done(0.5) if len(turn.output_ids) % 3 == 0 else Observation(f"you wrote {len(turn.output_ids)}")
        )


class NotAsync:
    """An environment whose functions are not async."""

    recovery = "stateless"

    def reset(self, task: Task) -> Observation:
        """Begin."""
        return Observation("go")

    def step(self, turn: Turn) -> Done:
        """End."""
        return Done(0.75)

    def close(self) -> None:
        """Nothing to let go of."""


class NoRecovery(NotAsync):
    """Says nothing of what a restart may do."""

    recovery = None  # type: ignore[assignment]


class OddRecovery(NotAsync):
    """Says what is not known."""

    recovery = "always"


class NoSnapshot(NotAsync):
    """Promises a state that it cannot give."""

    recovery = "snapshot"


class BytesAsState(SavedCountdown):
    """Gives its state as what is no text."""

    def snapshot(self) -> Any:
        """How many are left."""
        return b"3"


class NoStep:
    """Only begins."""

    recovery = "stateless"

    async def reset(self, task: Task) -> None:
        """Begin."""


async def bad_or_good(session: Session, *, bad: str) -> Any:
    """A bad rollout, unless the row says that it is a good one, which takes a while."""
    if session.task.metadata.get("good"):
        for _ in range(3):
            await session.generate("again" if session.turns else None)
            await asyncio.sleep(0.3)
        return 3.0
    return await globals()[bad](session)


async def is_killed(session: Session, *, times: int, path: str) -> float:
    """Its process is killed, as by another one, while its code runs: so many times."""
    await session.generate()
    kills(path, times)
    return 1.0


def kills(path: str, times: int) -> str:
    """A tool whose process is killed so many times.

    Args:
        path: Where it is counted.
        times: How often.
    """
    with open(path, "a") as file:
        file.write("x")
    if len(Path(path).read_text()) <= times:
        os.kill(os.getpid(), 9)
    return "done"
