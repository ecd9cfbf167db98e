"""NVML's readings of a GPU that works and of one that rests, and the trace of what it computes."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import torch

from millrace.connectors.host.gpu_busy import BusyMeter, nvml_reading
from millrace.connectors.host.torch_trace import SUFFIX, TorchTrace
from millrace.core.gpu_peaks import peak_of

WORK_S = 4.0


def work(seconds: float) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def test_a_gpu_that_works_is_busy_and_one_that_rests_is_not() -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[:1]
    read = nvml_reading(visible)
    assert read is not None
    meter = BusyMeter(read)
    work(0.1)
    time.sleep(1.5)  # a reading is of up to the last second
    marks = [time.time()]
    for act in (time.sleep, work):
        act(WORK_S)
        marks.append(time.time())
    rest, busy = (
        next(iter(meter.between(start + 1, end).values()))
        for start, end in zip(marks, marks[1:], strict=False)
    )
    assert rest.total / rest.readings < 0.2
    assert busy.total / busy.readings > 0.8


def test_the_trace_has_kernels(tmp_path: Path) -> None:
    trace = TorchTrace(gpu=True)
    work(0.1)
    trace.stop(str(tmp_path), "here")
    events = json.loads(gzip.decompress((tmp_path / f"here{SUFFIX}").read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def test_the_gpus_of_the_published_figures_have_a_peak() -> None:
    name = torch.cuda.get_device_name()
    assert peak_of(name) is not None or not {"H100", "H200", "A100"} & set(name.split())
