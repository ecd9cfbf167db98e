"""Whether anything grows in a long tiny run with real servers: memory, MILLRACE_HOME, descriptors, folders; and an idle server.

    python -m benchmarks.whole_runs.growth [--iterations 3000] [--minutes 60] [--out FILE]

Each process of the run is looked at again and again; the slope of each figure is fitted over the second half. Exit 0 only if none
grows, over 3,000 iterations, by more than its allowance in `ALLOWED`, MILLRACE_HOME ends below `HOME_MIB`, and the Prefect server
takes no more than `IDLE_PERCENT` of a core once the run has ended. Curves (mlflow.db) and the run folder are the run's result: they
grow. Other work on the host makes an idle server look busier.
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
HOME_MIB = 200.0
IDLE_PERCENT = 1.0
IDLE_S = 60.0
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=OVER)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--minutes", type=float, default=0, help="stop the run after so many; 0: never")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="g-"))  # short: sockets lie in it
    place = make_workplace(folder)
    (folder / "tmp").mkdir()
    place.environment |= {"TMPDIR": str(folder / "tmp"), "RAY_TMPDIR": str(folder)}
    overrides = [*TINY, f"run.iterations={args.iterations}", "checkpoint.every=50", *args.overrides]
    looks: list[Figures] = []
    try:
        for look in _looks(place, overrides, args.every, args.minutes * 60):
            looks.append(look)
            if args.out:
                args.out.write_text(json.dumps(looks, indent=0) + "\n")
        idle = idle_percent(place)
    finally:
        stop = [*place.command, "server", "stop"]
        subprocess.run(stop, cwd=folder, env=place.environment, check=True)
    problems = report(looks, idle)
    shutil.rmtree(folder)
    sys.exit(1 if problems else 0)


def idle_percent(place: Workplace) -> float:
    """The share of a core that the Prefect server takes while nobody asks it anything, in percent."""
    time.sleep(IDLE_S)  # it forgets what is too old, and gives memory back
    server = psutil.Process(processes("prefect", 0, place.folder / "home")[0])
    before = server.cpu_times()
    time.sleep(IDLE_S)
    after = server.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / IDLE_S


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
            if not found:
                continue  # it has ended, and the run ends
            pids |= {str(process.pid) for process in found}
            figures[f"{part} MiB"] = sum(process.memory_info().rss for process in found) / 2**20
            figures[f"{part} descriptors"] = sum(process.num_fds() for process in found)
            figures[f"{part} threads"] = sum(process.num_threads() for process in found)
        except psutil.NoSuchProcess:
            continue  # it is being replaced, or the run has ended
    figures["home MiB"] = _kib(home.rglob("*")) / 1024
    figures["database KiB"] = _kib((home / "prefect").glob("prefect.db*"))
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


def report(looks: list[Figures], idle: float) -> list[str]:
    """Print first, last and slope of every figure; returns the names of those that are beyond what they may be."""
    last = looks[-1]["iterations"]
    warm = [look for look in looks if look["iterations"] >= WARM_UP * last]
    print(f"{last:.0f} iterations in {looks[-1]['seconds']:.0f} s; slopes over the last {len(warm)} looks")
    problems = []
    for name in warm[0]:
        points = [(look["iterations"], look[name]) for look in warm if name in look]
        if name in ("iterations", "seconds") or len(points) < 3:
            continue
        growth = slope(points) * OVER
        limits = [limit for ending, limit in ALLOWED.items() if name.endswith(ending) and name != "home MiB"]
        bad = bool(limits) and growth > limits[0]
        problems += [name] if bad else []
        mark = f"more than {limits[0]:g}" if bad else ""
        print(
            f"{name:24} {looks[0].get(name, 0):10.1f} -> {points[-1][1]:10.1f}   in {OVER}: {growth:+10.1f} {mark}"
        )
    reached = looks[-1]["home MiB"]
    problems += ["home MiB"] if reached > HOME_MIB else []
    problems += ["idle server"] if idle > IDLE_PERCENT else []
    print(
        f"MILLRACE_HOME {reached:.0f} MiB, of {HOME_MIB:.0f}; idle server {idle:.2f} % of a core, of {IDLE_PERCENT:g}"
    )
    print("beyond what it may be: " + ", ".join(problems) if problems else "nothing is beyond what it may be")
    return problems


def slope(points: list[tuple[float, float]]) -> float:
    """Least-squares slope."""
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0


if __name__ == "__main__":
    main()
