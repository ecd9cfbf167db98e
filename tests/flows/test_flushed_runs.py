"""A run that is killed amid long answers: they go on where storage has them, and the run ends as one that was never killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.soak import forms, promises
from tests.support.flow_runs import Workplace, final_weights, wait_until
from tests.support.shard_runs import IN_SHARDS

SETTINGS = (*forms.overrides("flushed"), "run.iterations=2")


@pytest.mark.slow
@pytest.mark.parametrize("where", [(), IN_SHARDS], ids=["driver", "shards"])
def test_of_answers_that_a_kill_ended_little_is_generated_again(
    workplace: Workplace, tmp_path: Path, where: tuple[str, ...]
) -> None:
    (workplace.folder / forms.TAILED).write_text(forms.tailed_rows())
    log, reached = tmp_path / "ended.log", tmp_path / "reached"
    killed = tmp_path / "killed"
    process = workplace.start(
        "train",
        "run.yaml",
        f"storage.root={killed}",
        *SETTINGS,
        *where,
        MILLRACE_KILL_POINT="0/turns/in",  # segments are stored, and no more of them: engines are soon halted
        MILLRACE_KILL_POINT_FILE=str(reached),
        MILLRACE_FINISHED_LOG=str(log),
    )
    wait_until(lambda: reached.exists() or process.poll() is not None)
    assert reached.exists(), process.communicate()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    run, stored = killed / "a", promises.Killed(parts=promises.parts(killed / "a"))
    assert any(path.parent.name == "turns" for path in stored.parts)

    workplace.train(killed, *SETTINGS, *where, MILLRACE_FINISHED_LOG=str(log))
    # a log of its own: the ids of its samples are the same, and Ray's processes keep the environment they were begun in
    workplace.train(tmp_path / "whole", *SETTINGS, MILLRACE_FINISHED_LOG=str(tmp_path / "whole.log"))
    whole = tmp_path / "whole" / "a"
    assert not promises.different_numbers(whole, run)
    assert final_weights(run) == final_weights(whole)
    assert not promises.faulted_by_commands(workplace, run)

    lengths = {
        row["sample_id"]: row["response_length"]
        for path in run.glob("iterations/*/rollouts/part-*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    made = [
        (rid.split("~")[0], int(tokens)) for rid, _, tokens in map(str.split, log.read_text().splitlines())
    ]
    twice = sum(tokens for sample, tokens in made if sample in lengths) - sum(lengths.values())
    ended = {sample for sample, _ in made if sum(sample == other for other, _ in made) > 1} & lengths.keys()
    assert ended, "no answer was under way"
    assert 0 <= twice <= forms.FLUSH * len(ended), (twice, made)
