"""What a run relies on when it asks a rank, by the Protocol of connectors/trainers/rank.py: every trainer keeps it."""

from __future__ import annotations

import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NotRequired, get_origin, get_type_hints

import pytest
from safetensors.numpy import load_file

from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.fsdp.rank import FsdpRank
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.connectors.trainers.rank import HeldOutSample, Rank, RankState
from millrace.core.contracts.task_records import StepMetrics, StepRequest
from tests.connectors.rank_contract.conftest import UnderContract
from tests.support.bigram_rank import BigramRank
from tests.support.trainer_ranks import Group, RankFailedError, samples, write_batch

FIGURES = ("version", "loss", "grad_norm", "lr", "samples", "tokens")
BUCKET = 4096  # bytes: several tensors, and several buckets
PATIENCE_S = 60.0


def figures(step: Any) -> dict[str, Any]:
    return {name: step[name] for name in FIGURES}


def versions(ranks: Group) -> set[int | None]:
    return {state["version"] for state in ranks.call("state")}


def exported(ranks: Group, folder: Path, version: int) -> bytes:
    """The weights with what adapters add, as bytes of an exported file."""
    ranks.call("export", str(folder), version, merged=True)
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("cls", [TrainerRank, FsdpRank, BigramRank])
def test_a_class_of_ranks_has_every_method_with_its_parameters(cls: Any) -> None:
    methods = [name for name, _ in inspect.getmembers(Rank, inspect.isfunction) if name[0] != "_"]
    assert len(methods) > 20
    for name in methods:
        wanted = inspect.signature(getattr(Rank, name)).parameters
        assert list(inspect.signature(getattr(cls, name)).parameters) == list(wanted), name


def test_new_ranks_hold_version_0(trainer: UnderContract) -> None:
    states = trainer.ranks.call("state")
    assert [state["rank"] for state in states] == list(range(trainer.ranks.world))
    for state in states:
        assert state.keys() == RankState.__annotations__.keys()
        assert (state["version"], state["busy"], state["saving"]) == (0, None, None)
    assert len({state["pid"] for state in states}) == trainer.ranks.world


def test_a_step_is_made_once(trainer: UnderContract, tmp_path: Path) -> None:
    ranks, (first, second, third) = trainer.ranks, trainer.batches
    hashes = [Store(str(Path(url).parent)).entry("batch.parquet").sha256 for url in trainer.batches]
    made = ranks.step(1, first, None, None, hashes[0])
    hints = get_type_hints(StepMetrics, include_extras=True)
    assert made[0].keys() >= {name for name, kind in hints.items() if get_origin(kind) is not NotRequired}
    assert figures(made[0]) == figures(made[-1]), "all ranks say the same"
    weights = exported(ranks, tmp_path / "once", 1)
    assert ranks.step(1, first, None, None, hashes[0]) == made
    with pytest.raises(RankFailedError, match=r"^TrainerError: .*another batch"):
        ranks.step(1, second, None, None, hashes[1])
    with pytest.raises(RankFailedError, match=r"^TrainerError: .*version 1"):
        ranks.step(3, third)
    assert versions(ranks) == {1}
    assert exported(ranks, tmp_path / "again", 1) == weights
    assert ranks.step(2, second)[0]["version"] == 2
    assert exported(ranks, tmp_path / "second", 2) != weights


def test_a_refused_step_changes_nothing(trainer: UnderContract, tmp_path: Path) -> None:
    ranks, before = trainer.ranks, exported(trainer.ranks, tmp_path / "before", 0)
    endless = write_batch(tmp_path / "nan", [{**row, "advantage": float("nan")} for row in samples(1)])
    masked = [{**row, "loss_mask": [0] * row["response_length"]} for row in samples(1)]
    for url in (endless, write_batch(tmp_path / "masked", masked)):
        with pytest.raises(RankFailedError, match="^RefusedStepError"):
            ranks.step(1, url)
    with pytest.raises(RankFailedError, match="^CorruptFileError"):
        ranks.step(1, trainer.batches[0], None, None, "0" * 64)
    assert versions(ranks) == {0}
    assert exported(ranks, tmp_path / "after", 0) == before
    assert ranks.step(1, trainer.batches[0])[0]["version"] == 1


def test_ranks_that_load_a_checkpoint_go_on_as_if_they_had_not_stopped(
    trainer: UnderContract, tmp_path: Path
) -> None:
    ranks, (first, second, third) = trainer.ranks, trainer.batches
    url, other = str(tmp_path / "saved"), str(tmp_path / "other")
    ranks.step(1, first)
    ranks.call("save", url)
    marker = Store(url).read_sealed("complete.json")
    assert marker["version"] == 1
    assert {file["path"] for file in marker["files"]} == set(Store(url).list("")) - {"complete.json"}
    ranks.call("save", url)  # of the same version: it is kept
    assert Store(url).read_sealed("complete.json") == marker
    on = [ranks.step(version, batch)[0] for version, batch in ((2, second), (3, third))]
    weights = exported(ranks, tmp_path / "on", 3)
    with pytest.raises(RankFailedError, match="^StorageError"):
        ranks.call("save", url)
    assert ranks.call("load", url) == [1] * ranks.world
    again = [ranks.step(version, batch)[0] for version, batch in ((2, second), (3, third))]
    assert [figures(step) for step in again] == [figures(step) for step in on]
    assert exported(ranks, tmp_path / "again", 3) == weights
    ranks.call("save", other)
    Store(other).remove("complete.json")
    with pytest.raises(RankFailedError, match="^MissingFileError"):
        ranks.call("load", other)
    largest = max(Path(url).iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    with pytest.raises(RankFailedError, match="^CorruptFileError"):
        ranks.call("load", url)
    assert versions(ranks) == {3}
    assert exported(ranks, tmp_path / "unchanged", 3) == weights


def test_a_recorded_step_is_made_again_under_its_settings(trainer: UnderContract, tmp_path: Path) -> None:
    ranks, (first, second, _) = trainer.ranks, trainer.batches
    ranks.call("save", str(tmp_path / "start"))
    recorded: list[Any] = [ranks.step(1, first)[0], ranks.step(2, second)[0]]
    ranks.call("load", str(tmp_path / "start"))
    again = [
        ranks.call("train", StepRequest(step["version"], url, recorded=step))[0]
        for step, url in zip(recorded, (first, second), strict=True)
    ]
    assert [figures(step) for step in again] == [figures(step) for step in recorded]
    assert [step["settings"] for step in again] == [step["settings"] for step in recorded]


@pytest.mark.slow  # megatron's writer is a process, which loads its libraries
def test_a_checkpoint_is_written_while_training_goes_on(trainer: UnderContract, tmp_path: Path) -> None:
    ranks, (first, second, _) = trainer.ranks, trainer.batches
    ranks.step(1, first)
    weights = exported(ranks, tmp_path / "before", 1)
    ranks.call("begin_save", str(tmp_path / "dropped"))
    ranks.call("drop_save")
    assert [state["saving"] for state in ranks.call("state")] == [None] * ranks.world
    url = str(tmp_path / "saved")
    ranks.call("begin_save", url)
    ranks.step(2, second)
    until = time.monotonic() + PATIENCE_S
    while any(state["saving"]["state"] == "writing" for state in ranks.call("state")):
        assert time.monotonic() < until
        time.sleep(0.1)
    for state in ranks.call("state"):
        assert state["saving"] == {"url": url, "version": 1, "state": "written", "reason": None}
    assert not Store(url).exists("complete.json")
    assert all(seconds >= 0 for seconds in ranks.call("commit_save"))
    assert [state["saving"] for state in ranks.call("state")] == [None] * ranks.world
    assert ranks.call("load", url) == [1] * ranks.world
    assert exported(ranks, tmp_path / "after", 1) == weights
    assert not Store(str(tmp_path / "dropped")).exists("complete.json")


def test_losses_are_sums_over_the_tokens_that_have_one(trainer: UnderContract, tmp_path: Path) -> None:
    ranks, tokens = trainer.ranks, [3, 1, 4, 1, 5, 9]
    weights = exported(ranks, tmp_path / "before", 0)
    masks = [[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    asked = [HeldOutSample(tokens, mask) for mask in masks]
    for whole, *parts, nothing in ranks.call("losses", 0, asked):
        assert whole == pytest.approx(sum(parts), rel=1e-5)
        assert all(part > 0 for part in parts)
        assert nothing == 0
    with pytest.raises(RankFailedError, match=r"^TrainerError: .*version 0"):
        ranks.call("losses", 1, asked)
    assert exported(ranks, tmp_path / "after", 0) == weights


def test_chunks_are_passed_in_order_each_once(trainer: UnderContract, tmp_path: Path) -> None:
    ranks, rows = trainer.ranks, samples(1)
    urls = [write_batch(tmp_path / str(i), part) for i, part in enumerate((rows[:4], rows[4:]))]
    hashes = [Store(str(Path(url).parent)).entry("batch.parquet").sha256 for url in urls]

    def passed(version: int, number: int, chunk: int) -> set[int]:
        return set(ranks.call("pass_chunk", version, number, urls[chunk], hashes[chunk]))

    assert passed(1, 1, 1) == {0}, "an earlier one is missing"
    assert passed(1, 0, 0) == {1}
    assert passed(1, 0, 0) == {1}
    assert passed(1, 1, 1) == {2}
    with pytest.raises(RankFailedError, match=r"^TrainerError: .*version 0"):
        passed(2, 0, 0)
    step = ranks.step(1, trainer.batches[0], None, None, None, [4, 4])[0]
    assert (step["version"], step["samples"]) == (1, len(rows))


def sent(rank: Any) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """The tensors that a process which joined rank 0's group gets, and nothing elsewhere."""
    import torch

    from millrace.connectors.engines.embedded.weight_routes import Listed, WeightGroups

    engine, got = WeightGroups(), dict[str, tuple[tuple[int, ...], bytes]]()
    first = rank.state()["rank"] == 0
    with ThreadPoolExecutor(1) as beside:
        if first:
            assert rank.broadcast_group() is None
            group = rank.open_broadcast("of-the-test", ["http://127.0.0.1:1"], True)
            assert rank.broadcast_group() == group
            joining = beside.submit(engine.join, group.name, group.host, group.port, 1, 2)
            rank.enter_broadcast(2)
            joining.result()
        number, last = 0, False
        while not last:
            bucket = rank.bucket(0, number, BUCKET, False)
            assert [entry.start for entry in bucket.entries] == [0, *(e.end for e in bucket.entries[:-1])]
            assert bucket.entries[-1].end == bucket.size
            number, last = number + 1, bucket.last
            if first:
                names, shapes, dtypes, *_ = zip(*bucket.entries, strict=True)
                listed = Listed(names, shapes, getattr(torch, dtypes[0]))
                receiving = beside.submit(engine.receive, group.name, listed)
                rank.broadcast_bucket(PATIENCE_S)
                for name, tensor in receiving.result().items():
                    assert name not in got, "a pass has every tensor once"
                    got[name] = tuple(tensor.shape), tensor.numpy().tobytes()
        assert number > 1
        rank.end_buckets()
        rank.close_broadcast()
        assert rank.broadcast_group() is None
    return got


def test_every_way_carries_the_same_weights(trainer: UnderContract, tmp_path: Path) -> None:
    ranks = trainer.ranks
    exported(ranks, tmp_path / "exported", 0)
    files = [
        file for rank in ranks.call("upload", str(tmp_path / "uploaded"), 0, merged=True) for file in rank
    ]
    uploaded = Store(str(tmp_path / "uploaded"))
    assert sorted(file["path"] for file in files) == sorted(uploaded.list(""))
    assert {file["path"]: file["sha256"] for file in files} == {
        entry.path: entry.sha256 for entry in uploaded.entries(uploaded.list(""))
    }
    folders = [load_file(tmp_path / name / "model.safetensors") for name in ("exported", "uploaded")]
    weights = [{name: (t.shape, t.tobytes()) for name, t in folder.items()} for folder in folders]
    assert weights[0] == weights[1]
    assert ranks.run(sent)[0] == weights[0]
    for call in (("export", str(tmp_path / "x"), 1), ("upload", str(tmp_path / "x"), 1)):
        with pytest.raises(RankFailedError, match=r"^TrainerError: .*version 0"):
            ranks.call(*call)
    with pytest.raises(RankFailedError, match=r"^TrainerError: .*version 0"):
        ranks.call("bucket", 1, 0, BUCKET, False)


def test_weights_can_be_read_while_memory_is_released_and_training_takes_it_back(
    trainer: UnderContract, tmp_path: Path
) -> None:
    ranks = trainer.ranks
    ranks.step(1, trainer.batches[0])
    weights = exported(ranks, tmp_path / "before", 1)
    assert all(freed >= 0 for freed in ranks.call("offload"))
    assert exported(ranks, tmp_path / "released", 1) == weights
    ranks.call("reload")
    assert ranks.step(2, trainer.batches[1])[0]["version"] == 2
