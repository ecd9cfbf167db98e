"""trainer.store_logprobs: what ranks store is what the plain model gives for the same tokens, before the iteration's first update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.store import Store
from millrace.core.logprob_gap import LogprobGuard
from tests.support.plain_trainer import Plain
from tests.support.trainer_ranks import Workers, configuration, samples, write_batch

TEMPERATURE = 0.7
ANY_GAP = LogprobGuard(100.0)  # the batch's log-probabilities are made up
ONE_STEP, TWO_STEPS = (1,), (1, 2)
# steps of the iteration, rows of each chunk, what is set otherwise; two ranks each
CASES: dict[str, tuple[tuple[int, ...], list[int] | None, dict[str, Any]]] = {
    "data parallel, one step": (ONE_STEP, None, {}),
    "data parallel, chunks": (ONE_STEP, [4, 4], {}),
    "tensor parallel, old ones of two steps": (TWO_STEPS, None, {"parallel": {"tensor": 2}}),
    "context parallel, sampled ones of two passes": (
        ONE_STEP,
        None,
        {
            "parallel": {"context": 2},
            "passes": 2,
            "algorithm": {"preset": "cispo", "old_logprobs": "rollout"},
        },
    ),
    "pipeline parallel, two steps of a loss without old ones": (
        TWO_STEPS,
        None,
        {"parallel": {"pipeline": 2}, "algorithm": {"loss": "reinforce"}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_stored_log_probabilities_are_those_of_the_plain_model_before_the_first_update(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    steps, chunks, changes = CASES[case]
    rows = [row for step in steps for row in samples(step)]
    url, store = write_batch(tmp_path, rows), Store(str(tmp_path))
    config = configuration(model(), 2, store_logprobs=True, **changes)
    config["rollout"]["sampling"]["temperature"] = TEMPERATURE
    versions = range(1, 1 + len(steps) * config["trainer"]["passes"])
    named = []
    for attempt in range(2):
        with workers.group(config) as group:
            if chunks and attempt:  # the first passes are made before there is a batch
                early = write_batch(tmp_path / "early", rows[: chunks[0]])
                digest = Store(str(tmp_path / "early")).entry("batch.parquet").sha256
                assert group.call("pass_chunk", 1, 0, early, digest) == [1, 1]
            made = [
                group.step(
                    version,
                    url,
                    ANY_GAP if version == 1 else None,
                    None,
                    None,
                    chunks,
                    version == 1,
                )
                for version in versions
            ]
            assert group.step(versions[-1], url)[0] == made[-1][0]
        assert [["logprobs" in rank for rank in ranks] for ranks in made[1:]] == [[False] * 2] * (
            len(made) - 1
        )
        assert made[0][0]["logprobs"] == made[0][1]["logprobs"]
        named.append(made[0][0]["logprobs"])
        if not attempt:
            assert sorted(store.list("logprobs")) == sorted(file["path"] for file in named[0])
    assert named[0] == named[1]  # the same bits: the same files
    assert len(store.list("logprobs")) == len(named[0])
    stored: list[dict[str, Any]] = []
    for file in named[0]:
        stored += store.read_table(file["path"], "logprobs", FileEntry.model_validate(file)).to_pylist()
    assert len(named[0]) == (1 if "parallel" in changes else 2)  # of data parallel ranks
    assert sorted(row["sample_id"] for row in stored) == sorted(row["sample_id"] for row in rows)
    plain, batch = Plain(model()), {row["sample_id"]: row for row in rows}
    for row in stored:
        trained = batch[row["sample_id"]]
        assert row["train_step"] == trained["train_step"]
        with torch.no_grad():
            expected = plain.logprobs(trained, temperature=TEMPERATURE)
        assert row["trainer_logprobs"] == pytest.approx(expected.tolist(), abs=2e-5)


def test_steps_store_what_is_asked_for_whether_or_not_they_are_compared_and_train_the_same(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    url = write_batch(tmp_path, samples(1) + samples(2))
    found = []
    for asks, guard in ((True, ANY_GAP), (True, None), (False, ANY_GAP)):
        config = configuration(model(), 1, store_logprobs=True, algorithm={"loss": "reinforce"})
        with workers.group(config) as group:
            steps = [
                group.step(
                    version,
                    url,
                    guard if version == 1 else None,
                    None,
                    None,
                    None,
                    asks and version == 1,
                )[0]
                for version in (1, 2)
            ]
        assert ("logprobs" in steps[0]) == asks
        found.append(
            [{name: step[name] for name in ("loss", "grad_norm", "logprob_gap_mean")} for step in steps]
        )
    assert found[0] == found[1] == found[2]
