"""A run that distils a served teacher: its answers are stored once, also by a run that is killed amid them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from tests.soak.promises import finished
from tests.support.engine_process import CLOSE, embedded_engine, reference_logprobs
from tests.support.flow_runs import Workplace, final_weights, output_of, trained, wait_until
from tests.support.metric_names import unexplained

SHORT = ["run.iterations=2", "checkpoint.every=2", "evaluation.sets=[]"]
SAMPLES = 2 * 32


@pytest.fixture(scope="module")
def teacher(workplace: Workplace) -> Path:
    return build_tiny_model(workplace.folder / "served-teacher", seed=1)


@pytest.fixture
def engine(teacher: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The server's address, and the file with a line for each answer that it gave."""
    answers = tmp_path / "answers.log"
    log = tmp_path / "engine.log"
    with embedded_engine(
        teacher, "--dtype", "float32", "--finished-log", str(answers), log=log, key="key-of-the-teacher"
    ) as (url, _):
        yield url, answers


def overrides(url: str) -> list[str]:
    server = ["url=" + url, "key=${env:TEACHER_KEY}", "concurrency=4"]
    return ["algorithm.preset=opd", *(f"algorithm.teacher_server.{item}" for item in server), *SHORT]


def rewards(run: Path) -> dict[str, dict[str, Any]]:
    """Rows of the reward parts of all iterations, by sample; none is there twice."""
    parts = [pq.read_table(path).to_pylist() for path in sorted(run.glob("iterations/*/rewards/part-*"))]
    rows = {row["sample_id"]: row for part in parts for row in part}
    assert len(rows) == sum(map(len, parts))
    return rows


@pytest.mark.slow
def test_a_killed_run_keeps_what_the_teacher_answered_and_ends_in_the_same_weights(
    workplace: Workplace,
    teacher: Path,
    engine: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, answers = engine
    monkeypatch.setitem(workplace.environment, "TEACHER_KEY", "key-of-the-teacher")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    asked = [*overrides(url), "algorithm.teacher_server.top_k=4"]
    workplace.train(whole, *asked)
    stored = rewards(whole / "a")
    assert len(stored) == SAMPLES
    for batch in sorted((whole / "a" / "iterations").glob("*/batch.parquet")):
        for row in pq.read_table(batch).to_pylist()[::8]:
            size = row["response_length"]
            expected = reference_logprobs(teacher, row["tokens"][:-size], row["tokens"][-size:])
            assert row["teacher_logprobs"] == pytest.approx(expected, abs=CLOSE)
            for name in ("teacher_logprobs", "teacher_top_tokens", "teacher_top_logprobs"):
                assert row[name] == stored[row["sample_id"]][name]
            assert len(row["teacher_top_tokens"]) == 4 * size
    assert unexplained(["teacher/seconds_mean", "teacher/failed_share"]) == []

    given, reached = len(finished(answers)), tmp_path / "reached"
    held = {"MILLRACE_KILL_POINT": "1/reward/in", "MILLRACE_KILL_POINT_FILE": str(reached)}
    process = workplace.start("train", "run.yaml", f"storage.root={killed}", *asked, **held)
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    before = rewards(killed / "a")
    assert len(before) == 32 + 8  # of the second iteration one part of four
    workplace.train(killed, *asked)
    after = rewards(killed / "a")
    assert {
        sample: after[sample] for sample in before
    } == before  # the seconds among them: none was asked again
    assert {s: r["teacher_logprobs"] for s, r in after.items()} == {
        s: r["teacher_logprobs"] for s, r in stored.items()
    }
    assert trained(killed / "a") == trained(whole / "a")
    assert final_weights(killed / "a") == final_weights(whole / "a")
    checks = given - SAMPLES  # the texts that each start has the server cut
    assert len(finished(answers)) - given == SAMPLES + 2 * checks


@pytest.mark.slow
def test_a_teacher_that_is_gone_fails_samples_with_its_reason_and_is_asked_about_them_again(
    workplace: Workplace, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(workplace.environment, "TEACHER_KEY", "key-of-the-teacher")
    root, reached = tmp_path / "runs", tmp_path / "reached"
    rest = ["run.iterations=1", "checkpoint.every=1"]
    held = {"MILLRACE_KILL_POINT": "0/rollout/before", "MILLRACE_KILL_POINT_FILE": str(reached)}
    with embedded_engine(teacher, log=tmp_path / "one.log", key="key-of-the-teacher") as (url, server):
        command = ("train", "run.yaml", f"storage.root={root}", *overrides(url), *rest)
        process = workplace.start(*command, **held)
        wait_until(lambda: reached.exists() or process.poll() is not None)
        server.kill()
        server.wait()
        reached.unlink()
        out = output_of(process)
    assert process.returncode == 2, out
    text = " ".join(out.split())
    assert "could not be scored, more than reward.max_failed_share" in text
    assert "algorithm.teacher_server" in text
    failed = [row for row in rewards(root / "a").values() if row["scoring"] == "failed"]
    assert failed
    for row in failed:
        assert row["reward"] is None
        assert row["teacher_logprobs"] is None
        assert row["reason"].startswith("algorithm.teacher_server: ")
    with embedded_engine(teacher, log=tmp_path / "two.log", key="key-of-the-teacher") as (url, _):
        workplace.train(root, *overrides(url), *rest)
    assert all(row["teacher_logprobs"] for row in rewards(root / "a").values())


def test_a_teacher_with_another_tokenizer_is_refused_at_the_start(
    workplace: Workplace, teacher: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"f": ', '"é": ', 1))
    with embedded_engine(other, log=tmp_path / "engine.log") as (url, _):
        asked = ["algorithm.preset=opd", f"algorithm.teacher_server.url={url}"]
        for command in ("check", "train"):
            out = workplace.call(command, "run.yaml", f"storage.root={tmp_path}", *asked, expect=2)
            assert "its tokenizer is not the model's" in " ".join(out.split())


@pytest.mark.slow
def test_more_likeliest_tokens_than_the_server_gives_are_refused_at_the_start(
    workplace: Workplace, teacher: Path, tmp_path: Path
) -> None:
    with embedded_engine(teacher, log=tmp_path / "engine.log") as (url, _):
        asked = ["algorithm.preset=opd", f"algorithm.teacher_server.url={url}"]
        given = ("check", "run.yaml", f"storage.root={tmp_path}", *asked)
        out = workplace.call(*given, "algorithm.teacher_server.top_k=256", expect=2)
        assert "algorithm.teacher_server.top_k" in out
        assert "top_logprobs_num" in out
        workplace.call(*given, "algorithm.teacher_server.top_k=16")
