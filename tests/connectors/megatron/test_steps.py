"""A step is applied once, whole, or not at all."""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.connectors.trainers.process import cpu_threads
from millrace.core.contracts.task_records import StepRequest
from millrace.core.logprob_gap import LogprobGuard
from tests.support.trainer_ranks import Group, RankFailedError, Workers, configuration, samples, write_batch

SCHEDULE = {"kind": "linear", "warmup_steps": 2, "decay_steps": 9}


@pytest.fixture
def group(workers: Workers, model: Callable[..., Path]) -> Iterator[Group]:
    with workers.group(configuration(model(), schedule=SCHEDULE)) as ranks:
        yield ranks


def fingerprint(rank: Any) -> tuple[list[float], int, float]:
    """Everything a step changes: parameters, Adam's moments, schedule, learning rate."""
    sums = [float(parameter.double().abs().sum()) for parameter in rank.policy.parameters()]
    for part in rank.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            sums += [float(value.double().sum()) for value in state.values()]
    return sums, rank.schedule.num_steps, rank.optimizer.param_groups[0]["lr"]


def without_times(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in ("seconds", "tokens_per_second")}


def loaded_after_prepare(_: Any) -> list[str]:
    from tests.support.rank_imports import PREPARED

    return sorted(
        name
        for name in set(sys.modules) - PREPARED
        if name.startswith(("torch.", "megatron.", "transformers."))
    )


def test_a_rank_that_was_prepared_loads_its_libraries_once(group: Group, batch: str) -> None:
    """What `prepare` leaves out, a trainer loads only when its engines already wait for it."""
    group.train([1], batch.format(1))
    (loaded,) = group.run(loaded_after_prepare)
    assert len(loaded) < 20, (
        loaded
    )  # torch loads a module or two when it first uses them; all of it are hundreds


def test_the_version_held_is_answered_from_memory_the_next_is_made_and_any_other_is_refused(
    group: Group, batch: str
) -> None:
    first = group.step(1, batch.format(1))[0]
    held = group.run(fingerprint)
    assert group.step(1, batch.format(1))[0] == first
    assert group.run(fingerprint) == held
    for version in (0, 3, -1, 7):
        with pytest.raises(RankFailedError, match=r"TrainerError.*holds weight version 1"):
            group.step(version, batch.format(3))
    assert group.run(fingerprint) == held
    assert group.step(2, batch.format(2))[0]["version"] == 2
    assert group.call("state")[0]["version"] == 2


def test_version_zero_was_never_trained(group: Group, batch: str) -> None:
    with pytest.raises(RankFailedError, match=r"TrainerError.*cannot make version 0"):
        group.step(0, batch.format(1))


def test_a_batch_of_another_iteration_is_refused(group: Group, batch: str) -> None:
    with pytest.raises(RankFailedError, match=r"TrainerError.*no sample names step 1"):
        group.step(1, batch.format(2))


def refused(group: Group, url: str, message: str, guard: float | None = None) -> None:
    """The call is refused, changes nothing, and the step is then made as if it had not been tried."""
    before = group.run(fingerprint)
    for _ in range(2):
        with pytest.raises(RankFailedError, match=message):
            group.step(2, url, None if guard is None else LogprobGuard(guard))
    assert group.run(fingerprint) == before
    assert group.call("state")[0] | {"pid": 0} == {
        "rank": 0,
        "version": 1,
        "busy": None,
        "saving": None,
        "pid": 0,
    }


def test_refused_steps_change_nothing(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    with workers.group(configuration(model(), schedule=SCHEDULE)) as group:
        group.step(1, batch.format(1))
        refused(
            group, batch.format(2), r"engine and trainer disagree.*sync.max_logprob_gap is 0.01", guard=0.01
        )
        rows = samples(2)
        rows[3]["advantage"] = math.inf
        refused(group, write_batch(tmp_path / "loss", rows), r"the loss is (nan|-?inf); nothing was applied")
        rows = samples(2)
        rows[0]["advantage"] = 1e38
        refused(group, write_batch(tmp_path / "grad", rows), r"the (gradient norm|loss) is (nan|-?inf)")
        rows = samples(2)
        rows[0]["rollout_logprobs"][0] = math.nan
        refused(group, write_batch(tmp_path / "gap", rows), r"engine and trainer disagree.*nan", guard=10.0)
        refused(group, str(tmp_path / "missing" / "batch.parquet"), "MissingFileError")
        rows = samples(2)
        rows[1]["tokens"] = rows[1]["tokens"] * 20
        refused(group, write_batch(tmp_path / "long", rows), r"trainer.max_pack_tokens = 48")
        after = group.train([2], batch.format(2), guard=10.0)[0]
    with workers.group(configuration(model(), schedule=SCHEDULE)) as fresh:
        fresh.step(1, batch.format(1))
        assert without_times(fresh.train([2], batch.format(2), guard=10.0)[0]) == without_times(after)


def fail_in_the_last_layer(rank: Any) -> None:
    layer = rank.policy.last.decoder.layers[-1]
    calls = []

    def fail(module: Any, given: Any, output: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # the first pack has left its gradients
            handle.remove()
            raise RuntimeError("no memory")

    handle = layer.register_forward_hook(fail)


def test_a_failure_between_packs_leaves_the_weights_and_the_next_call_makes_the_step(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    with workers.group(configuration(model(), schedule=SCHEDULE)) as group:
        before = group.run(fingerprint)
        group.run(fail_in_the_last_layer)
        with pytest.raises(RankFailedError, match="no memory"):
            group.step(1, batch.format(1))
        assert group.run(fingerprint) == before
        after = group.train([1], batch.format(1))[0]
    with workers.group(configuration(model(), schedule=SCHEDULE)) as fresh:
        assert without_times(fresh.train([1], batch.format(1))[0]) == without_times(after)


def fail_in_the_optimizer(rank: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("half applied")

    rank.optimizer.chained_optimizers[0].optimizer.register_step_post_hook(fail)


def test_a_step_half_applied_leaves_no_version_to_go_on_from(group: Group, batch: str) -> None:
    group.run(fail_in_the_optimizer)
    with pytest.raises(RankFailedError, match="half applied"):
        group.step(1, batch.format(1))
    assert group.call("state")[0]["version"] is None
    with pytest.raises(RankFailedError, match="TrainerError"):
        group.step(1, batch.format(1))


def kept(rank: Any) -> list[bool]:
    return [item is not None for item in (rank._rows, rank.learner._iteration)]


def test_what_an_iteration_keeps_is_freed_with_its_last_step(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    url = write_batch(tmp_path, samples(1) + samples(2))
    with workers.group(configuration(model(), algorithm={"kl_coef": 0.1})) as group:
        group.step(1, url)
        assert group.run(kept) == [[True, True]]
        group.step(2, url)
        assert group.run(kept) == [[False, False]]


def test_a_replay_from_within_an_iteration_is_refused(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    url = write_batch(tmp_path, samples(1) + samples(2))
    with workers.group(configuration(model())) as group:
        group.step(1, batch.format(1))
        with pytest.raises(RankFailedError, match="before the iteration, which began at step 1"):
            group.step(2, url)


def test_steps_of_another_batch_are_not_taken_as_done(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    """Ranks outlive their driver: the batch of its iteration may be made again, and with other rows, at the same place."""
    rows = samples(1) + samples(2)
    other = [{**row, "advantage": -row["advantage"]} for row in rows]
    with workers.group(configuration(model())) as group:
        url, first = written(tmp_path, rows)
        with pytest.raises(RankFailedError, match="engine and trainer disagree"):
            group.step(1, url, LogprobGuard(1e-9), None, first)
        url, second = written(tmp_path, other)
        made = group.step(1, url, None, None, second)[0]
        held = group.run(fingerprint)
        url, first = written(tmp_path, rows)
        for version in (1, 2):
            with pytest.raises(
                RankFailedError, match=r"made weight version 1 of another batch.*millrace stop"
            ):
                group.step(version, url, None, None, first)
        with pytest.raises(RankFailedError, match=r"batch\.parquet: its sha256 is"):
            group.step(2, url, None, None, second)
        assert group.run(fingerprint) == held
        url, second = written(tmp_path, other)
        made_2 = group.step(2, url, None, None, second)[0]
    with workers.group(configuration(model())) as fresh:
        url, second = written(tmp_path, other)
        again = [fresh.step(version, url, None, None, second)[0] for version in (1, 2)]
        assert list(map(without_times, again)) == list(map(without_times, [made, made_2]))
    # the log-probabilities of both steps, before the first update; what a CPU can compute at most is not known
    assert made["scored_tokens"] == sum(len(row["tokens"]) for row in other)
    assert 0 < made["seconds"]["scoring"] < made["seconds"]["prepare"] + made["seconds"]["compute"]
    assert "mfu" not in made


def written(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """URL and hash of a batch with these rows, which takes the place of the one before."""
    url = write_batch(folder, rows)
    return url, hashlib.sha256(Path(url).read_bytes()).hexdigest()


def test_ranks_without_samples_take_part_in_the_step(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    url = write_batch(tmp_path, samples(1, count=1))
    found = []
    for world, parallel in ((1, {}), (2, {}), (2, {"context": 2})):
        changes = {"parallel": parallel, "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}}
        with workers.group(configuration(model(), world, **changes)) as group:
            found.append(group.train([1], url)[0])
    for other in found[1:]:
        for figure in ("loss", "grad_norm", "kl", "entropy", "logprob_gap_max"):
            assert other[figure] == pytest.approx(found[0][figure], rel=1e-5, abs=1e-6)


def test_masked_samples_and_empty_responses_cost_nothing(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    rows = samples(1)
    extra = samples(1, count=2, seed=5)
    extra[0]["loss_mask"] = [0] * extra[0]["response_length"]
    extra[1] |= {"response_length": 0, "loss_mask": [], "rollout_logprobs": []}
    for row in extra:
        row["sample_id"] = f"extra-{row['index']}"
    found = []
    for name, chosen in (("plain", rows), ("extra", rows + extra)):
        url = write_batch(tmp_path / name, chosen)
        with workers.group(configuration(model())) as group:
            found.append(group.train([1], url)[0])
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
    assert found[1]["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-5)


def states_while_training(rank: Any, url: str) -> list[Any]:
    seen = []
    worker = threading.Thread(
        target=lambda: [rank.train(StepRequest(1, url)), rank.train(StepRequest(2, url))]
    )
    worker.start()
    while worker.is_alive():
        seen.append((rank.state()["busy"], rank.state()["version"]))
        time.sleep(0.001)
    worker.join()
    return seen


def test_the_state_is_told_while_training(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    url = write_batch(tmp_path, samples(1) + samples(2))
    with workers.group(configuration(model())) as group:
        (seen,) = group.run(states_while_training, url)
    assert ("train", 0) in seen
    assert ("train", 1) in seen
    assert {version for _, version in seen} <= {0, 1, 2}


def train_bfloat16(rank: Any, url: str) -> tuple[bool, bool]:
    rank.train(StepRequest(1, url))
    main = rank.optimizer.param_groups[0]["params"][0]
    return main.dtype == torch.float32, all(p.dtype == torch.bfloat16 for p in rank.policy.parameters())


def test_bfloat16_parameters_are_stepped_in_fp32(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    exact = configuration(model())
    with workers.group(exact) as group:
        alone = group.train([1], batch.format(1))[0]
    with workers.group(configuration(model(), 2, dtype="bfloat16")) as group:
        assert group.run(train_bfloat16, batch.format(1)) == [(True, True)] * 2
        found = group.train([1], batch.format(1))[0]
        assert found["loss"] == pytest.approx(alone["loss"], abs=5e-3)
        assert found["grad_norm"] == pytest.approx(alone["grad_norm"], rel=0.05)
        group.call("save", str(tmp_path / "checkpoint"))
        onward = group.train([2], batch.format(2))[0]
        group.call("load", str(tmp_path / "checkpoint"))
        assert without_times(group.train([2], batch.format(2))[0]) == without_times(onward)


@pytest.mark.parametrize(
    ("wanted", "ranks", "gpu", "threads"),
    [(None, 1, False, 8), (None, 3, False, 2), (None, 16, False, 1), (None, 1, True, 1), (4, 1, True, 4)],
)
def test_a_rank_has_the_cpu_threads_it_is_given_and_one_beside_a_gpu(
    wanted: int | None, ranks: int, gpu: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert cpu_threads(wanted, ranks, gpu=gpu) == threads
