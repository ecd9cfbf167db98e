"""How long a start takes with an empty cache of kernels, and with a filled one: from `millrace train` to the first token.

    python -m benchmarks.gpu.start [--recipe deployments/recipes/smollm2_one_gpu.yaml] [--folder FOLDER] [--rounds 1]

Every start has an empty folder of kernels, as a fresh machine has. Cold: the storage of placement.kernel_cache is empty too, and
the run goes on until it has given what it compiled. Shipped: the same storage, now filled. Each is ended after the rollout of its
first iteration, the cold one after its first step and the second gift of its engine. Servers run already, the model is made,
and nothing is evaluated.

Seconds from the command to: engine, which answers; first_token, the first batch that the engine logs after that; rollout, all
answers of the first iteration. kernels: lines of the run's log of kernels. The first round also loads files from disk, so that the
second one compares caches alone. `--recipe` of a run on a CPU tries the command. JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import command_line
from millrace.connectors.host.kernel_folders import FOLDER, kernel_key
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.kernel_cache import GIVEN_AFTER_S, LOG
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.hooks.loading import load
from tests.support.ctrl_c import heed_ctrl_c

POLL_S = 0.05
GIFT_S = 8.0  # that a gift may take
ANSWERS = ("The server is fired up", "embedded engine serves")  # of SGLang, of the embedded engine
BATCHES = ("Decode batch", "Prefill batch")
ROOT = Path(__file__).parents[2]
MILLRACE = (sys.executable, "-m", "millrace.flows.commands")


def main() -> None:
    """Make the model, start a run twice in each round, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=ROOT / "deployments/recipes/smollm2_one_gpu.yaml")
    parser.add_argument("--folder", type=Path, help="where the recipe's model is made, and stays")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--patience", type=float, default=400.0, help="longest start, seconds")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value of the configuration")
    options = parser.parse_args()
    heed_ctrl_c()  # by which runs are ended
    report: dict[str, Any] = {"command": command_line(), "host": dict(kernel_key().parts)}
    with tempfile.TemporaryDirectory(prefix="start") as scratch:
        here = (options.folder or Path(scratch)).absolute()
        here.mkdir(parents=True, exist_ok=True)
        recipe = options.recipe.absolute()
        os.chdir(here)
        os.environ["MILLRACE_HOME"] = str(Path(scratch) / "home")
        prepare(load_config(str(recipe), options.overrides))
        os.environ["CUDA_CACHE_PATH"] = str(Path(scratch) / "driver")  # the driver keeps kernels as well
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        subprocess.run([*MILLRACE, "server", "start"], check=True, stdout=sys.stderr)
        try:
            for number in range(options.rounds):
                for case in ("cold", "shipped"):
                    found = Start(options, recipe, Path(scratch), case, number).measured()
                    report.setdefault(case, []).append(found)
                    if options.out:
                        options.out.write_text(json.dumps(report, indent=1) + "\n")
        finally:
            subprocess.run([*MILLRACE, "server", "stop"], check=False, stdout=sys.stderr)
    print(json.dumps(report, indent=1))


def prepare(config: RunConfig) -> None:
    """Make what the recipe's run.prepare makes, so that no start is timed with it."""
    if config.run.prepare:
        load(config.run.prepare.function, "run.prepare")(config, **config.run.prepare.options)


class Start:
    """One start of a run."""

    def __init__(
        self, options: argparse.Namespace, recipe: Path, scratch: Path, case: str, number: int
    ) -> None:
        self.cold, self.patience = case == "cold", options.patience
        self.name = f"{case}-{number}"
        self.store, self.root = scratch / f"store-{number}", scratch / "runs"
        self.run = RunFolder(str(self.root), self.name)
        self.logs = self.root / self.name / "logs"
        self.scratch = scratch
        self.settings = [
            f"run.name={self.name}",
            f"storage.root={self.root}",
            f"placement.kernel_cache={self.store}",
            "evaluation.sets=[]",
            *options.overrides,
        ]
        self.command = [*MILLRACE, "train", str(recipe), *self.settings]

    def measured(self) -> dict[str, Any]:
        """Seconds from the command to each event, and what the log of kernels says."""
        home = Path(os.environ["MILLRACE_HOME"])
        for folder in (home / FOLDER, Path(os.environ["CUDA_CACHE_PATH"])):
            shutil.rmtree(folder, ignore_errors=True)
        self.process, self.began = subprocess.Popen(self.command, stdout=sys.stderr), time.monotonic()
        try:
            found = {
                "engine_s": self.until(lambda: self.logged(ANSWERS, 0) >= 0),
                "first_token_s": self.first_token(),
                "rollout_s": self.until(lambda: self.recorded("rollout")),
            }
            if self.cold:
                found["first_step_s"] = self.until(lambda: self.recorded("train_step"))
                given = found["engine_s"] + sum(GIVEN_AFTER_S[:2]) + GIFT_S
                self.until(lambda: self.seconds() > given)
        finally:
            self.process.send_signal(signal.SIGINT)
            subprocess.run(
                [*MILLRACE, "stop", self.name, "--root", str(self.root)], check=False, stdout=sys.stderr
            )
            self.process.wait(timeout=120)
        log = self.logs / LOG
        files = [path for path in self.store.rglob("*") if path.is_file()] if self.store.exists() else []
        return {
            **found,
            "kernels": log.read_text().splitlines() if log.exists() else [],
            "stored_mib": round(sum(path.stat().st_size for path in files) / 2**20, 2),
        }

    def seconds(self) -> float:
        """Since the command."""
        return time.monotonic() - self.began

    def until(self, holds: Callable[[], bool]) -> float:
        """Wait for an event; returns seconds since the command. Exits if the run ends before or takes too long."""
        while not holds():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with {self.process.returncode}; see above")
            if self.seconds() > self.patience:
                raise SystemExit(f"{self.name} takes more than {self.patience:g} s; its logs: {self.tail()}")
            time.sleep(POLL_S)
        return round(self.seconds(), 2)

    def first_token(self) -> float | None:
        """Seconds to the first batch that SGLang logs once it answers; None of an engine that logs none."""
        at = self.logged(ANSWERS, 0)
        self.until(lambda: self.logged(BATCHES, at) >= 0 or self.recorded("rollout"))
        return round(self.seconds(), 2) if self.logged(BATCHES, at) >= 0 else None

    def logged(self, texts: Sequence[str], start: int) -> int:
        """Where the engine's log has one of these texts; -1 if it has none."""
        log = self.logs / "engine-0.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        return max(text.find(each, start) for each in texts)

    def recorded(self, task: str) -> bool:
        """Whether a task of the first iteration is over."""
        return IterationFiles(self.run, 0).record(task) is not None

    def tail(self) -> str:
        """The ends of the logs."""
        return "\n".join(
            f"{path}:\n{path.read_text(errors='replace')[-2000:]}" for path in self.logs.glob("*.log")
        )


if __name__ == "__main__":
    main()
