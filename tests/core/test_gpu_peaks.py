"""A GPU's peak by the name that its driver gives it, and the operations of a step."""

from __future__ import annotations

import pytest

from millrace.core.families.architecture import architecture
from millrace.core.gpu_peaks import TERA, peak_of
from tests.support.qwen3 import QWEN3_06B

NAMES = {
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA GH200 480GB": 989.0,
    "NVIDIA H20": 148.0,
    "NVIDIA H800": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A800-SXM4-80GB": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
    "NVIDIA A10": 125.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A40": 149.7,
    "NVIDIA H200 MIG 1g.18gb": None,
    "Tesla T4": None,
    "cpu": None,
}


@pytest.mark.parametrize(("name", "peak"), NAMES.items())
def test_a_gpu_has_the_peak_that_its_vendor_states(name: str, peak: float | None) -> None:
    assert peak_of(name) == (peak and peak * TERA)


def test_a_step_needs_three_times_a_forward_pass_and_the_output_layer_for_responses_alone() -> None:
    shape = architecture(QWEN3_06B)
    layer = 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072)
    head = 151936 * 1024
    attention = 6 * 28 * 2048 * (100**2 + 50**2)
    by_hand = 6 * 28 * layer * 150 + 6 * head * 70 + attention
    assert shape.step_flops([(100, 60), (50, 10)]) == by_hand
    assert shape.step_flops([(100, 100)]) == 3 * shape.flops(100)
    frozen = shape.step_flops([(100, 60), (50, 10)], frozen=True)
    assert by_hand - frozen == (6 - 4) * (28 * layer * 150 + head * 70)
