"""Tracking in a real MLflow store on SQLite."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.mlflow.tracker import FOLDER_TAG, PARAM_LIMIT, MlflowTracker
from millrace.core.errors import MillraceError, TrackerError
from millrace.core.metric_names import name_part
from millrace.core.tracker import RolloutTrace, TraceSpan
from tests.support.flow_runs import wait_until
from tests.support.odd_texts import ODD_TEXTS


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def started(
    uri: str | None, experiment: str, name: str, folder: str, run_id: str | None, identity: str = ""
) -> MlflowTracker:
    """The tracker of a run; one of another identity is another run."""
    return MlflowTracker.start(uri, experiment, name, folder, identity or f"{name}-{folder}", run_id)


def run_of(tracker: MlflowTracker) -> Any:
    return tracker._client.get_run(tracker.run_id)


def test_a_run_is_resumed_by_its_id(uri: str) -> None:
    first = started(uri, "e", "by-id", "/runs/by-id", None)
    first.log_metrics({"reward": 0.25}, 0)
    first.finish()
    assert run_of(first).info.status == "FINISHED"
    second = started(uri, "e", "by-id", "/runs/by-id", first.run_id)
    second.log_metrics({"reward": 0.5}, 1)
    assert second.run_id == first.run_id
    assert run_of(second).info.status == "RUNNING"
    assert run_of(second).info.end_time in (None, run_of(first).info.end_time)
    assert second.history("reward") == [(0, 0.25), (1, 0.5)]


def test_the_same_run_folder_twice_is_one_run(uri: str) -> None:
    first = started(uri, "e", "by-name", "/runs/by-name", None)
    first.finish()
    second = started(uri, "e", "by-name", "/runs/by-name", None)
    assert second.run_id == first.run_id
    assert run_of(second).info.status == "RUNNING"
    assert started(uri, "e", "another-name", "/runs/another-name", None).run_id != first.run_id
    assert started(uri, "another-experiment", "by-name", "/runs/by-name", None).run_id != first.run_id


@pytest.mark.slow
def test_runs_that_start_at_once_make_the_database_once(tmp_path: Path) -> None:
    """MLflow's migration fails where another process migrates the same file: `duplicate column name: step`."""
    code = (
        "import sys, mlflow.tracking; from millrace.connectors.mlflow.tracker import MlflowTracker\n"
        "print('imported', flush=True); sys.stdin.readline()\n"
        "MlflowTracker.start(sys.argv[1], 'e', *3 * [sys.argv[2]], None).log_metrics({'reward': 1.0}, 0)"
    )
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    starting = [
        subprocess.Popen(
            [sys.executable, "-c", code, uri, f"/runs/{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in starting:
        assert process.stdout
        assert process.stdout.readline() == "imported\n"
    for process in starting:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    problems = [process.communicate()[1] for process in starting]
    assert [process.returncode for process in starting] == [0, 0], problems
    runs = started(uri, "e", "/runs/0", "/runs/0", None, "/runs/0")
    assert len(runs._client.search_runs([runs.experiment_id])) == 2


def test_an_unknown_or_deleted_run_id_starts_a_new_run(uri: str) -> None:
    first = started(uri, "e", "deleted", "/runs/deleted", "0" * 32)
    first._client.delete_run(first.run_id)
    second = started(uri, "e", "deleted", "/runs/deleted", first.run_id)
    assert second.run_id != first.run_id
    second.log_metrics({"reward": 1.0}, 0)


def test_metrics_go_in_one_call_and_what_is_not_finite_is_left_out(uri: str) -> None:
    tracker = started(uri, "e", "metrics", "/runs/metrics", None)
    many = {f"m{n}": float(n) for n in range(1200)}
    tracker.log_metrics({**many, "nan": math.nan, "inf": math.inf, "reward/pass@4": 0.5}, 3)
    logged = run_of(tracker).data.metrics
    assert logged == {**many, "reward/pass_at_4": 0.5}
    assert tracker.history("reward/pass@4") == [(3, 0.5)]


def test_names_from_data_are_taken_and_stay_apart(uri: str) -> None:
    """Once `Counting & Probability` ended a run at its first evaluation."""
    tracker = started(uri, "e", "odd-names", "/runs/odd-names", None)
    names = [f"eval/test/{name_part(text)}/reward_mean" for text in ODD_TEXTS]
    tracker.log_metrics({name: float(at) for at, name in enumerate(names)}, 1)
    kept = run_of(tracker).data.metrics
    assert sorted(kept.values()) == [float(at) for at in range(len(ODD_TEXTS))]
    assert [tracker.history(name) for name in names] == [[(1, float(at))] for at in range(len(ODD_TEXTS))]
    tracker.log_params({text: {"x": text} for text in ODD_TEXTS})
    assert len(run_of(tracker).data.params) == len(ODD_TEXTS)


def test_the_curves_to_look_at_first_stand_in_a_section_that_sorts_first(uri: str) -> None:
    tracker = started(uri, "e", "overview", "/runs/overview", None)
    given = {"reward/mean": 0.5, "eval/sums/reward_mean": 0.25, "eval/sums/easy/reward_mean": 1.0, "zzz": 2.0}
    tracker.log_metrics(given, 1)
    logged = run_of(tracker).data.metrics
    assert logged == {**given, "0_overview/reward": 0.5, "0_overview/held_out_sums": 0.25}
    assert sorted(logged)[0].startswith("0_overview/")


def test_the_same_name_in_another_storage_is_another_run(uri: str) -> None:
    first = started(uri, "e", "name", "/runs/name", None)
    assert started(uri, "e", "name", "/other/name", None).run_id != first.run_id


def test_a_copied_folder_brings_the_id_of_its_original_and_gets_a_run_of_its_own(
    uri: str, tmp_path: Path
) -> None:
    folder, link = tmp_path / "original", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    first = started(uri, "e", "name", str(folder), None)
    copy = started(uri, "e", "name", str(tmp_path / "copy"), first.run_id)
    assert copy.run_id != first.run_id
    copy.log_metrics({"reward": 1.0}, 0)
    assert first.history("reward") == []
    assert started(uri, "e", "name", str(tmp_path / "copy"), first.run_id).run_id == copy.run_id
    assert started(uri, "e", "name", str(tmp_path / "copy"), copy.run_id).run_id == copy.run_id
    assert started(uri, "e", "name", str(link), first.run_id).run_id == first.run_id
    # an earlier release's names no folder
    client = first._client
    client.delete_tag(first.run_id, FOLDER_TAG)
    assert started(uri, "e", "name", str(folder), first.run_id).run_id == first.run_id


def test_a_run_that_begins_again_in_a_deleted_folder_is_another_one(uri: str) -> None:
    """It went on with the old one's curves: its first steps were left out as logged before."""
    first = started(uri, "e", "again", "/runs/again", None, "again-1")
    first.log_metrics({"reward": 1.0}, 1)
    second = started(uri, "e", "again", "/runs/again", None, "again-2")
    assert second.run_id != first.run_id
    second.log_metrics({"reward": 2.0}, 1)
    assert (first.history("reward"), second.history("reward")) == ([(1, 1.0)], [(1, 2.0)])
    assert started(uri, "e", "again", "/runs/again", None, "again-2").run_id == second.run_id


def test_what_is_logged_again_is_there_once(uri: str) -> None:
    tracker = started(uri, "e", "twice", "/runs/twice", None)
    for _ in range(2):
        tracker.log_metrics({"reward": 1.0, "length": 3.0}, 1)
    tracker.log_metrics({"reward": 2.0, "length": 4.0}, 2)
    points = tracker._client.get_metric_history(tracker.run_id, "reward")
    assert [(point.step, point.value) for point in points] == [(1, 1.0), (2, 2.0)]
    assert tracker.history("never_logged") == []


def test_params_are_flat_shortened_and_kept_when_logged_again(uri: str) -> None:
    tracker = started(uri, "e", "params", "/runs/params", None)
    tracker.log_params({"model": {"path": "p", "empty": {}}, "long": "x" * 10000, "list": [1, {"a": 2}]})
    tracker.log_params({"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]})
    tracker.log_params({f"p{n}": n for n in range(250)})
    tracker.log_params({"model": {"path": "changed"}, "late": 1})
    params = run_of(tracker).data.params
    assert params["model.path"] == "p"
    assert params["model.empty"] == "{}"
    assert params["long"] == "x" * PARAM_LIMIT
    assert params["list"] == "[1, {'a': 2}]"
    assert params["sources.1.path"] == "b.jsonl"
    assert params["late"] == "1"
    assert params["p249"] == "249"


def test_tags_and_artifacts_are_kept(uri: str, tmp_path: Path) -> None:
    tracker = started(uri, "e", "artifacts", "/runs/artifacts", None)
    tracker.set_tags({"prefect.flow_run": "http://127.0.0.1:4200/runs/1", "long": "x" * 20000})
    tracker.log_artifact(b"one", "curve.png")
    tracker.log_artifact(b"two", "iterations/000001/samples.md")
    assert run_of(tracker).data.tags["prefect.flow_run"] == "http://127.0.0.1:4200/runs/1"
    for name, data in (("curve.png", b"one"), ("iterations/000001/samples.md", b"two")):
        path = tracker._client.download_artifacts(tracker.run_id, name, str(tmp_path))
        assert Path(path).read_bytes() == data
    assert tracker.run_id in tracker.url()
    assert tracker.experiment_id in tracker.url()


def test_a_store_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path / 'missing' / 'deep' / 'mlflow.db'}"
    (tmp_path / "missing").write_text("a file where a folder should be")
    with pytest.raises(MillraceError, match=r"tracking\.uri"):
        started(where, "e", "n", "/runs/n", None)


def test_a_curve_is_read_once_and_holds_what_was_logged_since(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read for each picture of the reward, however long the run."""
    started(uri, "e", "once", "/runs/once", None).log_metrics({"reward": 0.0, "length": 1.0}, 0)
    tracker = started(uri, "e", "once", "/runs/once", None)
    read: list[str] = []
    in_store = tracker._client.get_metric_history

    def reading(run_id: str, key: str) -> Any:
        read.append(key)
        return in_store(run_id, key)

    monkeypatch.setattr(tracker._client, "get_metric_history", reading)
    for step in (1, 2, 2, 3):
        tracker.log_metrics({"reward": step / 2, "length": 1.0}, step)
        assert len(tracker.history("reward")) == step + 1
    assert sorted(read) == ["length", "reward"]
    again = started(uri, "e", "once", "/runs/once", None)
    assert again.history("reward") == tracker.history("reward") == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]


def test_the_load_of_the_host_is_logged_until_the_run_is_closed(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING", "1")
    tracker = started(uri, "e", "system", "/runs/system", None)
    tracker.watch_system()
    wait_until(lambda: "system/cpu_utilization_percentage" in run_of(tracker).data.metrics)
    tracker.finish()
    assert not [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]
    assert run_of(tracker).info.status == "FINISHED"


def rollout(sample: str, response: str = "5") -> RolloutTrace:
    spans = [
        TraceSpan("turn", "turn", {"event": 0}, {"text": response}, 1_800_000_000.0, 1_800_000_001.5),
        TraceSpan("add", "tool", {"arguments": "{}"}, {"text": "no"}, 1_800_000_001.5, 1_800_000_002.0, True),
        TraceSpan("reward", "reward", {"label": None}, {"reward": 0.5}, 1_800_000_002.0, 1_800_000_002.5),
    ]
    return RolloutTrace(sample, "g", "best", {"prompt": "2+3="}, {"response": response}, False, spans)


def traces_of(tracker: MlflowTracker) -> dict[str, Any]:
    """The traces of a run, by sample."""
    found = tracker._client.search_traces(locations=[tracker.experiment_id], run_id=tracker.run_id)
    assert len(found) == len({trace.info.tags["millrace.sample"] for trace in found})
    return {trace.info.tags["millrace.sample"]: trace for trace in found}


def test_rollouts_are_traces_of_the_run_each_once(uri: str) -> None:
    tracker = started(uri, "traced", "a", "/runs/a", None)
    views = {name: f"millrace view a, at /a/3/g/{name}" for name in ("s0", "s1")}
    tracker.log_traces([rollout("s0"), rollout("s1")], 3, views)
    again = started(uri, "traced", "a", "/runs/a", tracker.run_id)
    again.log_traces([rollout("s1", "five é \ud83d")], 3, views)  # a task that is made again
    again.log_traces([], 4, {})
    other = started(uri, "traced", "b", "/runs/b", None)
    other.log_traces([rollout("s0")], 3, {"s0": "millrace view b"})
    found = traces_of(tracker)
    assert (found.keys(), traces_of(other).keys()) == ({"s0", "s1"}, {"s0"})
    trace = found["s1"]
    tags = {name: value for name, value in trace.info.tags.items() if name.startswith("millrace.")}
    assert tags == {
        "millrace.sample": "s1",
        "millrace.group": "g",
        "millrace.iteration": "3",
        "millrace.chosen_as": "best",
        "millrace.view": views["s1"],
    }
    spans = {span.name: span for span in trace.data.spans}
    kinds = {name: span.span_type for name, span in spans.items()}
    assert kinds == {"rollout s1": "CHAIN", "turn": "LLM", "add": "TOOL", "reward": "EVALUATOR"}
    assert spans["rollout s1"].outputs == {"response": ["five é \\ud83d"]}
    assert spans["turn"].outputs == {"text": ["five é \\ud83d"]}
    assert spans["reward"].inputs == {}
    assert spans["reward"].outputs == {"reward": 0.5}
    assert [spans[name].status.status_code.name for name in ("turn", "add")] == ["OK", "ERROR"]
    assert (trace.info.request_time, trace.info.execution_duration) == (1_800_000_000_000, 2500)


def test_a_text_is_never_alone_in_a_trace(uri: str) -> None:
    """MLflow's page renders a text alone as Markdown, and a list as JSON."""
    tracker = started(uri, "plain", "a", "/runs/plain", None)
    tracker.log_traces([rollout("s0", "![x](http://evil.test/x.png)")], 1, {"s0": "v"})
    for span in traces_of(tracker)["s0"].data.spans:
        values = [*span.inputs.values(), *span.outputs.values()]
        assert not any(isinstance(value, str) for value in values), span.name


def test_a_store_that_takes_no_traces_is_a_trackers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = started(f"file://{tmp_path}", "e", "a", "/runs/a", None)
    with pytest.raises(TrackerError, match=r"tracking\.uri"):
        tracker.log_traces([rollout("s0")], 1, {"s0": "v"})
