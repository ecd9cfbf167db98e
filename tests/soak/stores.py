"""`python -m tests.soak.stores`: runs of four iterations on an S3 server that fails and whose listings lag, some killed.

Which faults, how often, the form of the run and its kills are drawn from the seed. A run must end with the weights, samples and
figures of a run on a local disk, or with an error that is named: exit code 2 and no traceback. Exit 0 if none fell.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import s3fs
import yaml

from tests.soak import jobs, promises
from tests.soak.forms import FORMS
from tests.soak.harness import Site, usual_seconds
from tests.soak.jobs import FELL, HELD, NAMED, Try
from tests.soak.points import Point
from tests.soak.starts import overrides
from tests.support.flow_runs import Patience, configuration, make_workplace, output_of
from tests.support.late_s3 import Odds, late_s3
from tests.support.s3_server import BUCKET, s3_server

ITERATIONS = 4
STARTS = 8  # at most, of one run
NAME = "late"
ENDS_WITHIN_S = 900.0  # a start, on a machine that is not busy
COMPARED = tuple(
    name for name, form in FORMS.items() if form.repeats and not form.two_nodes and not form.asks_server
)
RATES = {  # how often a fault happens, where it does
    "errors": (0.02, 0.05, 0.1),
    "lost": (0.01, 0.02, 0.05),
    "slow": (0.01, 0.03),
    "stale": (0.3, 1.0),
    "hidden": (0.3, 1.0),
}
PLACES = ("", "", "iterations", "rollouts", "rewards", "lease", "results", "checkpoints")


@dataclass(frozen=True)
class Draw:
    """One run: its form, the faults of its store, and when its driver dies, as shares of an undisturbed run's time."""

    form: str
    dynamic: bool
    rates: dict[str, float]
    only: str
    kills: tuple[float, ...]

    @property
    def point(self) -> Point:
        """What the harness calls a run of this form."""
        return Point("driver", "rollout", "in", self.dynamic, form=self.form)

    def __str__(self) -> str:
        rates = " ".join(f"{name} {rate:g}" for name, rate in self.rates.items())
        only = f" only {self.only}" if self.only else ""
        kills = f" killed at {', '.join(f'{share:.2f}' for share in self.kills)}" if self.kills else ""
        return f"{self.form or ('dynamic' if self.dynamic else 'plain')}: {rates}{only}{kills}"


def drawn(seed: int, number: int, forms: tuple[str, ...] = COMPARED) -> Draw:
    """A pure function of seed and number."""
    numbers = random.Random(f"{seed}/{number}")
    form = numbers.choice(forms) if forms and numbers.random() < 0.5 else ""
    kinds = numbers.sample(list(RATES), numbers.randint(1, len(RATES)))
    if not {"stale", "hidden"} & {*kinds}:
        kinds.append(numbers.choice(["stale", "hidden"]))
    return Draw(
        form=form,
        dynamic=not form and numbers.random() < 0.3,
        rates={kind: numbers.choice(RATES[kind]) for kind in RATES if kind in kinds},
        only=numbers.choice(PLACES),
        kills=tuple(numbers.uniform(0.1, 1.2) for _ in range(numbers.choice((0, 0, 1, 2)))),
    )


class StoreSite:
    """A workplace and an S3 server, on which one run after the other is made."""

    def __init__(self, site: Site, variables: dict[str, str], arguments: Namespace) -> None:
        self._site, self._arguments = site, arguments
        self._upstream = variables["AWS_ENDPOINT_URL"]
        self._place = site.place
        self._place.environment |= variables
        self._fs = s3fs.S3FileSystem(
            endpoint_url=self._upstream, key="test", secret="test", use_listings_cache=False
        )

    def make(self, number: int) -> Try:
        """Draw a run, make it, and compare it."""
        draw = drawn(self._arguments.seed, number, self._arguments.forms)
        reference = self._site.reference(draw.point)
        started = time.monotonic()
        verdict, said = self._run(draw, number, reference)
        seconds = time.monotonic() - started
        return Try(number, str(draw), verdict, said, seconds)

    def _run(self, draw: Draw, number: int, reference: Path) -> tuple[str, str]:
        kept = self._site.folder / f"run-{number}"
        kept.mkdir()
        root = f"s3://{BUCKET}/{number}"
        odds = Odds(**draw.rates, only=draw.only, seed=number)
        try:
            with late_s3(self._upstream, odds) as endpoint:
                complete, named = self._starts(draw, root, kept, endpoint, usual_seconds(reference))
            said = f"{len(named)} starts named an error: {named[-1]}" if named else ""
            broken = self._compare(root, kept, reference) if complete else []
            verdict = (FELL, "; ".join(broken)) if broken else (HELD if complete else NAMED, said)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            verdict = FELL, f"{error}; see {kept}"
        if verdict[0] == FELL:
            with contextlib.suppress(FileNotFoundError):
                self._fs.get(f"{BUCKET}/{number}", str(kept / "store"), recursive=True)
        else:
            shutil.rmtree(kept)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{BUCKET}/{number}", recursive=True)
        return verdict

    def _starts(
        self, draw: Draw, root: str, kept: Path, endpoint: str, usual: float
    ) -> tuple[bool, list[str]]:
        """Start, kill, start again until the run is complete, or not; the errors that starts named."""
        said: list[str] = []
        kills = [*draw.kills]
        for number in range(STARTS):
            log = kept / f"start-{number + 1}.log"
            kill_after = kills.pop(0) * usual if kills else None
            code = self._start(draw, root, log, endpoint, kill_after)
            if code == 0:
                return True, said
            text = log.read_text()
            assert "Traceback" not in text, f"a traceback in {log}"
            if code != -9:
                assert code == 2, f"{log} ended with {code}"
                said.append(text.strip().splitlines()[-1])
        return False, said

    def _start(self, draw: Draw, root: str, log: Path, endpoint: str, kill_after: float | None) -> int:
        """Exit code of one start; -9 if its driver was killed."""
        command = [*self._place.command, "train", "run.yaml", f"storage.root={root}", f"run.name={NAME}"]
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, *overrides(draw.point)],
                env={**self._place.environment, "AWS_ENDPOINT_URL": endpoint},
                cwd=self._place.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        patience = Patience(ENDS_WITHIN_S)
        started = time.monotonic()
        while process.poll() is None:
            time.sleep(0.05)
            if kill_after is not None and time.monotonic() - started > kill_after:
                process.kill()
                process.wait()
            if not patience.left:
                os.killpg(process.pid, 9)
                raise AssertionError(f"{log} does not end")
        return process.returncode

    def _compare(self, root: str, kept: Path, reference: Path) -> list[str]:
        """What differs from the run on a local disk, and what commands find."""
        problems = []
        for command in ("verify", "ledger"):
            process = self._place.start(command, NAME, "--root", root)
            said = output_of(process)
            if process.returncode:
                problems.append(f"millrace {command} ended with {process.returncode} and says: {said}")
        self._fs.get(root.removeprefix("s3://"), str(kept / "compared"), recursive=True)
        run = kept / "compared" / NAME
        problems += promises.different_numbers(reference, run)
        if promises.final_weights(run) != promises.final_weights(reference):
            problems.append("the final weights differ")
        return [f"{text}; see {kept}" for text in problems]


@contextlib.contextmanager
def store_site(folder: Path, arguments: Namespace) -> Iterator[Callable[[int], Try]]:
    """A workplace, its server, and what makes the run of a number."""
    place = make_workplace(folder)
    content = configuration()
    content["run"]["iterations"] = ITERATIONS
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    site = Site(place, shared=folder.parent)
    with s3_server() as variables:
        try:
            yield StoreSite(site, variables, arguments).make
        finally:
            site.close()


def main() -> None:
    """Parse, run, print, and exit 1 if a run fell."""
    parser = jobs.parser_of("tests.soak.stores", __doc__)
    parser.add_argument(
        "--forms", nargs="*", default=COMPARED, choices=COMPARED, help="of the runs that are not plain"
    )
    sys.exit(jobs.spread(store_site, parser.parse_args()))


if __name__ == "__main__":
    main()
