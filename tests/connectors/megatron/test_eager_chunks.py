"""Steps made in chunks: those of the plain step, the same bits however many chunks were passed early, and nothing of other rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.storage.store import Store
from millrace.core.logprob_gap import LogprobGuard
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Group, RankFailedError, Workers, configuration, samples, write_batch

COUNTS = [8, 4, 4]  # rows of each chunk: two groups, and one twice
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {},
    "tp2": {"parallel": {"tensor": 2}},
    "tp2 and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pp2": {"parallel": {"pipeline": 2}},
    "cp2": {"parallel": {"context": 2}},
    "replicated optimizer": {"optimizer": {"distributed": False}},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo"},
    "token_mean": {"preset": "dapo"},
    "constant": {"preset": "dr_grpo"},
    "gspo": {"preset": "gspo"},
    "reference": {"preset": "grpo", "kl_coef": 0.1},
    "recompute": {"preset": "grpo", "old_logprobs": "recompute", "entropy_coef": 0.01},
    "rollout": {"preset": "cispo", "old_logprobs": "rollout"},
}
# Adam divides by it. Its usual 1e-8 turns float32's rounding of a gradient as small into more than 1e-6 of a weight.
EPSILON = 1e-5
VARIES = ("seconds", "tokens_per_second", "scored_tokens", "settings", "packs", "chunks")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> RankPlace:
    return RankPlace(tmp_path_factory.mktemp("chunks"))


class RankPlace:
    """Two steps of 16 samples each: their batches, and their chunks in files of their own."""

    def __init__(self, folder: Path) -> None:
        self.batches = [write_batch(folder / f"{step}", self.rows(step)) for step in (1, 2)]
        self.chunks = [self.cut(folder / f"{step}-chunks", self.rows(step)) for step in (1, 2)]

    @staticmethod
    def rows(step: int, seed: int = 0) -> list[dict[str, Any]]:
        return samples(step, count=sum(COUNTS), seed=seed)

    @staticmethod
    def cut(folder: Path, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
        """URL and hash of each chunk's file."""
        found, start = [], 0
        for number, count in enumerate(COUNTS):
            url = write_batch(folder / str(number), rows[start : start + count])
            found.append((url, Store(str(folder / str(number))).entry("batch.parquet").sha256))
            start += count
        return found


def train(
    group: Group, place: RankPlace, early: int, versions: tuple[int, ...] = (1, 2)
) -> list[dict[str, Any]]:
    """Metrics of steps in chunks of which so many are passed before the step."""
    steps = []
    for version in versions:
        for number, chunk in enumerate(place.chunks[version - 1][:early]):
            assert set(group.call("pass_chunk", version, number, *chunk)) == {number + 1}
        url = place.batches[version - 1]
        steps.append(group.step(version, url, None, None, None, COUNTS)[0])
    return steps


def weights(rank: Any) -> dict[str, list[float]]:
    return {name: p.detach().flatten().tolist() for name, p in rank.policy.named_parameters()}


def figures(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in step.items() if name not in VARIES} for step in steps]


def assert_near(one: list[Any], other: list[Any]) -> None:
    """Equal within 1e-6, relative or absolute: float32 sums in another order."""
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name] == pytest.approx(right[name], rel=1e-6, abs=1e-6), name


def in_chunks(
    workers: Workers, place: RankPlace, config: dict[str, Any], early: int
) -> tuple[list[Any], list[Any]]:
    """Figures and every rank's weights of two steps in chunks."""
    with workers.group(config) as group:
        return figures(train(group, place, early)), group.run(weights)


def plain(workers: Workers, place: RankPlace, config: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The same of two plain steps."""
    with workers.group(config) as group:
        steps = [group.step(version, place.batches[version - 1])[0] for version in (1, 2)]
        return figures(steps), group.run(weights)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "one", "tp2 and sequence"))
def test_a_step_in_chunks_is_the_plain_step_however_many_chunks_are_early(
    workers: Workers, place: RankPlace, model: Callable[..., Path], layout: str
) -> None:
    optimizer = {"eps": EPSILON, **LAYOUTS[layout].get("optimizer", {})}
    changes = {**LAYOUTS[layout], "optimizer": optimizer}
    config = configuration(model(), 1 if layout == "one" else 2, **changes)
    never = in_chunks(workers, place, config, 0)
    assert in_chunks(workers, place, config, 1) == never
    assert in_chunks(workers, place, config, len(COUNTS) - 1) == never
    for one, other in zip(never, plain(workers, place, config), strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("name", slow_but(ALGORITHMS, "token_mean", "gspo", "reference", "rollout"))
def test_every_loss_that_is_served_has_the_denominator_of_the_whole_batch(
    workers: Workers, place: RankPlace, model: Callable[..., Path], name: str
) -> None:
    config = configuration(model(), algorithm=ALGORITHMS[name], optimizer={"eps": EPSILON})
    early = in_chunks(workers, place, config, len(COUNTS) - 1)
    for one, other in zip(early, plain(workers, place, config), strict=True):
        assert_near(one, other)


def count_passes(rank: Any) -> None:
    """Note how many rows each pass of a chunk has."""
    rank.passed, make = [], rank.chunks._pass

    def noting(passed: Any, rows: Any, *rest: Any) -> None:
        rank.passed.append(len(rows))
        make(passed, rows, *rest)

    rank.chunks._pass = noting


def taken_passes(rank: Any) -> list[int]:
    """The passes since the last call."""
    passed, rank.passed[:] = [*rank.passed], []
    return passed


def fail_before_agreeing(rank: Any) -> None:
    """Have rank 1 forget what it holds, as after an error that it alone had."""
    if rank.rank == 1:
        rank.chunks.drop()


@pytest.mark.parametrize("world", slow_but([1, 2], 1))
def test_what_is_held_is_not_passed_again_and_counts_only_for_the_rows_of_the_batch(
    workers: Workers, place: RankPlace, model: Callable[..., Path], tmp_path: Path, world: int
) -> None:
    first, second, _ = place.chunks[0]
    others = RankPlace.cut(tmp_path / "others", RankPlace.rows(1, seed=1))
    with workers.group(configuration(model(), world)) as group:
        group.run(count_passes)
        group.call("save", str(tmp_path / "start"))
        plain = train(group, place, 0, (1,))
        assert group.run(taken_passes) == [COUNTS] * world

        def passed() -> list[int]:
            """The passes since the last call, of any rank: all make the same."""
            (one,) = {tuple(each) for each in group.run(taken_passes)}
            return [*one]

        def again(*early: tuple[int, tuple[str, str], int]) -> None:
            """From the start: pass chunks, of which each call must answer so many held."""
            group.call("load", str(tmp_path / "start"))
            for number, chunk, held in early:
                assert group.call("pass_chunk", 1, number, *chunk) == [held] * world

        def made() -> list[int]:
            """The passes that the step itself makes, which must be the plain one."""
            passed()
            assert figures([group.step(1, place.batches[0], None, None, None, COUNTS)[0]]) == figures(plain)
            return passed()

        again((0, first, 1), (1, second, 2))
        assert passed() == COUNTS[:2]
        assert made() == COUNTS[2:]
        again((1, second, 0), (0, first, 1), (0, first, 1), (1, second, 2), (0, first, 2))
        assert passed() == COUNTS[:2]
        assert made() == COUNTS[2:]
        again((0, others[0], 1), (0, first, 1))
        assert passed() == [COUNTS[0]] * 2
        assert made() == COUNTS[1:]
        again((0, first, 1), (1, others[1], 2))
        assert made() == COUNTS
        again((0, first, 1), (1, others[1], 2), (1, second, 0))
        assert made() == COUNTS
        again((0, first, 1), (1, second, 2), (2, place.chunks[0][2], 3))  # the last: nothing was reduced
        assert made() == COUNTS
        again((0, first, 1))
        again()
        assert made() == COUNTS
        again((0, first, 1))
        group.run(fail_before_agreeing)
        assert made() == (COUNTS if world == 2 else COUNTS[1:])


def test_a_refused_step_is_made_again_from_its_first_chunk(
    workers: Workers, place: RankPlace, model: Callable[..., Path]
) -> None:
    with workers.group(configuration(model())) as group:
        whole = figures(train(group, place, 0))
    with workers.group(configuration(model())) as group:
        group.call("pass_chunk", 1, 0, *place.chunks[0][0])
        with pytest.raises(RankFailedError, match="RefusedStepError.*engine and trainer disagree"):
            group.step(1, place.batches[0], LogprobGuard(1e-9), None, None, COUNTS)
        assert group.call("state")[0]["version"] == 0
        assert figures(train(group, place, 1)) == whole
        with pytest.raises(RankFailedError, match="holds weight version 2 and cannot make passes of step 2"):
            group.call("pass_chunk", 2, 0, *place.chunks[1][0])


def test_a_recorded_step_is_made_again_in_the_chunks_that_it_was_made_in(
    workers: Workers, place: RankPlace, model: Callable[..., Path]
) -> None:
    with workers.group(configuration(model())) as group:
        (recorded,) = train(group, place, 2, (1,))
    assert recorded["chunks"] == COUNTS
    with workers.group(configuration(model())) as group:
        again = group.step(1, place.batches[0], None, recorded)[0]
    assert figures([again]) == figures([recorded])
    assert again["chunks"] == COUNTS
