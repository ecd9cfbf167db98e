"""`python -m tests.soak.numbers`: what runs of every form compute, as hashes, so that two versions of the code can be compared.

    python -m tests.soak.numbers make BEFORE            with the old code: train the runs, write BEFORE/numbers.json
    python -m tests.soak.numbers make AFTER             with the new code
    python -m tests.soak.numbers compare BEFORE AFTER   name each number that differs; exit 1 if one does
    python -m tests.soak.numbers replay BEFORE          with the new code: make the stored steps of the old runs again

Runs whose samples hang on time (`REPLAYED`) are trained and replayed, and not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from tests.soak import forms, promises, rollouts
from tests.soak.forms import FORMS
from tests.soak.starts import DYNAMIC
from tests.support.flow_runs import Workplace, final_weights, make_workplace
from tests.support.reward_server import serve_rewards

SEEDS = (0, 1, 2)  # of the quickstart
FILE = "numbers.json"
ALGORITHMS: Mapping[str, list[str]] = {
    "plain": [],
    "dynamic": [*DYNAMIC],
    "sft": ["algorithm.loss=sft", "rollout.samples_per_prompt=1", "trainer.global_batch=4"],
    "ppo": ["algorithm.preset=ppo"],
    "gspo": ["algorithm.preset=gspo"],
    "kl": ["algorithm.kl_coef=0.1"],
    "packed": ["trainer.max_pack_tokens=128", "trainer.store_logprobs=true"],
}
REPLAYED = tuple(name for name, form in FORMS.items() if not form.repeats)
RUNS: Mapping[str, list[str]] = {
    **ALGORITHMS,
    **{name: forms.overrides(name) for name, form in FORMS.items() if not form.two_nodes},
}


def main() -> None:
    """Parse and do it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.numbers",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", help="only these runs; quickstart-SEED names one of them")
    parser.add_argument("--iterations", type=int, default=8, help="of each quickstart")
    parser.add_argument("do", choices=("make", "replay", "compare"))
    parser.add_argument("folder", type=Path, nargs="+")
    arguments = parser.parse_args()
    wanted = arguments.only or [*RUNS, *(f"quickstart-{seed}" for seed in SEEDS)]
    first, *others = (folder.resolve() for folder in arguments.folder)
    if arguments.do == "compare":
        sys.exit(_report(differing(_read(first), _read(others[0]))))
    place = _place(first)
    if arguments.do == "replay":
        sys.exit(_report(list(_replays(place, first, wanted))))
    _make(place, first, wanted, arguments.iterations)


def _place(folder: Path) -> Workplace:
    """The workplace in a folder, which is made if there is none."""
    place = Workplace(folder) if (folder / "run.yaml").exists() else make_workplace(_new(folder))
    for name, text in {**forms.MODULES, forms.TAILED: forms.tailed_rows()}.items():
        (folder / name).write_text(text)
    place.environment[rollouts.NOTES] = str(folder / "notes.txt")
    return place


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _make(place: Workplace, folder: Path, wanted: list[str], iterations: int) -> None:
    """Train what is not there yet; numbers.json grows with each run."""
    kept = _read(folder) if (folder / FILE).exists() else {}
    with serve_rewards() as server:
        place.environment[forms.REWARD_SERVER] = server.url
        for name in (name for name in wanted if name not in kept):
            run = _run_of(folder, name)
            shutil.rmtree(run, ignore_errors=True)
            if name in RUNS:
                place.train(run.parent, *RUNS[name])
            else:
                seed = name.rpartition("-")[2]
                given = ("--root", str(run.parent), "--seed", seed, "--iterations", str(iterations))
                place.call("quickstart", *given)
            kept[name] = hashes(run)
            (folder / FILE).write_text(json.dumps(kept, indent=1))
            print(f"{name}: weights {kept[name]['weights'][:12]}", flush=True)
    place.call("server", "stop")


def _run_of(folder: Path, name: str) -> Path:
    return folder / name / (name if name not in RUNS else "a")


def hashes(run: Path) -> dict[str, str]:
    """Of the final weights, of each column of what was trained, and of each figure of its steps."""
    found = {"weights": hashlib.sha256(final_weights(run)).hexdigest()}
    for name, values in promises.numbers(run).items():
        found[name] = hashlib.sha256(repr(values).encode()).hexdigest()
    return found


def differing(one: Mapping[str, Mapping[str, str]], other: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What two versions of the code do not share; a run that one of them lacks is one such thing."""
    names = sorted(one.keys() ^ other.keys())
    problems = [f"{name}: only one of both has it" for name in names]
    for run in (name for name in one if name in other and name not in REPLAYED):
        for figure in sorted(one[run].keys() | other[run].keys()):
            if one[run].get(figure) != other[run].get(figure):
                problems.append(f"{run}: {figure} differs")
    return problems


def _replays(place: Workplace, folder: Path, wanted: list[str]) -> Iterator[str]:
    """What is wrong with a replay of each run."""
    for name in wanted:
        _forget_fields_that_are_gone(_run_of(folder, name))
        found = promises.replayed(place, _run_of(folder, name))
        print(f"{name}: {'replayed' if not found else 'DIFFERS'}", flush=True)
        yield from (f"{name}: {text}" for text in found)
    place.call("server", "stop")


def _forget_fields_that_are_gone(run: Path) -> None:
    """Take out of run.json what only the old code's configuration has."""
    store = Store(str(run))
    record = store.read_sealed("run.json")
    try:
        RunConfig.model_validate(record["config"])
    except ValidationError as error:
        for place in (item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"):
            section: Any = record["config"]
            for part in place[:-1]:  # a variant's name among them is no field
                section = section[part] if isinstance(section, list) or part in section else section
            del section[place[-1]]
        store.write_sealed("run.json", record)


def _read(folder: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((folder / FILE).read_text())
    return kept


def _report(problems: list[str]) -> int:
    print("\n".join(problems) or "every number is equal")
    return 1 if problems else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
