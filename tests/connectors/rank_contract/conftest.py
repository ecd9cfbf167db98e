"""The trainers under contract: megatron-core's ranks and FSDP's on gloo, and ranks of a bigram model in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.tiny_models import save_tiny_model
from tests.support.trainer_ranks import VOCAB, Group, Workers, configuration, samples, write_batch

TRAINERS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "fsdp": {"kind": "fsdp"},
    "fsdp of one context": {"kind": "fsdp", "parallel": {"context": 2}},
    "fsdp in copies": {"kind": "fsdp", "parallel": {"replicate": 2}},
    "fsdp, stepped on the host": {"kind": "fsdp", "optimizer": {"offload": 1.0}},
    "megatron with adapters": {"lora": {"rank": 4}},
    "fsdp with adapters": {"kind": "fsdp", "lora": {"rank": 4}},
    "bigram": {"rank": "tests.support.bigram_rank:BigramRank"},
}


class UnderContract(NamedTuple):
    """Ranks that hold version 0, and batches for them."""

    kind: str
    ranks: Group
    batches: list[str]  # of the steps 1, 2 and 3


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", VOCAB)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("batches")
    return [write_batch(folder / str(step), samples(step)) for step in (1, 2, 3)]


@pytest.fixture(
    params=[
        ("megatron", 1),
        ("fsdp", 2),
        ("bigram", 2),
        pytest.param(("megatron", 2), marks=pytest.mark.slow),
        pytest.param(("fsdp", 1), marks=pytest.mark.slow),
        pytest.param(("fsdp of one context", 2), marks=pytest.mark.slow),
        pytest.param(("fsdp in copies", 2), marks=pytest.mark.slow),
        pytest.param(("fsdp, stepped on the host", 2), marks=pytest.mark.slow),
        pytest.param(("megatron with adapters", 2), marks=pytest.mark.slow),
        pytest.param(("fsdp with adapters", 2), marks=pytest.mark.slow),
        pytest.param(("bigram", 1), marks=pytest.mark.slow),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def trainer(
    request: pytest.FixtureRequest, workers: Workers, model: Path, batches: list[str]
) -> Iterator[UnderContract]:
    kind, world = request.param
    with workers.group(configuration(model, world, **TRAINERS[kind])) as ranks:
        yield UnderContract(kind, ranks, batches)
