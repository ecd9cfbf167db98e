"""Numbered tries on several workplaces at once, each in a process of its own, until a number of tries or a time is reached."""

from __future__ import annotations

import json
import multiprocessing
import queue
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.support.ctrl_c import heed_ctrl_c

HELD, NAMED, FELL = "held", "named error", "FELL"


@dataclass(frozen=True)
class Try:
    """What one try came to."""

    number: int
    drawn: str
    verdict: str  # HELD, NAMED or FELL
    said: str  # why it fell, or what was named
    seconds: float


Site = Callable[
    [Path, Namespace], AbstractContextManager[Callable[[int], Try]]
]  # folder of its own, arguments


def parser_of(module: str, text: str | None) -> ArgumentParser:
    """The options that all such commands have."""
    parser = ArgumentParser(prog=f"python -m {module}", description=text)
    parser.add_argument("--seed", type=int, default=0, help="all draws follow from it")
    parser.add_argument("--runs", type=int, default=100, help="at most so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--seconds", type=float, default=0.0, help="none starts after so many; 0: no limit")
    parser.add_argument("--jobs", type=int, default=1, help="workplaces at a time")
    parser.add_argument("--folder", type=Path, help="where to work; runs that fell are left there")
    parser.add_argument("--out", type=Path, help="where the results are kept as JSON")
    return parser


def spread(site: Site, arguments: Namespace) -> int:
    """Make the tries, print a line each and a sum; the exit code, 1 if one fell or none was made."""
    heed_ctrl_c()
    folder = arguments.folder or Path(mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {arguments.seed}, {arguments.jobs} jobs in {folder}", flush=True)
    fork = multiprocessing.get_context("spawn")
    numbers, tries = fork.Value("i", arguments.first), fork.Queue()
    jobs = [
        fork.Process(target=_job, args=(site, folder / f"site-{number}", arguments, numbers, tries))
        for number in range(arguments.jobs)
    ]
    for job in jobs:
        job.start()
    signal.signal(signal.SIGTERM, lambda *_: [job.terminate() for job in jobs] and sys.exit(143))
    made = []
    for each in _made(jobs, tries):
        made.append(each)
        print(
            f"{each.number:4} {each.verdict:11} {each.seconds:6.1f} s  {each.drawn}  {each.said}", flush=True
        )
        if arguments.out:
            arguments.out.write_text(json.dumps([asdict(one) for one in made], indent=1))
    broken = [job.exitcode for job in jobs if job.exitcode]
    verdicts = Counter(each.verdict for each in made)
    print(f"{len(made)} tries: " + ", ".join(f"{verdicts[name]} {name}" for name in (HELD, NAMED, FELL)))
    if broken:
        print(f"{len(broken)} jobs ended with {broken}")
    return 1 if broken or verdicts[FELL] or not made else 0


def _made(jobs: list[Any], tries: Any) -> Iterator[Try]:
    """The tries as they end, until all jobs have ended."""
    while True:
        alive = any(job.is_alive() for job in jobs)
        try:
            yield tries.get(timeout=1)
        except queue.Empty:
            if not alive:
                return


def _job(site: Site, folder: Path, arguments: Namespace, numbers: Any, tries: Any) -> None:
    heed_ctrl_c()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the site ends its servers
    until = time.monotonic() + (arguments.seconds or float("inf"))
    folder.mkdir(parents=True)
    with site(folder, arguments) as make:
        for _ in count():
            with numbers.get_lock():
                number, numbers.value = numbers.value, numbers.value + 1
            if number >= arguments.first + arguments.runs or time.monotonic() > until:
                return
            tries.put(make(number))
