"""What the viewer reads of a run, view by view, on a disk and in an object store; and runs of which files are broken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import viewer as large
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.contracts.ids import group_id, sample_id
from millrace.core.errors import ConfigError, MillraceError, MissingFileError, StorageError
from millrace.flows.viewer import group_places
from millrace.flows.viewer.answers import ANSWERS, Viewer, as_json
from millrace.flows.viewer.tokens import texts_of
from tests.support.s3_server import BUCKET, s3_server
from tests.support.viewed_run import IDS, NAME, START, write_viewed_run

KEPT, SAME, LOST = "kept1-0000", "same1-0000", "lost1-0000"
# every answer, with what is asked and what must be in it
ASKED: dict[str, tuple[dict[str, str], Callable[[Any], object]]] = {
    "overview": (
        {},
        lambda v: (
            [line["iteration"] for line in v["iterations"]] == [1, 2, 3] and v["tokens"]["generated"] == 20
        ),
    ),
    "figure": ({"name": "reward/mean"}, lambda v: v["points"] == [[1, 0.5], [2, 0.75]]),
    "iteration": ({"iteration": "2"}, lambda v: (v["samples"], v["unused"], v["groups_found"]) == (10, 1, 4)),
    "group": (
        {"iteration": "2", "group": "kept1"},
        lambda v: [a["index"] for a in v["answers"]] == [0, 1, 2],
    ),
    "sample": (
        {"iteration": "2", "sample": KEPT},
        lambda v: v["messages"][-1]["generated"] and v["turns"] == 2,
    ),
    "tokens": ({"iteration": "2", "sample": KEPT}, lambda v: "".join(v["texts"]) == "2+3=5é."),
    "turns": (
        {"iteration": "2", "sample": KEPT},
        lambda v: [(b["branch"], b["parent"]) for b in v] == [(0, None), (1, 0)],
    ),
    "lineage": (
        {"iteration": "1", "sample": "kept0-0000"},
        lambda v: [t["iteration"] for t in v["trained"]] == [1, 2],
    ),
    "step": ({"version": "2"}, lambda v: (v["step"]["iteration"], v["step"]["samples"]) == (2, 6)),
    "account": ({}, lambda v: [row["dropped"] for row in v["rows"]] == [3, 3]),
    "timeline": ({}, lambda v: {"rollout", "answer"} <= {each["what"] for each in v["intervals"]}),
    "evaluations": ({}, lambda v: v["sets"] == {"easy": [1, 2]}),
    "evaluation": ({"set": "easy", "done": "2", "other": "1"}, lambda v: v["changed"] == 1),
    "sql": ({"q": "select count(*) from samples"}, lambda v: v["rows"] == [[17]]),
    "verify": ({"iteration": "1"}, lambda v: v["problems"] == []),
}


@pytest.fixture(scope="module", params=["disk", "s3"])
def viewer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    if request.param == "disk":
        root = str(tmp_path_factory.mktemp("runs"))
        write_viewed_run(root)
        yield Viewer(root, NAME)
        return
    with pytest.MonkeyPatch.context() as patch, s3_server() as variables:
        for name, value in variables.items():
            patch.setenv(name, value)
        write_viewed_run(f"s3://{BUCKET}/runs")
        yield Viewer(f"s3://{BUCKET}/runs", NAME)


def asked(viewer: Viewer, what: str, **values: str) -> Any:
    return json.loads(as_json(viewer.ask(NAME, what, values)))


def test_every_answer_has_a_row() -> None:
    assert set(ASKED) == set(ANSWERS)


@pytest.mark.parametrize("what", ASKED)
def test_an_answer_says_what_is_stored(viewer: Viewer, what: str) -> None:
    values, holds = ASKED[what]
    found = asked(viewer, what, **values)
    assert holds(found), found


def test_a_dropped_group_says_why_and_shows_its_answers(viewer: Viewer) -> None:
    group = asked(viewer, "group", iteration="2", group="same1")
    figures = [answer["figures"] for answer in group["answers"]]
    assert {(each["verdict"], each["reason"], each["dropped_by"]) for each in figures} == {
        ("dropped", "zero variance", "zero_variance")
    }
    assert [answer["messages"][0]["parts"][0]["text"] for answer in group["answers"]] == ["1"] * 3


def test_a_failed_sample_says_why(viewer: Viewer) -> None:
    sample = asked(viewer, "sample", iteration="2", sample=LOST)
    assert sample["figures"]["status"] == "failed"
    assert "too few scored" in sample["figures"]["reason"]


def test_rewarded_samples_with_another_answer_are_listed(viewer: Viewer) -> None:
    notable = asked(viewer, "iteration", iteration="1")["notable"]
    assert [each["sample_id"] for each in notable["rewarded, another answer"]] == ["kept0-0002"]


def test_an_iteration_says_which_figures_differ_from_those_before(viewer: Viewer) -> None:
    found = {each["name"]: each for each in asked(viewer, "iteration", iteration="2")["unusual"]}
    assert found["reward/mean"] == {"name": "reward/mean", "value": 0.75, "usual": 0.5}
    assert "time/rollout_s" not in found
    assert asked(viewer, "iteration", iteration="1")["unusual"] == []
    assert asked(viewer, "iteration", iteration="3")["unusual"] == []


def test_a_large_batch_shows_verdicts_first_and_its_samples_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large.write(str(tmp_path), samples=2000, tokens=3)
    groups = [group_id(large.RUN, 0, f"p{number}", number) for number in (0, 1, 61, 62, 125, 248)]

    def seen(values: Mapping[str, int]) -> tuple[Any, list[Any]]:
        for name, value in values.items():
            monkeypatch.setattr(f"millrace.flows.viewer.{name}", value)
        viewer = Viewer(str(tmp_path), large.RUN)
        view = json.loads(as_json(viewer.ask(large.RUN, "iteration", {"iteration": "1"})))
        shown = [
            json.loads(as_json(viewer.ask(large.RUN, what, {"iteration": "1", what: name})))
            for group in groups
            for what, name in (("group", group), ("sample", sample_id(group, 3)))
        ]
        return view, shown

    whole, of_whole = seen({})
    first, of_first = seen({"index.LARGE": 0, "group_places.FEW": 1})
    assert (whole["partial"], first["partial"]) == (False, True)
    assert first["verdicts"] == whole["verdicts"]
    assert [each["kept"] for each in first["groups"]] == [each["kept"] for each in whole["groups"]]
    assert first["points"] == []
    assert of_first == of_whole


def test_a_dropped_group_is_read_from_the_parts_that_landed_about_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts were read for it: hundreds, each from an object store."""
    large.write(str(tmp_path), samples=4000, tokens=3)
    for name, value in {"index.LARGE": 0, "group_places.FEW": 1}.items():
        monkeypatch.setattr(f"millrace.flows.viewer.{name}", value)
    monkeypatch.setattr(group_places, "AT_ONCE", dict.fromkeys(group_places.AT_ONCE, 1))
    viewer = Viewer(str(tmp_path), large.RUN)
    viewer.ask(large.RUN, "iteration", {"iteration": "1"})
    read: set[str] = set()
    ranges = Store.ranges

    def heard(self: Store, wanted: Sequence[tuple[str, int, int]]) -> Any:
        read.update(path for path, _, _ in wanted)
        return ranges(self, wanted)

    monkeypatch.setattr(Store, "ranges", heard)
    lost = group_id(large.RUN, 0, "p245", 245)  # of 8 parts of 500 samples it lies in the fourth
    found = viewer.ask(large.RUN, "group", {"iteration": "1", "group": lost})
    assert {answer.figures["verdict"] for answer in found.answers} == {"dropped"}
    assert read == {large_part(viewer, "rollout", 3), large_part(viewer, "reward", 3)}


def large_part(viewer: Viewer, task: str, number: int) -> str:
    record = viewer.of(large.RUN).run.iteration(0).files.record(task)
    assert record is not None
    return str(record["files"][number]["path"])


def test_a_page_and_a_sample_load_no_library_of_tables_beside_arrow(tmp_path: Path) -> None:
    """pandas took half of the time of a first sample."""
    write_viewed_run(str(tmp_path))
    code = (
        "import sys; from millrace.flows.viewer.answers import Viewer\n"
        "viewer = Viewer(sys.argv[1], sys.argv[2])\n"
        "viewer.ask(sys.argv[2], 'iteration', {'iteration': '2'})\n"
        "for what in ('sample', 'lineage', 'tokens', 'turns'):\n"
        "    viewer.ask(sys.argv[2], what, {'iteration': '2', 'sample': sys.argv[3]})\n"
        "print('pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), NAME, KEPT]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_figures_stand_at_their_tokens(viewer: Viewer) -> None:
    row = asked(viewer, "tokens", iteration="2", sample=KEPT)
    prompt = row["prompt"]
    assert list(row["texts"]) == ["2", "+", "3", "=", "5", "é", "", "."]
    for name in ("logprob", "gap", "advantage", "version", "segment", "mask"):
        assert row["values"][name][:prompt] == [None] * prompt
        assert len(row["values"][name]) == row["count"]
    assert row["values"]["gap"][prompt:] == [0.125] * 4
    assert row["values"]["segment"][prompt:] == [0, 1, 1, 1]
    assert row["values"]["version"][prompt:] == [1] * 4
    assert list(row["missing"]) == ["entropy"]


def test_tokens_come_in_pieces(viewer: Viewer) -> None:
    samples = viewer.of(NAME).samples
    found = samples.tokens(1, KEPT, first=3, most=2)
    assert (found.first, found.ids, found.count) == (3, IDS.encode("=5").ids, 8)
    assert found.values["logprob"] == [None, -0.25]


def test_an_open_iteration_is_shown_as_far_as_it_has_come(viewer: Viewer) -> None:
    found = asked(viewer, "iteration", iteration="3")
    assert (found["committed"], found["samples"]) == (False, 3)
    assert found["groups"][0]["unscored"] == 2
    assert asked(viewer, "sample", iteration="3", sample="kept2-0001")["figures"]["verdict"] is None


def test_the_timeline_has_recorded_intervals(viewer: Viewer) -> None:
    found = asked(viewer, "timeline", first="1", last="1")
    lanes = {
        each["lane"]: (each["start"], each["end"]) for each in found["intervals"] if each["what"] != "answer"
    }
    assert lanes["trainer"] == (START + 8, START + 10)
    assert lanes["sync"] == (START + 10, START + 10.5)
    answers = [each for each in found["intervals"] if each["lane"] == "engine-0"]
    assert answers[0]["end"] - answers[0]["start"] == 1.5


def test_runs_are_compared_by_iteration_tokens_and_hours(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_viewed_run(str(tmp_path), name)
    found = Viewer(str(tmp_path), "a").compare(["a", "b"], "reward/mean")
    assert found.points["b"] == [(1, 10, 12 / 3600, 0.5), (2, 20, 24 / 3600, 0.75)]
    assert found.differs == {"run.name": {"a": "a", "b": "b"}}


def test_what_is_asked_wrongly_is_said(viewer: Viewer) -> None:
    for what, values in {
        "iteration": {"iteration": "x"},
        "group": {"iteration": "0", "group": "kept0"},
        "figure ": {},
        "sql": {"q": "copy samples to 'x'"},
        "evaluation": {"set": "..", "done": "1"},
    }.items():
        with pytest.raises(MillraceError):
            viewer.ask(NAME, what, values)
    with pytest.raises(MissingFileError, match="has no sample"):
        viewer.ask(NAME, "sample", {"iteration": "1", "sample": "gone-0000"})
    with pytest.raises(ConfigError, match="unknown: sideways"):
        viewer.ask(NAME, "iteration", {"iteration": "1", "order": "sideways"})
    with pytest.raises(StorageError):
        viewer.ask("../runs", "overview", {})


def test_a_character_of_several_tokens_stands_at_its_first() -> None:
    assert texts_of(IDS, IDS.encode("aé€😀").ids) == ["a", "é", "", "€", "", "", "😀", "", "", ""]
    assert texts_of(IDS, IDS.encode("😀").ids[:2]) == ["\ufffd", ""]


def changed(folder: RunFolder, path: str, change: Callable[[bytes], bytes]) -> None:
    folder.store.write(path, change(folder.store.read(path)))


def gone(folder: RunFolder, path: str) -> None:
    folder.store.remove(path)


def part(folder: RunFolder, kind: str) -> str:
    return next(path for path in folder.store.list("iterations/000001") if f"/{kind}/" in path)


BROKEN: dict[str, tuple[Callable[[RunFolder], object], str]] = {
    "a half-written batch": (lambda f: changed(f, "iterations/000001/batch.parquet", lambda d: d[:-50]), "batch.parquet"),
    "a tampered batch": (lambda f: changed(f, "iterations/000001/batch.parquet", lambda d: d[:40] + b"\0" * 40 + d[80:]), "batch.parquet"),
    "no batch": (lambda f: gone(f, "iterations/000001/batch.parquet"), "batch.parquet"),
    "no verdicts": (lambda f: gone(f, "iterations/000001/verdicts.parquet"), "verdicts.parquet"),
    "a tampered part of rollouts": (lambda f: changed(f, part(f, "rollouts"), lambda d: d[:40] + b"\0" * 40 + d[80:]), "rollouts/"),
    "no part of rewards": (lambda f: gone(f, part(f, "rewards")), "rewards/"),
    "a tampered manifest": (lambda f: changed(f, "iterations/000001/manifest.json", lambda d: d.replace(b'"reward/mean": 0.75', b'"reward/mean": 0.95')), "manifest.json"),
    "a manifest that is no JSON": (lambda f: changed(f, "iterations/000001/manifest.json", lambda d: d[: len(d) // 2]), "manifest.json"),
    "a broken first manifest": (lambda f: changed(f, "iterations/000000/manifest.json", lambda d: b"{}"), "manifest.json"),
    "a tampered run.json": (lambda f: changed(f, "run.json", lambda d: d.replace(b"sums", b"suns")), "run.json"),
    "no run.json": (lambda f: gone(f, "run.json"), "run.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_run_says_so_and_shows_the_rest(tmp_path: Path, case: str) -> None:
    folder = write_viewed_run(str(tmp_path))
    breaks, where = BROKEN[case]
    breaks(folder)
    viewer = Viewer(str(tmp_path), NAME)
    view = asked(viewer, "overview")
    problems = view["problems"]
    shown = 0
    for iteration in ("1", "2", "3"):
        try:
            found = asked(viewer, "iteration", iteration=iteration)
        except StorageError as error:
            problems.append({"where": error.where})
            continue
        problems += found["problems"]
        shown += found["samples"]
        for sample in [each for rows in found["notable"].values() for each in rows][:3]:
            try:
                asked(viewer, "sample", iteration=iteration, sample=sample["sample_id"])
            except StorageError as error:
                problems.append({"where": error.where})
    assert any(where in each["where"] for each in problems), problems
    assert shown >= 6


def test_what_is_committed_later_is_seen_at_the_next_look(tmp_path: Path) -> None:
    folder = write_viewed_run(str(tmp_path))
    manifest = folder.store.read("iterations/000001/manifest.json")
    folder.store.remove("iterations/000001/manifest.json")
    viewer = Viewer(str(tmp_path), NAME)
    assert [line["committed"] for line in asked(viewer, "overview")["iterations"]] == [True, False, False]
    folder.store.write("iterations/000001/manifest.json", manifest)
    assert [line["committed"] for line in asked(viewer, "overview")["iterations"]] == [True, True, False]
