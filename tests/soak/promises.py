"""What a killed run must share with an uninterrupted one. Each broken promise is a sentence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.soak.rollouts import made_again, noted, recorded_calls, recorded_turns
from tests.support.flow_runs import Workplace, final_weights, output_of

# columns of batch.parquet that tell a sample's name, place and time; all others are numbers of the run
NAMES = {"sample_id", "group_id", "engine_id", "timings"}
RED = (" | ERROR ", " | CRITICAL", "Traceback")  # of a logger or of Python
FIGURES = ("loss", "grad_norm", "lr", "tokens", "samples")
# what a processor rounds by what else was in the batch; tokens and weights may not follow from that
ROUNDED = {"rollout_logprobs": 1e-5}
EVALUATED = "eval-"  # how requests for samples of held-out sets begin


@dataclass
class Killed:
    """What was in storage when the kill came, and what engines finished and tools noted before and after it."""

    parts: dict[Path, bytes] = field(default_factory=dict)
    noted: Counter[str] = field(default_factory=Counter)
    finished_before: list[str] = field(default_factory=list)
    finished_after: list[str] = field(default_factory=list)

    @property
    def regenerated(self) -> int:
        """Answers that an engine finished more than once: the process that was to store them died first."""
        counts = Counter(_request(rid) for rid in (*self.finished_before, *self.finished_after))
        return sum(count - 1 for count in counts.values())


def broken(reference: Path, run: Path, killed: Killed, starts: int) -> list[str]:
    """Every promise that the run broke, compared with the uninterrupted one. It was started `starts` times."""
    problems = different_numbers(reference, run)
    if final_weights(run) != final_weights(reference):
        problems.append("the final weights differ")
    problems += _different_evaluations(reference, run)
    problems += _generated_twice(run, killed)
    problems += _attempts(run, starts)
    return problems


def broken_of_its_own(run: Path, killed: Killed, starts: int) -> list[str]:
    """Every promise that a run broke in which time decides what is trained: all but that it is equal to another."""
    problems = _generated_twice(run, killed, deferred=_deferred(run))
    return problems + _attempts(run, starts)


def replayed(place: Workplace, run: Path) -> list[str]:
    """What is wrong with a replay of the whole run from what it stored: its steps must be made again bit for bit."""
    iterations = str(len(list(run.glob("iterations/*/manifest.json"))))
    process = place.start("replay", run.name, "--from", "0", "--to", iterations, "--root", str(run.parent))
    said = output_of(process)
    return [f"millrace replay ended with {process.returncode} and says: {said}"] if process.returncode else []


def _deferred(run: Path) -> set[str]:
    """Samples of groups that were deferred: their rows are taken over by the next iteration, and not made again."""
    return {sample for path in run.glob("iterations/*/deferred.parquet") for sample in _samples(path)}


def faulted_by_commands(place: Workplace, run: Path) -> list[str]:
    """What `millrace verify` finds in the run, and `millrace ledger` where the account of its tokens does not close."""
    problems = []
    for command in ("verify", "ledger"):
        process = place.start(command, run.name, "--root", str(run.parent))
        said = output_of(process)
        if process.returncode:
            problems.append(f"millrace {command} ended with {process.returncode} and says: {said}")
    return problems


def different_numbers(one: Path, other: Path) -> list[str]:
    """In what two runs of one configuration differ that no name, place or time decides: columns of samples, figures of steps."""
    left, right = numbers(one), numbers(other)
    return [f"{name} differs between the runs" for name in left if not _equal(name, left[name], right[name])]


def _equal(name: str, one: list[Any], other: list[Any]) -> bool:
    """Whether a column or figure is the same, within its rounding."""
    if name not in ROUNDED:
        return one == other
    left, right = list(chain.from_iterable(one)), list(chain.from_iterable(other))
    return len(left) == len(right) and all(
        abs(a - b) <= ROUNDED[name] for a, b in zip(left, right, strict=True)
    )


def numbers(run: Path) -> dict[str, list[Any]]:
    """Every number of the trained samples and of the steps, in order."""
    folders = sorted(batch.parent for batch in (run / "iterations").glob("*/batch.parquet"))
    rows = [row for folder in folders for row in pq.read_table(folder / "batch.parquet").to_pylist()]
    steps = [step for folder in folders for step in json.loads((folder / "step.json").read_text())["steps"]]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in NAMES}
    return columns | {f"step {name}": [step[name] for step in steps] for name in FIGURES}


def broken_by_ctrl_c(code: int, said: str, seconds: float, limit: float) -> list[str]:
    """What Ctrl-C promises of a command: an end in time, by its own exit code, with one sentence that says how to go on.

    said: since Ctrl-C. A command that needs some seconds says before that it ends.
    """
    problems = [] if code == 130 else [f"Ctrl-C ended the command with {code}, not 130"]
    if seconds > limit:
        problems.append(f"Ctrl-C took {seconds:.1f} s, more than {limit:.1f}")
    lines = [line for line in said.splitlines() if not line.startswith("Ctrl-C: the run ends")]
    if not lines or not lines[-1].startswith("Ended by Ctrl-C") or any(red in said for red in RED):
        problems.append(f"after Ctrl-C the command said {lines}")
    return problems


def parts(run: Path) -> dict[Path, bytes]:
    """The parts of rollouts, their turns and evaluations in storage, with their bytes."""
    kinds = ("rollouts", "turns", "evaluations")
    return {
        path: path.read_bytes() for kind in kinds for path in run.glob(f"iterations/*/{kind}/part-*.parquet")
    }


def finished(log: Path, seen: int = 0) -> list[str]:
    """Requests for samples that engines finished since their log was `seen` bytes long."""
    if not log.exists():
        return []
    with log.open() as file:
        file.seek(seen)
        ended = [line.split() for line in file]
    return [rid for rid, why, _ in ended if why != "abort" and not rid.startswith("health-")]


def _generated_twice(run: Path, killed: Killed, deferred: Set[str] = frozenset()) -> list[str]:
    """deferred: samples that may be stored in several iterations."""
    problems = [
        f"{path.name} was changed" for path, data in killed.parts.items() if path.read_bytes() != data
    ]
    turns = [path for path in killed.parts if path.parent.name == "turns"]
    stored = {sample for path in killed.parts if path not in turns for sample in _samples(path)}
    again = (stored | recorded_turns(turns)) & {_stored_as(rid) for rid in killed.finished_after}
    if again:
        problems.append(f"{len(again)} finished samples or turns were generated again, such as {min(again)}")
    calls = made_again(recorded_calls(turns), killed.noted, noted(run.parent / "notes.txt"))
    if calls:
        problems.append(f"{len(calls)} recorded calls were made again, such as {calls[0]}")
    samples = Counter(s for p in parts(run) if p.parent.name != "turns" for s in _samples(p))
    twice = [sample for sample, count in samples.items() if count > 1 and sample not in deferred]
    if twice:
        problems.append(f"{len(twice)} samples are stored twice, such as {twice[0]}")
    return problems


def _attempts(run: Path, starts: int) -> list[str]:
    record = json.loads((run / "run.json").read_text())
    numbers = [attempt["number"] for attempt in record["attempts"]]
    problems = [] if "completed" in record else ["run.json does not say that the run is complete"]
    if numbers != sorted(set(numbers)) or not numbers or not 1 <= numbers[-1] <= starts:
        problems.append(f"run.json counts attempts {numbers}, the run was started {starts} times")
    return problems


def _different_evaluations(reference: Path, run: Path) -> list[str]:
    one, other = _evaluations(reference), _evaluations(run)
    if one.keys() != other.keys():
        return [f"the evaluations are {sorted(other)}, not {sorted(one)}"]
    return [f"the evaluation {file} differs between the runs" for file in one if one[file] != other[file]]


def _evaluations(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of each evaluation, by its file."""
    paths = sorted((run / "eval").rglob("*.parquet"))
    return {str(path.relative_to(run)): pq.read_table(path).to_pylist() for path in paths}


def _samples(path: Path) -> list[str]:
    """The samples of a part; those of an evaluation by the names that their requests have."""
    if path.parent.name != "evaluations":
        ids: list[str] = pq.read_table(path, columns=["sample_id"])["sample_id"].to_pylist()
        return ids
    rows = pq.read_table(path, columns=["version", "prompt_id", "index"]).to_pylist()
    return [f"{EVALUATED}{row['version']}-{row['prompt_id']}-{row['index']}" for row in rows]


def _request(rid: str) -> str:
    """What was asked for: a sample or a turn, whose id has ~ and the number of the attempt after it."""
    return rid.split("~")[0]


def _stored_as(rid: str) -> str:
    """What stores the answer to a request: its sample or turn; in an evaluation, which stores rollouts whole, its rollout."""
    request = _request(rid)
    return request.partition(".")[0] if request.startswith(EVALUATED) else request
