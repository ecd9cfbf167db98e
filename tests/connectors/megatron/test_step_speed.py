"""A step's share of the GPUs' peak: of the passes that it needs, by the name of the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.trainers.step_speed import share_of_peak
from millrace.core.config import RunConfig
from millrace.core.families.architecture import architecture
from tests.support.qwen3 import QWEN3_06B


class Row:
    def __init__(self, length: int, response: int) -> None:
        self.tokens, self.response_length = [0] * length, response


ROWS: Any = [Row(2048, 1984)] * 8
SHAPE = architecture(QWEN3_06B)


def config(tmp_path: Path, dtype: str = "bfloat16", **trainer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "a"},
            "model": {"path": str(tmp_path), "dtype": dtype},
            "data": {"sources": [{"path": "none"}]},
            "trainer": {"device": "cuda", **trainer},
        }
    )


def test_a_published_step_has_the_share_that_its_benchmark_has(tmp_path: Path) -> None:
    """`benchmarks.gpu.trainer --shape 0.6b --lengths 2048` on an H100: 95,439 tokens/s are 41.0 %."""
    share = share_of_peak(config(tmp_path), SHAPE, "NVIDIA H100 80GB HBM3", ROWS, 8 * 2048 / 95_439)
    assert share == pytest.approx(0.410, abs=0.001)


def test_more_ranks_have_more_to_use(tmp_path: Path) -> None:
    one, four = (
        share_of_peak(config(tmp_path, world_size=size), SHAPE, "NVIDIA H200", ROWS, 1.0) for size in (1, 4)
    )
    assert one
    assert four == pytest.approx(one / 4)


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "bfloat16"), ("Tesla T4", "bfloat16"), ("NVIDIA H200", "float32")]
)
def test_there_is_none_without_a_known_peak(tmp_path: Path, device: str, dtype: str) -> None:
    assert share_of_peak(config(tmp_path, dtype), SHAPE, device, ROWS, 1.0) is None
