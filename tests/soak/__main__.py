"""`python -m tests.soak`: kill a training run, or set drivers beside it, again and again; exit 0 only if every promise held."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue

from tests.soak.harness import Outcome, Site, make_workplace
from tests.soak.points import NEIGHBOURS, OWN_VICTIMS, VICTIMS, Point, at_random, matrix
from tests.support.ctrl_c import heed_ctrl_c

ITERATIONS = 3


def main() -> None:
    """Parse, run, print the table, keep it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="random kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kills")
    parser.add_argument(
        "--matrix", action="store_true", help=f"the {len(matrix())} points of the matrix instead"
    )
    parser.add_argument("--every", action="store_true", help=f"all {len(matrix(every=True))} points instead")
    parser.add_argument(
        "--victim",
        choices=(*VICTIMS, *OWN_VICTIMS, *NEIGHBOURS),
        action="append",
        help="only these; may be repeated. Of the random kills, those that are no neighbours",
    )
    parser.add_argument("--only", help="only points whose name contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="workplaces at a time")
    parser.add_argument("--out", type=Path, default=Path("soak.json"), help="where the results are kept")
    parser.add_argument("--folder", type=Path, help="where to work; broken runs are left there")
    args = parser.parse_args()
    heed_ctrl_c()
    points = _points(args)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="millrace-soak-"))
    left: SimpleQueue[Point] = SimpleQueue()
    for point in points:
        left.put(point)
    sites = [_site(folder / f"site-{number}") for number in range(min(args.jobs, len(points)))]
    results = Results(args.out)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(partial(work, left=left, results=results), sites))
    print(f"results: {args.out}")
    sys.exit(judge(results.outcomes))


class Results:
    """What the points came to, in a file after each of them: hours of kills are not lost with their last one."""

    def __init__(self, file: Path) -> None:
        self.outcomes: list[Outcome] = []
        self._file = file
        self._writing = threading.Lock()

    def add(self, outcome: Outcome) -> None:
        """Keep one, and print its line."""
        with self._writing:
            self.outcomes.append(outcome)
            report = [{**asdict(one), "name": str(one.point)} for one in self.outcomes]
            self._file.write_text(json.dumps(report, indent=1))
            print(_line(outcome), flush=True)


def judge(outcomes: list[Outcome]) -> int:
    """Print how many points held; the exit code. A point that this machine cannot try has not held."""
    held = [outcome for outcome in outcomes if not outcome.problems and not outcome.skipped]
    print(f"{len(held)} of {len(outcomes)} points held every promise")
    for outcome in outcomes:
        if outcome.skipped:
            print(f"NOT TRIED, skipped: {outcome.point}: {outcome.skipped}")
    return 0 if outcomes and len(held) == len(outcomes) else 1


def _points(args: argparse.Namespace) -> list[Point]:
    if args.matrix or args.every:
        points = matrix(args.every)
        points = [point for point in points if not args.victim or point.victim in args.victim]
        return [point for point in points if not args.only or args.only in str(point)]
    chosen: Iterable[Point] = at_random(args.seed, ITERATIONS)
    chosen = (point for point in chosen if not args.victim or point.victim in args.victim)
    return list(islice(chosen, args.kills))


def _site(folder: Path) -> Site:
    """Make a workplace. Not in a thread: two threads cannot import transformers at once."""
    folder.mkdir(parents=True)
    return Site(make_workplace(folder), shared=folder.parent)


def work(site: Site, left: SimpleQueue[Point], results: Results) -> None:
    """Make kills in one workplace, one after the other, as long as some are left: a slow one holds up no other workplace."""
    try:
        while True:
            try:
                point = left.get_nowait()
            except Empty:
                return
            results.add(site.kill(point))
    finally:
        site.close()


def _line(outcome: Outcome) -> str:
    how = "survived" if outcome.survived else f"{outcome.starts} starts"
    ended = f"ended in {outcome.ended_s:.1f} s  " if outcome.ended_s else ""
    verdict = f"skipped: {outcome.skipped}" if outcome.skipped else "; ".join(outcome.problems) or "ok"
    return (
        f"{outcome.point!s:45} {outcome.landed:6} {how:9} again {outcome.regenerated:3d} "
        f"{outcome.seconds:6.1f} s  {ended}{verdict}"
    )


if __name__ == "__main__":
    main()
