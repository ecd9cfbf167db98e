"""`python -m tests.soak.flat --iterations N`: a long tiny run, and whether anything it holds grows with its iterations.

Processes are looked at again and again; after a warm-up each figure's slope is fitted. Exit 0 only if none grows, over 3,000
iterations, by more than its allowance in `ALLOWED`. Curves (mlflow.db) and the run folder are the run's result: they grow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from tests.soak.victims import processes
from tests.support.flow_runs import Workplace, make_workplace

OVER = 3000  # iterations that the allowances are for
ALLOWED = {  # growth over so many iterations, by the last part of a figure's name
    "MiB": 100.0,
    "descriptors": 5.0,
    "threads": 5.0,
    "database KiB": 10_240.0,
    "temporary entries": 5.0,
    "temporary KiB": 10_240.0,
    "Ray's folder KiB": 10_240.0,
    "shared memory entries": 1.0,
}
WARM_UP = 0.5  # share of the iterations
TINY = (
    "rollout.prompts=1",
    "rollout.samples_per_prompt=2",
    "rollout.part_groups=1",
    "rollout.sampling.max_new_tokens=4",
    "trainer.global_batch=2",
    "evaluation.sets=[]",
)
Figures = dict[str, float]


def main() -> None:
    """Run, look, fit, print, keep as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.flat", description=__doc__)
    parser.add_argument("--iterations", type=int, default=OVER)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--kept", type=int, default=50, help="MILLRACE_PREFECT_ITERATIONS of the run")
    parser.add_argument("--minutes", type=float, default=0, help="stop the run after so many; 0: never")
    parser.add_argument("--out", type=Path, default=Path("flat.json"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flat-"))
    place = make_workplace(folder)
    (folder / "tmp").mkdir()
    place.environment |= {
        "TMPDIR": str(folder / "tmp"),
        "RAY_TMPDIR": str(folder),
        "MILLRACE_PREFECT_ITERATIONS": str(args.kept),
    }
    overrides = [*TINY, f"run.iterations={args.iterations}", f"checkpoint.every={args.kept}", *args.overrides]
    try:
        looks = list(_looks(place, overrides, args.every, args.minutes * 60))
    finally:
        place.call("server", "stop")
    args.out.write_text(json.dumps(looks, indent=0))
    problems = report(looks)
    shutil.rmtree(folder)
    sys.exit(1 if problems else 0)


def _looks(place: Workplace, overrides: list[str], every_s: float, limit_s: float) -> Iterator[Figures]:
    """Figures of the run and its servers, until it ends."""
    log, began = place.folder / "train.log", time.monotonic()
    with log.open("w") as out:
        driver = subprocess.Popen(
            [*place.command, "train", "run.yaml", f"storage.root={place.folder / 'runs'}", *overrides],
            env=place.environment,
            cwd=place.folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while driver.poll() is None:
        time.sleep(every_s)
        done = len(list((place.folder / "runs" / "a" / "iterations").glob("*/manifest.json")))
        if done and driver.poll() is None:
            yield {"iterations": done, "seconds": time.monotonic() - began, **_figures(place, driver.pid)}
        if limit_s and time.monotonic() - began > limit_s:
            driver.terminate()
            driver.wait()
            return
    assert driver.returncode == 0, log.read_text()[-3000:]


def _figures(place: Workplace, driver: int) -> Figures:
    home = place.folder / "home"
    figures: Figures = {}
    pids: set[str] = set()
    for part in ("driver", "prefect", "trainer", "engine", "ray", "scorer"):
        try:
            found = [psutil.Process(pid) for pid in processes(part, driver, home)]
            pids |= {str(process.pid) for process in found}
            figures[f"{part} MiB"] = sum(process.memory_info().rss for process in found) / 2**20
            figures[f"{part} descriptors"] = sum(process.num_fds() for process in found)
            figures[f"{part} threads"] = sum(process.num_threads() for process in found)
        except psutil.NoSuchProcess:
            continue  # it is being replaced, or the run has ended
    figures["database KiB"] = (
        sum(file.stat().st_size for file in (home / "prefect").glob("prefect.db*")) / 1024
    )
    entries = list((place.folder / "tmp").rglob("*"))
    figures["temporary entries"] = len(entries)
    figures["temporary KiB"] = _kib(entries)
    figures["Ray's folder KiB"] = _kib(place.folder.glob("millrace-ray-*/**/*"))
    mine = [path for path in Path("/dev/shm").glob("millrace-*") if f"-{driver}." in path.name]
    mine += [path for path in Path("/dev/shm").glob("sem.*") if pids & set(path.name.split("-"))]
    figures["shared memory entries"] = len(mine)
    figures["curves KiB"] = (home / "mlflow.db").stat().st_size / 1024
    return figures


def _kib(paths: Iterable[Path]) -> float:
    """Of files; those that go meanwhile count for nothing."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    return total / 1024


def report(looks: list[Figures]) -> list[str]:
    """Print first, last and slope of every figure; returns those that grow beyond their allowance."""
    last = looks[-1]["iterations"]
    warm = [look for look in looks if look["iterations"] >= WARM_UP * last]
    print(f"{last:.0f} iterations in {looks[-1]['seconds']:.0f} s; slopes over the last {len(warm)} looks")
    problems = []
    for name in warm[0]:
        points = [(look["iterations"], look[name]) for look in warm if name in look]
        if name in ("iterations", "seconds") or len(points) < 3:
            continue
        growth = slope(points) * OVER
        limits = [limit for ending, limit in ALLOWED.items() if name.endswith(ending)]
        bad = bool(limits) and growth > limits[0]
        problems += [name] if bad else []
        mark = f"more than {limits[0]:g}" if bad else ""
        print(
            f"{name:24} {looks[0].get(name, 0):10.1f} -> {points[-1][1]:10.1f}   in {OVER}: {growth:+10.1f} {mark}"
        )
    return problems


def slope(points: list[tuple[float, float]]) -> float:
    """Least-squares slope."""
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0


if __name__ == "__main__":
    main()
