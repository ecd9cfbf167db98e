"""Chosen rollouts of an iteration as traces: which, what is in them, what is not, and that they take little of a run's time."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.errors import CorruptFileError, TrackerError
from millrace.core.tracker import RolloutTrace
from millrace.tasks.reporting import traces
from millrace.tasks.reporting.traces import LONGEST, SampleFigures, chosen, rollout_traces
from millrace.tasks.runtime import tracking
from millrace.tasks.runtime.tracking import RolloutTracer
from tests.support.attacks import ATTACKS
from tests.support.viewed_run import CALL, START, write_viewed_run

SCORED = (0.0, 1.0, 0.5, 0.5, 0.2)
LENGTHS = (5, 5, 90, 7, 6)


def samples(*failed: int) -> list[SampleFigures]:
    """Five samples; those that failed have no reward."""
    return [
        SampleFigures(f"s{at}", None if at in failed else SCORED[at], LENGTHS[at], at in failed)
        for at in range(5)
    ]


@pytest.mark.parametrize(
    ("failed", "most", "found"),
    [
        ((), 1, {"s0": "worst"}),
        ((), 4, {"s0": "worst", "s1": "best", "s2": "median", "s3": "longest"}),
        ((), 9, {"s0": "worst", "s1": "best", "s2": "median", "s3": "longest", "s4": "worst"}),
        ((3, 4), 9, {"s0": "worst", "s1": "best", "s2": "median", "s3": "longest", "s4": "failed"}),
        ((0, 4), 5, {"s2": "worst", "s1": "best", "s3": "median", "s4": "longest", "s0": "failed"}),
        ((0, 1, 2, 3, 4), 3, {"s2": "longest", "s4": "failed", "s3": "longest"}),
        ((), 0, {}),
    ],
)
def test_the_worst_best_median_longest_and_newest_failures_are_chosen_in_turn(
    failed: tuple[int, ...], most: int, found: dict[str, str]
) -> None:
    assert chosen(samples(*failed), most) == found
    assert chosen([], most) == {}


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_viewed_run(str(tmp_path_factory.mktemp("runs")))


def by_sample(folder: RunFolder, index: int, most: int = 16) -> dict[str, RolloutTrace]:
    return {trace.sample: trace for trace in rollout_traces(IterationFiles(folder, index), most)}


def test_a_trace_has_prompt_answer_verdict_turns_calls_and_reward(viewed: RunFolder) -> None:
    found = by_sample(viewed, 1)
    assert list(found)[:2] == ["kept1-0001", "kept1-0000"]
    assert len(found) == 7  # all that were generated, each once
    talked = found["kept1-0000"]
    assert (talked.group, talked.why, talked.failed) == ("kept1", "best", False)
    assert talked.inputs == {"source": "sums", "prompt": "2+3="}
    assert talked.outputs == {"response": "5é.", "verdict": "kept", "reason": None}
    assert [span.kind for span in talked.spans] == ["turn", "tool", "turn", "turn", "reward"]
    call, reward = talked.spans[1], talked.spans[-1]
    assert (call.name, call.outputs) == ("add", {"text": "5"})
    assert call.inputs == {"branch": 0, "event": 1, "arguments": '{"a": 2, "b": 3}'}
    assert CALL["arguments"] == {"a": 2, "b": 3}
    assert reward.inputs == {"label": "5"}
    assert reward.outputs == {
        "reward": 1.0,
        "parts": {"exact": 1.0, "format": 1.0},
        "words": {"words": "**judged** 5é."},
        "answer": "5é.",
        "reason": None,
    }
    assert reward.end - reward.start == pytest.approx(0.1)
    failed = found["lost1-0000"]
    assert (failed.why, failed.failed, failed.outputs["verdict"]) == ("failed", True, "dropped")
    alone = found["kept1-0001"].spans[0]
    assert (alone.kind, alone.start, alone.end) == ("turn", START + 101, START + 102.5)


def test_an_open_iteration_and_one_without_turns_have_traces_too(viewed: RunFolder) -> None:
    assert {trace.why for trace in by_sample(viewed, 0).values()} == {
        *("worst", "best", "median", "longest", "failed")
    }
    assert by_sample(viewed, 0, most=2).keys() == {"kept0-0001", "kept0-0000"}


def test_only_row_groups_with_a_chosen_sample_are_read_whole(
    viewed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, tuple[str, ...], bool]] = []
    groups = traces.RangedTables.groups

    def heard(self: Any, entries: Any, kind: str, columns: Any, keep: Any = None, failed: Any = None) -> Any:
        asked.append((kind, tuple(columns), keep is not None))
        return groups(self, entries, kind, columns, keep, failed)

    monkeypatch.setattr(traces.RangedTables, "groups", heard)
    by_sample(viewed, 1)
    texts = {"prompt", "response", "text", "arguments", "label", "answer", "reward_texts"}
    assert [(kind, chosen) for kind, columns, chosen in asked if texts.intersection(columns)] == [
        *(("rollouts", True), ("rewards", True), ("turns", True))
    ]
    assert not any({"tokens", "rollout_logprobs", "output_ids"}.intersection(row) for _, row, _ in asked)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_text_stays_data(attack: str, tmp_path: Path) -> None:
    text = ATTACKS[attack]
    found = by_sample(write_viewed_run(str(tmp_path), said=(text, "4", "6")), 0)
    assert found["kept0-0000"].outputs["response"] == text


def test_a_text_is_cut_whole_and_without_secrets() -> None:
    key = "hf_" + "a1B2" * 8
    assert traces.shown_part(f"password=hunter2 and {key}") == "password=*** and ***"
    assert traces.shown_part("half \ud83d") == "half \\ud83d"
    long = "x" * (LONGEST - 10) + f" {key}" + "y" * LONGEST
    found = traces.shown_part(long)
    assert found is not None
    assert "a1B2" not in found
    assert found.endswith(f"… ({len(long):,} characters)")
    assert len(found) < LONGEST + 40
    assert traces.shown_part(None) is None


def test_a_rollout_of_many_turns_has_the_first_and_the_last(
    viewed: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "SPANS", 2)
    talked = by_sample(viewed, 1)["kept1-0000"]
    assert [span.outputs.get("text") for span in talked.spans[:2]] == [
        "<think>I need a tool.</think>",
        "Right.",
    ]
    assert talked.outputs["turns left out"] == 2


class Kept:
    """Takes traces, or raises."""

    def __init__(self, error: Exception | None = None, waits_for: threading.Event | None = None) -> None:
        self.had: list[tuple[int, list[str], dict[str, str]]] = []
        self._error, self._waits_for = error, waits_for

    def log_traces(self, given: list[RolloutTrace], iteration: int, views: dict[str, str]) -> None:
        if self._waits_for:
            assert self._waits_for.wait(30)
        if self._error:
            raise self._error
        self.had.append((iteration, [trace.sample for trace in given], views))


def made(kept: Kept) -> RolloutTracer:
    tracer: Any = kept
    return RolloutTracer(tracer)


def test_nothing_waits_for_traces_and_an_iteration_meanwhile_has_none(viewed: RunFolder) -> None:
    gate = threading.Event()
    kept = Kept(waits_for=gate)
    tracer = made(kept)

    def read() -> list[RolloutTrace]:
        return rollout_traces(IterationFiles(viewed, 0), 2)

    started = time.monotonic()
    tracer.give(read, 0, "millrace view seen, at /seen/1")
    tracer.give(read, 1, "millrace view seen, at /seen/2")
    assert time.monotonic() - started < 10
    assert kept.had == []
    gate.set()
    tracer.close()
    views = {name: f"millrace view seen, at /seen/1/kept0/{name}" for name in ("kept0-0001", "kept0-0000")}
    assert kept.had == [(1, list(views), views)]


def test_the_end_of_a_run_waits_once_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trackers are finished, and then closed."""
    monkeypatch.setattr(tracking, "TRACED_S", 0.5)
    gate = threading.Event()
    tracer = made(Kept(waits_for=gate))
    tracer.give(list, 0, "")
    waited = []
    for _ in range(2):
        started = time.monotonic()
        tracer.close()
        waited.append(time.monotonic() - started >= 0.5)
    gate.set()
    assert waited == [True, False]


def test_traces_take_at_most_a_hundredth_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    now, worked = [100.0], [0.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tracking.time, "thread_time", lambda: worked[0])
    kept = Kept()
    tracer = made(kept)

    def read() -> list[RolloutTrace]:
        worked[0] += 0.5
        return []

    for number in range(1000):
        tracer.give(read, number, "")
        tracer.close()
        now[0] += 1.0  # an iteration of a second
    assert [iteration for iteration, *_ in kept.had][:3] == [1, 51, 101]
    assert worked[0] <= tracking.TRACED_SHARE * (now[0] - 100.0) + 0.5


@pytest.mark.parametrize("kind", ["tracker", "file", "disk"])
def test_a_failure_of_traces_ends_no_run_and_is_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    errors: dict[str, Exception] = {
        "tracker": TrackerError("no room"),
        "file": CorruptFileError("is short", where="rollouts/x", remedy="restore it"),
        "disk": OSError(28, "No space left on device"),
    }
    error = errors[kind]

    def read() -> list[RolloutTrace]:
        if kind == "file":
            raise error
        return []

    tracer = made(Kept(None if kind == "file" else error))
    with caplog.at_level(logging.WARNING):
        tracer.give(read, 6, "")
        tracer.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == f"the rollouts of iteration 7 are in no trace: {error}. The run goes on"
