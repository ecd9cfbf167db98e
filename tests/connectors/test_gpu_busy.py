"""How busy GPUs are: readings by a thread, added up between two moments."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from millrace.connectors.host.gpu_busy import BusyMeter, nvml_reading, visible_meter


def test_readings_between_two_moments_are_added_up_by_gpu() -> None:
    taken: list[int] = []

    def read() -> Mapping[str, float]:
        taken.append(len(taken))
        return {"one": 0.5, "two": float(taken[-1] % 2)}

    started = time.time()
    meter = BusyMeter(read, every_s=0.005)
    while len(taken) < 20:
        time.sleep(0.005)
    found = meter.between(started, time.time())
    assert found["one"].total == 0.5 * found["one"].readings
    assert 0 < found["two"].total < found["two"].readings
    assert meter.between(started - 2, started - 1) == {}
    middle = (started + time.time()) / 2
    halves = meter.between(started, middle), meter.between(middle, time.time())
    assert all(0 < half["one"].readings < found["one"].readings + 10 for half in halves)


def test_a_host_without_the_library_has_no_reading() -> None:
    assert nvml_reading(["0"], "libnothing-of-this-name.so.1") is None


@pytest.mark.parametrize("visible", ["", None])
def test_a_process_that_sees_no_gpu_starts_no_thread(
    visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_meter() is None
